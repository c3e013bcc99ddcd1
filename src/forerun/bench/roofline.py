"""The average pass of a run beside the shortest one that the machine's limits allow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forerun.bench.metrics import PLAIN, at_once, samples_of, time_split, totals
from forerun.bench.results import Manifest, Record
from forerun.bench.theory import PassCost


@dataclass(frozen=True)
class AfterPrompts:
    """The passes that follow those which computed the prompts."""

    passes: int
    forward: float  # seconds of the target in them
    wall: float  # seconds with all that is around them

    @property
    def mean_pass(self) -> float:
        """Seconds of the target's average pass."""
        return self.forward / self.passes

    @property
    def mean_step(self) -> float:
        """Seconds of the average step around it."""
        return self.wall / self.passes


def after_prompts(records: Iterable[Record]) -> AfterPrompts | None:
    """Passes and seconds of records, less the pass of each that computed its prompt.

    None where one does not tell, or nothing is left.
    """
    mine = [record for record in records if record.error is None]
    split, passes = time_split(mine), totals(samples_of(mine)).passes
    prefills = [r.prefill_seconds for r in mine if r.prefill_seconds is not None]
    if not split or passes is None or len(prefills) < len(mine):
        return None
    taken, wall = sum(prefills), sum(record.seconds for record in mine)
    found = AfterPrompts(passes - len(mine), split["forward"] - taken, wall - taken)
    return found if found.passes > 0 and min(found.forward, found.wall) > 0 else None


@dataclass(frozen=True)
class Fraction:
    """How near a method's passes come to the roofline."""

    roofline_seconds: float  # of one pass
    forward_seconds: float  # measured, the target's pass alone
    step_seconds: float  # measured, wall time over passes, those of the prompts taken off

    @property
    def of_forward(self) -> float:
        return self.roofline_seconds / self.forward_seconds

    @property
    def of_step(self) -> float:
        return self.roofline_seconds / self.step_seconds


def roofline_fraction(
    manifest: Manifest, records: Iterable[Record], method: str = PLAIN
) -> Fraction | None:
    """Roofline over measured time of a method's average pass; None if something is not told, as
    where several sequences share a pass, which counts for each of them.

    Memory is taken to be as fast as it was beside each record.
    """
    mine = [r for r in records if r.method == method and r.error is None]
    cost, found = PassCost.from_dict(manifest.model), after_prompts(mine)
    is_told = {"read_gb_s", "gflop_s"} <= manifest.limits.keys() and not at_once(method)
    if cost is None or found is None or not is_told:
        return None
    roofline = sum(_roofline_of(cost, manifest.limits, r) for r in mine)
    return Fraction(roofline / found.passes, found.mean_pass, found.mean_step)


def _roofline_of(cost: PassCost, limits: dict[str, float], record: Record) -> float:
    """Seconds at the limits of all passes of a record but the one that computed its prompt."""
    found = totals(samples_of([record]))
    if not found.passes:
        return 0.0
    rows = round(1 + (found.drafted or 0) / found.passes)
    own = limits | {name: x for name, x in (record.limits or {}).items() if name == "read_gb_s"}
    seconds = cost.roofline_seconds(own, context=mean_context([record]), rows=rows)
    return (found.passes - 1) * seconds


def mean_context(records: Iterable[Record]) -> float:
    """Tokens before a pass on average: the prompt and half of what was generated."""
    weighted = [
        (sample.tokens, record.num_prompt_tokens + sample.tokens / 2)
        for record in records
        for sample in record.samples
    ]
    total = sum(tokens for tokens, _ in weighted)
    return sum(tokens * context for tokens, context in weighted) / total if total else 0.0
