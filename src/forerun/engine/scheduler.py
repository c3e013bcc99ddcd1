"""The queue of waiting sequences and the list of running ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from forerun.core.records import Sequence
from forerun.errors import ConfigError


class Scheduler:
    """First come, first served; at most `max_seqs` sequences run at once."""

    def __init__(self, max_seqs: int) -> None:
        if max_seqs < 1:
            raise ConfigError(f"max_seqs must be at least 1, got {max_seqs}")
        self.max_seqs = max_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> None:
        """Puts a sequence at the end of the queue."""
        self.waiting.append(seq)

    def admit(self, on_start: Callable[[Sequence], None]) -> None:
        """Starts waiting sequences up to `max_seqs`."""
        while self.waiting and len(self.running) < self.max_seqs:
            seq = self.waiting.popleft()
            on_start(seq)
            self.running.append(seq)

    def retire(self) -> tuple[list[Sequence], list[Sequence]]:
        """Removes and returns finished sequences, and those cancelled while waiting."""
        ended = [seq for seq in self.running if seq.finish is not None]
        dropped = [seq for seq in self.waiting if seq.finish is not None]
        if ended or dropped:
            self.running = [seq for seq in self.running if seq.finish is None]
            self.waiting = deque(seq for seq in self.waiting if seq.finish is None)
        return ended, dropped
