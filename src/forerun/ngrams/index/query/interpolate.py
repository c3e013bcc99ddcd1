"""Interpolates a neural model with corpus n-grams: w P_corpus + (1 - w) P_neural.

Liu et al., "Infini-gram: Scaling Unbounded n-gram Language Models to a Trillion Tokens", 2024.
P_corpus uses the longest suffix that occurs; both models share a tokenizer. w is one of two numbers
(`TwoWeights`): for sparse estimates, with a single next token, and for others. Or w is predicted by
a random forest (`Forest`) from the suffix's length and counts. Both are fitted on text outside the
corpus and the evaluation. `decontaminated` removes documents that overlap with the evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forerun.core.records import Snapshot
from forerun.errors import ConfigError, DataError, install_extra
from forerun.ngrams.index.query.engine import Ids, Index
from forerun.ngrams.index.query.results import Next
from forerun.state import array_file
from forerun.utils.jit import compiled
from forerun.utils.numbers import finite, whole

LENGTHS = 16  # features: counts of the last 1 .. 16 tokens of a suffix
KIND = "interpolation forest"
Weigh = Callable[[np.ndarray], np.ndarray]  # features [m, 2 + LENGTHS] to weights [m]


def features(index: Index, contexts: Many[Ids], found: Many[Next]) -> np.ndarray:
    """Features of a weight: sparse or not, the suffix's length, log counts of its last tokens.

    float32 [m, 2 + LENGTHS]; found: `index.infgram_ntd` of the contexts.
    """
    rows = np.zeros((len(contexts), 2 + LENGTHS), np.float32)
    ends: list[Ids] = []
    for row, context, one in zip(rows, contexts, found, strict=True):
        row[:2] = one.is_sparse, one.suffix_length
        longest = min(one.suffix_length, LENGTHS)
        ends += [context[len(context) - k :] for k in range(1, longest + 1)]
    counts = iter(index.count_many(ends).tolist())
    for row in rows:
        for k in range(min(int(row[1]), LENGTHS)):
            row[2 + k] = np.log1p(next(counts))
    return rows


class Cases(NamedTuple):
    """Positions of a text: both models' probability of the actual token, and the features."""

    neural: np.ndarray  # float64 [m], P_neural(token)
    corpus: np.ndarray  # float64 [m], P_corpus(token)
    features: np.ndarray  # float32 [m, 2 + LENGTHS]

    def mixed(self, weigh: Weigh | None) -> np.ndarray:
        """P(token) per position; None: the neural model alone. float64 [m]."""
        if weigh is None:
            return self.neural
        w = weigh(self.features)
        return w * self.corpus + (1 - w) * self.neural

    def perplexity(self, weigh: Weigh | None = None) -> float:
        """exp of the mean of -log P(token); infinite if a probability is 0."""
        with np.errstate(divide="ignore"):
            return float(np.exp(-np.log(self.mixed(weigh)).mean()))


def cases_of(
    index: Index,
    contexts: Many[Ids],
    tokens: Many[int],
    neural: np.ndarray,
    max_support: int | None = 1000,
) -> tuple[Cases, list[Next]]:
    """Cases from contexts, actual tokens and their P_neural [m]; and the next-token estimates."""
    found = index.infgram_many(contexts, max_support)
    return Cases(neural, probs_of(found, tokens), features(index, contexts, found)), found


def probs_of(found: Many[Next], tokens: Many[int]) -> np.ndarray:
    """P(token) of each estimate, float64 [m]."""
    probs = np.zeros(len(found))
    for i, (one, token) in enumerate(zip(found, tokens, strict=True)):
        at = int(np.searchsorted(one.ids, token))
        if at < len(one.ids) and one.ids[at] == token:
            probs[i] = one.counts[at] / one.context_count
    return probs


