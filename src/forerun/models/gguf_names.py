"""Maps llama.cpp architectures to Hugging Face: model types, tensor names, values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.models.gguf import GgufFile

TOPS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA = LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PHI3 = {
    **{name: LLAMA[name] for name in ("attn_norm", "attn_output", "ffn_norm", "ffn_down")},
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
BIASES = ("attn_q", "attn_k", "attn_v")
FREQS = "rope_freqs.weight"  # divisors of the frequencies of llama 3
FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
TABLES = {FREQS, *FACTORS.values()}  # become part of the config


@dataclass(frozen=True)
class Family:
    """How llama.cpp stores an architecture.

    layer: its names of a layer's tensors -> Hugging Face's. is_permuted: the rows of queries and
    keys are reordered for its rotary embedding. norm_shift: constant added to the norm weights.
    """

    model_type: str
    model_class: str
    layer: Mapping[str, str]
    needs_biases: bool = False
    is_permuted: bool = False
    norm_shift: float = 0.0


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", LLAMA, is_permuted=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", LLAMA, needs_biases=True),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", LLAMA | QK_NORMS),
    "phi3": Family("phi3", "Phi3ForCausalLM", PHI3),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", GEMMA, norm_shift=1.0),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", GEMMA | QK_NORMS, norm_shift=1.0),
}


class Fields:
    """Metadata of one architecture, by key without the architecture prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def get(self, key: str, default: Any = None) -> Any:
        """A field; a list of equal values per layer becomes one value."""
        value = self.file.metadata.get(f"{self.file.architecture}.{key}", default)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if isinstance(value, list):
            raise self.unsupported(f"{key} differs from layer to layer")
        return _as_written(value) if isinstance(value, float) else value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer field. Raises ModelError if it is missing or of another type."""
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise ModelError(
                f"{self.file.path}: the field {self.file.architecture}.{key} must be an integer "
                f"of at least 1, got {value!r}; convert the model again"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number field. Raises ModelError if it is missing or of another type."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ModelError(
                f"{self.file.path}: the field {self.file.architecture}.{key} must be a finite "
                f"number, got {value!r}; convert the model again"
            )
        return float(value)

    def unsupported(self, what: str) -> ModelError:
        """The error for a setting that our decoder does not implement."""
        return ModelError(
            f"{self.file.path} cannot be used: {what}, which is not supported for architecture "
            f"{self.file.architecture}; use the original checkpoint"
        )

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.count("attention.head_count")

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""
        return self.count("attention.head_count_kv", self.heads)

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        size = self.count("attention.key_length", self.count("embedding_length") // self.heads)
        if self.get("attention.value_length", size) != size:
            raise self.unsupported("heads of keys and values differ in size")
        return size


def _as_written(value: float) -> float:
    """The shortest decimal of a stored fp32: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def family_of(file: GgufFile) -> Family:
    """The family of a file. Raises ModelError for an unsupported architecture."""
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(f"{file.path} holds a {kind!r}, not a model; use the model's file")
    if file.architecture not in FAMILIES:
        raise ModelError(
            f"{file.path} has architecture {file.architecture!r}, which cannot be loaded; "
            f"supported are {', '.join(FAMILIES)} (a mistral file says llama)"
        )
    return FAMILIES[file.architecture]


def check_tensors(file: GgufFile) -> None:
    """Raises ModelError for a missing or an unknown tensor."""
    family, fields = family_of(file), Fields(file)
    missing = next((name for name in _wanted(file, family) if name not in file.tensors), None)
    if missing is not None:
        raise ModelError(
            f"{file.path} lacks the tensor {missing}; fetch the file again, or convert the model "
            "again"
        )
    layers = {str(i) for i in range(fields.count("block_count"))}
    for name in file.tensors:
        if hf_name(file, family, name) and name.startswith("blk.") and _layer(name) not in layers:
            raise _without_place(file, name)
    for part, heads in _permuted(fields, family).items():
        shape = file.tensors[f"blk.0.{part}.weight"].shape
        if shape[0] != heads * fields.head_dim:
            raise ModelError(
                f"{file.path}: tensor blk.0.{part}.weight has shape {list(shape)}, and there are "
                f"{heads} heads of {fields.head_dim}; fetch the file again"
            )


def _wanted(file: GgufFile, family: Family) -> Iterator[str]:
    """The tensors that a file of this family must have."""
    yield from ("token_embd.weight", "output_norm.weight")
    for i in range(Fields(file).count("block_count")):
        yield from (f"blk.{i}.{name}.weight" for name in family.layer)
        if family.needs_biases:
            yield from (f"blk.{i}.{name}.bias" for name in BIASES)


def hf_name(file: GgufFile, family: Family, name: str) -> str | None:
    """The Hugging Face name of a tensor; None for a table of the config. Raises ModelError."""
    if name in TABLES:
        return None
    stem, _, kind = name.rpartition(".")
    found = TOPS.get(stem, "")
    words = stem.split(".")
    if words[0] == "blk" and len(words) == 3 and words[2] in family.layer:
        found = f"model.layers.{words[1]}.{family.layer[words[2]]}"
    if not found or kind not in ("weight", "bias"):
        raise _without_place(file, name)
    return f"{found}.{kind}"


def _layer(name: str) -> str:
    return name.split(".")[1]


def _without_place(file: GgufFile, name: str) -> ModelError:
    return ModelError(
        f"{file.path} holds the tensor {name}, which has no place in a {file.architecture} of "
        f"{Fields(file).count('block_count')} layers; use the original checkpoint"
    )


def hf_shapes(file: GgufFile) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what `hf_tensors` gives, in its order."""
    family = family_of(file)
    pairs = ((hf_name(file, family, name), info.shape) for name, info in file.tensors.items())
    return {name: shape for name, shape in pairs if name is not None}


def hf_tensors(file: GgufFile, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """All tensors one by one, with Hugging Face's names, values and row order."""
    family = family_of(file)
    permuted = _permuted(Fields(file), family)
    for name in file.tensors:
        found, part = hf_name(file, family, name), name.split(".")[-2]
        if found is None:
            continue
        if family.norm_shift and part.endswith("norm"):
            yield found, (file.tensor(name, torch.float32) - family.norm_shift).to(dtype)
        elif part in permuted:
            yield found, in_halves(file.tensor(name, dtype), permuted[part])
        else:
            yield found, file.tensor(name, dtype)


def _permuted(fields: Fields, family: Family) -> dict[str, int]:
    """Projections with reordered rows, and their number of heads."""
    return {"attn_q": fields.heads, "attn_k": fields.kv_heads} if family.is_permuted else {}


def in_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Reorders the rows of each head: neighbouring pairs (llama.cpp) to halves (Hugging Face)."""
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
