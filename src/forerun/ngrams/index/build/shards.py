"""Makes shards for queries from a text in memory or from the files of an index."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from forerun.ngrams.index.build import manifest as store
from forerun.ngrams.index.build.page_sums import no_pages
from forerun.ngrams.index.build.sparse_index import NO_FENCES, STEP, make_fences
from forerun.ngrams.index.build.suffix_array import (
    TYPES,
    Shard,
    find_buckets,
    largest_id,
    pack,
    pointer_width,
    suffix_array,
)
from forerun.ngrams.index.build.verify import FAST, check_mode, pages_of_shard


def shard_of(text: np.ndarray, top: int | None = None, step: int = STEP) -> Shard:
    """A shard in memory; `step`: ranks between fences, 0: no fences."""
    top = largest_id(text) if top is None else top
    buckets, shift = find_buckets(text, top)
    width = pointer_width(len(text))
    table = pack(suffix_array(text, top), width)
    fences = make_fences(text, table, width, step) if step else NO_FENCES
    return read_only(Shard(text, table, width, buckets, shift, fences, step, top, *no_pages()))


def read_only(shard: Shard) -> Shard:
    """The shard with plain read-only arrays, except `seen`, so that kernels see one type."""

    def closed(array: np.ndarray) -> np.ndarray:
        view = np.asarray(array).view()
        view.flags.writeable = False
        return view

    names = ("text", "table", "buckets", "fences", "sums", "firsts")
    arrays: dict[str, Any] = {name: closed(getattr(shard, name)) for name in names}
    return shard._replace(**arrays)


def open_shards(
    path: Path,
    manifest: store.Manifest,
    *,
    load: bool = False,
    numbers: Iterable[int] | None = None,
    verify: str = FAST,
) -> list[Shard]:
    """The shards of `numbers`, or all, as mapped arrays; in memory with `load`.

    verify: see `verify`. Raises DataError for a missing file, a wrong size, and damage.
    """
    check_mode(verify)
    is_sparse = store.is_larger_than_cache(manifest.bytes_of())
    chosen = range(len(manifest.shards)) if numbers is None else numbers
    return [_open_shard(path, manifest, number, load, is_sparse, verify) for number in chosen]


def _open_shard(
    path: Path, manifest: store.Manifest, number: int, load: bool, is_sparse: bool, verify: str
) -> Shard:
    info = manifest.shards[number]

    def array(kind: str, dtype: Any) -> Any:
        file = path / manifest.folder / store.file_name(kind, number)
        sparse = is_sparse and kind in ("tokens", "suffixes")
        return store.open_array(file, info.files[kind].bytes, dtype, load=load, is_sparse=sparse)

    pages = pages_of_shard(path, manifest, number, verify)
    return read_only(
        Shard(
            array("tokens", TYPES[manifest.width]),
            array("suffixes", np.uint8),
            info.pointer_width,
            array("buckets", np.int64),
            info.shift,
            array("fences", np.uint64) if info.step else NO_FENCES,
            info.step,
            info.top,
            *pages,
        )
    )
