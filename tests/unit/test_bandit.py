"""One of several drafters at a time, chosen by what its steps have made."""

from __future__ import annotations

import pytest
from says import FIRST, GREEDY, LAW, SECOND, Says, run, truth, wrong

import forerun
from fakes import FakeTarget, run_all, sequence
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.dice import SeededDice
from forerun.drafters.auto import Auto
from forerun.drafters.bandit import EXPLORE, Bandit
from forerun.drafters.draft_model import DraftModel
from forerun.engine.loop import Engine
from forerun.errors import ConfigError
from forerun.sampling import Sampling
from forerun.verifiers.recursive import Recursive


class Dear(Says):
    """Says the truth at the price of ten passes."""

    def seconds(self, nodes: int, num: int = 1) -> float:
        return 10.0


def half(tokens: list[int], count: int) -> list[int]:
    return truth(tokens, 2) + wrong(tokens, count)[2:]


@pytest.mark.parametrize("order", [(truth, wrong), (wrong, truth)])
@pytest.mark.parametrize("seqs", [1, 3])
def test_who_pays_is_found(order, seqs: int) -> None:
    texts, stats = run(Bandit(parts=tuple(map(Says, order))), count=1000, seqs=seqs)
    assert texts == [truth([0, 1], 1000)] * seqs
    best, worst = (FIRST, SECOND) if order[0] is truth else (SECOND, FIRST)
    for one in stats:
        assert one.drafted_by[best] > 4 * one.drafted_by[worst] > 0
        assert one.accepted == one.accepted_by[best]


def test_what_drafting_costs_counts() -> None:
    _, (stats,) = run(Bandit(parts=(Dear(truth), Says(half))), count=1000)
    assert stats.accepted_by["says"] > stats.accepted_by["test_bandit"] > 0


def test_a_part_that_has_learned_is_found_again() -> None:
    def late(tokens: list[int], count: int) -> list[int]:
        return (wrong if len(tokens) < 2000 else truth)(tokens, count)

    bandit = Bandit(parts=(Says(half), Says(late)), scope="global")
    _, (stats,) = run(bandit, count=12000)
    assert stats.accepted_by[SECOND] > 0.5 * stats.accepted
    speeds = bandit.speeds(sequence((0, 1), 5, SeededDice(0), GREEDY))
    assert speeds[SECOND] > speeds[FIRST] > 0


def test_at_every_so_many_choices_another_one_is_tried() -> None:
    _, (stats,) = run(Bandit(parts=(Says(truth), Says(wrong)), run=4), count=4000)
    passes = stats.drafted / 4
    assert stats.drafted_by[SECOND] / 4 == pytest.approx(passes / EXPLORE, rel=0.2)


def test_steps_in_which_another_one_drafted_do_not_count() -> None:
    """A router asks a bandit and may use somebody else's tree."""
    bandit = Bandit(parts=(Says(wrong), Says(wrong)), scope="global")
    router = registry.make("drafter", "router", parts=(bandit, Says(truth)), scope="global")
    run(router, count=3000)
    seq = sequence((0, 1), 5, SeededDice(0), GREEDY)
    plain_step = 1 / 1.0625  # one token for five rows, as `says` has them
    assert list(bandit.speeds(seq).values()) == pytest.approx([plain_step] * 2, rel=0.02)


def test_what_a_group_taught_ends_with_it() -> None:
    bandit = Bandit(parts=(Says(wrong), Says(truth)))
    loop = Engine(FakeTarget(LAW), bandit, Recursive(), Fixed(nodes=4))
    for group in ("prompt", None):
        seq = sequence((0, 1), 300, SeededDice(0), GREEDY)
        seq.group = group
        run_all(loop, [seq])
    assert set(bandit._records) == {"prompt"}
    bandit.forget("prompt")
    assert not bandit._records


def test_it_drafts_for_a_batch_as_for_one() -> None:
    """Each sequence its own part, in one call per part."""
    bandit = Bandit(parts=(Says(truth), Says(wrong)), run=1)
    seqs = [sequence((0, 1), 9, SeededDice(i), GREEDY, index=i) for i in range(3)]
    trees = bandit.propose(seqs, [Fixed(nodes=2).plan(seq) for seq in seqs])
    said = [tree.tokens.tolist() for tree in trees]
    assert said == [truth([0, 1], 2), wrong([0, 1], 2), truth([0, 1], 2)]


def test_bad_options_are_refused() -> None:
    parts = Says(truth), Says(wrong)
    for options in ({"run": 0}, {"trials": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            Bandit(parts=parts, **options)
    with pytest.raises(ConfigError, match="not both"):
        Auto(parts=parts, model="draft")


def test_auto_with_a_draft_model_uses_all_it_has() -> None:
    model = forerun.load("reasoner")
    drafter = model.drafter("auto:model=draft")
    names = [type(part).__name__ for part in drafter.within()]
    assert names == ["Auto", "Bandit", "DraftModel", "Stand", "Suffix"]
    draft = next(part for part in drafter.within() if isinstance(part, DraftModel))
    assert draft.seconds(4, 16) < draft.seconds(4), "a pass of the draft serves the whole batch"
    question = "Question: Tom has 3 apples and buys 4 more. How many apples has he?\nAnswer:"
    sampling = Sampling(temperature=0, max_new_tokens=60, n=2)
    (result,) = model.generate([question], sampling, drafter=drafter, controller="fixed:nodes=4")
    (plain,) = model.generate([question], sampling, drafter="none")
    assert [s.text for s in result.samples] == [s.text for s in plain.samples]
    drafted = [s.stats.drafted_by for s in result.samples]
    assert sum(by.get("draft_model", 0) for by in drafted) > 0
