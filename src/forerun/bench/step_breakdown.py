"""Time of a decoding step by part, with shares and flags."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from forerun.bench.timers import Clock

if TYPE_CHECKING:
    from forerun.core.records import Step

MAX_SHARE = 0.10  # of a step; larger parts outside the pass are flagged
MAX_TIMER_ERROR = 0.15  # between a step with timers, minus their cost, and one without
FORWARD = "forward: "
REST = FORWARD + "rest"
NATIVE = FORWARD + "native kernels"
PYTHON = "Python rest"
COUNTING = "counting"  # work of the profile itself, not part of the breakdown
ORDER = (  # of the lines; kinds of layers are sorted by time
    "draft",
    "plan",
    "logits copy and shaping",
    "verify",
    "commit",
    "learn",
    "statistics",
    "tokens and stops",
    PYTHON,
)


@dataclass(frozen=True)
class Line:
    """One part of a step."""

    name: str
    microseconds: float  # per step
    share: float
    calls: float | None  # per step; None without a timer
    is_flagged: bool


@dataclass(frozen=True)
class StepBreakdown:
    """A step's time by part."""

    lines: list[Line]
    steps: int
    tokens: int
    step_microseconds: float  # sum of the lines
    bare_microseconds: float  # a step without timers, measured interleaved
    bare_outside: float | None  # its share outside the pass; None for asynchronous devices
    timer_share: float  # of a timed step, subtracted above
    notes: tuple[str, ...] = ()

    @property
    def outside_lines(self) -> float:
        """Share outside the target's pass, by the lines.

        Usually above `bare_outside`: the cost of a timer is calibrated with warm caches, and timers
        after a pass run with cold ones.
        """
        return sum(line.share for line in self.lines if not line.name.startswith(FORWARD))

    @property
    def outside_share(self) -> float:
        """The share without timers, if known; the one to quote."""
        return self.outside_lines if self.bare_outside is None else self.bare_outside

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {
            "outside_lines": self.outside_lines, "outside_share": self.outside_share
        }  # fmt: skip


@dataclass
class UntimedRuns:
    """Seconds of runs without timers."""

    seconds: float = 0.0
    forward: float = 0.0  # of these, in passes, as the engine reports

    def add(self, other: UntimedRuns) -> None:
        """Adds another run's figures."""
        self.seconds += other.seconds
        self.forward += other.forward


@dataclass
class TimedRuns:
    """Counts of runs with timers; a Clock has the seconds."""

    asynchronous: int = 0  # steps with logits on an asynchronous device
    steps: int = 0
    tokens: int = 0
    rows: int = 0  # of all passes

    def count(self, step: Step) -> None:
        """Listener: counts one step."""
        self.steps += 1
        self.rows += sum(1 + len(tree) for tree in step.trees)
        self.tokens += sum(map(len, step.emitted))
        self.asynchronous += any(law.rows.is_on_device for law in step.laws)


def breakdown(
    clock: Clock,
    cost: tuple[float, float],
    run: TimedRuns,
    bare: UntimedRuns,
    alone: dict[str, float] | None = None,
) -> StepBreakdown:
    """The lines of a profile in the order of a step.

    bare: the same texts without timers. alone: seconds per step of kinds of layers within native
    kernels.
    """
    spent, steps = clock.corrected(cost), max(run.steps, 1)
    spent.pop(COUNTING, None)
    total, timers = sum(spent.values()) or 1.0, clock.overhead(cost)
    untimed = bare.seconds / steps
    calls = {name: clock.calls[name] / steps for name in spent if name != PYTHON}
    notes = _split_native(spent, {kind: steps * seconds for kind, seconds in (alone or {}).items()})

    def line(name: str) -> Line:
        share = spent[name] / total
        is_flagged = not name.startswith(FORWARD) and share > MAX_SHARE
        return Line(name, 1e6 * spent[name] / steps, share, calls.get(name), is_flagged)

    forward = sorted((n for n in spent if n.startswith(FORWARD)), key=lambda n: -spent[n])
    rest = sorted(n for n in spent if n not in ORDER and n not in forward)
    names = [*(n for n in ORDER[:2] if n in spent), *forward]
    names += [n for n in (*ORDER[2:-1], *rest, PYTHON) if n in spent]
    return StepBreakdown(
        [line(name) for name in names],
        steps,
        run.tokens,
        1e6 * total / steps,
        1e6 * untimed,
        1 - bare.forward / bare.seconds if bare.seconds and not run.asynchronous else None,
        timers / (total + timers),
        (*notes, *_timer_error(total / steps, untimed)),
    )


def _timer_error(step: float, bare: float) -> list[str]:
    """A warning if steps with and without timers differ too much."""
    error = step / bare - 1 if bare else 0.0
    if abs(error) <= MAX_TIMER_ERROR:
        return []
    more = "more" if error > 0 else "less"
    return [
        f"steps with timers took {abs(error):.0%} {more} time than those without; measure again "
        "with more --rounds"
    ]


def _split_native(spent: dict[str, float], alone: dict[str, float]) -> tuple[str, ...]:
    """Splits the time of the native kernels by kind of layer, in place; returns notes."""
    whole = spent.get(NATIVE, 0.0)
    if not alone or not whole:
        return ()
    if not all(alone.values()):
        return ("qkv, out, mlp or head is too fast to measure alone: native kernels are not split",)
    scale = min(1.0, whole / sum(alone.values()))
    spent |= {FORWARD + kind: scale * seconds for kind, seconds in alone.items()}
    del spent[NATIVE]
    note = "native kernels run a pass in one call; qkv, out, mlp and head were measured alone"
    if scale < 1:
        return (f"{note}, and took longer than the pass: attention and norms are unknown",)
    spent[FORWARD + "attention, norms, waiting"] = max(0.0, whole - sum(alone.values()))
    return (note,)
