"""Groups of peers that fit into memory together.

By default all peers form one group. A peer that does not fit next to the running ones moves to the
next group. Each group is interleaved with plain decoding. Memory is read before every start:
running peers count with their actual use, the next one with its estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from forerun.bench import machine
from forerun.bench.contestants import Contestant
from forerun.bench.formatting import size_text
from forerun.bench.metrics import PLAIN
from forerun.runner.free_memory import available_bytes

RESERVE_SHARE, RESERVE_BYTES = 0.05, 1 << 30  # of memory, at most, kept free for the system


class PeerGroups:
    """The group number of every peer. Group 0 also contains all local methods."""

    def __init__(
        self, contestants: Mapping[str, Contestant], known: Mapping[str, Mapping[str, int]]
    ) -> None:
        """known: the peers' entries in the manifest."""
        self._contestants = contestants
        self.group_of = {
            name: known.get(name, {}).get("group", 0)
            for name, one in contestants.items()
            if one.host is not None
        }

    @property
    def last(self) -> int:
        """The highest group number of a peer."""
        return max(
            (self.group_of[name] for name in self._contestants if name in self.group_of), default=0
        )

    def peers(self, group: int) -> list[str]:
        return [name for name in self._contestants if self.group_of.get(name) == group]

    def members(self, group: int) -> list[str]:
        """Contestants of a group; later groups have their peers and plain decoding."""
        if group == 0:
            return [name for name in self._contestants if self.group_of.get(name, 0) == 0]
        peers = self.peers(group)
        return [name for name in (PLAIN,) if peers and name in self._contestants] + peers

    def shortage(self, name: str, running: Iterable[str]) -> str:
        """Needed and free memory if a peer does not fit; "" if it fits."""
        need = self._contestants[name].memory_needed()
        growth = {one: self._contestants[one].memory_needed() for one in running}
        own = max((size for one, size in growth.items() if one not in self.group_of), default=0)
        peers = sum(size for one, size in growth.items() if one in self.group_of)
        free = available_bytes(torch.device("cpu")) - own - peers  # local methods share a cache
        free -= min(int(RESERVE_SHARE * machine.memory_bytes()), RESERVE_BYTES)
        if need <= free:
            return ""
        cache = self._contestants[name].memory_plan().get("cache_bytes", 0)
        sizes = f"{size_text(need)} of memory ({size_text(cache)} of cache)"
        return f"needs {sizes}, {size_text(free)} are free"
