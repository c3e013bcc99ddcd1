"""Several drafters side by side: who drafts for whom, who failed, who gets the credit."""

from __future__ import annotations

import gc
import logging
import weakref

import numpy as np
import pytest
from says import FIRST, GREEDY, LAW, SECOND, Says, run, silent, truth, wrong

from fakes import FakeTarget, run_all, sequence
from forerun import registry
from forerun.controllers.budget import Budget
from forerun.core.acceptance_prior import AcceptanceCounts
from forerun.core.cost import Cost
from forerun.core.dice import SeededDice
from forerun.core.mixins import Priced
from forerun.core.records import Plan, Sequence
from forerun.core.roles import name_of
from forerun.core.tree import EMPTY, Tree, chain
from forerun.drafters.auto import Auto
from forerun.drafters.base import PerSequence
from forerun.drafters.cascade import Cascade
from forerun.drafters.fuse import Fuse
from forerun.drafters.router import Router
from forerun.drafters.sam import Sam
from forerun.drafters.stand import Stand
from forerun.engine.engine import Engine
from forerun.engine.safe_drafter import SafeDrafter
from forerun.errors import CapacityError, ConfigError
from forerun.verifiers.recursive import Recursive
from harness import distance

pytestmark = pytest.mark.usefixtures("short_collections")


def test_a_cascade_asks_in_order_until_somebody_answers() -> None:
    for order, name in (((truth, wrong), FIRST), ((silent, truth), SECOND)):
        cascade = Cascade(parts=tuple(Says(say) for say in order))
        texts, (stats,) = run(cascade)
        assert texts == [truth([0, 1], 120)]
        assert set(stats.drafted_by) == {name}


def test_a_short_answer_is_kept_if_nobody_has_a_longer_one() -> None:
    def one(tokens: list[int], count: int) -> list[int]:
        return truth(tokens, min(count, 1))

    _, (stats,) = run(Cascade(parts=(Says(one), Says(silent)), least=3))
    assert stats.accepted > 0


def test_fuse_gives_credit_to_who_came_first() -> None:
    fuse = Fuse(parts=(Says(wrong), Says(truth)))
    _, (stats,) = run(fuse)
    assert stats.accepted_by[SECOND] == stats.accepted > 0
    assert stats.drafted_by[FIRST] > 0 == stats.accepted_by[FIRST]
    told = stats.to_dict()["by_drafter"]
    assert told[SECOND]["accepted"] == stats.accepted


def test_two_of_one_class_learn_from_their_own_nodes_alone() -> None:
    """The second STAND knows nothing, so its chances stay what is believed at first."""
    taught, fresh = Stand(context=1), Stand(context=1, scope="request")
    run(Router(parts=(taught, fresh), optimism=2.0), seqs=2)
    fuse = Fuse(parts=(taught, fresh))
    seq = sequence((0, 1), 5, SeededDice(0), GREEDY)
    before = taught.memory(seq).acceptance[False].tries.sum()
    assert (
        fresh.memory(seq).acceptance[False].tries.sum() == AcceptanceCounts(drawn=False).tries.sum()
    )
    _, (stats,) = run(fuse)
    assert set(stats.drafted_by) == {"stand", "stand 2"}
    assert taught.memory(seq).acceptance[False].tries.sum() > before


def test_names_are_told_apart_however_deep_they_lie() -> None:
    inner = Router(parts=("stand", "suffix"))
    sam = Sam(other="stand")
    outer = Fuse(parts=(inner, sam, "stand"))
    assert inner.names == ["stand", "suffix"] and outer.names == ["router", "sam", "stand 3"]
    assert sam.other is not None and name_of(sam.other) == "stand 2"


def test_what_another_drafts_for_sam_is_its_own() -> None:
    sam = Sam(other=Says(truth), threshold=1000)
    _, (stats,) = run(SafeDrafter(sam))
    assert set(stats.drafted_by) == {FIRST}


@pytest.mark.parametrize("name", ["auto", "cascade", "router", "fuse"])
def test_by_its_name_it_drafts_and_keeps_the_text(name: str) -> None:
    texts, (stats,) = run(registry.make("drafter", name))
    assert texts == [truth([0, 1], 120)]
    assert stats.accepted > 60 and stats.drafted_by.keys() <= {"stand", "suffix", "prompt_lookup"}


@pytest.mark.parametrize("make", [Router, Cascade, Fuse])
def test_one_part_is_too_few(make) -> None:
    with pytest.raises(ConfigError, match="two parts or more"):
        make(parts=(Says(truth),))


@pytest.mark.parametrize("make", [Router, Cascade, Fuse, Auto])
def test_a_text_is_no_tuple_of_parts(make) -> None:
    with pytest.raises(ConfigError, match=r"takes a tuple of parts, got 'stand\+stand'; write \('"):
        make(parts="stand+stand")


