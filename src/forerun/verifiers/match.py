"""Match verification: draw from the target and compare with the draft; q is not needed.

At each visited node draw y ~ p; if a child holds y descend, else emit y. The acceptance rate is
p(children): equal to recursive rejection for POINT children, lower for drawn ones. Used by Saxena,
"Prompt Lookup Decoding", 2023. Lossless.
"""

from __future__ import annotations

from forerun.core.dice import Dice
from forerun.core.logits import TargetProbs
from forerun.core.records import Verdict
from forerun.core.roles import Verifier
from forerun.core.tree import Tree
from forerun.verifiers.base import ALL_LABELS


class Match(Verifier):
    """One draw per visited node."""

    judges = ALL_LABELS

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