@dataclass(frozen=True)
class TwoWeights:
    """Weights lambda_sparse and lambda_other."""

    sparse: float
    other: float

    def __post_init__(self) -> None:
        if not (0 <= self.sparse <= 1 and 0 <= self.other <= 1):
            raise ConfigError(
                f"sparse={self.sparse}, other={self.other} are out of range; weights must be in "
                "[0, 1]"
            )

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Weights [m]."""
        return np.where(features[:, 0] > 0, self.sparse, self.other)

    @classmethod
    def fit(cls, cases: Cases) -> TwoWeights:
        """The weights with the smallest perplexity on these cases."""
        check_enough(cases)
        is_sparse = cases.features[:, 0] > 0
        groups = [g if g.any() else np.ones_like(g) for g in (is_sparse, ~is_sparse)]
        return cls(*(_best_weight(cases.corpus[g], cases.neural[g]) for g in groups))


def _best_weight(a: np.ndarray, b: np.ndarray) -> float:
    """The w in [0, 1] that maximises sum log(w a + (1 - w) b), a concave function."""
    low, high = 0.0, 1.0
    for _ in range(40):
        w = (low + high) / 2
        mixed = w * a + (1 - w) * b
        slope = ((a - b)[mixed > 0] / mixed[mixed > 0]).sum()
        low, high = (w, high) if slope > 0 else (low, w)
    return low


class Forest:
    """Predicts a weight per position by a random forest over the features."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self._parts = tuple(arrays[name] for name in PARTS)

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Weights [m]: the mean of all trees."""
        return _predict(np.ascontiguousarray(features, np.float32), *self._parts)

    @classmethod
    def fit(
        cls, cases: Cases, *, trees: int = 50, leaf: int = 25, rounds: int = 5, seed: int = 0
    ) -> Forest:
        """Fits weights by expectation-maximisation. Needs scikit-learn.

        E-step: the share of each token's probability that comes from the corpus. M-step: the forest
        is fitted to the shares; a position's new weight is its out-of-bag prediction.
        """
        regressor = _sklearn()
        check_enough(cases)
        w = TwoWeights.fit(cases)(cases.features)
        for _ in range(rounds):
            w = np.clip(w, 1e-3, 1 - 1e-3)
            share = w * cases.corpus / np.maximum(cases.corpus * w + cases.neural * (1 - w), 1e-300)
            forest = regressor(
                trees, min_samples_leaf=leaf, oob_score=True, random_state=seed, n_jobs=1
            ).fit(cases.features, share)
            w = np.nan_to_num(forest.oob_prediction_, nan=float(share.mean()))
        return cls(_flat([tree.tree_ for tree in forest.estimators_]))

    def save(self, path: Path | str, origin: array_file.Origin | None = None) -> None:
        """Writes the forest to a file."""
        snapshot = Snapshot(KIND, self.arrays, {"lengths": LENGTHS}, {})
        array_file.write(path, snapshot, origin or array_file.Origin())

    @classmethod
    def load(cls, path: Path | str) -> Forest:
        """Loads a file of `save`. Raises DataError."""
        snapshot, _ = array_file.read(path, KIND)
        if snapshot.settings.get("lengths") != LENGTHS:
            raise DataError(f"{path} has other features; fit the forest again")
        return cls(snapshot.arrays)


PARTS = ("roots", "left", "right", "feature", "threshold", "value")


def _sklearn() -> Any:
    try:
        from sklearn.ensemble import RandomForestRegressor
    except ImportError:
        raise ConfigError(
            f"fitting a forest needs scikit-learn; {install_extra('interpolation')}, or fit "
            "TwoWeights"
        ) from None
    return RandomForestRegressor


def _flat(trees: list[Any]) -> dict[str, np.ndarray]:
    """Concatenated trees of scikit-learn; a leaf has the left child -1."""
    starts = np.cumsum([0, *(tree.node_count for tree in trees)])[:-1]

    def joined(name: str, dtype: type, is_node: bool = False) -> np.ndarray:
        arrays: list[Any] = [np.asarray(getattr(tree, name), dtype) for tree in trees]
        if is_node:
            arrays = [
                np.where(a >= 0, a + s, -1).astype(dtype)
                for a, s in zip(arrays, starts, strict=True)
            ]
        return np.concatenate(arrays)

    return {
        "roots": starts.astype(np.int64),
        "left": joined("children_left", np.int64, True),
        "right": joined("children_right", np.int64, True),
        "feature": joined("feature", np.int64),
        "threshold": joined("threshold", np.float64),
        "value": np.concatenate([tree.value[:, 0, 0] for tree in trees]),
    }


@compiled
def _predict(
    rows: np.ndarray,
    roots: np.ndarray,
    left: np.ndarray,
    right: np.ndarray,
    feature: np.ndarray,
    threshold: np.ndarray,
    value: np.ndarray,
) -> np.ndarray:
    """The mean leaf value over the trees, per row."""
    out = np.zeros(len(rows))
    for i in range(len(rows)):
        for root in roots:
            node = root
            while left[node] >= 0:
                is_low = rows[i, feature[node]] <= threshold[node]
                node = left[node] if is_low else right[node]
            out[i] += value[node]
    return out / len(roots)


def check_enough(cases: Cases) -> None:
    """Raises DataError if there are no cases."""
    if not len(cases.neural):
        raise DataError("expected positions to fit weights on, got none; use a longer text")


@dataclass
class Removed:
    """Numbers of documents and tokens that `decontaminated` removed, and in all."""

    documents: int = 0
    tokens: int = 0
    of_documents: int = 0
    of_tokens: int = 0


def decontaminated(
    documents: Iterable[Many[int]],
    texts: Iterable[Many[int]],
    removed: Removed,
    *,
    length: int = 13,
    share: float = 0.8,
) -> Iterator[Many[int]]:
    """The documents with less than `share` of their n-grams of `length` tokens in the texts.

    A shorter document is removed if it occurs in the texts. `removed` is updated.
    """
    whole("length", length)
    finite("share", share, 0, 1, is_open=True)
    evaluation = Index.of(texts, width=4)
    for document in documents:
        n = min(length, len(document))
        matched = evaluation.longest_matches(document, n) if n else np.empty(0, np.int64)
        num = len(document) - n + 1
        is_known = n > 0 and (matched[:num] >= n).sum() >= share * num
        removed.of_documents += 1
        removed.of_tokens += len(document)
        if is_known:
            removed.documents += 1
            removed.tokens += len(document)
        else:
            yield document
