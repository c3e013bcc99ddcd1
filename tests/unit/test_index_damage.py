"""Damage to an index on disk is found, named, and never searched."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from index_files import IDS, file_of, numbers_file

from forerun.errors import DataError
from forerun.ngrams.index.build import manifest as store
from forerun.ngrams.index.build.build import Options, build
from forerun.ngrams.index.build.check import check
from forerun.ngrams.index.query.engine import Index


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    build(
        tmp_path / "ix",
        [numbers_file(tmp_path)],
        Options(tokenizer="ids", reading=IDS.reading, shards=2),
    )
    return tmp_path / "ix"


@pytest.mark.parametrize("kind", store.KINDS)
def test_a_flipped_bit_is_found(sharded: Path, kind: str) -> None:
    file = file_of(sharded, kind, 1)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    (found,) = check(sharded)
    assert found.file.endswith(f"{kind}.00001.{store.KINDS[kind]}") and "checksum" in found.problem


@pytest.mark.parametrize("kind", store.KINDS)
def test_a_truncated_file_is_found(sharded: Path, kind: str) -> None:
    file = file_of(sharded, kind, 0)
    size = file.stat().st_size
    os.truncate(file, size - 1)
    (found,) = check(sharded)
    assert (
        found.file.endswith(file.name) and found.problem == f"truncated: {size - 1} of {size} bytes"
    )
    with pytest.raises(DataError, match=f"{kind}.*truncated"):
        Index.open(sharded)


def test_a_missing_shard_or_file_is_found(sharded: Path) -> None:
    file_of(sharded, "suffixes", 0).unlink()
    (found,) = check(sharded)
    assert found.file.endswith("suffixes.00000.bin") and found.problem == "missing"
    for kind in store.KINDS:
        file_of(sharded, kind, 1).unlink()
    found = check(sharded)
    assert [f.file for f in found][-1] == "shard 1" and "missing" in found[-1].problem
    with pytest.raises(DataError, match="missing"):
        Index.open(sharded)


def test_a_damaged_manifest_is_found(sharded: Path) -> None:
    file = sharded / "manifest.json"
    text = file.read_text()
    for damaged in (text.replace('"width": 2', '"width": 4'), text[:-40], "[]"):
        file.write_text(damaged)
        (found,) = check(sharded)
        assert found.file == "manifest.json" and "damaged" in found.problem
        with pytest.raises(DataError, match="damaged"):
            Index.open(sharded)
    file.write_text(text.replace('"version": 1', '"version": 9'))
    with pytest.raises(DataError, match="version 9"):
        Index.open(sharded)
    with pytest.raises(DataError, match="no such folder"):
        check(sharded / "elsewhere")


def test_a_wrong_order_with_right_checksums_is_found_deep(sharded: Path) -> None:
    """Such as a sorter of another version would leave."""
    file = file_of(sharded, "suffixes", 0)
    table = np.fromfile(file, np.uint8).reshape(-1, 2)
    for damaged in (table[::-1], np.repeat(table[:1], len(table), axis=0)):
        np.ascontiguousarray(damaged).tofile(file)
        manifest = store.read_manifest(sharded)
        info = manifest.shards[0]
        files = dict(info.files) | {
            "suffixes": store.FileInfo(file.stat().st_size, store.sha256_of(file))
        }
        shards = (replace(info, files=files), manifest.shards[1])
        (sharded / "manifest.json").write_text(replace(manifest, shards=shards).to_json())
        assert check(sharded) == []
        (found,) = check(sharded, deep=True)
        assert found.file == "suffixes.00000.bin"


def test_fences_of_other_suffixes_are_found_deep(sharded: Path) -> None:
    file = file_of(sharded, "fences", 1)
    fences = np.fromfile(file, "<u8")
    fences[len(fences) // 2] += 1
    fences.tofile(file)
    manifest = store.read_manifest(sharded)
    first, info = manifest.shards
    files = dict(info.files) | {
        "fences": store.FileInfo(file.stat().st_size, store.sha256_of(file))
    }
    whole = replace(manifest, shards=(first, replace(info, files=files)))
    (sharded / "manifest.json").write_text(whole.to_json())
    (found,) = check(sharded, deep=True)
    assert found.file == "fences.00001.bin"


def test_an_index_of_before_there_were_fences_is_read(sharded: Path) -> None:
    expected = Index.open(sharded).count_many([[1, 2], [3], [0, 0, 4]]).tolist()
    manifest = store.read_manifest(sharded)
    shards = []
    for number, info in enumerate(manifest.shards):
        files = dict(info.files)
        for kind in ("fences", "pages"):
            file_of(sharded, kind, number).unlink()
            del files[kind]
        shards.append(replace(info, files=files, step=0))
    (sharded / "manifest.json").write_text(replace(manifest, shards=tuple(shards)).to_json())
    assert Index.open(sharded).count_many([[1, 2], [3], [0, 0, 4]]).tolist() == expected
    assert check(sharded, deep=True) == []


def test_only_what_memory_cannot_hold_is_read_without_reading_ahead() -> None:
    assert not store.is_larger_than_cache(1 << 20) and store.is_larger_than_cache(1 << 60)
