"""ctypes records of types.h and signatures of the kernels."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int64, c_void_p

F32, BF16, F16, BF16_PAIRS, INT8, INT8_PAIRS = range(6)  # number formats
LANES, GROUP, CHUNK, RUN, STATE = 16, 64, 256, 1024, 2
TOP_BLOCK, TOP_SPAN = 1024, 8192
MOST_DIM, MOST_FOLD = 256, 64
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
QK_NORMS = ("", "head", "width")


def _record(name: str, **fields: type) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


Linear = _record(
    "Linear",
    weight=c_void_p,
    bias=c_void_p,
    scale=c_void_p,
    n=c_int64,
    k=c_int64,
    groups=c_int64,
    kind=c_int64,
    is_gated=c_int64,
    scaled=c_int64,
    num_scales=c_int64,
    is_streamed=c_int64,
    fetched=c_int64,
)
Norm = _record("Norm", weight=c_void_p, bias=c_void_p, is_layer=c_int64, eps=c_double)
Layer = _record(
    "Layer",
    qkv=Linear,
    out=Linear,
    up=Linear,
    down=Linear,
    attn=Norm,
    post_attn=Norm,
    mlp=Norm,
    post_mlp=Norm,
    q=Norm,
    k=Norm,
    window=c_int64,
    rope=c_int64,
)
Model = _record(
    "Model",
    **dict.fromkeys(
        ("hidden", "num_layers", "num_heads", "num_kv", "head_dim", "inner")
        + ("activation", "qk_norm", "cell_kind", "act_kind"),
        c_int64,
    ),
    **dict.fromkeys(("attn_scale", "attn_cap", "logit_cap", "embed_scale"), c_double),
    **dict.fromkeys(("logit_scale", "residual_scale"), c_double),
    embed=c_void_p,
    places=c_void_p,
    layers=POINTER(Layer),
    norm=Norm,
    head=Linear,
)
Span = _record(
    "Span",
    **dict.fromkeys(("slot", "base", "stop", "num_rows", "first_row"), c_int64),
    sees=c_void_p,
)
Pass = _record(
    "Pass",
    **dict.fromkeys(("num_rows", "num_wanted", "num_spans", "num_threads", "is_split"), c_int64),
    ids=c_void_p,
    positions=c_void_p,
    wanted=c_void_p,
    spans=c_void_p,  # to records of `Span`
    rope=c_void_p,
    rope_stride=c_int64,
    cells=c_void_p,
    layer_stride=c_int64,
    slot_stride=c_int64,
    head_stride=c_int64,
    **dict.fromkeys(("x", "wide", "qkv", "partial", "act", "inner_act"), c_void_p),
    **dict.fromkeys(("wide_stride", "act_stride", "max_runs"), c_int64),
    hidden=c_void_p,
    logits=c_void_p,
    logit_stride=c_int64,
)
SIGNATURES: dict[str, list[type]] = {
    "forerun_read": [c_int64, c_void_p, c_int64, c_int64, c_int64],
    "forerun_pass": [c_int64, POINTER(Model), POINTER(Pass), c_void_p, c_void_p],
    "forerun_attention": [c_int64, POINTER(Model), POINTER(Pass), c_void_p],
    "forerun_product": [
        c_int64,
        POINTER(Linear),
        c_void_p,
        c_int64,
        c_int64,
        c_void_p,
        c_int64,
        c_void_p,
        c_int64,
        c_int64,
        c_int64,
    ],
    "forerun_top_probs": [
        c_int64,
        c_void_p,
        *[c_int64] * 3,
        *[c_void_p] * 3,
        c_int64,
    ],
}


def fingerprint() -> int:
    """Sizes of the records, like `forerun_layout` in C."""
    number = 0
    for record in (Pass, Span, Model, Layer, Linear):
        number = 1000 * number + ctypes.sizeof(record)
    return number
