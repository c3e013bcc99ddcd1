"""Draw from the target, then look whether the draft had it: exact for any draft, q not needed.

At each visited node draw y ~ p; if a child holds y descend, else emit y. Acceptance is p(children),
which for POINT children is what recursive rejection reaches, and less for drawn ones (sheet of
verification rules, F4 "naive"). Saxena, prompt lookup decoding, 2023, verifies so. Lossless.
"""

from __future__ import annotations

from forerun.core.dice import Dice
from forerun.core.logits import TargetProbs
from forerun.core.records import Verdict
from forerun.core.roles import Verifier
from forerun.core.tree import Tree


class Match(Verifier):
    """One draw per visited node."""

    def verify(self, tree: Tree, laws: TargetProbs, dice: Dice) -> Verdict:
        node = -1
        kept: list[int] = []
        while True:
            token = dice.choice(laws[node])
            hits = [child for child in tree.children(node) if tree.tokens[child] == token]
            if not hits:
                return Verdict(kept, token)
            node = hits[0]
            kept.append(node)
