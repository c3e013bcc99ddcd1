"""Starts, warms up, restarts and stops the contestants of a run, and keeps the manifest current.

A contestant that cannot start, or fails MAX_FAILURES times in a row, is left out with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from forerun.bench.contestants import Contestant, SkippedPeer
from forerun.bench.local_runner import LocalMethod
from forerun.bench.peer_groups import PeerGroups
from forerun.bench.planning import Unit
from forerun.bench.run_writer import RunWriter
from forerun.bench.scoring import last_line, last_lines
from forerun.bench.unit_prompts import UnitPrompts
from forerun.errors import ForerunError

MAX_FAILURES = 2  # in a row
RESTARTS = "restarts"  # key in the manifest's entry of a peer
MEMORY_FIX = "end other programs, or use a smaller model, -n or --max-new-tokens"


class ContestantPool:
    """All contestants of a run, by name."""

    def __init__(
        self,
        contestants: Sequence[Contestant],
        writer: RunWriter,
        prompts: UnitPrompts,
        notice: Callable[[str], None],
    ) -> None:
        self.writer, self.prompts, self.notice = writer, prompts, notice
        self.order = [contestant.name for contestant in contestants]
        self.contestants = {contestant.name: contestant for contestant in contestants}
        self.groups = PeerGroups(self.contestants, writer.manifest.peer_memory)
        self._running: set[str] = set()
        self._failures: Counter[str] = Counter()  # in a row
        measured = {record.method for record in writer.done}
        self._earlier_restarts = {  # before this process
            name: found.get(RESTARTS, 0) if isinstance(found, dict) else int(name in measured)
            for name, found in writer.manifest.peers.items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self.contestants

    def __getitem__(self, name: str) -> Contestant:
        return self.contestants[name]

    def is_local(self, name: str) -> bool:
        return isinstance(self.contestants[name], LocalMethod)

    def leave_out_skipped(self) -> None:
        """Leaves out the peers that the manifest names as skipped."""
        for name, found in self.writer.manifest.peers.items():
            if isinstance(found, str) and name in self:
                self.leave_out(name, found)

    def start(self, names: Collection[str], group: int) -> None:
        """Starts these contestants, local methods first.

        Peers that do not fit into memory move to the next group.
        """
        self._set_cache_sizes()
        ordered = [name for name in self.order if name in names]
        for name in sorted(ordered, key=lambda name: self[name].host is not None):
            if name not in self._running and self._has_room(name, group):
                self.notice(f"starting {name}")
                self._start(name)

    def _set_cache_sizes(self) -> None:
        """Contestants in one process share a cache, sized for the largest demand."""
        batched = {one.host for one in self.contestants.values() if one.is_batched}
        demands = {flag: self.prompts.cache_demand(flag) for flag in (False, True)}
        for one in self.contestants.values():
            one.size_for(demands[one.host in batched])

    def _has_room(self, name: str, group: int) -> bool:
        """Whether a contestant fits into memory; a peer that does not is deferred or left out."""
        if self[name].host is None:
            return True
        try:
            shortage = self.groups.shortage(name, self._running)
        except Exception:  # without an estimate, its own error at the start tells the cause
            return True
        if not shortage:
            return True
        if any(self[one].host is not None for one in self._running):
            self.notice(f"{name} {shortage}: it is measured after the other peers")
            self.groups.group_of[name] = group + 1
            self._write_memory(name)
        else:
            self.leave_out(name, f"it {shortage}; {MEMORY_FIX}")
        return False

    def _start(self, name: str) -> None:
        """Starts and warms up a contestant, or leaves it out; errors of local methods pass."""
        contestant = self[name]
        try:
            self._start_warm(contestant)
        except Exception as error:
            if self.is_local(name):
                raise
            is_skipped = isinstance(error, SkippedPeer)
            why = str(error) if is_skipped else "failed to start: " + last_lines(error)
            self.leave_out(name, why)
            return
        self._running.add(name)
        if not self.is_local(name):
            self._write_peer(name, contestant.versions())
            self.write_restarts(name)
            self._write_memory(name)

    def _start_warm(self, contestant: Contestant) -> None:
        """Warms up on the longest prompt, so that no record includes a growing cache.

        A peer that fails on it is restarted and warmed up on the first prompt.
        """
        contestant.start()
        try:
            self._warm_up(contestant, self.prompts.longest)
        except SkippedPeer:
            raise
        except Exception as error:
            if isinstance(contestant, LocalMethod):
                raise
            why = last_line(last_lines(error))
            self.notice(f"restarting {contestant.name}, which failed on the longest prompt: {why}")
            contestant.close()
            contestant.start()
            self._warm_up(contestant, self.prompts.units[0])

    def _warm_up(self, contestant: Contestant, unit: Unit) -> None:
        contestant.warm_up(self.prompts.filled(unit), self.prompts.sampling(unit))

    def succeeded(self, name: str) -> None:
        self._failures[name] = 0

    def restart_after(self, name: str, error: str) -> None:
        """Restarts a peer that failed, or leaves it out after MAX_FAILURES in a row."""
        self._failures[name] += 1
        contestant = self[name]
        with suppress(Exception):
            contestant.close()
        try:
            if self._failures[name] >= MAX_FAILURES:
                raise ForerunError(f"failed {MAX_FAILURES} times in a row: {error}")
            self.notice(f"restarting {name}")
            contestant.start()
            self._warm_up(contestant, self.prompts.units[0])
        except Exception as problem:
            self.leave_out(name, last_lines(problem))

    def stop(self, name: str) -> None:
        """Ends a peer's process; local methods stay, as others use their weights."""
        if self[name].host is not None and name in self._running:
            self._running.discard(name)
            with suppress(Exception):
                self[name].close()

    def close(self) -> None:
        """Closes all contestants; their errors are ignored."""
        for contestant in self.contestants.values():
            with suppress(Exception):
                contestant.close()

    def leave_out(self, name: str, why: str) -> None:
        """Removes a contestant and writes the reason into the manifest; shows its last line."""
        self.notice(f"{name} is left out: {last_line(why)}")
        self._running.discard(name)
        with suppress(Exception):
            self.contestants.pop(name).close()
        self._write_peer(name, why)

    def write_restarts(self, name: str) -> None:
        """Writes the number of restarts, earlier processes included, into the manifest."""
        entry = self.writer.manifest.peers.get(name)
        restarts = self._earlier_restarts.get(name, 0) + self[name].restarts
        if isinstance(entry, dict) and restarts:
            self._write_peer(name, entry | {RESTARTS: restarts})

    def _write_peer(self, name: str, entry: Any) -> None:
        """Writes a peer's versions, or why it was skipped, into the manifest."""
        manifest = self.writer.manifest
        if manifest.peers.get(name) != entry:
            self.writer.update(replace(manifest, peers={**manifest.peers, name: entry}))

    def _write_memory(self, name: str) -> None:
        """Writes a peer's sizes and group into the manifest."""
        if plan := self[name].memory_plan():
            manifest = self.writer.manifest
            plan = plan | {"group": self.groups.group_of[name]}
            if manifest.peer_memory.get(name) != plan:
                memory = {**manifest.peer_memory, name: plan}
                self.writer.update(replace(manifest, peer_memory=memory))
