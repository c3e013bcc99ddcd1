"""Writes a GGUF file of a llama checkpoint, weights as they are, without a vocabulary.

llama.cpp rotates neighbouring pairs of a head's channels, Hugging Face the two halves of it, so the
rows of the query and key projections are interleaved. Token ids go in and out, hence no tokenizer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # bf16 as its bits


def write(model: Path, target: Path, dtype: str) -> None:
    """The checkpoint in folder `model` as the file `target`; whole or not at all."""
    import gguf

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    check(config)
    kind = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]
    beside = target.with_suffix(".part")
    writer = gguf.GGUFWriter(str(beside), "llama", use_temp_file=True)
    describe(writer, config, getattr(gguf.LlamaFileType, f"MOSTLY_{kind}", 0))
    for name, array, stored in tensors(model):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        array, own = renamed(name, array, config)[::-1]
        if array.ndim == 1:
            writer.add_tensor(own, widened(array, stored))
        else:
            packed = as_kind(array, stored, kind)
            raw = getattr(gguf.GGMLQuantizationType, kind)
            writer.add_tensor(own, packed.view(np.uint8), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(beside, target)


def check(config: dict[str, Any]) -> None:
    """Raises NotImplementedError for what this writer does not know."""
    if config.get("model_type") != "llama":
        raise NotImplementedError(
            f"only llama checkpoints are converted to GGUF, this is {config.get('model_type')!r}"
        )
    kind = rope(config).get("rope_type", "default")
    if kind != "default":
        raise NotImplementedError(f"rope of type {kind!r} is not converted to GGUF")


def rope(config: dict[str, Any]) -> dict[str, Any]:
    """Parameters of the rotary embedding, in the old form or the new."""
    scaling = config.get("rope_scaling") or {}
    old = {"rope_theta": config.get("rope_theta", 10000.0)}
    return {**old, **scaling, **(config.get("rope_parameters") or {})}


def head_dim(config: dict[str, Any]) -> int:
    """Channels of one head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def describe(writer: Any, config: dict[str, Any], file_type: int) -> None:
    """Writes the hyperparameters."""
    heads = config["num_attention_heads"]
    writer.add_file_type(file_type)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope(config)["rope_theta"])
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def tensors(model: Path) -> Iterator[tuple[str, np.ndarray, str]]:
    """Name, array and stored dtype of every tensor; bf16 comes as uint16."""
    for path in sorted(model.glob("*.safetensors")):
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        data = np.memmap(path, mode="r", offset=8 + size)
        for name, facts in header.items():
            if name == "__metadata__":
                continue
            if facts["dtype"] not in STORED:
                raise NotImplementedError(f"tensor {name} has dtype {facts['dtype']}")
            start, stop = facts["data_offsets"]
            array = data[start:stop].view(STORED[facts["dtype"]]).reshape(facts["shape"])
            yield name, array, facts["dtype"]


def renamed(name: str, array: np.ndarray, config: dict[str, Any]) -> tuple[str, np.ndarray]:
    """llama.cpp's name of a tensor, and its rows in llama.cpp's order."""
    stem, _, part = name.removeprefix("model.").rpartition(".")
    prefix = ""
    if stem.startswith("layers."):
        _, layer, stem = stem.split(".", 2)
        prefix = f"blk.{layer}."
    if stem not in NAMES:
        raise NotImplementedError(f"tensor {name} has no place in GGUF's llama")
    if stem in ("self_attn.q_proj", "self_attn.k_proj"):
        array = interleaved(array, head_dim(config))
    return f"{prefix}{NAMES[stem]}.{part}", array


def interleaved(array: np.ndarray, dim: int) -> np.ndarray:
    """Rows [heads * dim, ...]: channel i of a head next to channel i + dim / 2."""
    halves = array.reshape(-1, 2, dim // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def widened(array: np.ndarray, stored: str) -> np.ndarray:
    """The same numbers in float32."""
    if stored == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def as_kind(array: np.ndarray, stored: str, kind: str) -> np.ndarray:
    """The numbers in another dtype; float32 to bf16 rounds to the nearest, ties to even."""
    if stored == kind:
        return np.ascontiguousarray(array)
    wide = widened(array, stored)
    if kind == "F32":
        return np.ascontiguousarray(wide)
    if kind == "F16":
        return wide.astype(np.float16)
    bits = np.ascontiguousarray(wide).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
