"""Files of arrays: what was written comes back, anything else is refused, the old one survives."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from forerun import __version__, registry
from forerun.assets import embedded
from forerun.core.records import Snapshot
from forerun.errors import CapacityError, ConfigError, DataError
from forerun.models.tokenizer import Tokenizer
from forerun.ngrams.index.build import encoders
from forerun.ngrams.index.build.build import build
from forerun.ngrams.index.build.check import check
from forerun.ngrams.index.build.documents import list_sources
from forerun.ngrams.index.build.manifest import open_array
from forerun.ngrams.index.counts import corpus
from forerun.ngrams.index.counts.trie import NgramModel
from forerun.state import array_file
from forerun.state.array_file import Origin, read, write

ORIGIN = Origin("t" * 64, (("reasoner", "m" * 64),), "acme")
MADE = Snapshot(
    "stand",
    {
        "keys": np.array([1, 2**63 + 5], np.uint64),
        "probs": np.array([[0.5, 0.25], [1.0, 0.0]], np.float32),
        "none": np.zeros((0, 3), np.int32),
    },
    {"context": [4, 2], "store": "model"},
    {"tokens": 7, "contexts": 2},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.mem"


def assert_equal(one: Snapshot, other: Snapshot) -> None:
    assert (one.kind, one.settings, one.counts) == (other.kind, other.settings, other.counts)
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        assert array.dtype == other.arrays[name].dtype
        np.testing.assert_array_equal(array, other.arrays[name])


def test_round_trip(path: Path) -> None:
    origin = write(path, MADE, ORIGIN)
    snapshot, found = read(path, "stand")
    assert_equal(snapshot, MADE)
    assert found == origin
    assert (found.tokenizer, found.models, found.tenant) == (
        ORIGIN.tokenizer,
        ORIGIN.models,
        "acme",
    )
    assert found.created == found.changed and found.writer == __version__
    assert snapshot.nbytes == MADE.nbytes == 32
    assert os.listdir(path.parent) == ["a.mem"]
    again = write(path, MADE, replace(found, created="2025-01-01T00:00:00+00:00"))
    assert again.created < again.changed


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_arrays_come_back(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    kinds = [np.uint8, np.int32, np.uint64, np.float32, np.float64, np.bool_]
    arrays = {}
    for name in data.draw(st.sets(st.text("abcxyz_", min_size=1, max_size=5), max_size=4)):
        shape = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
        seed = data.draw(st.integers(0, 99))
        kind = data.draw(st.sampled_from(kinds))
        arrays[name] = np.random.default_rng(seed).integers(0, 2, shape).astype(kind)
    place = tmp_path_factory.mktemp("any") / "a.mem"
    made = Snapshot("x", arrays, {}, {"tokens": 0})
    write(place, made, Origin())
    assert_equal(read(place)[0], made)


def test_flipped_bits_and_cuts_are_refused(path: Path) -> None:
    """Wherever they are; all bits of all bytes were tried once, here it is some of each."""
    write(path, MADE, ORIGIN)
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        flipped = whole[at] ^ 1 << at // 3 % 8
        path.write_bytes(whole[:at] + bytes([flipped]) + whole[at + 1 :])
        with pytest.raises(DataError):
            read(path)
    for length in range(0, len(whole), 13):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"a\.mem was cut off|reads 1|altered"):
            read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DataError):
        read(path)


def test_a_flipped_bit_in_an_array_is_named_as_damage(path: Path) -> None:
    write(path, MADE, ORIGIN)
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(DataError, match="do not match its checksum; restore a copy"):
        read(path)


def test_other_files_are_refused_and_left_alone(path: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        read(path)
    with pytest.raises(DataError, match="is a folder"):
        read(tmp_path)
    path.write_text("notes of mine")
    with pytest.raises(DataError, match="not written by forerun"):
        read(path)
    with pytest.raises(DataError, match="not written by forerun"):
        write(path, MADE, ORIGIN)
    assert path.read_text() == "notes of mine"
    save_file({"weight": np.ones(3, np.float32)}, path)
    before = path.read_bytes()
    for call in (lambda: read(path), lambda: write(path, MADE, ORIGIN)):
        with pytest.raises(DataError, match="safetensors file, but not a data file of forerun"):
            call()
    assert path.read_bytes() == before


def test_kinds_are_not_mixed(path: Path) -> None:
    write(path, MADE, ORIGIN)
    with pytest.raises(DataError, match="expected a file of kind 'other', but .* holds 'stand'"):
        read(path, "other")
    with pytest.raises(DataError, match="holds 'stand'; 'other' does not overwrite it"):
        write(path, replace(MADE, kind="other"), ORIGIN)
    assert_equal(read(path)[0], MADE)


def test_a_later_format_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_file, "FORMAT", 2)
    write(path, MADE, ORIGIN)
    monkeypatch.undo()
    with pytest.raises(DataError, match="has format 2, but this forerun .* reads 1"):
        read(path)


@pytest.mark.parametrize("place", ["save_file", "_sync", "replace"])
def test_a_failure_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    write(path, MADE, ORIGIN)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if place == "save_file":
        monkeypatch.setattr("safetensors.numpy.save_file", fail)
    else:
        monkeypatch.setattr(array_file if place == "_sync" else Path, place, fail)
    with pytest.raises(CapacityError, match="No space left on device; free some space"):
        write(path, replace(MADE, counts={"tokens": 8}), ORIGIN)
    monkeypatch.undo()
    assert_equal(read(path)[0], MADE)
    assert os.listdir(path.parent) == ["a.mem"]


@pytest.mark.parametrize("moment", ["before the rename", "after the rename"])
def test_a_process_that_dies_leaves_the_old_file_or_the_new_one(path: Path, moment: str) -> None:
    write(path, MADE, ORIGIN)
    code = f"""
