"""On an asynchronous target one step may be pending; nothing that depends on it comes before it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path

import pytest
from says import GREEDY, LAW, truth

from fakes import FakeTarget, run_all, sequence
from forerun.controllers.fixed import Fixed
from forerun.core.dice import Dice, SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.mixins import Persistent
from forerun.core.records import Plan, Rows, Sequence, Snapshot, Step
from forerun.core.tree import Tree, chain
from forerun.drafters.base import PerSequence
from forerun.drafters.fuse import Fuse
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import SafeDrafter
from forerun.state.array_file import Origin
from forerun.state.drafter_files import MemoryFile
from forerun.verifiers.recursive import Recursive


class Device(FakeTarget):
    """A target that computes between `launch` and `collect`."""

    is_async = True

    def __init__(self, log: list[str]) -> None:
        super().__init__(LAW)
        self.log = log

    def launch(self, batch: ForwardBatch) -> list[Rows]:
        self.log.append("launch")
        return super().launch(batch)

    def collect(self) -> None:
        self.log.append("collect")


class Late(PerSequence, Persistent):
    """Notes all that it is asked and shown."""

    labels = frozenset({"point"})
    can_observe_late = True

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def start(self, seq: Sequence) -> None:
        self.log.append("start")

    def read(self, seqs: Many[Sequence]) -> None:
        self.log.append("read")

    def draft(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        self.log.append("draft")
        return chain(truth(seq.tokens, 1))

    def observe(self, step: Step) -> None:
        self.log.append("observe")

    def finish(self, seq: Sequence) -> None:
        self.log.append("finish")

    def forget(self, group: object) -> None:
        self.log.append("forget")

    def keep(self, tenant: str = "") -> None:
        self.log.append("keep")

    def restore(self, snapshot: Snapshot, tenant: str = "") -> None:
        self.log.append("restore")

    def snapshot(self, tenant: str = "") -> Snapshot:
        self.log.append("snapshot")
        return Snapshot("stand", {}, {}, {"tokens": 1})


def engine_of(drafter: Late, seqs: int = 1) -> Engine:
    engine = Engine(
        Device(drafter.log), SafeDrafter(drafter), Recursive(), Fixed(nodes=1), max_seqs=seqs
    )
    for i in range(seqs):
        engine.submit(sequence((0, 1), 6, SeededDice(i), GREEDY, index=i))
    return engine


def test_a_step_is_observed_during_the_next_pass_and_before_the_end() -> None:
    drafter = Late([])
    engine_of(drafter).run()
    step = ["draft", "launch", "observe", "read", "collect"]
    assert drafter.log[:5] == ["start", "draft", "launch", "read", "collect"]
    assert drafter.log[5:10] == step
    assert drafter.log[-2:] == ["observe", "finish"], "the last step is not lost"
    assert drafter.log.count("observe") == drafter.log.count("launch")


def test_a_drafter_that_reads_rows_observes_at_once() -> None:
    drafter = Late([])
    drafter.can_observe_late = False
    engine_of(drafter).run()
    assert drafter.log[:6] == ["start", "draft", "launch", "read", "collect", "observe"]


def test_a_prompt_is_read_during_its_pass_before_any_draft() -> None:
    """A sequence that only learns in its first step starts before the pass of that step."""
    drafter = Late([])
    engine = engine_of(drafter)
    engine.controller.plan = lambda _: Plan(0)  # type: ignore[method-assign]
    engine.step()
    assert drafter.log == ["start", "launch", "read", "collect"]


def test_a_sequence_that_neither_drafts_nor_learns_is_not_read() -> None:
    drafter = Late([])
    engine = engine_of(drafter)
    engine.controller.plan = lambda _: Plan(0, learns=False)  # type: ignore[method-assign]
    engine.step()
    assert drafter.log == ["launch", "collect"]


def test_an_error_of_read_costs_no_text(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Late):
        def read(self, seqs: Many[Sequence]) -> None:
            raise ValueError("unreadable")

    engine = engine_of(Broken([]))
    (seq,) = engine.scheduler.waiting
    engine.run()
    assert seq.generated == truth([0, 1], 6) and "unreadable" in caplog.text


@pytest.mark.parametrize("call", ["forget", "snapshot", "restore"])
def test_a_pending_step_is_observed_before(call: str, tmp_path: Path) -> None:
    drafter = Late([])
    engine = engine_of(drafter)
    kept = MemoryFile(tmp_path / "some.mem", drafter, Origin("t" * 64, (("m", "h"),)))
    drafter.kept = frozenset({""})
    if call == "restore":
        kept.save()
    drafter.log.clear()
    engine.step()
    assert "observe" not in drafter.log, "it is pending"
    if call == "forget":
        engine.drafter.forget("group")  # type: ignore[attr-defined]
    elif call == "snapshot":
        kept.save()
    else:
        kept.load()
    assert drafter.log[-2:] == ["observe", call]


def test_one_sequence_ends_while_another_runs() -> None:
    """The end of one settles the step of both."""
    drafter = Late([])
    engine = engine_of(drafter, seqs=2)
    engine.scheduler.waiting[0].limit = 2
    engine.run()
    first = drafter.log.index("finish")
    before = drafter.log[:first]
    assert before.count("observe") == before.count("launch")


def test_a_composite_is_late_if_all_of_its_parts_are() -> None:
    log: list[str] = []
    parts = Late(log), Late(log)
    assert Fuse(parts=parts).can_observe_late
    parts[1].can_observe_late = False
    assert not Fuse(parts=parts).can_observe_late


def test_two_engines_share_a_drafter_in_order() -> None:
    """Each engine's step is observed before the other's next one."""
    drafter = Late([])
    one, two = engine_of(drafter), engine_of(drafter)
    for engine in (one, two, one):
        engine.step()
    assert drafter.log.count("observe") == 2
    run_all(one, [])
    run_all(two, [])
    assert drafter.log.count("observe") == drafter.log.count("launch")
