"""The largest entries of next-token distributions, which a logit memory keeps."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from forerun.core.sampling import softmax
from forerun.ngrams.tables.logits.top_k import select_top
from forerun.runner.native import top_probs as native


def largest(rows: Many[np.ndarray] | np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    """The `num` largest probabilities of each of n distributions [V].

    Returns ids int32 and probabilities float32, both [n, num], falling, then zeros; ties: lowest
    ids. NaN is skipped.
    """
    ids, probs = np.zeros((len(rows), num), np.int32), np.zeros((len(rows), num), np.float32)
    for row, *found in zip(rows, ids, probs, strict=True):
        select_top(row, *found)
    return ids, probs


def top_probs(rows: Many[np.ndarray] | np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    """`largest` of softmax(row) for each of n rows of logits [V].

    Computed in C where its kernels run and all rows are float32, and then ordered by logit. A row
    with NaN or +inf, or without a finite logit, gets zeros.
    """
    if len(rows) and native.is_supported(rows):
        return native.top_probs(rows, num)
    return largest([softmax(row) for row in rows], num)