import os, sys
from dataclasses import replace
from pathlib import Path
from forerun.state import array_file as files
path = Path(sys.argv[1])
snapshot, origin = files.read(path)
files._sync = lambda place: os._exit(9) if place.is_dir() == {moment.startswith("after")} else None
files.write(path, replace(snapshot, counts={{"tokens": 8}}), origin)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=environment)
    assert done.returncode == 9
    assert read(path)[0].counts["tokens"] == (8 if moment.startswith("after") else 7)


def test_a_file_is_on_disk_before_its_name_points_to_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        assert path.exists() == (len(synced) > 1), "the file before it is renamed, then the folder"
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    write(path, MADE, ORIGIN)
    assert len(synced) == 2 and synced[1] == str(path.parent.resolve())
    assert Path(synced[0]).parent == path.parent.resolve() and synced[0].endswith(".tmp")


def test_links_and_rights_stay(path: Path, tmp_path: Path) -> None:
    write(path, MADE, ORIGIN)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    link = tmp_path / "link.mem"
    link.symlink_to(path)
    write(link, replace(MADE, counts={"tokens": 9}), ORIGIN)
    assert link.is_symlink() and read(path)[0].counts["tokens"] == 9
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        array_file.check_place(tmp_path / "absent" / "a.mem")
    with pytest.raises(DataError, match="cannot write .*: File name too long; use another path"):
        array_file.check_place(tmp_path / ("a" * 255))
    array_file.check_place(tmp_path / "a.mem")
    assert not [*tmp_path.iterdir()]


LONG = ("a" * 300, "a" * 5000)  # of either the system does not say whether it is there


@pytest.mark.parametrize("name", LONG, ids=len)
@pytest.mark.parametrize("option", ["aded:matrix", "rest:index", "infini:index", "rest:corpus"])
def test_an_option_that_names_no_possible_file_is_a_data_error(option: str, name: str) -> None:
    part, _, option = option.partition(":")
    tokenizer = Tokenizer.load(embedded("reasoner"))
    with pytest.raises(DataError, match="File name too long; check"):
        registry.make("drafter", part, **{option: name}, tokenizer=tokenizer)


@pytest.mark.parametrize("name", LONG, ids=len)
@pytest.mark.parametrize(
    "look",
    [
        NgramModel.of_files,
        lambda names, _: list_sources(names),
        lambda names, _: encoders.load(names[0]),
        lambda names, _: check(names[0]),
        lambda names, _: build(names[0], [__file__]),
    ],
    ids=["of_files", "list_sources", "tokenizer", "check", "build"],
)
def test_so_is_a_name_that_others_give(look: Any, name: str) -> None:
    with pytest.raises(DataError, match="File name too long"):
        look([name], Tokenizer.load(embedded("reasoner")))


def test_what_no_name_can_hold_is_a_data_error() -> None:
    with pytest.raises(DataError, match="cannot be read: embedded null byte; check it"):
        next(corpus.lines(Path("a\0b")))


def test_a_file_of_an_index_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied")

    np.zeros(3, np.uint8).tofile(tmp_path / "tokens.0")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"cannot read .*tokens\.0: Permission denied; check"):
        open_array(tmp_path / "tokens.0", 3, np.uint8)


def test_joined_origins() -> None:
    one = Origin("t", (("a", "1"),), created="2025-02-01")
    two = Origin("t", (("b", "2"), ("a", "1")), created="2025-01-01")
    joined = Origin.joined([one, two, Origin()])
    assert joined == Origin("t", (("a", "1"), ("b", "2")), created="2025-01-01")
    with pytest.raises(ConfigError, match="one tokenizer, got data of t and u"):
        Origin.joined([one, replace(two, tokenizer="u")])


def test_the_header_is_plain_json(path: Path) -> None:
    """Any safetensors reader can show what a file is."""
    from safetensors import safe_open

    write(path, MADE, ORIGIN)
    with safe_open(path, framework="numpy") as file:
        record = json.loads(file.metadata()["forerun"])
    assert record["kind"] == "stand" and record["origin"]["tenant"] == "acme"
