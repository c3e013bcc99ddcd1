"""The Hugging Face config of a GGUF file.

Values that the metadata lacks, because llama.cpp has them in its code, are constants here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.models.gguf import PLAIN, GgufFile
from forerun.models.gguf_names import FACTORS, FREQS, Fields, check_tensors, family_of

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
GEMMA_27B = (46, 62)  # layers of gemma2 27B and gemma3 27B: their attention has another scale
LOCAL_BASE = 10_000.0  # rope base of gemma3's sliding layers
GLOBAL_EVERY = {"gemma2": 2, "gemma3": 6}  # every n-th layer has full attention
NO_ID = 0xFFFFFFFF
CHANGES = (  # unsupported fields that change the model
    "expert_count",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "use_parallel_residual",
    "nextn_predict_layers",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.shared_kv_layers",
    "attention.temperature_scale",
    "attention.temperature_length",
    "rope.dimension_sections",
    "rope.scaling.alpha",
)


def hf_config(file: GgufFile) -> dict[str, Any]:
    """Fields of config.json. Raises ModelError for a file that cannot be used."""
    check_tensors(file)
    family, fields = family_of(file), Fields(file)
    _check_changes(fields)
    params = rope(fields)
    length = params.get("original_max_position_embeddings")
    switch = {"original_max_position_embeddings": length} if length else {}
    return {
        "model_type": family.model_type,
        "architectures": [family.model_class],
        "dtype": _dtype(file),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": fields.count("embedding_length"),
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": fields.count("block_count"),
        "num_attention_heads": fields.heads,
        "num_key_value_heads": fields.kv_heads,
        "head_dim": fields.head_dim,
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": params,
        **(switch if params["rope_type"] == "longrope" else {}),  # phi3 reads it here
        **token_ids(file),
        **MORE[file.architecture](fields),
    }


def _check_changes(fields: Fields) -> None:
    for key in CHANGES:
        if value := fields.file.metadata.get(f"{fields.file.architecture}.{key}"):
            raise fields.unsupported(f"{key} is {value}")
    if fields.get("attention.causal", True) is False:
        raise fields.unsupported("its attention is not causal")
    turning = fields.get("rope.dimension_count", fields.head_dim)
    if turning != fields.head_dim and fields.file.architecture != "phi3":
        raise fields.unsupported(f"{turning} of {fields.head_dim} dimensions of a head rotate")
    if fields.get("attention.scale") and not fields.file.architecture.startswith("gemma"):
        raise fields.unsupported("attention.scale is set")


def token_ids(file: GgufFile) -> dict[str, int | None]:
    """bos, eos and padding ids; None if the file has none."""
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: token_id(file, key) for name, key in keys.items()}


def token_id(file: GgufFile, key: str) -> int | None:
    """One of the special tokens: bos, eos, eot, eom, padding, unknown. Raises ModelError."""
    found = file.metadata.get(f"tokenizer.ggml.{key}_token_id", NO_ID)
    if found == NO_ID:
        return None
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    size = len(tokens) if isinstance(tokens, list) else 0  # `Vocabulary` refuses other types
    if type(found) is not int or (size and not 0 <= found < size):
        raise ModelError(
            f"{file.path}: the {key} token is {found!r}, and there are {size:,} tokens; convert "
            "the model again"
        )
    return found


def _dtype(file: GgufFile) -> str:
    """fp32 and fp16 files keep their type; everything else becomes bf16."""
    kinds = {PLAIN.get(kind) for kind in file.kinds()} - {torch.float32}
    if not kinds:
        return "float32"
    return "float16" if kinds == {torch.float16} else "bfloat16"


def rope(fields: Fields) -> dict[str, Any]:
    """rope_parameters, as transformers 5 writes them."""
    base: dict[str, Any] = {"rope_theta": fields.number("rope.freq_base", 10_000.0)}
    if FREQS in fields.file.tensors:
        return base | _llama3(fields, base["rope_theta"])
    if FACTORS["short_factor"] in fields.file.tensors:
        return base | _longrope(fields)
    kind = fields.get("rope.scaling.type", "none")
    if kind == "none":
        return base | {"rope_type": "default"}
    if kind == "linear":
        return base | {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind != "yarn":
        raise fields.unsupported(f"its rope scaling is {kind!r}")
    return base | {"rope_type": kind} | _yarn(fields)


def _yarn(fields: Fields) -> dict[str, Any]:
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
        if fields.get(f"rope.scaling.{name}") is not None:
            raise fields.unsupported(f"rope.scaling.{name} is set")
    betas = {name: fields.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    return {
        "factor": fields.number("rope.scaling.factor"),
        "original_max_position_embeddings": fields.count("rope.scaling.original_context_length"),
        **{name: value for name, value in betas.items() if value is not None},
    }


def _llama3(fields: Fields, theta: float) -> dict[str, Any]:
    """llama3 parameters if they give the stored factors; else the factors in longrope form."""
    factors = fields.file.tensor(FREQS, torch.float32)
    made = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3}
    if torch.allclose(factors, llama3_factors(made, theta, 2 * len(factors)), rtol=1e-4):
        return made
    table = factors.tolist()
    return {
        "rope_type": "longrope",
        "short_factor": table,
        "long_factor": table,
        "attention_factor": 1.0,
        "original_max_position_embeddings": fields.count("context_length"),
    }


def llama3_factors(params: Mapping[str, Any], theta: float, dim: int) -> Tensor:
    """The divisors that llama 3 applies to the frequencies of `dim` rotating dimensions."""
    lengths = 2 * math.pi * theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    low, high = params["low_freq_factor"], params["high_freq_factor"]
    turns = params["original_max_position_embeddings"] / lengths
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / params["factor"] + smooth)


def _longrope(fields: Fields) -> dict[str, Any]:
    file = fields.file
    missing = [name for name in FACTORS.values() if name not in file.tensors]
    if missing:
        raise ModelError(f"{file.path} lacks the tensor {missing[0]}; fetch or copy it again")
    found = {
        "rope_type": "longrope",
        "original_max_position_embeddings": fields.count("rope.scaling.original_context_length"),
        **{key: file.tensor(name, torch.float32).tolist() for key, name in FACTORS.items()},
    }
    scale = fields.get("rope.scaling.attn_factor")
    return found if scale is None else found | {"attention_factor": scale}


def _llama(fields: Fields) -> dict[str, Any]:
    """llama, and mistral, which is stored as llama with a sliding window."""
    window = fields.get("attention.sliding_window")
    if window:
        return {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "hidden_act": "silu",
            "sliding_window": window,
        }
    names = fields.file.tensors
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_output.bias" in names,
        "mlp_bias": "blk.0.ffn_down.bias" in names,
    }


def _qwen2(fields: Fields) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3(fields: Fields) -> dict[str, Any]:
    has_biases = "blk.0.attn_output.bias" in fields.file.tensors
    return {"hidden_act": "silu", "attention_bias": has_biases, "use_sliding_window": False}


def _phi3(fields: Fields) -> dict[str, Any]:
    params, size = rope(fields), fields.head_dim
    params["partial_rotary_factor"] = fields.count("rope.dimension_count", size) / size
    context = fields.count("context_length")
    return {
        "hidden_act": "silu",
        "sliding_window": fields.get("attention.sliding_window") or None,
        "original_max_position_embeddings": params.get("original_max_position_embeddings", context),
        "rope_parameters": params,
    }


def _gemma2(fields: Fields) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # as in llama.cpp
    return _gemma(fields) | {name: fields.number(name, cap) for name, cap in caps.items()}


def _gemma3(fields: Fields) -> dict[str, Any]:
    base = fields.number("rope.freq_base_swa", LOCAL_BASE)
    local = {"rope_type": "default", "rope_theta": base}
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return _gemma(fields) | {
        **{name: fields.get(name) for name in caps},
        "rope_parameters": {"full_attention": rope(fields), "sliding_attention": local},
    }


def _gemma(fields: Fields) -> dict[str, Any]:
    """Fields common to gemma2 and gemma3."""
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _attention_scalar(fields),
        "sliding_window": fields.count("attention.sliding_window"),
        "layer_types": _layer_types(fields),
        "attention_bias": False,
    }


def _attention_scalar(fields: Fields) -> int:
    """query_pre_attn_scalar: the head size, except in the 27B models."""
    if fields.get("attention.scale"):
        return round(fields.number("attention.scale") ** -2)  # transformers needs an integer
    if fields.count("block_count") in GEMMA_27B:
        return fields.count("embedding_length") // fields.heads
    return fields.head_dim


def _layer_types(fields: Fields) -> list[str]:
    """Sliding or full attention by layer, from a list in the file, or every n-th is full."""
    layers, name = fields.count("block_count"), fields.file.architecture
    found = fields.file.metadata.get(f"{name}.attention.sliding_window_pattern")
    if isinstance(found, list) and len(found) == layers:
        sliding = [bool(is_sliding) for is_sliding in found]
    else:
        step = fields.count("attention.sliding_window_pattern", GLOBAL_EVERY[name])
        sliding = [(i + 1) % step != 0 for i in range(layers)]
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding]


MORE: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
