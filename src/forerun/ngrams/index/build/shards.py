"""Makes shards for queries from a text in memory or from arrays on disk."""

from __future__ import annotations

import numpy as np

from forerun.ngrams.index.build.sparse_index import NO_FENCES, STEP, make_fences
from forerun.ngrams.index.build.suffix_array import (
    Shard,
    find_buckets,
    largest_id,
    pack,
    pointer_width,
    suffix_array,
)


def shard_of(text: np.ndarray, top: int | None = None, step: int = STEP) -> Shard:
    """A shard in memory; `step`: ranks between fences, 0: no fences."""
    top = largest_id(text) if top is None else top
    buckets, shift = find_buckets(text, top)
    width = pointer_width(len(text))
    table = pack(suffix_array(text, top), width)
    fences = make_fences(text, table, width, step) if step else NO_FENCES
    return read_only(Shard(text, table, width, buckets, shift, fences, step))


def read_only(shard: Shard) -> Shard:
    """The shard with plain read-only arrays, so that kernels see one type."""

    def closed(array: np.ndarray) -> np.ndarray:
        view = np.asarray(array).view()
        view.flags.writeable = False
        return view

    text, table, buckets, fences = map(
        closed, (shard.text, shard.table, shard.buckets, shard.fences)
    )
    return shard._replace(text=text, table=table, buckets=buckets, fences=fences)
