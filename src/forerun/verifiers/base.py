"""What verifiers share."""

from __future__ import annotations

import numpy as np

from forerun.records import Verdict
from forerun.shaping import Laws
from forerun.tree import Tree


def follow_argmax(tree: Tree, laws: Laws) -> Verdict:
    """Descends while a child holds the argmax of its parent's shaped logits."""
    node, kept = -1, []
    while True:
        token = int(np.argmax(laws.logits(node)))
        hits = np.flatnonzero((tree.parents == node) & (tree.tokens == token))
        if not len(hits):
            return Verdict(kept, token)
        node = int(hits[0])
        kept.append(node)
