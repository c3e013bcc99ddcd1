"""Roofline: the average pass of a run over the shortest pass within the machine's limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forerun.bench.metrics import PLAIN, batch_option, samples_of, time_split, totals
from forerun.bench.results import Manifest, Record
from forerun.bench.theory import PassCost


@dataclass(frozen=True)
class DecodePasses:
    """The passes after the prefill."""

    passes: int
    forward: float  # seconds of the target
    wall: float  # wall seconds

    @property
    def mean_pass(self) -> float:
        """Seconds of the average pass."""
        return self.forward / self.passes

    @property
    def mean_step(self) -> float:
        """Wall seconds of the average step."""
        return self.wall / self.passes


def decode_passes(records: Iterable[Record]) -> DecodePasses | None:
    """Passes and seconds of records without their prefill; None if unknown or empty."""
    mine = [record for record in records if record.error is None]
    split, passes = time_split(mine), totals(samples_of(mine)).passes
    prefills = [r.prefill_seconds for r in mine if r.prefill_seconds is not None]
    if not split or passes is None or len(prefills) < len(mine):
        return None
    taken, wall = sum(prefills), sum(record.seconds for record in mine)
    found = DecodePasses(passes - len(mine), split["forward"] - taken, wall - taken)
    return found if found.passes > 0 and min(found.forward, found.wall) > 0 else None


@dataclass(frozen=True)
class Fraction:
    """Roofline and measured time of a method's passes."""

    roofline_seconds: float  # of one pass
    forward_seconds: float  # measured, the pass alone
    step_seconds: float  # measured, wall time over passes, without prefill

    @property
    def of_forward(self) -> float:
        return self.roofline_seconds / self.forward_seconds

    @property
    def of_step(self) -> float:
        return self.roofline_seconds / self.step_seconds


def roofline_fraction(
    manifest: Manifest, records: Iterable[Record], method: str = PLAIN
) -> Fraction | None:
    """Roofline over measured time of a method's average pass, with the reading speed of each
    record; None if unknown, and for batched methods."""
    mine = [r for r in records if r.method == method and r.error is None]
    cost, found = PassCost.from_dict(manifest.model), decode_passes(mine)
    is_known = {"read_gb_s", "gflop_s"} <= manifest.limits.keys() and not batch_option(method)
    if cost is None or found is None or not is_known:
        return None
    roofline = sum(_roofline_of(cost, manifest.limits, r) for r in mine)
    return Fraction(roofline / found.passes, found.mean_pass, found.mean_step)


def _roofline_of(cost: PassCost, limits: dict[str, float], record: Record) -> float:
    """Seconds at the limits of all passes of a record without its prefill."""
    found = totals(samples_of([record]))
    if not found.passes:
        return 0.0
    rows = round(1 + (found.drafted or 0) / found.passes)
    own = limits | {name: x for name, x in (record.limits or {}).items() if name == "read_gb_s"}
    seconds = cost.roofline_seconds(own, context=mean_context([record]), rows=rows)
    return (found.passes - 1) * seconds


def mean_context(records: Iterable[Record]) -> float:
    """Mean number of tokens before a pass: the prompt and half of the generated tokens."""
    weighted = [
        (sample.tokens, record.num_prompt_tokens + sample.tokens / 2)
        for record in records
        for sample in record.samples
    ]
    total = sum(tokens for tokens, _ in weighted)
    return sum(tokens * context for tokens, context in weighted) / total if total else 0.0
