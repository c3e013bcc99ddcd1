"""Converts a llama, mistral, qwen2, qwen3 or gemma3 checkpoint to GGUF, without a vocabulary.

The llama architecture of llama.cpp rotates neighbouring channels of a head, Hugging Face its two
halves, so the rows of query and key projections are interleaved. No tokenizer is needed, as
requests contain token ids.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # bf16 as its bits


@dataclass(frozen=True)
class Architecture:
    """llama.cpp's name and storage of a model family."""

    name: str
    is_interleaved: bool = False  # rows of the query and key projections
    norm_offset: float = 0.0  # added to the weights of norms
    names: Mapping[str, str] = field(default_factory=lambda: NAMES)
    has_local_layers: bool = False  # sliding windows in layers fixed by llama.cpp


ARCHITECTURES = {
    "llama": Architecture("llama", is_interleaved=True),
    "mistral": Architecture("llama", is_interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", names=NAMES | HEAD_NORMS),
    "gemma3_text": Architecture(
        "gemma3", norm_offset=1.0, names=NAMES | HEAD_NORMS | GEMMA_NORMS, has_local_layers=True
    ),
}
LOCAL_LAYERS = {"sliding_window_pattern": 6, "rope_theta": 10000.0}  # llama.cpp's, for gemma3


def write(model: Path, target: Path, dtype: str) -> None:
    """Writes the checkpoint in folder `model` to `target`, atomically."""
    import gguf

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    kind_of_model = architecture(config)
    kind = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(str(part), kind_of_model.name, use_temp_file=True)
    describe(writer, config, getattr(gguf.LlamaFileType, f"MOSTLY_{kind}", 0))
    for name, array, stored in tensors(model):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        array, own = renamed(name, array, config)[::-1]
        if array.ndim == 1:
            offset = kind_of_model.norm_offset if own.endswith("norm.weight") else 0.0
            writer.add_tensor(own, to_float32(array, stored) + np.float32(offset))
        else:
            packed = to_dtype(array, stored, kind)
            raw = getattr(gguf.GGMLQuantizationType, kind)
            writer.add_tensor(own, packed.view(np.uint8), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, target)


def architecture(config: dict[str, Any]) -> Architecture:
    """The family of a checkpoint. Raises NotImplementedError for unsupported ones."""
    kind = ARCHITECTURES.get(config.get("model_type", ""))
    if kind is None:
        raise NotImplementedError(
            f"cannot convert {config.get('model_type')!r} to GGUF, only {', '.join(ARCHITECTURES)}"
        )
    if (found := rope(config).get("rope_type", "default")) != "default":
        raise NotImplementedError(f"rope of type {found!r} is not converted to GGUF")
    if kind.has_local_layers:
        _check_local_layers(config)
    elif config.get("sliding_window") and config.get("use_sliding_window", True):
        raise NotImplementedError("a sliding window is not converted to GGUF")
    return kind


def _check_local_layers(config: dict[str, Any]) -> None:
    """Raises NotImplementedError for local layers other than llama.cpp's."""
    every = LOCAL_LAYERS["sliding_window_pattern"]
    usual = ["full" if (i + 1) % every == 0 else "sliding" for i in range(len(_layers(config)))]
    if _layers(config) != usual:
        raise NotImplementedError(f"llama.cpp expects a global layer after every {every - 1:g}")
    local = (config.get("rope_parameters") or {}).get("sliding_attention", {})
    theta = local.get("rope_theta", config.get("rope_local_base_freq", 10000.0))
    if theta != LOCAL_LAYERS["rope_theta"]:
        raise NotImplementedError(f"llama.cpp has a fixed rope_theta of local layers, not {theta}")


def _layers(config: dict[str, Any]) -> list[str]:
    """ "full" or "sliding", by layer."""
    return [name.removesuffix("_attention") for name in config.get("layer_types", [])]


def rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary embedding parameters of the global layers, from the old or new config form."""
    scaling = config.get("rope_scaling") or {}
    old = {"rope_theta": config.get("rope_theta", 10000.0)}
    new = config.get("rope_parameters") or {}
    return {**old, **scaling, **new.get("full_attention", new)}


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
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)


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
    kind = architecture(config)
    stem, _, part = name.removeprefix("model.").rpartition(".")
    prefix = ""
    if stem.startswith("layers."):
        _, layer, stem = stem.split(".", 2)
        prefix = f"blk.{layer}."
    if stem not in kind.names:
        raise NotImplementedError(f"tensor {name} is unknown in GGUF's {kind.name}")
    if kind.is_interleaved and stem in ("self_attn.q_proj", "self_attn.k_proj"):
        array = interleaved(array, head_dim(config))
    return f"{prefix}{kind.names[stem]}.{part}", array


def interleaved(array: np.ndarray, dim: int) -> np.ndarray:
    """Rows [heads * dim, ...] with channel i of a head next to channel i + dim / 2."""
    halves = array.reshape(-1, 2, dim // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def to_float32(array: np.ndarray, stored: str) -> np.ndarray:
    """The values in float32."""
    if stored == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def to_dtype(array: np.ndarray, stored: str, kind: str) -> np.ndarray:
    """The values in another dtype; float32 to bf16 rounds to nearest, ties to even."""
    if stored == kind:
        return np.ascontiguousarray(array)
    wide = to_float32(array, stored)
    if kind == "F32":
        return np.ascontiguousarray(wide)
    if kind == "F16":
        return wide.astype(np.float16)
    bits = np.ascontiguousarray(wide).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
