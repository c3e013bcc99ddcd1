"""Options of STAND that were removed; the nodes that it counts acceptance by."""

from __future__ import annotations

import numpy as np
import pytest

from fakes import FakeTarget, run_all, sequence, table_law
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.core.acceptance_prior import AcceptanceCounts
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence, Step
from forerun.core.roles import Drafter
from forerun.core.tree import POINT, Tree, chain
from forerun.drafters.base import PerSequence
from forerun.drafters.fuse import Fuse, merge
from forerun.drafters.router import Router
from forerun.drafters.stand import Stand
from forerun.engine.engine import Engine
from forerun.errors import ConfigError
from forerun.verifiers.recursive import Recursive

LAW = table_law(1)


@pytest.mark.parametrize("option", ["choice=measured", "refit=true", "update_from=tree"])
def test_removed_options_are_named(option: str) -> None:
    name = option if option == "choice=measured" else f"option {option.partition('=')[0]}"
    with pytest.raises(ConfigError, match=f"stand: {name} was removed in this release"):
        registry.make("drafter", f"stand:{option}")


def test_the_choice_is_one_of_two() -> None:
    with pytest.raises(ConfigError, match="choice must be one of .*top.*got 'best'"):
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
    memories = drafter._memories._pool._memories.values()
    first = AcceptanceCounts(drawn=drawn).tries.sum()
    return sum(memory.acceptance[drawn].tries.sum() - first for memory in memories)


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
