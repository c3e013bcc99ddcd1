"""Verification of an index at open: `full`, `fast` or `off`.

full: every file is read and compared with its SHA-256. fast, the default: the file of page
checksums is compared, and every page when a query first reads it; an index of an older release has
no page checksums, and only its small files are compared. off: sizes only; a damaged index may then
give wrong answers, but no kernel reads outside its arrays.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from forerun.errors import DataError, UnknownName
from forerun.ngrams.index.build import manifest as store
from forerun.ngrams.index.build.page_sums import FILES, Pages, no_pages, pages_of, sums_of
from forerun.ngrams.index.build.suffix_array import TYPES, pointer_width
from forerun.state.array_file import reading
from forerun.utils.files import write_whole

log = logging.getLogger("forerun")
FULL, FAST, OFF = MODES = ("full", "fast", "off")
SMALL_FILE_BYTES = 16 << 20  # compared at open if there are no page checksums
RESTORE = "restore it from a copy, or build the index again"


def check_mode(verify: str) -> None:
    """Raises UnknownName for an unknown mode."""
    if verify not in MODES:
        raise UnknownName.of("verification", verify, MODES)


def pages_of_shard(path: Path, manifest: store.Manifest, number: int, verify: str) -> Pages:
    """The page checksums for queries on a shard, after the checks of this mode.

    Raises DataError for damage.
    """
    info = manifest.shards[number]
    check_sizes(path, manifest, info)
    folder = path / manifest.folder
    has_pages = "pages" in info.files
    for kind, expected in info.files.items():
        file = folder / store.file_name(kind, number)
        is_small = expected.bytes <= SMALL_FILE_BYTES
        if verify == FULL or (verify == FAST and (kind == "pages" or (not has_pages and is_small))):
            check_file(file, expected)
    if verify != FAST or not has_pages:
        return no_pages()
    size = info.files["pages"].bytes
    sums = store.open_array(folder / store.file_name("pages", number), size, np.uint64, load=True)
    return pages_of(sums, [info.files[k].bytes if k in info.files else 0 for k in FILES])


def check_file(file: Path, expected: store.FileInfo) -> None:
    """Raises DataError unless a file has the expected size and SHA-256."""
    problem = file_problem(file, expected)
    if problem:
        raise DataError(f"{file} is damaged: {problem}; {RESTORE}")


def file_problem(file: Path, expected: store.FileInfo) -> str:
    """The problem of one file; empty if there is none."""
    problem = store.size_problem(file, expected.bytes)
    if problem:
        return problem.removeprefix(f"{file} is ")
    with reading(file):
        if store.sha256_of(file) != expected.sha256:
            return "changed since it was written (checksum differs)"
    return ""


def check_sizes(path: Path, manifest: store.Manifest, info: store.ShardInfo) -> None:
    """Raises DataError unless the manifest's sizes of a shard fit together."""
    n, files = info.tokens, info.files
    sizes = {kind: file.bytes for kind, file in files.items()}
    fences = -(-n // info.step) if info.step > 0 else 0
    expected = {
        "tokens": n * manifest.width,
        "suffixes": n * info.pointer_width,
        "documents": 8 * info.documents,
        "lines": 8 * info.documents,
    } | ({"fences": 8 * fences} if info.step else {})
    is_right = (
        expected.items() <= sizes.items()
        and n > 0
        and info.pointer_width == pointer_width(n)
        and sizes.get("buckets", 0) >= 16
        and sizes["buckets"] % 8 == 0
        and 0 <= info.shift < 32
        and info.step >= 0
        and "metadata" in sizes
    )
    if not is_right:
        raise DataError(
            f"{path / 'manifest.json'} is damaged: its sizes do not fit together; {RESTORE}"
        )


def warn_without_pages(path: Path, manifest: store.Manifest) -> None:
    """Logs that an index of an older release has no page checksums."""
    if not all("pages" in shard.files for shard in manifest.shards):
        log.warning(
            "%s has no page checksums, so queries do not notice damage to its larger files; add "
            "them with `forerun index checksum %s`",
            path,
            path,
        )


def add_page_sums(path: str | Path) -> store.Manifest:
    """Adds page checksums to an index of an older release; returns its manifest.

    All files are first compared with their SHA-256. Raises DataError for damage, CapacityError for
    a full disk, ConfigError during a build.
    """
    path = Path(path)
    store.read_manifest(path)  # before the lock, which needs a folder
    with store.Lock(path):
        manifest = store.read_manifest(path)
        shards = []
        for number, info in enumerate(manifest.shards):
            pages_of_shard(path, manifest, number, FULL)
            file = write_page_sums(path / manifest.folder, number, manifest.width, info)
            shards.append(replace(info, files={**info.files, "pages": file}))
        found = tokenizer_files(path / manifest.folder)
        tokenizer = dict(manifest.tokenizer) | {"files": manifest.tokenizer.get("files", found)}
        changed = replace(manifest, shards=tuple(shards), tokenizer=tokenizer)
        write_whole(path / "manifest.json", changed.to_json(), store.write_error)
    return changed


def write_page_sums(
    folder: Path, number: int, width: int, info: store.ShardInfo | None = None
) -> store.FileInfo:
    """Writes the page checksums of a shard's files; `info`: leaves out files it does not have."""
    types = dict(zip(FILES, element_types(width), strict=True))
    kinds = [kind for kind in FILES if info is None or kind in info.files]
    sums = sums_of([(folder / store.file_name(kind, number), types[kind]) for kind in kinds])
    file = folder / store.file_name("pages", number)
    try:
        with file.open("wb") as stream:
            stream.write(sums.astype("<u8").data)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise store.write_error(file, error) from error
    return store.FileInfo(file.stat().st_size, store.sha256_of(file))


def element_types(width: int) -> tuple[type, ...]:
    """The element types of FILES."""
    return TYPES[width], np.uint8, np.int64, np.uint64, np.int64, np.int64, np.uint8


def tokenizer_files(folder: Path) -> dict[str, dict[str, object]]:
    """Size and SHA-256 of every file of the saved tokenizer, for the manifest."""
    below = folder / "tokenizer"
    return {
        str(file.relative_to(below)): {
            "bytes": file.stat().st_size,
            "sha256": store.sha256_of(file),
        }
        for file in sorted(below.rglob("*"))
        if file.is_file()
    }


def check_tokenizer_files(folder: Path, tokenizer: dict[str, object]) -> None:
    """Raises DataError unless the saved tokenizer is as it was written."""
    files = tokenizer.get("files")
    for name, expected in files.items() if isinstance(files, dict) else ():
        check_file(folder / "tokenizer" / name, store.FileInfo(**expected))
