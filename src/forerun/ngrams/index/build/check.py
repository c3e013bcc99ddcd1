"""Checks an index on disk: sizes and checksums of its files, order of its arrays."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import DataError
from forerun.ngrams.index.build import manifest as store
from forerun.ngrams.index.build.merge import is_before
from forerun.ngrams.index.build.shards import open_shards
from forerun.ngrams.index.build.sparse_index import FENCES_PER_PIECE, fence_pieces
from forerun.ngrams.index.build.suffix_array import Shard, pointer
from forerun.ngrams.index.build.verify import OFF, file_problem
from forerun.state.array_file import reading
from forerun.utils.jit import compiled

MAX_CHECKED_PAIRS = 1 << 20  # neighbouring ranks with a checked order, per shard
MAX_COMPARED_TOKENS = 50_000


@dataclass(frozen=True)
class Finding:
    """A problem of an index."""

    file: str  # relative to the index, or "shard N"
    problem: str


def check(
    path: str | Path,
    *,
    deep: bool = False,
    threads: int = 2,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[Finding]:
    """The problems of an index: missing shards, files with a wrong size or content.

    deep: also checks that each suffix array has every position once, in order, and that every
    document begins at a separator. Raises DataError if there is no index.
    """
    path = Path(path)
    with reading(path):
        if not (path / "manifest.json").is_file():
            store.read_manifest(path)  # raises DataError
    try:
        manifest = store.read_manifest(path)
    except DataError as error:
        return [Finding("manifest.json", str(error))]
    found: list[Finding] = []
    total, done = sum(f.bytes for s in manifest.shards for f in s.files.values()), 0
    with ThreadPoolExecutor(threads) as pool:
        for number, info in enumerate(manifest.shards):
            files = {
                path / manifest.folder / store.file_name(kind, number): file
                for kind, file in info.files.items()
            }
            if not any(file.exists() for file in files):
                found.append(Finding(f"shard {number}", f"all its {len(files)} files are missing"))
                continue
            problems = pool.map(file_problem, files.keys(), files.values())
            for file, problem in zip(files, problems, strict=True):
                if problem:
                    found.append(Finding(f"{manifest.folder}/{file.name}", problem))
                done += files[file].bytes
                report(done, total)
    found += _tokenizer_findings(path, manifest)
    if deep and not found:
        for number, shard in enumerate(open_shards(path, manifest, verify=OFF)):
            found += _structure(path, manifest, number, shard)
    return found


def _tokenizer_findings(path: Path, manifest: store.Manifest) -> list[Finding]:
    """Problems of the saved tokenizer's files."""
    folder = Path(manifest.folder) / "tokenizer"
    files = {folder / name: store.FileInfo(**f) for name, f in _files(manifest).items()}
    problems = {file: file_problem(path / file, info) for file, info in files.items()}
    return [Finding(str(file), problem) for file, problem in problems.items() if problem]


def _files(manifest: store.Manifest) -> dict[str, Any]:
    return dict(manifest.tokenizer.get("files", {}))


def _structure(path: Path, manifest: store.Manifest, number: int, shard: Shard) -> list[Finding]:
    """Checks order and completeness of one shard."""
    found, n = [], len(shard.text)
    seen = np.zeros(n, np.bool_)
    if mark_positions(shard.table, shard.width, seen) < n:
        problem = "is not a permutation of the positions"
        found.append(Finding(store.file_name("suffixes", number), problem))
    else:
        step = max(1, n // MAX_CHECKED_PAIRS)
        rank = first_disorder(shard, step, MAX_COMPARED_TOKENS)
        if rank >= 0:
            problem = f"the suffixes at ranks {rank} and {rank + 1} are in the wrong order"
            found.append(Finding(store.file_name("suffixes", number), problem))
    if not found and shard.step:
        pieces = enumerate(fence_pieces(shard.text, shard.table, shard.width, shard.step))
        kept = shard.fences
        size = FENCES_PER_PIECE
        if any(not np.array_equal(p, kept[i * size : (i + 1) * size]) for i, p in pieces):
            problem = "the fences differ from the first tokens of their suffixes"
            found.append(Finding(store.file_name("fences", number), problem))
    info = manifest.shards[number].files["documents"]
    file = path / manifest.folder / store.file_name("documents", number)
    starts = store.open_array(file, info.bytes, np.int64)
    if len(starts) and not bool((shard.text[starts] == manifest.separator).all()):
        found.append(Finding(file.name, "a document does not begin at a separator"))
    return found


@compiled
def mark_positions(table: np.ndarray, width: int, seen: np.ndarray) -> int:
    """Marks all positions of a table; returns the number of distinct valid ones."""
    n, count = len(seen), 0
    for rank in range(n):
        at = pointer(table, width, rank)
        if at < n and not seen[at]:
            seen[at] = True
            count += 1
    return count


@compiled
def first_disorder(shard: Shard, step: int, depth: int) -> int:
    """The first rank, of every `step`-th, with a suffix not before the next one; -1: none."""
    for rank in range(0, len(shard.text) - 1, step):
        a = pointer(shard.table, shard.width, rank)
        b = pointer(shard.table, shard.width, rank + 1)
        is_right = is_before(shard.text, a, b, depth)
        if not is_right and not is_repeat(shard.text, a, b, depth):
            return rank
    return -1


@compiled
def is_repeat(text: np.ndarray, a: int, b: int, depth: int) -> bool:
    """Whether two suffixes share their first `depth` tokens; their order is then undefined."""
    for k in range(min(depth, len(text) - max(a, b))):
        if text[a + k] != text[b + k]:
            return False
    return len(text) - max(a, b) >= depth