@pytest.mark.parametrize("inner", ["auto", "router"])
def test_a_router_is_no_part_of_a_router(inner: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot have the part '{inner}', which is a router too"):
        registry.make("drafter", f"auto:parts=stand+{inner}")


@pytest.mark.parametrize("make", [Router, Cascade, Fuse, Auto])
def test_parts_that_add_nothing_are_refused(make) -> None:
    same = Says(truth)
    for parts in (("stand", "stand"), (same, Says(wrong), same)):
        with pytest.raises(ConfigError, match="has the duplicate part"):
            make(parts=parts)
    with pytest.raises(ConfigError, match="the part 'none', which drafts nothing"):
        make(parts=("none", "stand"))
    assert make(parts=("suffix", "suffix:scope=group")).names == ["suffix", "suffix 2"]


# failing drafters


class Failing(PerSequence):
    """Drafts the truth, but fails now and then, wherever it can."""

    labels = frozenset({"point"})

    def __init__(self, rate: float = 0.3, seed: int = 0) -> None:
        self.rng, self.rate = np.random.default_rng(seed), rate

    def _maybe(self) -> None:
        if self.rng.random() < self.rate:
            raise RuntimeError("a wire came loose")

    def start(self, seq: Sequence) -> None:
        self._maybe()

    def draft(self, seq: Sequence, plan: Plan, dice) -> Tree:
        self._maybe()
        return chain(truth(seq.tokens, plan.nodes))

    def observe(self, step) -> None:
        self._maybe()

    def finish(self, seq: Sequence) -> None:
        self._maybe()


@pytest.mark.parametrize("seqs", [1, 3])
def test_generation_goes_on_when_the_drafter_fails(
    seqs: int, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[int] = []

    class Counted(SafeDrafter):
        def finish(self, seq: Sequence) -> None:
            super().finish(seq)
            failed.append(self.failures(seq))

    with caplog.at_level(logging.WARNING, "forerun"):
        texts, stats = run(Counted(Failing()), seqs=seqs)
    assert texts == [truth([0, 1], 120)] * seqs
    assert all(one.accepted for one in stats)  # where it did not fail it helped
    assert sum(failed) > 3
    assert len(caplog.records) == 1 and "a wire came loose" in caplog.text


def test_who_cannot_tell_its_room_takes_none(caplog: pytest.LogCaptureFixture) -> None:
    class Mute(Failing, Priced):
        def check_room(self, seqs: int, tokens: int, taken: int = 0) -> int:
            raise CapacityError("full") if taken else RuntimeError("a wire came loose")

    guarded = SafeDrafter(Mute())
    with caplog.at_level(logging.WARNING, "forerun"):
        assert guarded.check_room(1, 10) == 0
    assert "a wire came loose" in caplog.text
    with pytest.raises(CapacityError, match="full"):
        guarded.check_room(1, 10, taken=1)


def test_the_law_is_untouched_by_a_drafter_that_fails() -> None:
    error = distance(
        LAW, lambda: SafeDrafter(Failing(0.5, seed=1)), Recursive(), plan=Plan(2, 2), lengths=(3,)
    )
    assert error <= 1e-12


def test_a_failing_prompt_of_a_batch_leaves_the_others_their_drafts() -> None:
    class Picky(Says):
        def draft(self, seq: Sequence, plan: Plan, dice) -> Tree:
            if seq.index == 1:
                raise ValueError("not this one")
            return super().draft(seq, plan, dice)

    guarded = SafeDrafter(Picky(truth))
    _, stats = run(guarded, seqs=3)
    assert [bool(one.accepted) for one in stats] == [True, False, True]


def test_a_sequence_that_nobody_finishes_is_not_kept() -> None:
    """Whoever drives the guard may give a sequence up without a word."""
    guarded, seq = SafeDrafter(Says(truth)), sequence([0, 1], 9, SeededDice(0))
    (tree,) = guarded.propose([seq], [Plan(4)], [seq.dice])
    assert len(tree)
    given_up = weakref.ref(seq)
    del seq
    gc.collect()
    assert given_up() is None


def test_each_of_several_guards_tells_its_drafter_once_that_a_text_begins_and_ends() -> None:
    told: list[str] = []

    class Tells(Says):
        def start(self, seq: Sequence) -> None:
            told.append("start")

        def finish(self, seq: Sequence) -> None:
            told.append("finish")

    texts, _ = run(SafeDrafter(Fuse(parts=(SafeDrafter(Tells(truth)), SafeDrafter(Tells(wrong))))))
    assert told == ["start"] * 2 * len(texts) + ["finish"] * 2 * len(texts)


def test_an_empty_tree_needs_no_name() -> None:
    _, (stats,) = run(Auto(parts=(Says(silent), Says(silent))))
    assert stats.drafted == 0 and not stats.drafted_by and len(EMPTY) == 0


@pytest.mark.parametrize("error", [ValueError, CapacityError])
@pytest.mark.parametrize("broken", ["active_drafter", "catch_up_seconds", "draft_seconds"])
def test_a_part_that_cannot_say_what_it_costs_costs_no_request(
    broken: str, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, whichever part it is; the text is as without drafts."""

    class Broken(Says, Priced):
        pass

    def fails(*_: object, **__: object) -> float:
        raise error("no price")

    setattr(Broken, broken, fails)
    router = Router(parts=(Broken(truth), Broken(wrong)))
    target = FakeTarget(LAW)
    target.cost = Cost((1, 65), (1.0, 2.0))
    engine = Engine(target, SafeDrafter(router), Recursive(), Budget())
    seq = sequence((0, 1), 200, SeededDice(0), GREEDY)
    run_all(engine, [seq])
    assert seq.generated == truth([0, 1], 200)
    assert len([r for r in caplog.records if "failed" in r.message]) == 1
