"""Drawn or best tokens by what has gained more; whose nodes STAND counts chances by."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import FakeTarget, run_all, sequence, table_law
from forerun.controllers.fixed import Fixed
from forerun.core.acceptance_prior import Chances, Gain
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence, Step
from forerun.core.roles import Drafter
from forerun.core.sampling import Sampling
from forerun.core.tree import POINT, SWOR, Tree, chain
from forerun.drafters.base import PerSequence
from forerun.drafters.fuse import Fuse, merge
from forerun.drafters.router import Router
from forerun.drafters.stand import Stand, Trial
from forerun.engine.engine import Engine
from forerun.errors import ConfigError
from forerun.verifiers.recursive import Recursive

LAW = table_law(1)


def seq_of(temperature: float = 1.0) -> Sequence:
    return sequence((0, 1), 5, SeededDice(0), Sampling(temperature=temperature))


# the choice


def test_gain_starts_from_what_others_showed_at_that_temperature() -> None:
    gain, seq = Gain(), seq_of()
    assert gain.of(seq) == 0 and gain.draws(seq)
    for _ in range(200):
        gain.learn(seq, -1)
    assert -1 < gain.of(seq) < -0.8
    assert -1 < gain.of(seq_of()) < -0.8
    assert gain.of(seq_of(temperature=0.3)) == 0


def test_where_best_tokens_lead_drawing_is_tried_now_and_then() -> None:
    gain, seq = Gain(look=2, tries=4), seq_of()
    gain.learn(seq, -3)
    turns = []
    for _ in range(12):
        turns.append((gain.draws(seq), gain.compares(seq)))
        gain.step(seq)
    assert [draws for draws, _ in turns] == [True, False, False, False] * 3
    assert all(compares for draws, compares in turns if draws)


def test_a_trial_waits_until_the_text_decides() -> None:
    seq = seq_of()
    trial = Trial(2, chain([5, 6, 7]), accepted=1)
    found = []
    for token in (5, 6, 9):
        seq.tokens.append(token)
        found.append(trial.difference(seq))
    assert found == [(0, False), (-1, False), (-1, True)]


class Taught(Stand):
    """A STAND whose memory says the same after every token, and keeps saying it."""

    def __init__(self, law: dict[int, float], **options: object) -> None:
        super().__init__(context=1, entries=4, **options)
        self.law = law

    def start(self, seq: Sequence) -> None:
        super().start(seq)
        for token in range(3):
            self.memory(seq).update([token], list(self.law), list(self.law.values()))

    def _learn(self, *args: object) -> None:
        """Learns no laws."""


@pytest.mark.parametrize(
    ("p", "q", "is_drawn"),
    [
        ((0.9, 0.05, 0.05), (0.4, 0.3, 0.3), False),  # q ranks right and is too flat
        ((0.4, 0.35, 0.25), (0.4, 0.35, 0.25), True),  # q is the law
    ],
)
def test_what_gains_more_is_chosen(p: tuple, q: tuple, is_drawn: bool) -> None:
    drafter = Taught(dict(enumerate(q)), choice="measured")
    kinds = []

    def listen(step: Step) -> None:
        kinds.extend(bool((tree.laws == SWOR).all()) for tree in step.trees if len(tree))

    target = FakeTarget(lambda tokens: np.array(p))
    engine = Engine(target, drafter, Recursive(), Fixed(nodes=1), listeners=[listen])
    run_all(engine, [sequence((0, 1), 2000, SeededDice(i), index=i) for i in range(2)])
    late = np.mean(kinds[len(kinds) // 2 :])
    assert late > 0.95 if is_drawn else 0.05 < late < 0.25  # one in eight is tried


class Eager(Stand):
    """Compares at every step, doubts drawing at first, and tries it at every other step."""

    def start(self, seq: Sequence) -> None:
        super().start(seq)
        gain = self.memory(seq).gain
        gain.look, gain.tries = 1, 2
        gain.learn(seq, -0.5)


Eager.__module__ = Stand.__module__  # known by the same name


def test_a_few_tokens_are_enough_to_change_an_eager_choice() -> None:
    """What tests/laws enumerate would prove nothing if all trees were drawn."""
    kinds = set()

    def listen(step: Step) -> None:
        kinds.update(tree.laws[0] for tree in step.trees if len(tree))

    for seed in range(40):
        drafter = Eager(context=1, entries=3, choice="measured")
        engine = Engine(
            FakeTarget(LAW), drafter, Recursive(), Fixed(nodes=2, depth=2), listeners=[listen]
        )
        run_all(engine, [sequence((0, 1), 4, SeededDice(seed))])
    assert kinds == {POINT, SWOR}


def test_greedy_requests_measure_nothing() -> None:
    drafter, seq = Stand(choice="measured", scope="global"), seq_of(temperature=0.0)
    seq.limit = 60
    run_all(Engine(FakeTarget(LAW), drafter, Recursive(), Fixed(nodes=2)), [seq])
    assert len(drafter.memory(seq)) and not drafter.memory(seq).gain._all


def test_the_choice_is_one_of_three() -> None:
    with pytest.raises(ConfigError, match="choice must be one of .*measured.*got 'best'"):
        Stand(choice="best")


# whose nodes are counted


class Wrong(PerSequence):
    """Drafts best tokens of a foreign grower, with cells of its own."""

    labels = frozenset({"point"})

    def draft(self, seq: Sequence, plan: Plan, dice) -> Tree:
        from dataclasses import replace

        return replace(chain([2, 2][: plan.nodes]), cells=np.zeros(min(2, plan.nodes), np.int8))


def trials(drafter: Stand, drawn: bool = True) -> float:
    """Trials counted beyond those that are believed at first."""
    memories = drafter._memories._held.values()
    first = Chances(drawn=drawn).tries.sum()
    return sum(memory.chances[drawn].tries.sum() - first for memory in memories)


def run(drafter: Drafter, tokens: int = 60) -> list[Step]:
    steps: list[Step] = []
    engine = Engine(FakeTarget(LAW), drafter, Recursive(), Fixed(nodes=4), listeners=[steps.append])
    run_all(engine, [sequence((0, 1), tokens, SeededDice(3))])
    return steps


@pytest.mark.parametrize("parts", [(Wrong, Stand), (Stand, Wrong)])
def test_in_a_router_chances_are_counted_by_own_trees_alone(parts: tuple) -> None:
    made = [part() for part in parts]
    (stand,) = (part for part in made if isinstance(part, Stand))
    steps = run(Router(parts=tuple(made)), tokens=400)
    tried = dict.fromkeys(("stand", "test_stand_choice"), 0)
    for step in steps:
        for name in step.trees[0].sources:
            tried[name] += 1
    # both were used; one that is always wrong need not be where it comes second
    assert tried["stand"] > 0 and (tried["test_stand_choice"] > 0 or parts[0] is Stand)
    assert 0 < trials(stand) <= tried["stand"] and trials(stand, drawn=False) == 0


def test_in_a_fusion_chances_are_counted_by_own_nodes() -> None:
    stand = Stand(context=1, entries=3)
    steps = run(Fuse(parts=(Wrong(), stand)))
    tried = sum(step.trees[0].sources.count("stand") for step in steps)
    assert 0 < trials(stand) <= tried and trials(stand, drawn=False) == 0


def test_a_fused_node_keeps_the_cell_of_its_drafter() -> None:
    from dataclasses import replace

    one = chain([4, 5])
    two = replace(chain([4, 6, 7]), cells=np.array([3, 8, 9], np.int8))
    tree = merge([one, two], ["a", "b"])
    assert tree.tokens.tolist() == [4, 5, 6, 7] and (tree.laws == POINT).all()
    assert tree.cells.tolist() == [-1, -1, 8, 9]
    assert tree.cells_of("b").tolist() == [-1, -1, 8, 9]
    assert tree.cells_of("a").tolist() == [-1] * 4
    assert chain([1]).cells_of("a").tolist() == [-1]
