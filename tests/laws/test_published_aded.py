"""The sampled verification that ADED's authors ship is biased, and the harness shows it.

Their rule samples a token per position and per path, keeps the longest path that agrees with its
own samples, then samples the next token afresh although one was rejected there.
"""

from __future__ import annotations

import numpy as np
import pytest

from fakes import table_law
from forerun import registry
from forerun.core.dice import Dice
from forerun.core.logits import TargetProbs
from forerun.core.records import Plan, Verdict
from forerun.core.roles import Drafter, Verifier
from forerun.core.tree import Tree
from harness import distance

TARGET = table_law(1)
TEXT = np.random.default_rng(0).integers(0, 3, 60).astype(np.int32)


def drafter() -> Drafter:
    """Drafts the two most visited tokens from a matrix counted in a text, without updates."""
    made = registry.make("drafter", "aded:iterations=2,length=2,increment=0")
    made.layer().count([TEXT])
    return made


class Published(Verifier):
    """Every leaf is a path with samples of its own; the longest agreement wins, the first if tied.

    `resamples` False repairs the last step alone: the rejected sample is emitted.
    """

    def __init__(self, resamples: bool = True) -> None:
        self.resamples = resamples

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        best = Verdict([], -1)
        leaves = [node for node in range(len(tree)) if not tree.children(node)]
        for leaf in leaves or [-1]:
            found = self._agreement(tree, leaf, laws, dice)
            if best.token < 0 or len(found.nodes) > len(best.nodes):
                best = found
        if not self.resamples:
            return best
        return Verdict(best.nodes, dice.choice(laws[best.nodes[-1] if best.nodes else -1]))

    def _agreement(self, tree: Tree, leaf: int, laws: TargetProbs, dice: Dice) -> Verdict:
        path = [leaf]
        while path[-1] >= 0:
            path.append(int(tree.parents[path[-1]]))
        kept: list[int] = []
        for above, node in zip(path[::-1], [*path[-2::-1], None], strict=True):
            token = dice.choice(laws[above])
            if node is None or tree.tokens[node] != token:
                return Verdict(kept, token)
            kept.append(node)
        raise AssertionError("the last position has no node to agree with")


@pytest.mark.parametrize(
    ("verifier", "is_exact"),
    [(Published(), False), (Published(resamples=False), False), ("match", True)],
    ids=["published", "published, rejected sample emitted", "one draw per node"],
)
def test_the_published_sampling_is_biased(verifier: Verifier | str, is_exact: bool) -> None:
    error = distance(
        TARGET,
        drafter,
        registry.make("verifier", verifier) if isinstance(verifier, str) else verifier,
        plan=Plan(nodes=2, depth=1),
        lengths=(2,),
    )
    print(f"largest error of a text's probability: {error:.2e}")
    assert (error <= 1e-12) == is_exact
    assert is_exact or error > 1e-3
