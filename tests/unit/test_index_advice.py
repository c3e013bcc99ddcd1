"""The advice in messages of index commands works: each is followed here, word by word."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from index_files import data
from test_index_build import Cut, cut_at

import forerun
from forerun.cli.main import main
from forerun.errors import ForerunError
from forerun.ngrams.index.build import build as building
from forerun.ngrams.index.build import tokenize
from forerun.ngrams.index.query.engine import Index

Call = Callable[..., tuple[int, str, str]]
GOOD = [{"text": "the cat"}, {"text": "sat on"}, {"text": "the mat"}, {"text": "and ran"}]
BYTES = ("--tokenizer", "bytes", "--workers", 1)
SOURCES = ("ngrams", *(f"cli/index{x}.py" for x in ("", "_build", "_fm", "_show")), "retrieval")
FOLLOWED = {  # every option that a message advises: all are followed in this file
    "--on-error",
    "--width",
    "--restart",
    "--overwrite",
    "--tokenizer",
    "--ids",
}


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*words: Any) -> tuple[int, str, str]:
        status = main(["index", *map(str, words)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def followed(call: Call, words: tuple[Any, ...], advice: str) -> str:
    """Runs a command, checks that it fails with this advice, follows it; returns the output."""
    status, _, err = call(*words)
    assert status == 2 and err.count("\n") == 1 and advice in err, err
    status, out, err = call(*words, *advice.split())
    assert status == 0, f"{advice} was advised: {err}"
    return out


def lines_file(path: Path, *lines: Any) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """Good records with a bad one after the second."""
    return lines_file(tmp_path / "bad.jsonl", *GOOD[:2], "broken", *GOOD[2:])


@pytest.fixture(autouse=True)
def saved_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build saves its state after every document, so a failure leaves a part to continue."""
    monkeypatch.setattr(tokenize, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(tokenize, "BATCH_DOCUMENTS", 1)


def test_bad_records_are_skipped_as_advised(call: Call, bad: Path, tmp_path: Path) -> None:
    out = followed(call, ("build", tmp_path / "ix", bad, *BYTES), "--on-error skip")
    assert "4 documents" in out
    assert call("build", tmp_path / "new", bad, *BYTES, "--on-error", "skip")[0] == 0
    assert data(tmp_path / "ix") == data(tmp_path / "new")


def test_a_bad_record_is_repaired_as_advised(call: Call, bad: Path, tmp_path: Path) -> None:
    words = ("build", tmp_path / "ix", bad, *BYTES)
    status, _, err = call(*words)
    assert status == 2 and "repair the record" in err
    lines_file(bad, *GOOD)
    assert call(*words)[0] == 0
    assert Index.open(tmp_path / "ix").count(list(b"the")) == 2


def test_wide_ids_get_the_advised_width(call: Call, tmp_path: Path) -> None:
    file = lines_file(tmp_path / "i.jsonl", {"tokens": [1, 2]}, {"tokens": [70000, 2]})
    words = ("build", tmp_path / "ix", file, "--tokenizer", "ids")
    followed(call, words, "--width 4")
    assert Index.open(tmp_path / "ix").count([70000, 2]) == 1


def test_one_advice_after_the_other(call: Call, tmp_path: Path) -> None:
    rows = {"tokens": [1, 2]}, {"tokens": [70000, 2]}, "broken", {"tokens": [3]}
    words = ("build", tmp_path / "ix", lines_file(tmp_path / "i.jsonl", *rows))
    words = (*words, "--tokenizer", "ids")
    assert "--width 4" in call(*words)[2]
    followed(call, (*words, "--width", 4), "--on-error skip")


def test_other_options_after_an_interruption_need_a_restart(call: Call, tmp_path: Path) -> None:
    file = lines_file(tmp_path / "t.jsonl", *GOOD)
    options = building.Options(tokenizer="bytes", workers=1)
    with pytest.raises(Cut):
        building.build(tmp_path / "ix", [file], options, report=cut_at("sort", 0))
    followed(call, ("build", tmp_path / "ix", file, *BYTES, "--shards", 2), "--restart")


def test_skipped_records_are_not_forgotten(call: Call, bad: Path, tmp_path: Path) -> None:
    """A build that has skipped a record does not go on as one that fails at it."""
    options = building.Options(tokenizer="bytes", workers=1, on_error="skip")
    with pytest.raises(Cut):
        building.build(tmp_path / "ix", [bad], options, report=cut_at("sort", 0))
    status, _, err = call("build", tmp_path / "ix", bad, *BYTES)
    assert status == 2 and "other on_error" in err and "--restart" in err


def test_an_index_is_replaced_as_advised(call: Call, tmp_path: Path) -> None:
    file = lines_file(tmp_path / "t.jsonl", *GOOD)
    for words in (("build", tmp_path / "ix", file, *BYTES), ("fm", "build", tmp_path / "f", file)):
        assert call(*words)[0] == 0
        followed(call, words, "--overwrite")


def test_bad_records_of_an_fm_index_are_skipped_as_advised(
    call: Call, bad: Path, tmp_path: Path
) -> None:
    out = followed(call, ("fm", "build", tmp_path / "f", bad), "--on-error skip")
    assert "4 documents" in out


def test_an_index_of_ids_is_opened_with_a_tokenizer(call: Call, tmp_path: Path) -> None:
    file = lines_file(tmp_path / "i.jsonl", {"tokens": list(b"the cat")})
    assert call("build", tmp_path / "ix", file, "--tokenizer", "ids")[0] == 0
    status, _, err = call("count", tmp_path / "ix", "cat")
    assert status == 2 and "open it with a tokenizer" in err
    assert call("count", tmp_path / "ix", "cat", "--tokenizer", "bytes")[:2] == (0, "1\n")
    status, out, _ = call("search", tmp_path / "ix", "cat", "--tokenizer", "bytes")
    assert status == 0 and "the cat" in out


def test_a_missing_index_is_created_as_advised(call: Call, tmp_path: Path) -> None:
    status, _, err = call("count", tmp_path / "ix", "the")
    assert status == 2 and "create it with `forerun index build`" in err
    file = lines_file(tmp_path / "t.jsonl", *GOOD)
    assert call("build", tmp_path / "ix", file, *BYTES)[0] == 0
    assert call("count", tmp_path / "ix", "the")[:2] == (0, "2\n")


def test_a_drafter_gets_an_index_with_the_targets_tokenizer(call: Call, tmp_path: Path) -> None:
    from forerun.ngrams.index.query.datastore import open_datastore

    tokenizer = forerun.load().tokenizer
    file = lines_file(tmp_path / "t.jsonl", *GOOD)
    words = ("build", tmp_path / "ix", file, "--workers", 1, "--overwrite")
    assert call(*words, "--tokenizer", "bytes")[0] == 0
    with pytest.raises(ForerunError, match="build it with --tokenizer and the target's folder"):
        open_datastore("rest", index=tmp_path / "ix", tokenizer=tokenizer)
    assert call(*words, "--tokenizer", "reasoner")[0] == 0
    assert open_datastore("rest", index=tmp_path / "ix", tokenizer=tokenizer).tokens > 4


def advised() -> dict[str, str]:
    """Every option in a text of the sources, with a place; not those that declare options."""
    root, found = Path(forerun.__file__).parent, {}
    for name in SOURCES:
        files = [root / name] if name.endswith(".py") else sorted((root / name).rglob("*.py"))
        for file in files:
            tree = ast.parse(file.read_text())
            skipped = _declarations(tree)
            for node in ast.walk(tree):
                text = node.value if isinstance(node, ast.Constant) else None
                if isinstance(text, str) and id(node) not in skipped:
                    for option in re.findall(r"--[a-z][a-z-]*", text):
                        found[option] = f"{file.name}:{node.lineno}"
    return found


def _declarations(tree: ast.AST) -> set[int]:
    """The texts in calls of typer and in docstrings."""
    found = set()
    for node in ast.walk(tree):
        is_typer = isinstance(node, ast.Call) and ast.unparse(node.func).startswith("typer.")
        if is_typer or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            found |= {id(inner) for inner in ast.walk(node)}
    return found


def test_no_advice_is_left_out() -> None:
    """A new message with an option needs a test that follows it."""
    places = advised()
    assert places.keys() <= FOLLOWED, {k: v for k, v in places.items() if k not in FOLLOWED}
    assert places.keys() >= {"--on-error", "--width", "--restart", "--overwrite"}
