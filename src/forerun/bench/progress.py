"""How far a run is, and when it will end."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass
class Progress:
    """How far a run is, and when it will end."""

    total: int  # records
    done: int = 0
    here: int = 0  # of them, in this process
    spent: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    left: Counter[str] = field(default_factory=Counter)  # records to come, by method

    def finish(self, method: str, seconds: float) -> None:
        """One record is there; seconds: all that it took, set-up included."""
        self.done += 1
        self.here += 1
        self.left[method] -= 1
        self.spent[method].append(seconds)

    @property
    def eta(self) -> float | None:
        """Seconds that are left, from what each method has taken so far; None before the first."""
        all_seconds = [s for seconds in self.spent.values() for s in seconds]
        if not all_seconds:
            return None
        usual = sum(all_seconds) / len(all_seconds)
        mean = {m: sum(s) / len(s) for m, s in self.spent.items() if s}
        return sum(count * mean.get(method, usual) for method, count in self.left.items())
