"""The processes that torchrun starts: rank 0 runs the recipe, the others wait for its work.

Work is sent through torchrun's key-value store, so that waiting has no time limit: recording the
answers of a target takes hours.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

POLL_SECONDS = 0.2  # between looks for work


@dataclass
class Torchrun:
    """This process among those of torchrun."""

    rank: int
    size: int
    local_rank: int
    local_size: int  # processes on this machine
    store: dist.Store
    num_groups: int = 0  # process groups so far

    def send(self, work: bytes) -> None:
        """Rank 0: sends the other ranks their work in the next group; without any they end."""
        self.store.set(f"work {self.num_groups}", work)  # type: ignore[arg-type]  # takes bytes too

    def receive(self) -> bytes:
        """Waits for the work of the next group; none if rank 0 has ended."""
        key = f"work {self.num_groups}"
        with suppress(dist.DistError):  # the machine of rank 0 is gone
            while not self.store.check([key]):
                time.sleep(POLL_SECONDS)
            return self.store.get(key)
        return b""

    def release(self) -> None:
        """Rank 0: ends the processes that wait for work."""
        with suppress(dist.DistError):  # torchrun has ended
            self.send(b"")

    def rendezvous(self) -> dict[str, Any]:
        """Arguments of `init_process_group` for the next group; each has keys of its own."""
        self.num_groups += 1
        return {"store": dist.PrefixStore(f"group {self.num_groups}", self.store)}


_current: Torchrun | None = None  # set by `join`


def join(rank: int, size: int, local_rank: int, local_size: int) -> Torchrun:
    """Joins the processes of torchrun; process groups consist of them from now on."""
    global _current
    store = dist.PrefixStore("forerun", next(dist.rendezvous("env://"))[0])
    _current = Torchrun(rank, size, local_rank, local_size, store)
    return _current


def current() -> Torchrun | None:
    """The processes of torchrun that this one has joined; None without torchrun."""
    return _current
