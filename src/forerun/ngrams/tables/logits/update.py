"""One call per lesson: the laws along a text, averaged into a logit memory.

The fast form of `LogitMemory.learn` over the largest entries of each law: same slots, same means
bit for bit (tests compare them slot by slot). Contexts are windows of the text.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.ngrams.tables.logits.kernels import Table, hash_context, observe
from forerun.ngrams.tables.logits.top_k import PIECE, STRETCH, select_into
from forerun.utils.jit import bare, copy


class Room(NamedTuple):
    """Room to learn in: K entries, contexts of L tokens, S stretches of a vocabulary."""

    lanes: np.ndarray  # [PIECE], of the laws' type as the next three
    tops: np.ndarray  # [S]
    bounds: np.ndarray  # [K]
    held: np.ndarray  # [K], the largest of a law
    hashes: np.ndarray  # uint64 [L]
    context: np.ndarray  # int32 [L]
    new_ids: np.ndarray  # int32 [K]
    new_probs: np.ndarray  # float32 [K]
    ids: np.ndarray  # int32 [2 K]
    probs: np.ndarray  # float32 [2 K]


def new_room(longest: int, entries: int, vocab: int) -> np.ndarray:
    """What a `Room` is laid out in. float64."""
    return np.empty(PIECE + -(-vocab // STRETCH) + 6 * (entries + 1) + 2 * longest)


@bare
def laid_out(room: np.ndarray, longest: int, entries: int, law: np.ndarray) -> Room:
    """The arrays that lie in `room`: a kernel is told of one in a fraction of the time."""
    tops = PIECE + -(-len(law) // STRETCH)
    bounds, held = tops + entries, tops + 2 * entries
    hashes = held + longest
    context = hashes + (longest + 1) // 2
    half = (entries + 1) // 2
    new_ids, new_probs = context + half, context + 2 * half
    ids = new_probs + entries
    return Room(
        room[:PIECE].view(law.dtype),
        room[PIECE:tops].view(law.dtype),
        room[tops:bounds].view(law.dtype)[:entries],
        room[bounds:held].view(law.dtype)[:entries],
        room[held:hashes].view(np.uint64),
        room[hashes:context].view(np.int32)[:longest],
        room[context:new_ids].view(np.int32)[:entries],
        room[new_ids:new_probs].view(np.float32)[:entries],
        room[new_probs:ids].view(np.int32),
        room[ids : ids + entries].view(np.float32),
    )


@bare
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
    room: np.ndarray,
) -> int:
    """Averages laws [n, V] into the slots of all contexts that end before them in a text.

    The first five: of a Table. text int32 [longest + n - 1], padded in front: law i comes after
    text[: longest + i]. Returns the number of new keys.
    """
    table = Table(keys, counts, stamps, ids, probs)
    longest, entries, added = lengths[0], ids.shape[1], 0
    own = laid_out(room, longest, entries, laws[0])
    for i in range(len(laws)):
        own.new_ids[:] = 0
        own.held[:] = 0.0
        select_into(laws[i], own.new_ids, own.held, own.tops, own.bounds, own.lanes)
        copy(own.held, own.new_probs)
        for j in range(longest):
            own.context[j] = text[longest - 1 + i - j]
        known = hash_context(own.context, own.hashes)
        for n in lengths:
            if n <= known:
                key = own.hashes[n - 1]
                added += observe(table, key, clock, own.new_ids, own.new_probs, own.ids, own.probs)
    return added
