"""Runs contestants interleaved: every prompt by all of them, in alternating order, A B then B A.

One record per prompt, method and round is written as soon as it exists. With `turns` the local
methods alternate on a prompt, a few steps at a time and each on its own cache, so that a slow
moment of the machine hits all of them. Peers that do not fit into memory together run in groups,
each interleaved with plain decoding (`peer_groups`). Failures are recorded and the run continues;
an interrupted run resumes where it stopped, with drafters that start empty.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from forerun.bench import cpu_load, hardware_limits, memory_pressure
from forerun.bench.contestant_pool import ContestantPool
from forerun.bench.contestants import Contestant, Outcome, PeerError
from forerun.bench.local_runner import LocalMethod, LocalRun
from forerun.bench.planning import Unit
from forerun.bench.progress import Progress
from forerun.bench.results import Record
from forerun.bench.run_writer import RunWriter
from forerun.bench.scoring import last_lines, majority_score, mean, scored, text_to_score
from forerun.bench.unit_prompts import UnitPrompts
from forerun.core.sampling import Sampling

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.tasks.base import Example

READ_TRIES = 2  # of the reading speed measured before every record

Listener = Callable[[Record, Progress], None]


class Harness:
    """A run: units, contestants and a folder to write to.

    retry: measure failed records and skipped peers again; methods that alternated with a failed one
    are measured again with it.
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
        self.units, self.writer = units, writer
        self.texts, self.turns, self.retry, self.on_record = texts, turns, retry, on_record
        self.prompts = UnitPrompts(units, model, sampling, seed)
        self.pool = ContestantPool(contestants, writer, self.prompts, notice)
        if again := to_repeat(writer.done, units, retry):
            writer.drop(again)
        self.groups, self.order = self.pool.groups, self.pool.order
        self.records = {record.key: record for record in writer.done}
        self._needed_texts = {(u.task_name, i) for u in units for i in u.example.after}

    def run(self) -> Progress:
        """Measures everything not yet recorded. Raises CapacityError when the disk is full."""
        try:
            if not self.retry:
                self.pool.leave_out_skipped()
            group, progress = 0, self._progress()
            while group <= self.groups.last:
                self._run_group(group, progress)
                group += 1
            return progress
        finally:
            self.pool.close()

    def _run_group(self, group: int, progress: Progress) -> None:
        missing = {name for unit in self.units for name in self._missing(unit, group)}
        if not missing:
            return
        self.pool.start(missing, group)
        self._count_missing(progress)
        for unit in self.units:
            for names in self._next_methods(unit, group):
                self._measure(unit, group, names, progress)
        for name in self.groups.peers(group):
            self.pool.stop(name)

    def _missing(self, unit: Unit, group: int) -> list[str]:
        """Members of a group without a record of a unit.

        A peer is measured once, in any group; plain decoding in every group with a peer's record of
        the unit.
        """
        groups, members = range(self.groups.last + 1), self.groups.members(group)
        found = {}
        for name in members:
            places = groups if name in self.groups.group_of else (group,)
            found[name] = [at for at in places if _key(unit, name, at) in self.records]
        if group and not any(found[name] in ([], [group]) for name in self.groups.peers(group)):
            return []  # its peers were measured in earlier groups
        return [name for name in members if not found[name]]

    def _next_methods(self, unit: Unit, group: int) -> Iterator[list[str]]:
        """The methods to measure next, in the order of the unit; several if they alternate.

        Evaluated lazily, as a contestant may be left out meanwhile.
        """
        order = self.order[::-1] if unit.is_reversed else self.order
        for name in order:
            missing = self._missing(unit, group)
            if name in missing:
                local = [n for n in order if n in missing and self.pool.is_local(n)]
                yield local if self.turns and name in local else [name]

    def _progress(self) -> Progress:
        progress = Progress(0)
        groups = range(self.groups.last + 1)
        total = len(self.units) * sum(len(self.groups.members(group)) for group in groups)
        self._count_missing(progress)
        progress.done, progress.total = total - progress.left.total(), total
        return progress

    def _count_missing(self, progress: Progress) -> None:
        """Updates the counts after a change of the groups."""
        groups = range(self.groups.last + 1)
        progress.left = Counter(
            name for group in groups for unit in self.units for name in self._missing(unit, group)
        )
        progress.total = progress.done + progress.left.total()

    def _measure(self, unit: Unit, group: int, names: list[str], progress: Progress) -> None:
        """Measures one method on a unit, or several that alternate, and writes the records."""
        start = time.perf_counter()
        example = self._with_earlier_answers(unit)
        outcomes, limits = self._decode_monitored(names, example, self.prompts.sampling(unit))
        records = [
            replace(self._record(unit, name, group, example, outcomes[name]), limits=limits)
            for name in names
        ]
        self.writer.append(*records)
        for record in records:
            self.records[record.key] = record
            progress.finish(record.method, (time.perf_counter() - start) / len(names))
            self.on_record(record, progress)
            self._after_record(record, progress)

    def _after_record(self, record: Record, progress: Progress) -> None:
        """Restarts a failed peer; stops one that is done."""
        name = record.method
        if record.error is None:
            self.pool.succeeded(name)
        elif not self.pool.is_local(name):
            self.pool.restart_after(name, record.error)
            if name not in self.pool:
                self._count_missing(progress)
        if name in self.pool:
            self.pool.write_restarts(name)
            if progress.left[name] <= 0:
                self.pool.stop(name)

    def _decode_monitored(
        self, names: list[str], example: Example, sampling: Sampling
    ) -> tuple[dict[str, Outcome | Exception], dict[str, float]]:
        """Outcomes, and the state of the machine: reading speed, lost cores, memory pressure."""
        manifest = self.writer.manifest
        gc.collect()
        cpu_load.wait_until_idle()
        device = str(manifest.machine.get("device", "cpu"))
        read = hardware_limits.read_bandwidth(manifest.threads, tries=READ_TRIES, device=device)
        meter, before = cpu_load.CoreLossMeter(manifest.threads), memory_pressure.sample()
        start = time.perf_counter()
        outcomes = self._decode(names, example, sampling)
        lost, seconds = meter.lost(), time.perf_counter() - start
        limits = {"read_gb_s": round(read, 3)}
        limits |= memory_pressure.pressure_between(before, memory_pressure.sample(), seconds)
        if lost is not None:
            limits["taken"] = round(lost, 3)
        if len(names) > 1:
            limits["in_turns"] = len(names)
        return outcomes, limits

    def _decode(
        self, names: list[str], example: Example, sampling: Sampling
    ) -> dict[str, Outcome | Exception]:
        """The outcome or error of every method.

        Of several local methods the one with the fewest tokens continues, so that all end at about
        the same time.
        """
        found: dict[str, Outcome | Exception] = {}
        running: dict[str, LocalRun] = {}
        for name in names:
            one = self.pool[name]
            try:
                if isinstance(one, LocalMethod):
                    running[name] = one.begin(example, sampling)
                else:
                    found[name] = one.run(example, sampling)
            except Exception as error:
                found[name] = error
        try:
            while running:
                name = min(running, key=lambda name: running[name].tokens)
                try:
                    if not running[name].advance(self.turns or None):
                        found[name] = running[name].finish()
                except Exception as error:
                    found[name] = error
                if name in found:
                    running.pop(name).stop()
            return found
        finally:
            for left in running.values():
                left.stop()

    def _with_earlier_answers(self, unit: Unit) -> Example:
        """The example after the first method's first answers to its earlier turns."""
        if not unit.example.after:
            return unit.example
        answers = [self._answer(unit, index) for index in unit.example.after]
        return self.prompts.with_answers(unit, answers)

    def _answer(self, unit: Unit, index: int) -> str:
        for group, name in itertools.product(range(self.groups.last + 1), self.order):
            record = self.records.get((unit.task_name, index, name, unit.round, group))
            if record and record.samples and record.samples[0].text is not None:
                return record.samples[0].text
        return ""

    def _record(
        self, unit: Unit, name: str, group: int, example: Example, outcome: Outcome | Exception
    ) -> Record:
        """The record of an outcome, scored by the task, or of an error."""
        expected = self.prompts.base.n
        if isinstance(outcome, Outcome) and len(outcome.samples) != expected:
            outcome = PeerError(f"{name} returned {len(outcome.samples)} of {expected} samples")
        place = self.order.index(name)
        place = len(self.order) - 1 - place if unit.is_reversed else place
        record = Record(
            task=unit.task_name,
            index=unit.index,
            id=example.id,
            category=example.label,
            method=name,
            round=unit.round,
            order=(unit.number + group * len(self.units)) * len(self.order) + place,
            num_prompt_tokens=self.prompts.num_tokens(example),
            seconds=0.0,
            generated=0,
            group=group,
        )
        if isinstance(outcome, Exception):
            return replace(record, error=last_lines(outcome))
        samples = [scored(unit.task, example, sample) for sample in outcome.samples]
        keeps_texts = self.texts or (unit.task_name, unit.index) in self._needed_texts
        return replace(
            record,
            seconds=outcome.seconds,
            generated=sum(sample.tokens for sample in samples),
            samples=samples if keeps_texts else [replace(one, text=None) for one in samples],
            prefill_seconds=outcome.prefill_seconds,
            score=mean([sample.score for sample in samples]),
            majority=majority_score(
                unit.task, example, [text_to_score(unit.task, sample) for sample in samples]
            ),
            memory=outcome.memory,
            headroom=outcome.headroom,
        )


def to_repeat(done: Sequence[Record], units: Sequence[Unit], retry: bool) -> list[Record]:
    """Records to measure again: alternating methods of which one lost its line; with `retry`,
    failures and the methods that alternated with them; and prompts that build on these answers."""
    together = Counter(r.pair_key for r in done if r.is_shared)
    torn = {r.pair_key for r in done if 0 < together[r.pair_key] < r.in_turns}
    failed = {r.pair_key for r in done if retry and r.error is not None}
    lost = {key[:3] for key in torn | failed}
    dependent: set[tuple[str, int, int]] = set()
    for unit in units:
        if any((unit.task_name, i, unit.round) in lost | dependent for i in unit.example.after):
            dependent.add((unit.task_name, unit.index, unit.round))
    return [
        r
        for r in done
        if (retry and r.error is not None)
        or r.prompt_key in dependent
        or (r.is_shared and r.pair_key in torn | failed)
    ]


def _key(unit: Unit, name: str, group: int) -> tuple[str, int, str, int, int]:
    return unit.task_name, unit.index, name, unit.round, group
