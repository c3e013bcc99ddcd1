"""Writes small GGUF files as llama.cpp's converters do, with the names that the package `gguf` has.

Everything here is done without forerun's own tables, so that tests compare two descriptions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ARCHS = {
    "mistral": "llama",
    "gemma3_text": "gemma3",
}  # model type -> architecture, where they differ


def write_gguf(
    model: Any,
    path: Path,
    kind: str = "F32",
    *,
    tokenizer: Path | None = None,
    fields: Mapping[str, Any] | None = None,
    leaves_out: Callable[[str], bool] = lambda name: False,
    more: Mapping[str, np.ndarray] | None = None,
    architecture: str = "",
) -> Path:
    """The file of a transformers model. `kind`: the type of its matrices.

    tokenizer: a folder with a byte-level tokenizer.json. fields: metadata that is added, or, with
    None, left out. more: tensors that are added.
    """
    config = model.config
    name = ARCHS.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(path), architecture or name)
    said = described(config, name) | vocabulary(tokenizer, config.vocab_size) | dict(fields or {})
    for key, value in said.items():
        if value is not None:
            add(writer, key.replace("ARCH", architecture or name), value)
    tables = rope_tables(config, name) | dict(more or {})
    for own, array in {**tensors(model, name), **tables}.items():
        if leaves_out(own):
            continue
        wanted = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        writer.add_tensor(own, gguf.quantize(array, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """One field, of the type that converters write."""
    types = {bool: "bool", int: "uint32", float: "float32", str: "string"}
    add_one = writer.add_array if isinstance(value, list) else None
    (add_one or getattr(writer, f"add_{types[type(value)]}"))(key, value)


def described(config: Any, name: str) -> dict[str, Any]:
    """The metadata of a config; ARCH stands for the architecture."""
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    said = {
        "general.type": "model",
        "ARCH.block_count": config.num_hidden_layers,
        "ARCH.context_length": config.max_position_embeddings,
        "ARCH.embedding_length": config.hidden_size,
        "ARCH.feed_forward_length": config.intermediate_size,
        "ARCH.attention.head_count": config.num_attention_heads,
        "ARCH.attention.head_count_kv": config.num_key_value_heads,
        "ARCH.attention.key_length": head_dim,
        "ARCH.attention.value_length": head_dim,
        "ARCH.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "ARCH.attention.sliding_window": window,
    }
    if name.startswith("gemma"):
        said["ARCH.attention.scale"] = float(config.query_pre_attn_scalar**-0.5)
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            said[f"ARCH.{cap}"] = getattr(config, cap, None)
    return said | rope_fields(config, head_dim)


def rope_fields(config: Any, head_dim: int) -> dict[str, Any]:
    """Metadata of the rotary embedding; of gemma3 that of its layers with full attention."""
    params = config.rope_parameters
    params = params.get("full_attention", params)
    kind = params.get("rope_type", "default")
    rotary = int(head_dim * params.get("partial_rotary_factor", 1.0))
    said = {
        "ARCH.rope.freq_base": float(params["rope_theta"]),
        "ARCH.rope.dimension_count": rotary,
    }
    if kind in ("linear", "yarn"):
        said["ARCH.rope.scaling.type"] = kind
        said["ARCH.rope.scaling.factor"] = float(params["factor"])
    if kind in ("yarn", "longrope"):
        original = params["original_max_position_embeddings"]
        said["ARCH.rope.scaling.original_context_length"] = original
    if kind == "longrope":
        scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[1]
        said["ARCH.rope.scaling.attn_factor"] = float(scale)
    return said


def rope_tables(config: Any, name: str) -> dict[str, np.ndarray]:
    """Tensors that hold what scales the frequencies."""
    params = config.rope_parameters
    kind = params.get("rope_type", "default")
    if kind == "longrope":
        keys = {"rope_factors_long.weight": "long_factor"}
        keys["rope_factors_short.weight"] = "short_factor"
        return {own: np.array(params[key], np.float32) for own, key in keys.items()}
    if kind != "llama3":
        return {}
    scaled = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]
    power = torch.arange(0, 2 * len(scaled), 2) / (2 * len(scaled))
    return {"rope_freqs.weight": (1 / params["rope_theta"] ** power / scaled).numpy()}


def tensors(model: Any, name: str) -> dict[str, np.ndarray]:
    """All weights by llama.cpp's names, in its order of rows, norms of gemma with the 1 added."""
    config = model.config
    arch = next(arch for arch, own in gguf.MODEL_ARCH_NAMES.items() if own == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found = {}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert own is not None, key
        array = tensor.float().numpy()
        if name == "llama" and ".attn_q." in own:
            array = in_pairs(array, config.num_attention_heads)
        if name == "llama" and ".attn_k." in own:
            array = in_pairs(array, config.num_key_value_heads)
        if name.startswith("gemma") and own.endswith("norm.weight"):
            array = array + 1
        found[own] = np.ascontiguousarray(array)
    return found


def in_pairs(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows i of both halves of each head next to each other, as llama.cpp rotates them."""
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def vocabulary(folder: Path | None, size: int) -> dict[str, Any]:
    """The tokenizer of a folder as metadata; without one bytes and tokens that nothing makes."""
    if folder is None:
        tokens = sorted(ByteLevel.alphabet())[: size - 2] + ["ab", "<end>"]
        tokens += [f"[PAD{i}]" for i in range(size - len(tokens))]
        kinds, merges = [1] * (size - 1) + [3], ["a b"]
        end = tokens.index("<end>")
        kinds[end] = 3
    else:
        said = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        ids = said["model"]["vocab"]
        tokens = sorted(ids, key=lambda token: ids[token])
        merges = [" ".join(pair) for pair in said["model"]["merges"]]
        special = {row["content"] for row in said["added_tokens"] if row["special"]}
        kinds = [3 if token in special else 1 for token in tokens]
        end = tokens.index("<end>")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": end,
    }
