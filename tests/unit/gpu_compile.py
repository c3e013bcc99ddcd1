"""Compiles the kernels of passes for GPUs that are not here; prints a JSON line for each.

    python tests/unit/gpu_compile.py 90 [quick]

The passes are those of the engine, on tensors without memory ("meta"): Triton specialises every
launch as it would, compiles it to machine code by its own ptxas, and launches nothing.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from forerun.models.layers import GatedMLP, Linear, RMSNorm
from forerun.models.transformer import DecoderConfig, Layer, RopeConfig, Transformer
from forerun.runner.gpu import bodies
from forerun.runner.gpu.layout import Shape
from forerun.runner.kv_cache import Cache

META = torch.device("meta")
LLAMA = DecoderConfig(
    vocab_size=128256, hidden_size=2048, num_layers=1, num_heads=32, num_kv_heads=8, head_dim=64,
    mlp_size=8192, context=4096, attn_scale=0.125, ropes=(RopeConfig(tuple([1.0] * 32)),),
)  # fmt: skip
WIDE = replace(
    LLAMA, hidden_size=4096, head_dim=128, mlp_size=14336, ropes=(RopeConfig(tuple([1.0] * 64)),)
)
CASES = [  # name, decoder, number type
    ("heads of 64", LLAMA, torch.bfloat16),
    ("heads of 128", WIDE, torch.bfloat16),
    ("fp16 with biases", replace(LLAMA, qkv_bias=True, mlp_bias=True), torch.float16),
    ("windows", replace(LLAMA, windows=(512,)), torch.bfloat16),
    ("soft caps", replace(LLAMA, attn_softcap=50.0, act="gelu_tanh"), torch.bfloat16),
    ("fp32", LLAMA, torch.float32),
]
SHAPES = [Shape(1, 1, 1), Shape(16, 16, 1), Shape(16, 1, 16), Shape(128, 128, 1), Shape(128, 8, 16)]


@dataclass
class Target:
    """The part of a Triton driver that compilation needs, for a GPU that is not here."""

    capability: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


def decoder(c: DecoderConfig, dtype: torch.dtype) -> Transformer:
    """A decoder with weights that have no memory."""

    def linear(rows: int, inner: int, bias: bool, is_gated: bool = False) -> Linear:
        given = torch.empty(rows, dtype=dtype, device=META) if bias else None
        weight = torch.empty(rows, inner, dtype=dtype, device=META)
        return Linear(weight, given, is_gated=is_gated, pack=False)

    def norm() -> RMSNorm:
        return RMSNorm(torch.empty(c.hidden_size, dtype=dtype, device=META), c.norm_eps)

    mlp = GatedMLP(
        linear(2 * c.mlp_size, c.hidden_size, c.mlp_bias, is_gated=True),
        linear(c.hidden_size, c.mlp_size, c.mlp_bias),
        c.act,
    )
    qkv = linear(c.num_lanes * c.head_dim, c.hidden_size, c.qkv_bias)
    out = linear(c.hidden_size, c.num_heads * c.head_dim, c.out_bias)
    table = torch.empty(c.vocab_size, c.hidden_size, dtype=dtype, device=META)
    head = linear(c.vocab_size, c.hidden_size, False)
    layers = [Layer(qkv, out, mlp, norm(), mlp_norm=norm())]
    return Transformer(c, table, layers, norm(), head)


def passes(c: DecoderConfig, dtype: torch.dtype, shapes: list[Shape]) -> None:
    """One pass of each shape."""
    model = decoder(c, dtype)
    cache = Cache(
        c.num_layers, c.num_kv_heads, c.head_dim, max_slots=4, max_cells=4096, dtype=dtype,
        device=META,
    )  # fmt: skip
    cache._grow((c.num_layers, 4, 4096, 2, c.num_kv_heads, c.head_dim))
    for shape in shapes:
        described = torch.empty(shape.size, dtype=torch.int64, device=META)
        bodies.body(model, cache, shape, described)()


def main(capability: int, is_quick: bool) -> None:
    """Prints a line for every kernel that was compiled."""
    driver.set_active(Target(capability))  # type: ignore[arg-type]
    bodies.can_overlap = lambda _: capability >= 90
    run, seen, name = JITFunction.run, set(), ""

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found = run(self, *args, grid=grid, warmup=True, **options)
        if found.hash not in seen:
            seen.add(found.hash)
            line = {"case": name, "kernel": self.fn.__name__, "shared": found.metadata.shared}
            line |= {"cubin": len(found.asm["cubin"]), "ptx": _words(found.asm["ptx"])}
            print(json.dumps(line), flush=True)

    JITFunction.run = compiled  # type: ignore[method-assign]
    with torch.inference_mode():
        for case in CASES[:1] if is_quick else CASES:
            name, config, dtype = case  # noqa: F841 - `compiled` reads the name
            passes(config, dtype, SHAPES[:3:2] if is_quick else SHAPES)


def _words(ptx: str) -> dict[str, Any]:
    """Counts of instructions in a kernel's assembly."""
    target = next(line.split()[1] for line in ptx.splitlines() if line.startswith(".target"))
    return {
        "target": target.rstrip(","),
        "wide loads": len(re.findall(r"ld\.global[\w.:]*\.v4\.b32|cp\.async\.cg", ptx)),
        "narrow loads": len(re.findall(r"ld\.global[\w.:]*\.b(?:8|16)\b", ptx)),
        "tensor cores": sum(ptx.count(word) for word in ("mma.sync", "wgmma", "tcgen05.mma")),
        "overlaps": ptx.count("griddepcontrol"),
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), "quick" in sys.argv)
