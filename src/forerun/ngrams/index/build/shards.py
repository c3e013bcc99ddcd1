"""Shards for queries: made of a text in memory, or of arrays that lie on disk."""

from __future__ import annotations

import numpy as np

from forerun.ngrams.index.build.sparse_index import NONE, STEP, make_fences
from forerun.ngrams.index.build.suffix_array import (
    Shard,
    find_buckets,
    largest_id,
    pack,
    pointer_width,
    suffix_array,
)


def shard_of(text: np.ndarray, top: int | None = None, step: int = STEP) -> Shard:
    """A shard in memory; `step` ranks from fence to fence, 0: none."""
    top = largest_id(text) if top is None else top
    buckets, shift = find_buckets(text, top)
    width = pointer_width(len(text))
    table = pack(suffix_array(text, top), width)
    fences = make_fences(text, table, width, step) if step else NONE
    return read_only(Shard(text, table, width, buckets, shift, fences, step))


def read_only(shard: Shard) -> Shard:
    """The same with arrays of one type for kernels, wherever they come from."""

    def closed(array: np.ndarray) -> np.ndarray:
        view = np.asarray(array).view()
        view.flags.writeable = False
        return view

    text, table, buckets, fences = map(
        closed, (shard.text, shard.table, shard.buckets, shard.fences)
    )
    return shard._replace(text=text, table=table, buckets=buckets, fences=fences)
