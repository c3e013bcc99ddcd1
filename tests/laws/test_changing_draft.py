"""Weights of a draft that change between steps keep the law; a change within a cycle breaks it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import pytest

from fakes import FakeRunner, FakeTarget, exact_law, run_all, sequence, table_law
from forerun import registry
from forerun.core.dice import Dice, EnumeratedDice
from forerun.core.records import Plan, Step
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.online import ONE_CLASS, Online
from forerun.engine.engine import Engine
from harness import EXACT, PROMPT, TARGET, Given

REQUESTS = {"free": Sampling(), "top-k 2": Sampling(top_k=2), "greedy": Sampling(temperature=0)}
PAIRS = [("chain", "speculative"), ("gumbel", "recursive")]


class Changing(FakeRunner):
    """A fake draft model with the number of its law as its only weight."""

    def __init__(self, seed: int = 2) -> None:
        super().__init__(table_law(seed))

    def update_weights(self, state: dict[str, int]) -> None:
        self.law = table_law(state["seed"])


def outcomes(
    make, verifier: str, sampling: Sampling, lengths: Many[int]
) -> dict[tuple[tuple[int, ...], ...], float]:
    """Every outcome of texts one after the other, with its probability.

    make: returns a drafter and a listener.
    """

    def program(dice: Dice) -> tuple[tuple[int, ...], ...]:
        drafter, listener = make()
        engine = Engine(
            FakeTarget(TARGET),
            drafter,
            registry.make("verifier", verifier),
            Given(Plan(nodes=2, depth=2)),
            listeners=[listener],
            max_seqs=1,
        )
        return run_all(engine, [sequence(PROMPT, n, dice, sampling) for n in lengths])

    found: dict[tuple[tuple[int, ...], ...], float] = {}
    for texts, probability in EnumeratedDice().outcomes(program):
        found[texts] = found.get(texts, 0.0) + probability
    return found


def error(found, sampling: Sampling, lengths: Many[int]) -> float:
    """Largest distance from the target's own probabilities."""
    joint: dict[tuple[tuple[int, ...], ...], float] = {(): 1.0}
    for n in lengths:
        law = exact_law(TARGET, PROMPT, n, sampling)
        joint = {(*texts, t): p * pt for texts, p in joint.items() for t, pt in law.items()}
    return max(abs(found.get(texts, 0.0) - p) for texts, p in joint.items())


def taught(step: Step) -> dict[str, int]:
    """New weights that depend on the text, as those of a learner do."""
    return {"seed": 3 + sum(step.seqs[0].tokens) % 5}


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize(("grower", "verifier"), PAIRS)
def test_weights_that_change_within_a_request_keep_the_law(grower, verifier, request_) -> None:
    changes = 0

    def make():
        runner = Changing()

        def listen(step: Step) -> None:
            nonlocal changes
            changes += 1
            runner.update_weights(taught(step))

        return DraftModel(model=runner, grower=grower), listen

    sampling = REQUESTS[request_]
    assert error(outcomes(make, verifier, sampling, (4,)), sampling, (4,)) <= EXACT
    assert changes


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize(("grower", "verifier"), PAIRS)
def test_versions_published_between_steps_keep_the_law(grower, verifier, request_) -> None:
    seen = set()

    def make():
        drafter, version = Online(model=Changing, grower=grower), 0

        def listen(step: Step) -> None:
            nonlocal version
            version += 1
            seen.add(drafter.version_of(step.seqs[0]))
            drafter.publish(ONE_CLASS, taught(step), version)

        return drafter, listen

    sampling = REQUESTS[request_]
    assert error(outcomes(make, verifier, sampling, (2, 2)), sampling, (2, 2)) <= EXACT
    assert len(seen) > 1, "the second text must start on new weights"


def test_weights_that_change_within_a_cycle_break_the_law() -> None:
    """The draft reports the q of weights that did not draw its tokens."""

    class MidCycle(DraftModel):
        def propose(self, seqs, plans, dice) -> list[Tree]:
            drawn = super().propose(seqs, plans, dice)
            law = table_law(3)
            return [
                replace(
                    tree,
                    q_probs=np.concatenate(
                        [law(seqs[0].tokens + tree.path(int(p))) for p in tree.parents]
                    ),
                )
                if len(tree)
                else tree
                for tree in drawn
            ]

    def make():
        return MidCycle(model=Changing()), lambda step: None

    found = outcomes(make, "speculative", Sampling(), (3,))
    assert error(found, Sampling(), (3,)) > 0.01


def test_a_request_keeps_the_weights_that_it_began_with() -> None:
    drafter = Online(model=Changing)
    first, second, third, seeded = (sequence(PROMPT, 9, None) for _ in range(4))  # type: ignore[arg-type]
    seeded.tenant = "a\0" + "7.0"
    drafter.start(first)
    assert drafter.publish(ONE_CLASS, {"seed": 3}, 1)
    drafter.start(second)
    assert drafter.publish(ONE_CLASS, {"seed": 4}, 2)
    drafter.start(third)
    drafter.start(seeded)
    assert [drafter.version_of(s) for s in (first, second, third, seeded)] == [0, 1, 2, 0]
    assert drafter.class_of(seeded) is None and drafter.class_of(first) == ONE_CLASS
    assert not drafter.publish(ONE_CLASS, {"seed": 5}, 3), "requests use both copies"
    laws = [drafter.propose([s], [Plan(1, 1)], [EnumeratedDice()])[0].q_probs for s in (first,)]
    assert np.allclose(laws[0], table_law(2)(PROMPT))
    drafter.finish(second)
    assert drafter.publish(ONE_CLASS, {"seed": 5}, 3) and drafter.versions() == {ONE_CLASS: 3}
    assert drafter.version_of(third) == 2
