"""Runs contestants side by side: every prompt by all of them, one after the other, A B and B A in
turn, and one record per prompt, method and round as soon as it is there. With `turns` our methods
decode a prompt at the same time, each on a cache of its own and so many steps before the next goes
on: a machine that has slow seconds then has them for all.

Peers that do not fit into memory together are measured in groups, one group after the other, each
interleaved with plain decoding (`peer_groups`). A peer's process ends after its last prompt.

A contestant that fails is recorded with its last lines and the run goes on. A run that ended early
goes on where it stopped; a drafter that learns across prompts then begins anew.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from forerun.bench import machine, pressure
from forerun.bench.contestants import Contestant, Demand, Outcome, SkippedPeer
from forerun.bench.local_runner import Own, Running
from forerun.bench.peer_groups import PeerGroups
from forerun.bench.planning import Unit
from forerun.bench.progress import Progress
from forerun.bench.results import Record
from forerun.bench.run_writer import RunWriter
from forerun.bench.scoring import last_line, last_lines, majority_score, mean, scored
from forerun.bench.validate import impossible
from forerun.core.sampling import Sampling
from forerun.errors import ForerunError

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.tasks.base import Example

MOST_FAILURES = 2  # in a row, before a peer is not asked again
QUICK = 2  # tries of the read limit beside every record
RESTARTS = "restarts"  # in the manifest, beside a peer's versions: how often it began anew
LESS_MEMORY = "end other programs, or take a smaller model, -n or --max-new-tokens"
SPARE_TOKENS = 128  # the longest sequence is rounded up to a multiple, as texts may be retokenised


Listener = Callable[[Record, Progress], None]


class Harness:
    """A run: units, contestants, a folder to write to.

    retry: whether what has failed, records and peers, is tried again; then beside the others no
    longer, but who takes turns is measured anew together.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        contestants: Sequence[Contestant],
        writer: RunWriter,
        model: Model,
        sampling: Sampling,
        *,
        seed: int = 0,
        texts: bool = False,
        turns: int = 0,
        retry: bool = False,
        on_record: Listener = lambda record, progress: None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.units, self.writer, self.model, self.sampling = units, writer, model, sampling
        self.seed, self.texts, self.turns, self.retry = seed, texts, turns, retry
        self.on_record, self.notice = on_record, notice
        self.order = [contestant.name for contestant in contestants]
        self.contestants = {contestant.name: contestant for contestant in contestants}
        self.failures: Counter[str] = Counter()
        told = writer.manifest.peers.items()  # before this process
        ran = {record.method for record in writer.done}  # who was left out later begins anew
        self.restarts = {
            name: found.get(RESTARTS, 0) if isinstance(found, dict) else int(name in ran)
            for name, found in told
        }
        if again := self._again(retry):
            writer.drop(again)
        self.records = {record.key: record for record in writer.done}
        self.groups = PeerGroups(self.contestants, writer.manifest.peer_memory)
        self.running: set[str] = set()  # those that have been started
        self.wanted = {(u.task_name, i) for u in units for i in u.example.after}

    def run(self) -> Progress:
        """Everything that is not yet recorded. Raises CapacityError when the disk is full."""
        try:
            if not self.retry:  # left out before: no later pairs, unless that is asked for
                for name, found in self.writer.manifest.peers.items():
                    if isinstance(found, str) and name in self.contestants:
                        self._leave_out(name, found)
            group, progress = 0, self._progress()
            while group <= self.groups.last:
                self._run_group(group, progress)
                group += 1
            return progress
        finally:
            self.close()

    def close(self) -> None:
        """Closes all contestants, whatever they say."""
        for contestant in self.contestants.values():
            with suppress(Exception):
                contestant.close()

    def _run_group(self, group: int, progress: Progress) -> None:
        """Everything of one group that is not yet recorded."""
        if not any(self._missing(unit, group) for unit in self.units):
            return
        self._start_group(group)
        self._count(progress)
        for unit in self.units:
            for names in self._turns(unit, group):
                self._run(unit, group, names, progress)
        for name in self.groups.peers(group):
            self._end(name)

    def _end(self, name: str) -> None:
        """Ends a peer's process; methods of ours stay, as others use their weights."""
        if self.contestants[name].host is not None and name in self.running:
            self.running.discard(name)
            with suppress(Exception):
                self.contestants[name].close()

    def _again(self, retry: bool) -> list[Record]:
        """What is measured anew: who took turns with one whose line was lost; on `retry` what has
        failed, with those who took turns with it; and what builds on an answer of these."""
        done = self.writer.done
        together = Counter(r.pair_key for r in done if r.is_shared)
        parted = {r.pair_key for r in done if 0 < together[r.pair_key] < r.in_turns}
        failed = {r.pair_key for r in done if retry and r.error is not None}
        gone = parted | failed
        lost = {key[:3] for key in gone}
        built: set[tuple[str, int, int]] = set()
        for unit in self.units:
            if any((unit.task_name, i, unit.round) in lost | built for i in unit.example.after):
                built.add((unit.task_name, unit.index, unit.round))
        return [
            r
            for r in done
            if (retry and r.error is not None)
            or r.prompt_key in built
            or (r.is_shared and r.pair_key in gone)
        ]

    def _missing(self, unit: Unit, group: int) -> list[str]:
        """Members of a group whose record of a unit is not there.

        A peer is measured once, in whichever group; plain decoding in every group that has a peer's
        record of the unit, or is to have one.
        """
        groups, members = range(self.groups.last + 1), self.groups.members(group)
        places = {name: groups if name in self.groups.of else (group,) for name in members}
        found = {
            name: [at for at in places[name] if _key(unit, name, at) in self.records]
            for name in members
        }
        missing = [name for name in members if not found[name]]
        if group and not any(found[name] in ([], [group]) for name in self.groups.peers(group)):
            return []  # its peers have theirs in earlier groups
        return missing

    def _turns(self, unit: Unit, group: int) -> Iterator[list[str]]:
        """Who is to run a unit, in its order, and with whom in turn.

        Asked again each time, as one may drop out.
        """
        order = self.order[::-1] if unit.is_reversed else self.order
        for name in order:
            left = self._missing(unit, group)
            missing = [each for each in order if each in left]
            own = [each for each in missing if isinstance(self.contestants[each], Own)]
            if name in missing:
                yield own if self.turns and name in own else [name]

    def _progress(self) -> Progress:
        progress = Progress(0)
        groups = range(self.groups.last + 1)
        whole = len(self.units) * sum(len(self.groups.members(group)) for group in groups)
        self._count(progress)
        progress.done = whole - progress.left.total()
        progress.total = whole
        return progress

    def _count(self, progress: Progress) -> None:
        """Counts what is left to do, as groups change when peers do not fit."""
        groups = range(self.groups.last + 1)
        progress.left = Counter(
            name for group in groups for unit in self.units for name in self._missing(unit, group)
        )
        progress.total = progress.done + progress.left.total()

    def _start_group(self, group: int) -> None:
        """Sizes, starts and warms the members of a group that have something to do.

        Peers that do not fit wait for the next group. The manifest names those that cannot take
        part, with the reason.
        """
        left = {name for unit in self.units for name in self._missing(unit, group)}
        self._size()
        names = [name for name in self.order if name in left]
        for name in sorted(names, key=lambda name: self.contestants[name].host is not None):
            if name in self.running or not self._has_room(name, group):
                continue
            self.notice(f"starting {name}")
            contestant = self.contestants[name]
            try:
                self._begin(contestant)
            except Exception as error:
                if isinstance(contestant, Own):
                    raise
                if isinstance(error, SkippedPeer):
                    self._leave_out(name, str(error))
                else:
                    self._leave_out(name, "failed to start: " + last_lines(error))
                continue
            self.running.add(name)
            if not isinstance(contestant, Own):
                self._tell(name, contestant.versions())
                self._tell_restarts(name)
                self._note_memory(name)

    def _has_room(self, name: str, group: int) -> bool:
        """Whether a contestant fits into memory; a peer that does not is deferred or left out.

        A peer without an estimate is started; its own error says why it fails.
        """
        if self.contestants[name].host is None:
            return True
        try:
            shortage = self.groups.shortage(name, self.running)
        except Exception:
            return True
        if not shortage:
            return True
        if any(self.contestants[one].host is not None for one in self.running):
            self.notice(f"{name} {shortage}: it is measured after the other peers")
            self.groups.of[name] = group + 1
            self._note_memory(name)
        else:
            self._leave_out(name, f"it {shortage}; {LESS_MEMORY}")
        return False

    def _size(self) -> None:
        """Passes the number of concurrent sequences and their length to all contestants.

        Contestants in one process share its cache: it is sized for the one that needs most.
        """
        first = [unit for unit in self.units if unit.round == 0]
        longest = max(
            self._num_tokens(self._filled(unit)) + self._sampling(unit).max_new_tokens
            for unit in first
        )
        blocks = -(-longest // SPARE_TOKENS) + any(unit.example.after for unit in first)
        tokens = min(blocks * SPARE_TOKENS, self.model.target.context)
        batched = {one.host for one in self.contestants.values() if one.is_batched}
        for one in self.contestants.values():
            one.size_for(Demand(self.sampling.n if one.host in batched else 1, tokens))

    def _note_memory(self, name: str) -> None:
        """A peer's sizes and group go into the manifest."""
        if plan := self.contestants[name].memory_plan():
            manifest = self.writer.manifest
            plan = plan | {"group": self.groups.of[name]}
            if manifest.peer_memory.get(name) != plan:
                memory = {**manifest.peer_memory, name: plan}
                self.writer.update(replace(manifest, peer_memory=memory))

    def _begin(self, contestant: Contestant) -> None:
        """Starts it and warms it up on the longest prompt: no record pays for what that makes grow.

        A peer for which that is too much is started again, and tries the first one.
        """
        contestant.start()
        try:
            self._warm_up(contestant, self._longest)
        except SkippedPeer:
            raise
        except Exception as problem:
            if isinstance(contestant, Own):
                raise
            why = last_line(last_lines(problem))
            self.notice(
                f"{contestant.name} broke on the longest prompt and is started again: {why}"
            )
            contestant.close()
            contestant.start()
            self._warm_up(contestant, self.units[0])

    @cached_property
    def _longest(self) -> Unit:
        """With the longest prompt, full answers counted in; later rounds have the same ones."""
        first = [unit for unit in self.units if unit.round == 0]

        def size(unit: Unit) -> int:
            answers = len(unit.example.after) * self._sampling(unit).max_new_tokens
            return self._num_tokens(unit.example) + answers

        return max(first, key=size)

    def _warm_up(self, contestant: Contestant, unit: Unit) -> None:
        """A short run; the answers that an example builds on are taken to be as long as can be."""
        contestant.warm_up(self._filled(unit), self._sampling(unit))

    def _filled(self, unit: Unit) -> Example:
        """The example of a unit, with made-up answers of full length where it builds on any."""
        from forerun.tasks.base import made_up_answers, prepare

        example, tokenizer = unit.example, self.model.tokenizer
        if not example.after:
            return example
        context, most = self.model.target.context, self._sampling(unit).max_new_tokens
        answers = made_up_answers(example, tokenizer, context, most)
        return prepare(unit.task.example(unit.index), tokenizer, answers)

    def _leave_out(self, name: str, why: str) -> None:
        self.notice(f"{name} is left out: {why}")
        self.running.discard(name)
        with suppress(Exception):
            self.contestants.pop(name).close()
        self._tell(name, why)

    def _tell(self, name: str, what: Any) -> None:
        """Versions of a peer, or why it does not take part, go into the manifest."""
        manifest = self.writer.manifest
        if manifest.peers.get(name) != what:
            self.writer.update(replace(manifest, peers={**manifest.peers, name: what}))

    def _tell_restarts(self, name: str) -> None:
        """How often a peer had to begin anew goes there too, what was told before counted in."""
        told = self.writer.manifest.peers.get(name)
        again = self.restarts.get(name, 0) + self.contestants[name].restarts
        if isinstance(told, dict) and again:
            self._tell(name, told | {RESTARTS: again})

    def _run(self, unit: Unit, group: int, names: list[str], progress: Progress) -> None:
        """Runs one contestant on one unit, or several in turn; records what came."""
        began = time.perf_counter()
        sampling, example = self._sampling(unit), self._prepared(unit)
        gc.collect()
        threads = self.writer.manifest.threads
        machine.settle()  # a peer's threads spin on for a moment, and take from what is read
        read = machine.read_bandwidth(threads, tries=QUICK, device=self._device)
        watch, before, start = machine.Watch(threads), pressure.sample(), time.perf_counter()
        found = self._decoded(names, example, sampling)
        taken, limits = watch.taken(), {"read_gb_s": round(read, 3)}
        limits |= pressure.found(before, pressure.sample(), time.perf_counter() - start)
        if taken is not None:
            limits["taken"] = round(taken, 3)
        if len(names) > 1:
            limits["in_turns"] = len(names)
        records = []
        for name in names:
            got = found[name]
            outcome, error = (None, last_lines(got)) if isinstance(got, Exception) else (got, None)
            record = self._record(unit, name, example, outcome, error)
            order = record.order + group * len(self.units) * len(self.order)
            records.append(replace(record, limits=limits, group=group, order=order))
        self.writer.append(*records)  # who took turns is recorded together
        for record in records:
            self.records[record.key] = record
            progress.finish(record.method, (time.perf_counter() - began) / len(names))
            self.on_record(record, progress)
            if record.error is None:
                self.failures[record.method] = 0
            elif not isinstance(self.contestants[record.method], Own):
                self._mend(record.method, record.error, progress)
            if record.method in self.contestants:
                self._tell_restarts(record.method)
                if progress.left[record.method] <= 0:
                    self._end(record.method)

    def _decoded(
        self, names: list[str], example: Example, sampling: Sampling
    ) -> dict[str, Outcome | Exception]:
        """What came of an example, or why nothing did.

        Of several of ours the one with the fewest tokens goes on: all end at about the same time.
        """
        found: dict[str, Outcome | Exception] = {}
        running: dict[str, Running] = {}
        for name in names:
            one = self.contestants[name]
            try:
                if isinstance(one, Own):
                    running[name] = one.begin(example, sampling)
                else:
                    found[name] = one.run(example, sampling)
            except Exception as problem:
                found[name] = problem
        try:
            while running:
                name = min(running, key=lambda name: running[name].tokens)
                try:
                    if not running[name].advance(self.turns or None):
                        found[name] = running[name].finish()
                except Exception as problem:
                    found[name] = problem
                if name in found:
                    running.pop(name).stop()
            return found
        finally:
            for left in running.values():
                left.stop()

    def _mend(self, name: str, error: str, progress: Progress) -> None:
        """Starts a peer again that broke, unless it has broken too often."""
        self.failures[name] += 1
        contestant = self.contestants[name]
        with suppress(Exception):
            contestant.close()
        try:
            if self.failures[name] >= MOST_FAILURES:
                raise ForerunError(f"failed {MOST_FAILURES} times in a row: {error}")
            self.notice(f"{name} is started again")
            contestant.start()
            self._warm_up(contestant, self.units[0])
        except Exception as problem:
            self._leave_out(name, last_lines(problem))
            self._count(progress)

    @property
    def _device(self) -> str:
        return str(self.writer.manifest.machine.get("device", "cpu"))

    def _sampling(self, unit: Unit) -> Sampling:
        """The sampling of a unit: the same seed for all contestants, another for every prompt."""
        longest = unit.max_new_tokens or self.sampling.max_new_tokens
        seed = self.seed + unit.index + 100_003 * unit.round
        return replace(self.sampling, seed=seed, max_new_tokens=longest)

    def _prepared(self, unit: Unit) -> Example:
        """The example with the answers that it builds on: the first method's first samples."""
        from forerun.tasks.base import prepare

        if not unit.example.after:
            return unit.example
        answers = [self._answer(unit, index) for index in unit.example.after]
        return prepare(unit.task.example(unit.index), self.model.tokenizer, answers)

    def _answer(self, unit: Unit, index: int) -> str:
        places = itertools.product(range(self.groups.last + 1), self.order)
        for group, name in places:
            record = self.records.get((unit.task_name, index, name, unit.round, group))
            if record and record.samples and record.samples[0].text is not None:
                return record.samples[0].text
        return ""

    def _record(
        self, unit: Unit, name: str, example: Example, outcome: Outcome | None, error: str | None
    ) -> Record:
        """The record of what came, scored by the task's own checker; what cannot be is an error."""
        record = Record(
            task=unit.task_name,
            index=unit.index,
            id=example.id,
            category=example.label,
            method=name,
            round=unit.round,
            order=unit.number * len(self.order) + self._place(unit, name),
            num_prompt_tokens=self._num_tokens(example),
            seconds=0.0,
            generated=0,
            error=error,
        )
        if outcome is None:
            return record
        samples = [scored(unit.task, example, sample) for sample in outcome.samples]
        keeps = self.texts or (unit.task_name, unit.index) in self.wanted
        told = replace(
            record,
            seconds=outcome.seconds,
            generated=sum(sample.tokens for sample in samples),
            samples=samples if keeps else [replace(sample, text=None) for sample in samples],
            prefill_seconds=outcome.prefill_seconds,
            score=mean([sample.score for sample in samples]),
            majority=majority_score(unit.task, example, [sample.text for sample in samples]),
            memory=outcome.memory,
            headroom=outcome.headroom,
        )
        wrong = impossible(told, self.writer.manifest)
        return replace(record, error=f"{name} tells what cannot be{wrong}") if wrong else told

    def _num_tokens(self, example: Example) -> int:
        return len(self.model.tokenizer.encode(example.prompt))

    def _place(self, unit: Unit, name: str) -> int:
        at = self.order.index(name)
        return len(self.order) - 1 - at if unit.is_reversed else at


def _key(unit: Unit, name: str, group: int) -> tuple[str, int, str, int, int]:
    return unit.task_name, unit.index, name, unit.round, group
