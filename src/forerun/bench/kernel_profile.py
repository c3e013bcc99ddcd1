"""Times of the matrix products of a native pass, each kind measured alone.

Native kernels run a whole pass in one call, so timers cannot split it.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forerun.bench.timers import seconds_of

if TYPE_CHECKING:
    from forerun.models.transformer import Transformer

NUM_TRIES = 7


def seconds_alone(model: Transformer, rows: int) -> dict[str, float]:
    """Seconds per pass of qkv, out, mlp and head on `rows` rows, minus the call overhead.

    Weights are read layer by layer, as in a pass, for the same cache hits.
    """
    kinds: dict[str, list[Any]] = {
        "qkv": [layer.qkv for layer in model.layers],
        "out": [layer.out for layer in model.layers],
        "mlp": [],
        "head": [model.head],
    }
    for layer in model.layers:
        mlp: Any = layer.mlp
        kinds["mlp"] += [getattr(mlp, "gate_up", None) or mlp.up, mlp.down]
    work = {
        kind: [(part.packed, _input(part, rows, model.dtype)) for part in parts]
        for kind, parts in kinds.items()
    }
    call = _call_overhead(rows, model.dtype)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(NUM_TRIES):
        for kind, calls in work.items():
            times[kind].append(seconds_of(partial(_multiply, calls)))
    return {k: max(statistics.median(times[k]) - call * len(work[k]), 0.0) for k in kinds}


def _input(part: Any, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(rows, part.shape[1], dtype=dtype)


def _multiply(calls: list[tuple[Any, torch.Tensor]]) -> None:
    for packed, x in calls:
        packed.product(x)


def _call_overhead(rows: int, dtype: torch.dtype) -> float:
    """Seconds of a product of a tiny matrix."""
    from forerun.runner.native.packing import Packed

    small = Packed(torch.ones(64, 16, dtype=dtype))
    calls = [(small, torch.ones(rows, 16, dtype=dtype))] * 50
    times = [seconds_of(partial(_multiply, calls)) for _ in range(NUM_TRIES)]
    return min(times) / len(calls)
