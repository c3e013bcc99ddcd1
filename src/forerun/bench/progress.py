"""Progress of a run and its estimated time left."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass
class Progress:
    """Progress of a run and its estimated time left."""

    total: int  # records
    done: int = 0
    spent: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    left: Counter[str] = field(default_factory=Counter)  # missing records by method

    def finish(self, method: str, seconds: float) -> None:
        """Counts one record; seconds include its set-up."""
        self.done += 1
        self.left[method] -= 1
        self.spent[method].append(seconds)

    @property
    def eta(self) -> float | None:
        """Estimated seconds left, from the mean of each method; None before the first record."""
        all_seconds = [s for seconds in self.spent.values() for s in seconds]
        if not all_seconds:
            return None
        overall = sum(all_seconds) / len(all_seconds)
        mean = {m: sum(s) / len(s) for m, s in self.spent.items() if s}
        return sum(count * mean.get(method, overall) for method, count in self.left.items())
