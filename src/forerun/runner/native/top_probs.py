"""The largest probabilities of rows of logits, in one call on all threads."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from forerun.runner.native import kernels
from forerun.runner.native.layout import TOP_BLOCK, TOP_SPAN

MIN_SHARED = 1 << 17  # logits; for fewer, waking threads takes longer than they save


def is_supported(rows: Many[np.ndarray] | np.ndarray) -> bool:
    """Whether `top_probs` takes these rows of logits."""
    return bool(kernels()) and all(
        row.dtype == np.float32 and row.flags.c_contiguous and row.shape == rows[0].shape
        for row in rows
    )


def top_probs(rows: Many[np.ndarray] | np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    """The `num` largest probabilities of softmax(row) for each of n >= 1 rows [V].

    Returns ids int32 and probabilities float32, both [n, num], ordered by logit, then zeros; equal
    logits: lowest id first. A row with NaN or +inf, or without a finite logit, gets zeros. A row's
    result does not depend on the other rows or on the number of threads.
    """
    import torch  # here: the options of a drafter are checked without loading torch

    found, n, vocab = kernels(), len(rows), len(rows[0])
    ids, probs = np.empty((n, num), np.int32), np.empty((n, num), np.float32)
    scratch = np.empty(n * (-(-vocab // TOP_BLOCK) + 2 * -(-vocab // TOP_SPAN)), np.float32)
    starts = np.array([row.ctypes.data for row in rows], np.uint64)
    threads = torch.get_num_threads() if n * vocab >= MIN_SHARED else 1
    found.library.forerun_top_probs(  # type: ignore[union-attr]
        found.level,
        starts.ctypes.data,
        n,
        vocab,
        num,
        scratch.ctypes.data,
        ids.ctypes.data,
        probs.ctypes.data,
        threads,
    )
    return ids, probs
