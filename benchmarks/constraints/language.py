"""The exact laws of a finite language under a model: conditional, masked, and of ASAp.

All splits of all texts into tokens are enumerated, each with its probability under the model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.api import Model
from forerun.constraints._asap_trie import Trie
from forerun.constraints.base import Constraint
from forerun.core.records import Step
from forerun.core.sampling import Sampling, softmax

MAX_PREFIXES = 20_000
BATCH = 16

Law = dict[str, float]  # text -> probability


@dataclass
class Prefix:
    """A beginning of a text. ids, probs [k]: allowed tokens, and their probabilities."""

    path: tuple[int, ...]
    ids: np.ndarray
    probs: np.ndarray
    below: dict[int, Prefix] = field(default_factory=dict)  # by token; none for an end token


class Language:
    """The texts of a constraint after a prompt. Raises OverflowError if there are too many."""

    def __init__(self, model: Model, prompt: list[int], constraint: Constraint) -> None:
        self.model, self.prompt = model, prompt
        self.constraint = constraint.bind(model.tokenizer, model.target.vocab_size)
        self.prefixes: list[Prefix] = []  # by length, so that parents come first
        level: list[tuple[Prefix | None, tuple[int, ...]]] = [(None, ())]
        while level:
            level = self._expand(level)
        self.num_texts = len(self.law())

    def _expand(self, level: list) -> list:
        """Adds the prefixes of one length; returns the next ones."""
        if len(self.prefixes) + len(level) > MAX_PREFIXES:
            raise OverflowError(f"more than {MAX_PREFIXES} beginnings of texts; use a smaller one")
        following = []
        rows = next_laws(self.model, [[*self.prompt, *path] for _, path in level])
        for (above, path), row in zip(level, rows, strict=True):
            ids = np.flatnonzero(self.constraint.allowed(self.constraint.after(path)))
            one = Prefix(path, ids, row[ids])
            self.prefixes.append(one)
            if above is not None:
                above.below[path[-1]] = one
            ends = self.constraint.eos_ids
            following += [(one, (*path, int(i))) for i in ids if i not in ends]
        return following

    @property
    def mass(self) -> float:
        """Probability that a text of the model is allowed."""
        masses: dict[tuple[int, ...], float] = {}
        for one in reversed(self.prefixes):
            below = [masses[one.below[i].path] if i in one.below else 1.0 for i in one.ids.tolist()]
            masses[one.path] = float(one.probs @ np.array(below))
        return masses[()]

    def law(self) -> Law:
        """The model's law given that the text is allowed."""
        found = self._law(lambda one: one.probs, normalises=False)
        total = sum(found.values())
        return {text: p / total for text, p in found.items()}

    def masked(self) -> Law:
        return self._law(lambda one: one.probs)

    def asap(self, trie: Trie | None) -> Law:
        """The law of the next sample of ASAp, given what its trie knows."""

        def weights(one: Prefix) -> np.ndarray:
            node = None if trie is None else trie.find(one.path)
            return one.probs if node is None else one.probs * node.weights(one.ids)

        return self._law(weights)

    def _law(self, weights, normalises: bool = True) -> Law:  # type: ignore[no-untyped-def]
        """Texts with their probabilities, summed over their splits into tokens."""
        reach, found = {(): 1.0}, defaultdict[str, float](float)
        for one in self.prefixes:
            w = weights(one)
            p = reach[one.path] * (w / w.sum() if normalises and w.sum() > 0 else w)
            for token, probability in zip(one.ids.tolist(), p.tolist(), strict=True):
                if token in one.below:
                    reach[*one.path, token] = probability
                else:
                    found[self.model.tokenizer.decode(list(one.path))] += probability
        return dict(found)


def next_laws(model: Model, prefixes: Sequence[list[int]]) -> list[np.ndarray]:
    """The probabilities [V] of the token after each prefix, temperature 1."""
    found: dict[tuple[int, ...], np.ndarray] = {}

    def record(step: Step) -> None:
        for i, (seq, law) in enumerate(zip(step.seqs, step.laws, strict=True)):
            row = law.rows.row(-1).astype(np.float64)
            found[tuple(seq.tokens[: step.start(i)])] = softmax(row)

    one_token = Sampling(max_new_tokens=1, ignore_eos=True, seed=0)
    model.generate(list(prefixes), one_token, drafter="none", batch=BATCH, on_step=record)
    return [found[tuple(prefix)] for prefix in prefixes]


def divergence(p: Law, q: Law) -> float:
    """KL(p || q) in nats."""
    return sum(v * math.log(v / q[text]) for text, v in p.items() if v > 0)


def divergence_of(laws: Sequence[Law], q: Law) -> tuple[float, float]:
    """KL(p || q) and its standard error, from unbiased estimates of p: a text has weight 1.

    The mean is plugged in, less its bias to second order, sum of Var(p_x) / 2 p_x. If each estimate
    is one text, that is Miller and Madow's (k - 1) / 2n.
    """
    texts = sorted({text for law in laws for text in law})
    rows = np.array([[law.get(text, 0.0) for text in texts] for law in laws])  # [n, k]
    mean, num = rows.mean(axis=0), len(rows)
    logs = np.log(mean / np.array([q[text] for text in texts]))
    bias = float((rows.var(axis=0) / mean).sum()) / (2 * num)
    spread = float((rows @ logs).std())
    return float(mean @ logs) - bias, spread / math.sqrt(num)
