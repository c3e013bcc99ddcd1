"""The harness must catch what breaks the law: three mistakes, planted on purpose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fakes import TableSource, table_law
from forerun import registry
from forerun.core.records import Plan
from forerun.core.tree import IID, Tree, TreeBuilder
from forerun.core.tree_template import grid
from forerun.drafters.base import Grown
from forerun.growers.chain import Chain
from forerun.growers.gumbel import Gumbel
from harness import distance

TARGET, DRAFT = table_law(1), table_law(2)


class Mislabelled(Grown):
    """Siblings drawn without replacement, labelled as i.i.d. draws."""

    def spoil(self, tree: Tree) -> Tree:
        return replace(tree, laws=np.full_like(tree.laws, IID))

    def propose(self, seqs, plans, dice):
        return [self.spoil(tree) for tree in super().propose(seqs, plans, dice)]


class DropsDoubtful(Mislabelled):
    """A sampled token that looks unlikely is dropped, instead of stopping after it."""

    def spoil(self, tree: Tree) -> Tree:
        out = TreeBuilder()
        for node in range(len(tree)):
            q, token = tree.q(node), int(tree.tokens[node])
            if q.probs[q.ids == token][0] < 0.35:
                break
            out.add(token, int(tree.parents[node]), IID, q)
        return out.build()


class Reorders(Mislabelled):
    """Sampled siblings sorted by their score, best first."""

    def spoil(self, tree: Tree) -> Tree:
        score = [-tree.q(i).probs[tree.q(i).ids == tree.tokens[i]][0] for i in range(len(tree))]
        return replace(tree, tokens=tree.tokens[np.argsort(score)])


class Prunes(Mislabelled):
    """The sampled sibling of the lowest score is pruned."""

    def spoil(self, tree: Tree) -> Tree:
        scores = [tree.q(i).probs[tree.q(i).ids == tree.tokens[i]][0] for i in range(len(tree))]
        out = TreeBuilder()
        for i in range(len(tree)):
            if scores[i] > min(scores):
                out.add(int(tree.tokens[i]), -1, int(tree.laws[i]), tree.q(i))
        return out.build()


SIBLINGS = Gumbel(template=grid(2))
CASES = {
    "honest siblings": (Grown, SIBLINGS, True),
    "honest chain": (Grown, Chain(), True),
    "drawn without replacement, labelled i.i.d.": (Mislabelled, SIBLINGS, False),
    "doubtful token dropped": (DropsDoubtful, Chain(), False),
    "siblings reordered by score": (Reorders, SIBLINGS, False),
    "sibling pruned by score": (Prunes, SIBLINGS, False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_harness_sees_mistakes(name: str) -> None:
    drafter, grower, is_exact = CASES[name]
    error = distance(
        TARGET,
        lambda: drafter(TableSource(DRAFT), grower),
        registry.make("verifier", "recursive"),
        plan=Plan(nodes=2, depth=1),
        lengths=(2,),
    )
    assert (error <= 1e-12) == is_exact, error
    assert is_exact or error > 1e-3, error
