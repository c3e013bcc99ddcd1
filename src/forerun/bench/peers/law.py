"""Tests of a contestant's samples against the model's distribution: first tokens, whole texts.

A peer that is greedy at temperature 1, truncates by default, or changes the distribution by its
speculation is not comparable. The model's distribution comes from plain passes here; the tests are
those of forerun.utils.stats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.bench.contestants import PeerError
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Sequence
from forerun.core.sampling import Sampling, to_probs
from forerun.core.tree import TreeBuilder
from forerun.errors import ConfigError
from forerun.utils.stats import EXCLUDED, fit, ranks

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.bench.peers.peer import PeerContestant

ALPHA = 1e-3  # p-values below this fail
NUM_TEXT_BINS = 20  # of the ranks of whole texts


@dataclass(frozen=True)
class LawCheck:
    """Goodness of fit of a contestant's tokens to the model's distribution."""

    num_samples: int
    num_bins: int
    statistic: float  # G, Williams' correction
    p_value: float
    entropy: float  # of the distribution, nats; for texts the mean over positions
    num_excluded: int = 0  # tokens of probability 0

    @property
    def passed(self) -> bool:
        return self.p_value >= ALPHA

    @property
    def is_vacuous(self) -> bool:
        """Whether the distribution is too narrow to test anything."""
        return self.num_bins < 2 and self.num_excluded == 0


def check_law(
    contestant: PeerContestant,
    law: np.ndarray,
    prompt: Any,
    sampling: Sampling,
    n: int = 400,
    seed: int = 0,
) -> LawCheck:
    """First tokens of n samples against `law` [V], the processed distribution after the prompt.

    Raises PeerError for a wrong number of tokens or an id outside V.
    """
    _must_sample(sampling)
    tokens = np.array(contestant.first_tokens(prompt, replace(sampling, seed=seed), n))
    if len(tokens) != n or not ((tokens >= 0) & (tokens < len(law))).all():
        raise PeerError(f"{contestant.name}: expected {n} token ids below {len(law)}")
    rng = np.random.default_rng(seed)
    return _judged(ranks(law, tokens, rng), np.sort(law)[::-1], _entropy(law))


def check_texts(
    model: Model, prompt: Many[int], texts: Many[Many[int]], sampling: Sampling, seed: int = 0
) -> LawCheck:
    """All tokens of sampled texts against the distribution after their prefixes.

    The randomised rank of a token is uniform if it follows its distribution. Texts with a common
    prefix were drawn independently, so their tokens can be tested together.
    """
    _must_sample(sampling)
    rng = np.random.default_rng(seed)
    found, entropies = [], []
    for text in texts:
        for row, token in zip(logits_along(model, prompt, text), text, strict=False):
            law = to_probs(row, sampling).astype(np.float64)
            found.append(float(ranks(law, np.array([token]), rng)[0]))
            entropies.append(_entropy(law))
    return _judged(
        np.array(found), np.full(NUM_TEXT_BINS, 1 / NUM_TEXT_BINS), float(np.mean(entropies))
    )


def first_law(model: Model, prompt: Many[int], sampling: Sampling) -> np.ndarray:
    """The model's processed distribution [V] of the token after a prompt, float64."""
    return to_probs(logits_along(model, prompt, [])[0], sampling).astype(np.float64)


def widest(model: Model, texts: Many[Many[int]], sampling: Sampling, least: int = 4) -> list[int]:
    """The prefix of some token lists with the highest entropy of the next token."""
    best, start = -1.0, list(texts[0])
    for text in texts:
        for count, row in enumerate(logits_along(model, text[:least], text[least:]), start=least):
            entropy = _entropy(to_probs(row, sampling))
            if entropy > best:
                best, start = entropy, list(text[:count])
    return start


def first_difference(model: Model, prompt: Many[int], tokens: Many[int]) -> tuple[int, float]:
    """(length of the greedy prefix, gap of the first other token); (len(tokens), 0.0) for none.

    The gap is the logit of the argmax minus that of the token; small gaps are rounding.
    """
    rows = logits_along(model, prompt, tokens)
    for i, (row, token) in enumerate(zip(rows, tokens, strict=False)):
        if token != int(np.argmax(row)):
            return i, float(row.max() - row[token])
    return len(tokens), 0.0


def logits_along(model: Model, prompt: Many[int], tokens: Many[int]) -> np.ndarray:
    """Logits [len(tokens) + 1, V] after the prompt and after each of the tokens, in one pass."""
    chain = TreeBuilder()
    for i, token in enumerate(tokens):
        chain.add(token, parent=i - 1)
    seq = Sequence(list(prompt), len(prompt), Sampling(), SeededDice(0, 0, 0), limit=1)
    try:
        [rows] = model.target.forward(ForwardBatch([seq], [chain.build()]))
    finally:
        model.target.release(seq)
    return np.stack([rows.row(node) for node in range(-1, len(tokens))])


def _judged(u: np.ndarray, shape: np.ndarray, entropy: float) -> LawCheck:
    excluded = int((u == EXCLUDED).sum())
    bins, statistic, p_value = fit(u, shape)
    return LawCheck(len(u), bins, statistic, p_value, entropy, excluded)


def _entropy(law: np.ndarray) -> float:
    kept = law[law > 0].astype(np.float64)
    return max(0.0, -float((kept * np.log(kept)).sum()))


def _must_sample(sampling: Sampling) -> None:
    if sampling.is_greedy or math.isclose(sampling.temperature, 0.0):
        raise ConfigError(
            "sampling tests need a temperature above 0, got 0; compare greedy texts instead"
        )
