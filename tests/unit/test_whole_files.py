"""Files are written whole or not at all, whatever goes wrong."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from forerun.errors import CapacityError
from forerun.utils.files import parsed, write_atomically, write_whole


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def stop(path: Path) -> None:
    path.write_text("half")
    raise KeyboardInterrupt


def test_a_text_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    for text in ("first\n", "zweite, kürzer\n"):
        write_whole(path, text)
        assert path.read_bytes() == text.encode()
    assert [*path.parent.iterdir()] == [path]


def test_nothing_stays_of_a_text_that_cannot_be_encoded(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "kept")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "half \ud800")
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == "kept"


def test_nothing_stays_of_a_write_that_was_interrupted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "a.bin", stop)
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_is_told_in_the_words_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "kept")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError, match=r"cannot write a\.txt into the folder .*No space left"):
        write_whole(path, "lost")
    with pytest.raises(CapacityError, match="in other words"):
        write_whole(path, "lost", lambda path, error: CapacityError("in other words"))
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == "kept"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "duplicate key 'c'"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":', "Expecting value"),
    ],
)
def test_json_that_nobody_can_have_meant(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parsed(text)
