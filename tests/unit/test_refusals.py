"""Drafts that break their own law: an error in debug; under `python -O` a plain draw, counted."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import forerun
from forerun.core.dice import EnumeratedDice, SeededDice
from forerun.core.sampling import Sampling
from forerun.core.tree import IID, POINT, SWOR, Proposal, Tree, TreeBuilder
from forerun.verifiers import base
from forerun.verifiers.block import Block
from forerun.verifiers.k_seq import KSeq
from forerun.verifiers.recursive import Recursive
from forerun.verifiers.speculative import Speculative
from forerun.verifiers.transport import Transport

P = np.array([0.5, 0.3, 0.2])
GOOD = Proposal(np.array([0, 1, 2], np.int32), np.array([0.2, 0.3, 0.5]))


class TargetProbs(dict):
    sampling = Sampling()

    def unshaped(self) -> None:
        """No logits: laws alone."""


def q(ids: list[int], probs: list[float]) -> Proposal:
    return Proposal(np.array(ids, np.int32), np.array(probs))


# what a node claims to have been drawn from, and what is wrong with that
FLAWS = {
    "token not covered": (q([0, 1], [0.5, 0.5]), "with q = 0"),
    "token of probability 0": (q([0, 1, 2], [0.5, 0.5, 0.0]), "with q = 0"),
    "NaN": (q([0, 1, 2], [np.nan, 0.5, 0.5]), "no distribution .sum nan"),
    "zero sum": (q([0, 1, 2], [0.0, 0.0, 0.0]), "no distribution .sum 0"),
    "infinite": (q([0, 1, 2], [np.inf, 0.5, 0.5]), "no distribution .sum inf"),
    "negative": (q([0, 1, 2], [0.7, -0.2, 0.5]), "no distribution .sum 1"),
    "empty": (q([], []), "no distribution .sum 0"),
    "larger vocabulary": (q([0, 2, 3], [0.2, 0.3, 0.5]), "holds token 3, of 3 tokens"),
    "negative id": (q([-1, 2], [0.5, 0.5]), "holds token -1, of 3 tokens"),
}
VERIFIERS = [Recursive, Speculative, Block, KSeq, Transport]


def draft(bad: Proposal, verifier: type, law: int = IID) -> Tree:
    """A chain of a good and a bad node; a bad sibling of a good node where trees are judged."""
    tree = TreeBuilder()
    if verifier is Block:
        tree.add(2, tree.add(1, -1, law, GOOD), law, bad)
    else:
        tree.add(2, -1, law, bad)
    return tree.build()


def laws(p: np.ndarray = P) -> TargetProbs:
    return TargetProbs(dict.fromkeys(range(-1, 3), p))


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", FLAWS)
def test_debug_raises(name: str, verifier: type) -> None:
    bad, message = FLAWS[name]
    with pytest.raises(AssertionError, match=message):
        verifier().verify(draft(bad, verifier), laws(), SeededDice(0))


@pytest.fixture
def release(monkeypatch):
    monkeypatch.setattr(base, "STRICT", False)
    monkeypatch.setattr(base.InvalidDrafts, "count", 0)
    return base.InvalidDrafts


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", FLAWS)
def test_release_draws_from_the_target(name: str, verifier: type, release) -> None:
    tree = draft(FLAWS[name][0], verifier)
    for seed in range(20):
        dice = SeededDice(seed)
        verdict = verifier().verify(tree, laws(), dice)
        assert verdict.nodes == [] and verdict.token == SeededDice(seed).choice(P)
    assert release.count == 20


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_release_keeps_the_law(verifier: type, release) -> None:
    """A good sibling is judged first where the rule allows it; the bad one ends the trials."""
    bad = q([0, 1], [0.5, 0.5])

    def program(dice: EnumeratedDice) -> int:
        tree = TreeBuilder()
        tree.add(int(GOOD.ids[dice.choice(GOOD.probs)]), -1, IID, GOOD)
        tree.add(2, -1 if verifier is not Block else 0, IID, bad)
        return verifier().verify(tree.build(), laws(), dice).tokens(tree.build())[0]

    law = np.zeros(3)
    for token, weight in EnumeratedDice().outcomes(program):
        law[token] += weight
    np.testing.assert_allclose(law, P, atol=1e-12)
    assert release.count > 0


def test_release_keeps_the_law_of_the_fast_form(release) -> None:
    """The kernel stops at the bad sibling exactly as the plain form does, draw by draw."""
    tree = TreeBuilder()
    tree.add(2, -1, SWOR, GOOD)
    tree.add(2, -1, SWOR, GOOD)  # drawn twice without replacement
    tree.add(0, -1, SWOR, GOOD)
    for seed in range(300):
        ours, theirs = SeededDice(seed), SeededDice(seed)
        fast = Speculative().verify(tree.build(), laws(), ours)
        assert fast == Recursive().verify(tree.build(), laws(), theirs)
        assert ours.uniform() == theirs.uniform()
    assert release.count > 100


@pytest.mark.parametrize("law", [POINT, SWOR])
def test_release_refuses_other_draws_for_k_seq(law: int, release) -> None:
    tree = TreeBuilder()
    tree.add(0, -1, law, None if law == POINT else GOOD)
    assert KSeq().verify(tree.build(), laws(), SeededDice(1)).nodes == []
    assert release.count == 1


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("row", [[np.nan, 0.5, 0.5], [0.0, 0.0, 0.0]])
def test_a_target_without_a_law_is_an_error_in_both(verifier, row, release) -> None:
    """There is nothing to fall back to."""
    from forerun.errors import ConfigError

    tree = draft(GOOD, verifier)
    with np.errstate(all="ignore"), pytest.raises(ConfigError, match="should sum to 1"):
        for seed in range(50):
            verifier().verify(tree, laws(np.array(row)), SeededDice(seed))


def test_the_log_counts_in_powers_of_ten(release, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="forerun"):
        for _ in range(120):
            base.reject_invalid("node 3 holds token 7, with q = 0")
    assert [record.args[0] for record in caplog.records] == [1, 10, 100]
    assert "(100 so far): node 3 holds token 7" in caplog.text


OPTIMISED = """
import numpy as np
from forerun.core.dice import SeededDice
from forerun.core.sampling import Sampling
from forerun.core.tree import IID, Proposal, TreeBuilder
from forerun.verifiers.base import STRICT, InvalidDrafts
from forerun.verifiers.recursive import Recursive
class Laws(dict):
    sampling = Sampling()
tree = TreeBuilder()
tree.add(2, -1, IID, Proposal(np.array([0, 1], np.int32), np.array([0.5, 0.5])))
verdict = Recursive().verify(tree.build(), Laws({-1: np.array([0.5, 0.3, 0.2])}), SeededDice(0))
print(STRICT, verdict.nodes, InvalidDrafts.count)
"""


def test_python_without_assertions_is_release() -> None:
    env = os.environ | {"PYTHONPATH": str(Path(forerun.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-O", "-c", OPTIMISED], capture_output=True, text=True, env=env
    )
    assert done.stdout.split("\n")[0] == "False [] 1", done.stderr
    assert "invalid draft, drew" in done.stderr
