"""Write a drafter in ten lines and prove that it does not change the output distribution.

    python examples/03_write_a_drafter.py

No model is needed. The target is a table over three tokens. Every outcome of a whole generation is
enumerated with its probability.
"""

import itertools
from collections import defaultdict

import numpy as np
import torch

from forerun.controllers.fixed import Fixed
from forerun.core.dice import EnumeratedDice
from forerun.core.records import Rows, Sequence
from forerun.core.roles import Target
from forerun.core.sampling import Sampling
from forerun.core.tree import chain
from forerun.drafters.base import PerSequence
from forerun.engine.engine import Engine
from forerun.verifiers.recursive import Recursive


class LastFollower(PerSequence):
    """Drafts what followed each token the last time. Learns from every step."""

    labels = frozenset({"point"})

    def __init__(self):
        self.after = {}

    def draft(self, seq, plan, dice):
        tokens = [seq.tokens[-1]]
        while tokens[-1] in self.after and len(tokens) <= min(plan.nodes, plan.depth):
            tokens.append(self.after[tokens[-1]])
        return chain(tokens[1:])

    def observe(self, step):
        for seq, new in zip(step.seqs, step.emitted, strict=True):
            self.after.update(itertools.pairwise(seq.tokens[-len(new) - 1 :]))


class Table(Target):
    """A target with next-token probabilities that depend on the last token only."""

    vocab_size, context = 3, 100
    law = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]])

    def forward(self, batch):
        paths = [
            [(seq.tokens + tree.path(node))[-1] for node in range(-1, len(tree))]
            for seq, tree in zip(batch.seqs, batch.trees, strict=True)
        ]
        return [Rows(torch.from_numpy(np.log(self.law[path]))) for path in paths]

    def commit(self, seqs, trees, verdicts):
        pass


def generate(dice, length=4):
    """Generates one text with the whole engine; all randomness comes from `dice`."""
    engine = Engine(Table(), LastFollower(), Recursive(), Fixed(nodes=3, depth=3))
    seq = Sequence([0], 1, Sampling(), dice, limit=length)
    engine.submit(seq)
    engine.run()
    return tuple(seq.generated)


found = defaultdict(float)
outcomes = 0
for text, probability in EnumeratedDice().outcomes(generate):
    found[text] += probability
    outcomes += 1

exact = {
    text: float(np.prod([Table.law[a, b] for a, b in itertools.pairwise((0, *text))]))
    for text in itertools.product(range(3), repeat=4)
}
error = max(abs(found[text] - exact[text]) for text in exact)
print(f"{outcomes} outcomes, {len(exact)} texts, largest error of a probability {error:.1e}")
assert error < 1e-12, "this drafter changes the distribution"
