"""Learns the distributions along a text into a logit memory, in one call.

The compiled form of `LogitMemory.learn` with the largest entries of each distribution: same slots,
bitwise equal means (tests compare them). Contexts are windows of the text.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.ngrams.tables.logits.kernels import Table, hash_context, observe
from forerun.ngrams.tables.logits.top_k import BLOCK, LANES, select_into
from forerun.utils.jit import copy, kernel


class Workspace(NamedTuple):
    """Scratch arrays for K entries, contexts of L tokens, and S blocks of a vocabulary.

    The first four have the type of the distributions.
    """

    lanes: np.ndarray  # [LANES]
    tops: np.ndarray  # [S]
    bounds: np.ndarray  # [K]
    values: np.ndarray  # [K], largest entries of a distribution
    hashes: np.ndarray  # uint64 [L]
    context: np.ndarray  # int32 [L]
    new_ids: np.ndarray  # int32 [K]
    new_probs: np.ndarray  # float32 [K]
    ids: np.ndarray  # int32 [2 K]
    probs: np.ndarray  # float32 [2 K]


def new_workspace(longest: int, entries: int, vocab: int) -> np.ndarray:
    """The buffer of a `Workspace`, float64; one argument instead of ten for the kernel."""
    return np.empty(LANES + -(-vocab // BLOCK) + 6 * (entries + 1) + 2 * longest)


@kernel
def split_workspace(buffer: np.ndarray, longest: int, entries: int, law: np.ndarray) -> Workspace:
    """The arrays of a workspace as views of its buffer."""
    tops = LANES + -(-len(law) // BLOCK)
    bounds, values = tops + entries, tops + 2 * entries
    hashes = values + longest
    context = hashes + (longest + 1) // 2
    half = (entries + 1) // 2
    new_ids, new_probs = context + half, context + 2 * half
    ids = new_probs + entries
    return Workspace(
        buffer[:LANES].view(law.dtype),
        buffer[LANES:tops].view(law.dtype),
        buffer[tops:bounds].view(law.dtype)[:entries],
        buffer[bounds:values].view(law.dtype)[:entries],
        buffer[values:hashes].view(np.uint64),
        buffer[hashes:context].view(np.int32)[:longest],
        buffer[context:new_ids].view(np.int32)[:entries],
        buffer[new_ids:new_probs].view(np.float32)[:entries],
        buffer[new_probs:ids].view(np.int32),
        buffer[ids : ids + entries].view(np.float32),
    )


@kernel
def follow(
    keys: np.ndarray,
    counts: np.ndarray,
    stamps: np.ndarray,
    ids: np.ndarray,
    probs: np.ndarray,
    lengths: np.ndarray,
    clock: int,
    text: np.ndarray,
    laws: np.ndarray,
    buffer: np.ndarray,
) -> int:
    """Averages distributions [n, V] into the slots of all contexts before them in a text.

    The first five arguments are the fields of a Table. text int32 [longest + n - 1] is padded in
    front; distribution i follows text[: longest + i]. Returns the number of new keys.
    """
    table = Table(keys, counts, stamps, ids, probs)
    longest, entries, added = lengths[0], ids.shape[1], 0
    space = split_workspace(buffer, longest, entries, laws[0])
    for i in range(len(laws)):
        space.new_ids[:] = 0
        space.values[:] = 0.0
        select_into(laws[i], space.new_ids, space.values, space.tops, space.bounds, space.lanes)
        copy(space.values, space.new_probs)
        for j in range(longest):
            space.context[j] = text[longest - 1 + i - j]
        known = hash_context(space.context, space.hashes)
        for n in lengths:
            if n <= known:
                key = space.hashes[n - 1]
                added += observe(
                    table, key, clock, space.new_ids, space.new_probs, space.ids, space.probs
                )
    return added
