"""Cost of a pass, the cost curve c(N), predicted speed-ups, and the headroom of acceptance.

c(N) is the time of a pass over N rows (the root and N - 1 draft nodes) over that of one row.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.bench.metrics import Totals, ratio
from forerun.bench.optimum import candidates, for_drafts
from forerun.bench.results import Record
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Sequence as Trajectory
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree, TreeBuilder

if TYPE_CHECKING:
    from forerun.core.records import Step
    from forerun.core.roles import Target

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
CONTEXT = 256  # tokens before the pass
ROUNDS = 15


@dataclass(frozen=True)
class PassCost:
    """Bytes read and operations of one pass over one row."""

    weight_bytes: int  # as stored, padding included; one row of the embedding
    kv_bytes_per_token: int  # keys and values of one token, all layers
    flops_per_row: int  # two per used weight; without attention

    def bytes_read(self, context: float) -> float:
        """Bytes of a pass after `context` tokens."""
        return self.weight_bytes + self.kv_bytes_per_token * context

    def roofline_seconds(
        self, limits: Mapping[str, float], *, context: float = 0.0, rows: int = 1
    ) -> float:
        """The shortest possible time of a pass: the longer of reading and computing."""
        reading = self.bytes_read(context) / (1e9 * limits["read_gb_s"])
        return max(reading, rows * self.flops_per_row / (1e9 * limits["gflop_s"]))

    def to_dict(self) -> dict[str, int]:
        """Plain values for the manifest."""
        return {
            "pass_bytes": self.weight_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "flops_per_row": self.flops_per_row,
        }

    @classmethod
    def from_dict(cls, model: Mapping[str, Any]) -> PassCost | None:
        """From a manifest's `model`; None if unknown."""
        names = ("pass_bytes", "kv_bytes_per_token", "flops_per_row")
        return cls(*(model[name] for name in names)) if all(n in model for n in names) else None


def pass_cost(target: Target) -> PassCost | None:
    """Cost of a one-row pass of our decoder; None for models run by transformers."""
    from forerun.runner.model_runner import ModelRunner

    if not isinstance(target, ModelRunner):
        return None
    model = target.model
    linears = _used(model)
    held = sum(part.nbytes for part in (*linears, *model.norms()))
    c, size = model.config, model.dtype.itemsize
    return PassCost(
        weight_bytes=held + size * c.hidden_size,
        kv_bytes_per_token=2 * c.num_layers * c.num_kv_heads * c.head_dim * size,
        flops_per_row=sum(2 * math.prod(part.shape) for part in linears),
    )


def _used(model: Any) -> list[Any]:
    """The products of one row; of a mixture of experts, those of one token."""
    from forerun.models.layers import Experts

    left_out = [
        id(part)
        for layer in model.layers
        if isinstance(layer.mlp, Experts)
        for expert in layer.mlp.experts[layer.mlp.top_k :]
        for part in (expert.gate_up, expert.down)
    ]
    return [part for part in model.linears() if id(part) not in left_out]


def cost_curve(
    target: Target,
    rows: Sequence[int] = ROWS,
    *,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> dict[str, float]:
    """Median seconds of a pass over N rows after `context` tokens, all N interleaved."""
    length = max(1, min(context, target.context - max(rows) - 1))
    tokens = np.random.default_rng(seed).integers(0, target.vocab_size, length).tolist()
    seq = Trajectory(tokens, length, Sampling(), SeededDice(0), limit=target.context)
    trees = {n: binary_tree(n - 1, target.vocab_size) for n in rows}
    times: dict[int, list[float]] = {n: [] for n in rows}
    try:
        for i in range(rounds + 1):
            for n in rows if i % 2 else rows[::-1]:
                start = time.perf_counter()
                (found,) = target.forward(ForwardBatch([seq], [trees[n]]))
                found.row(-1)  # on a GPU: wait for it
                if i:
                    times[n].append(time.perf_counter() - start)
    finally:
        target.release(seq)
    return {str(n): statistics.median(times[n]) for n in rows}


def binary_tree(num_nodes: int, vocab: int) -> Tree:
    """A tree with up to two children per node."""
    builder = TreeBuilder()
    for node in range(num_nodes):
        builder.add((7 * node + 3) % vocab, (node - 2) // 2 if node > 1 else -1)
    return builder.build()


def pass_seconds(curve: Mapping[str, float], rows: float) -> float | None:
    """Seconds of a pass over `rows` rows, interpolated; None outside the measured range."""
    known = sorted((int(n), seconds) for n, seconds in curve.items())
    if not known or not known[0][0] <= rows <= known[-1][0]:
        return None
    return float(np.interp(rows, [n for n, _ in known], [seconds for _, seconds in known]))


def relative_cost(curve: Mapping[str, float]) -> dict[int, float]:
    """c(N) by rising N; empty without a measurement of one row."""
    one = curve.get("1")
    return {n: curve[str(n)] / one for n in sorted(map(int, curve))} if one else {}


def predicted_speed_up(found: Totals, curve: Mapping[str, float], outside: float = 0.0) -> float:
    """tau t(1) / (t(1 + D/S) + outside); NaN if unknown.

    outside: seconds per step outside the pass.
    """
    if not found.passes or found.drafted is None or found.tau is None:
        return float("nan")
    one, many = pass_seconds(curve, 1), pass_seconds(curve, 1 + found.drafted / found.passes)
    if one is None or many is None:
        return float("nan")
    return found.tau * one / (many + outside)


def memory_bound_speed_up(tau: float, passes: float, share: float) -> float:
    """tau / (1 + k r): k draft passes per round, each reading a share r of the target's weights."""
    return tau / (1 + passes * share)


@dataclass
class Headroom:
    """Listener: acceptance per drafted position, and the optimum (`forerun.bench.optimum`).

    A position is a visited node with drafts. The optimum is over rules that judge positions one by
    one; block verification does not and may exceed it.
    """

    examined: int = 0  # positions
    accepted: int = 0  # positions that went on to a draft
    best: float = 0.0  # expected acceptance of the optimal rule, summed over positions
    unknown: int = 0  # positions with an unknown optimum, not counted above

    def __call__(self, step: Step) -> None:
        for tree, laws, verdict in zip(step.trees, step.laws, step.verdicts, strict=True):
            for depth, node in enumerate((-1, *verdict.nodes)):
                if drafts := candidates(tree, node):
                    best = for_drafts(tree, drafts, laws[node])
                    self._count(depth < len(verdict.nodes), best)

    def _count(self, is_accepted: bool, best: float | None) -> None:
        if best is None:
            self.unknown += 1
            return
        self.examined += 1
        self.accepted += is_accepted
        self.best += best

    @classmethod
    def of(cls, records: Iterable[Record]) -> Headroom:
        """Summed over records; empty if unknown."""
        found = [record.headroom for record in records if record.headroom]
        names = ("examined", "accepted", "best", "unknown")
        return cls(*(sum(head[name] for head in found) for name in names))  # type: ignore[arg-type]

    @property
    def acceptance(self) -> float | None:
        return ratio(self.accepted, self.examined)

    @property
    def optimum(self) -> float | None:
        return ratio(self.best, self.examined)
