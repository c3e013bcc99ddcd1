"""The budget of a step: its lines, their shares, and which of them are flagged."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from forerun.bench.timers import Clock

if TYPE_CHECKING:
    from forerun.core.records import Step

LIMIT = 0.10  # share of a step above which a part outside the pass is flagged
APART = 0.15  # between a step with timers, their cost taken off, and one without
FORWARD = "forward: "
REST = FORWARD + "rest"
NATIVE = FORWARD + "native kernels"
PYTHON = "Python rest"
COUNTING = "counting"  # what the profile itself does in a step: no part of a budget
ORDER = (  # of the lines of a budget; kinds of layers are sorted by time
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
    calls: float | None  # per step; None where no timer was
    is_flagged: bool


@dataclass(frozen=True)
class Budget:
    """A step's time by part."""

    lines: list[Line]
    steps: int
    tokens: int
    step_microseconds: float  # sum of the lines
    bare_microseconds: float  # a step without timers, measured in turn with the others
    bare_outside: float | None  # its share outside the pass; None: a device may compute on
    timer_share: float  # of a timed step, taken off above
    notes: tuple[str, ...] = ()

    @property
    def outside_lines(self) -> float:
        """Share of everything that is not the target's pass, by the lines.

        Mostly above `bare_outside`: what a timer costs is measured while its code is warm, and most
        of them lie behind a pass, which has made it cold.
        """
        return sum(line.share for line in self.lines if not line.name.startswith(FORWARD))

    @property
    def outside_share(self) -> float:
        """The share to quote: that without timers, where it is known."""
        return self.outside_lines if self.bare_outside is None else self.bare_outside

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {
            "outside_lines": self.outside_lines, "outside_share": self.outside_share
        }  # fmt: skip


@dataclass
class Bare:
    """Runs without timers, as anybody's run would be: nothing of the profile's listens to them."""

    seconds: float = 0.0
    forward: float = 0.0  # of these, in passes, as the engine itself tells

    def add(self, other: Bare) -> None:
        """Adds another run's figures."""
        self.seconds += other.seconds
        self.forward += other.forward


@dataclass
class Measured:
    """What timed runs did; their clock knows the seconds."""

    away: int = 0  # steps whose logits lie on a device, which may compute on
    steps: int = 0
    tokens: int = 0
    rows: int = 0  # of all passes

    def count(self, step: Step) -> None:
        """Listener: one more step of the run."""
        self.steps += 1
        self.rows += sum(1 + len(tree) for tree in step.trees)
        self.tokens += sum(map(len, step.emitted))
        self.away += any(law.rows.is_on_device for law in step.laws)


def budget(
    clock: Clock,
    cost: tuple[float, float],
    run: Measured,
    bare: Bare,
    alone: dict[str, float] | None = None,
) -> Budget:
    """The lines of a profile in the order in which a step goes.

    bare: the same texts, and so steps, without timers. alone: seconds per step of kinds of layers
    within native kernels.
    """
    spent, steps = clock.corrected(cost), max(run.steps, 1)
    spent.pop(COUNTING, None)
    total, timers = sum(spent.values()) or 1.0, clock.overhead(cost)
    untimed = bare.seconds / steps
    calls = {name: clock.calls[name] / steps for name in spent if name != PYTHON}
    notes = _divide(spent, {kind: steps * seconds for kind, seconds in (alone or {}).items()})

    def line(name: str) -> Line:
        share = spent[name] / total
        is_flagged = not name.startswith(FORWARD) and share > LIMIT
        return Line(name, 1e6 * spent[name] / steps, share, calls.get(name), is_flagged)

    forward = sorted((n for n in spent if n.startswith(FORWARD)), key=lambda n: -spent[n])
    rest = sorted(n for n in spent if n not in ORDER and n not in forward)
    names = [*(n for n in ORDER[:2] if n in spent), *forward]
    names += [n for n in (*ORDER[2:-1], *rest, PYTHON) if n in spent]
    return Budget(
        [line(name) for name in names],
        steps,
        run.tokens,
        1e6 * total / steps,
        1e6 * untimed,
        1 - bare.forward / bare.seconds if bare.seconds and not run.away else None,
        timers / (total + timers),
        (*notes, *_apart(total / steps, untimed)),
    )


def _apart(step: float, bare: float) -> list[str]:
    """That a step took much longer, or less, with timers than without."""
    apart = step / bare - 1 if bare else 0.0
    if abs(apart) <= APART:
        return []
    more = "more" if apart > 0 else "less"
    return [
        f"steps with timers took {abs(apart):.0%} {more} time than those without: the machine "
        "changed meanwhile, or what timers cost was misjudged; measure again, with more --rounds"
    ]


def _divide(spent: dict[str, float], alone: dict[str, float]) -> tuple[str, ...]:
    """Divides the time of the native kernels among kinds of layers, in place; says how."""
    whole = spent.get(NATIVE, 0.0)
    if not alone or not whole:
        return ()
    if not all(alone.values()):
        return ("qkv, out, mlp or head, measured alone, took no time that shows: not told apart",)
    scale = min(1.0, whole / sum(alone.values()))
    spent |= {FORWARD + kind: scale * seconds for kind, seconds in alone.items()}
    del spent[NATIVE]
    said = "the kernels run a pass in one call; qkv, out, mlp and head were measured alone"
    if scale < 1:
        return (f"{said}, and took longer so: nothing is left to tell of attention and norms",)
    spent[FORWARD + "attention, norms, waiting"] = max(0.0, whole - sum(alone.values()))
    return (said,)
