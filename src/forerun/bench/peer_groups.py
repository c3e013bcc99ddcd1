"""Which peers run at the same time, so that what runs together fits into memory.

By default all peers form one group. A peer that does not fit together with those that already run
waits for the next group. Each group is interleaved with plain decoding again. Memory is read before
every start: running peers count with what they use, only the next one with its estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from forerun.bench import machine
from forerun.bench.contestants import Contestant
from forerun.bench.metrics import PLAIN
from forerun.runner.free_memory import available_bytes

GIB = 1 << 30
RESERVE_SHARE, RESERVE_BYTES = 0.05, GIB  # of memory, at most: left to the system and its files


class PeerGroups:
    """The group of every peer. Group 0 also holds all methods of ours."""

    def __init__(
        self, contestants: Mapping[str, Contestant], known: Mapping[str, Mapping[str, int]]
    ) -> None:
        """contestants: all that take part; known: what the manifest says of peers."""
        self._contestants = contestants
        self.of = {
            name: known.get(name, {}).get("group", 0)
            for name, one in contestants.items()
            if one.host is not None
        }

    @property
    def last(self) -> int:
        """The number of the last group that has a peer."""
        return max((self.of[name] for name in self._contestants if name in self.of), default=0)

    def peers(self, group: int) -> list[str]:
        return [name for name in self._contestants if self.of.get(name) == group]

    def members(self, group: int) -> list[str]:
        """Contestants of a group: a later one has its peers and plain decoding, or none."""
        if group == 0:
            return [name for name in self._contestants if self.of.get(name, 0) == 0]
        peers = self.peers(group)
        return [name for name in (PLAIN,) if peers and name in self._contestants] + peers

    def shortage(self, name: str, running: Iterable[str]) -> str:
        """Why a peer does not fit together with what runs, in numbers; "" if it fits."""
        need = self._contestants[name].memory_needed()
        growth = {one: self._contestants[one].memory_needed() for one in running}
        own = max((size for one, size in growth.items() if one not in self.of), default=0)
        peers = sum(size for one, size in growth.items() if one in self.of)
        free = available_bytes(torch.device("cpu")) - own - peers  # our methods share a cache
        free -= min(int(RESERVE_SHARE * machine.memory_bytes()), RESERVE_BYTES)
        if need <= free:
            return ""
        cache = self._contestants[name].memory_plan().get("cache_bytes", 0)
        return f"needs {shown(need)} of memory ({shown(cache)} its cache), {shown(free)} are free"


def shown(size: int) -> str:
    """Bytes as "1.5 GiB", or "14 MiB" where they are fewer."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{max(size, 0) >> 20} MiB"
