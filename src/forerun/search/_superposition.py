"""The step of superposed decoding: k drafts share the model's state and differ by n-grams."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from forerun.core.sampling import log_softmax, softmax
from forerun.errors import ConfigError
from forerun.ngrams.index.counts.trie import NgramModel, check_weights
from forerun.runner.soft_embeddings import MixedStream
from forerun.utils.numbers import finite, whole

WEIGHTS = (0.01, 0.04, 0.15, 0.18, 0.12)  # of contexts of 1 .. 5 tokens


@dataclass(frozen=True)
class Settings:
    """Parameters of the paper, with its values. Raises ConfigError."""

    k: int = 3
    temperature: float = 0.06  # of the target's distribution, before logarithms are mixed
    ngram_weight: float = 0.54  # a: s = (1 - a) log p + a log P_ng
    candidates: int = 0  # n, tokens that may follow a draft; 0: 3 k
    penalty: float = 200.0  # of a draft without a successor in the n-grams
    weights: tuple[float, ...] = WEIGHTS

    def __post_init__(self) -> None:
        if isinstance(self.k, int) and self.k < 2:
            raise ConfigError(
                f"k, the number of superposed drafts (-n), must be at least 2, got {self.k}; "
                "for one draft use plain decoding: forerun generate --temperature 0"
            )
        whole("k, the number of superposed drafts (-n),", self.k, 2)
        finite("ngram_weight (0: no n-grams; 0.54 is published)", self.ngram_weight, 0, 1)
        finite("temperature of the mix", self.temperature, 0, is_open=True)
        finite("penalty", self.penalty, 0)
        check_weights(self.weights)
        if self.ngram_weight and not any(self.weights):
            raise ConfigError("weights are all 0; give one above 0, or ngram_weight=0")
        if whole("candidates", self.candidates, 0) and self.candidates < self.k:
            raise ConfigError(
                f"candidates={self.candidates} gives fewer first tokens than k={self.k} drafts; "
                "use at least k, or 0 for 3 k"
            )

    @property
    def num_candidates(self) -> int:
        return self.candidates or 3 * self.k


@dataclass(frozen=True)
class Draft:
    """One draft: `score` is the sum of mixed log scores, not a log-probability."""

    tokens: tuple[int, ...]
    score: float = 0.0
    text: str = ""
    finish: str = "length"

    @property
    def mean_score(self) -> float:
        """Score per token; the paper calls `exp(-mean_score)` the draft's perplexity."""
        return self.score / max(1, len(self.tokens))


def drafts_of(
    stream: MixedStream,
    prompt: list[int],
    ngrams: NgramModel | None,
    how: Settings,
    max_new_tokens: int,
    eos_ids: Many[int] = (),
) -> list[Draft]:
    """The k best drafts, by descending mean score.

    Where fewer than k continuations are in the n-grams, the likeliest others fill up.
    """
    logits = stream.prompt(prompt)
    alive = [Draft(())]  # one draft until the first token
    finished: list[Draft] = []
    for step in range(max_new_tokens):
        ids, logp = likeliest(logits, how.temperature, how.num_candidates)
        scores = [mixed_scores(logp, _shares(ngrams, prompt, d, ids, how), how) for d in alive]
        penalised = (1 - how.ngram_weight) * logp - how.penalty
        extended = extend(alive, ids, np.stack(scores), 2 * how.k, how.k, penalised)
        ended = [Draft(d.tokens, d.score, finish="stop") for d in extended if is_end(d, eos_ids)]
        finished = best([*finished, *ended], how.k)
        alive = [d for d in extended if not is_end(d, eos_ids)][: how.k]
        if not alive or step == max_new_tokens - 1:
            break
        logits = stream.step(*superposition(alive))
    ranked = sorted([*alive, *finished], key=lambda d: -d.mean_score)
    return ranked[: how.k]


def likeliest(logits: np.ndarray, temperature: float, num: int) -> tuple[np.ndarray, np.ndarray]:
    """The n likeliest tokens, descending, and their renormalised log p; int64, float64 [n]."""
    num = min(num, len(logits))
    top = np.argpartition(-logits, num - 1)[:num]
    ids = top[np.lexsort((top, -logits[top]))]
    return ids, log_softmax(logits[ids].astype(np.float64) / temperature)


def mixed_scores(logp: np.ndarray, shares: np.ndarray | None, how: Settings) -> np.ndarray:
    """s(v) = (1 - a) log p(v) + a log P_ng(v), [n]; a penalty if P_ng is 0 for all v."""
    a = how.ngram_weight
    if shares is None or a == 0:
        return logp
    if not shares.any():
        return (1 - a) * logp - how.penalty
    with np.errstate(divide="ignore"):
        return (1 - a) * logp + a * np.log(shares)


def extend(
    drafts: Many[Draft],
    ids: np.ndarray,
    scores: np.ndarray,
    most: int,
    least: int = 0,
    penalised: np.ndarray | None = None,
) -> list[Draft]:
    """The `most` best extensions of drafts by tokens, descending; scores [k, n]. Ties: earlier.

    An extension of score -inf is left out. If fewer than `least` remain, such extensions follow
    with the scores `penalised` [n].
    """
    before = np.array([d.score for d in drafts])[:, None]
    totals = (before + scores).ravel()
    order = np.argsort(-totals, kind="stable")[:most]
    order = order[np.isfinite(totals[order])]
    if len(order) < least and penalised is not None:
        spare = np.where(np.isfinite(totals), -np.inf, (before + penalised).ravel())
        added = np.argsort(-spare, kind="stable")[: least - len(order)]
        added = added[np.isfinite(spare[added])]
        totals[added] = spare[added]
        order = np.concatenate([order, added])
    rows, columns = np.divmod(order, len(ids))
    return [
        Draft((*drafts[row].tokens, int(ids[column])), float(totals[at]))
        for at, row, column in zip(order, rows, columns, strict=True)
    ]


def superposition(drafts: Many[Draft]) -> tuple[list[int], list[float]]:
    """Last tokens and their weights g = softmax(scores), summed per token."""
    weights: dict[int, float] = {}
    for draft, g in zip(drafts, softmax(np.array([d.score for d in drafts])), strict=True):
        token = draft.tokens[-1]
        weights[token] = weights.get(token, 0.0) + float(g)
    return list(weights), list(weights.values())


def best(drafts: list[Draft], num: int) -> list[Draft]:
    """The `num` best by score."""
    return heapq.nlargest(num, drafts, key=lambda d: d.score)


def is_end(draft: Draft, eos_ids: Many[int]) -> bool:
    """Whether a draft ends in an end token."""
    return draft.tokens[-1] in eos_ids


def _shares(
    ngrams: NgramModel | None, prompt: list[int], draft: Draft, ids: np.ndarray, how: Settings
) -> np.ndarray | None:
    """P_ng of the candidates after a draft; None without n-grams."""
    if ngrams is None or not how.ngram_weight:
        return None
    last = [*prompt[-len(how.weights) :], *draft.tokens][-len(how.weights) :]
    return ngrams.shares(last, ids, how.weights)
