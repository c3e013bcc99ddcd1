"""Text files as training documents."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from forerun.errors import DataError
from forerun.training.data.texts import Texts
from forerun.training.data.tokenizer import train_tokenizer

BOOK = (
    "licence\n*** START OF THE BOOK ***\n" + "a line of the book\n" * 200 + "*** END OF THE BOOK\nx"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plain.txt").write_text("one two three\n" * 200)
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress(BOOK.encode()))
    with tarfile.open(tmp_path / "code.tar.gz", "w:gz") as archive:
        for i in range(20):
            data = f"def function_{i}():\n    return {i}\n".encode()
            member = tarfile.TarInfo(f"file_{i:02d}.py")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    (tmp_path / "notes.md").write_text("not read")
    return tmp_path


def test_each_file_is_a_domain_and_books_lose_their_licence(folder: Path) -> None:
    domains = Texts(folder, 32).domains()
    assert sorted(domains) == ["book", "code", "plain"]
    assert domains["book"] == ["a line of the book\n" * 200]
    assert len(domains["code"]) == 20


def test_the_held_out_part_is_not_trained_on(folder: Path) -> None:
    texts = Texts(folder, 32, held_out=0.1)
    tokenizer = train_tokenizer(texts.trained(), 300, 64)
    trained, held_out = texts.pieces(tokenizer)
    read = "".join(str(tokenizer.decode(trained.document(i))) for i in range(len(trained)))
    code = "".join(
        str(tokenizer.decode(held_out["code"].document(i))) for i in range(len(held_out["code"]))
    )
    assert code.count("def ") == 2 and "function_9()" in code and "function_19()" in code
    assert "function_9()" not in read and "function_8()" in read
    assert read.count("one two three") == 180
    assert max(trained.lengths()) == 32 and not trained.prompts.any()


@pytest.mark.parametrize("name", ["bad.txt.gz", "bad.tar.gz", "bad.txt"])
def test_an_unreadable_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfe no text")
    with pytest.raises(DataError, match=f"{name} cannot be read as text"):
        Texts(tmp_path, 32).domains()


def test_a_cut_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(BOOK.encode())[:-10])
    with pytest.raises(DataError, match=r"cut\.txt\.gz cannot be read"):
        Texts(tmp_path, 32).domains()


def test_a_folder_without_texts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no text in files \.txt"):
        Texts(tmp_path, 32).domains()
