"""`forerun index`: what a user gets, for people and as JSON, and what bad input gets."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.index_build import read_size
from forerun.cli.index_show import Bars
from forerun.cli.main import main
from forerun.errors import ConfigError
from forerun.ngrams.index.build import manifest

TEXTS = ["the cat sat on the mat", "the cat ran", "a dog sat on the cat"]
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*words: Any) -> tuple[int, str, str]:
        status = main(["index", *map(str, words)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return path


@pytest.fixture
def index(call: Call, corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "ix"
    words = ("build", path, corpus, "--tokenizer", "bytes", "--workers", 1)
    status, out, err = call(*words)
    assert status == 0, err
    assert "3 documents" in out and "tokens/s" in out
    return path


def test_what_a_build_left_out_is_said_once(call: Call, tmp_path: Path) -> None:
    lines = tmp_path / "c.jsonl"
    lines.write_text('{"text": "the cat"}\nbroken\n')
    words = ("build", tmp_path / "ix", lines, "--tokenizer", "bytes", "--workers", 1)
    status, out, err = call(*words, "--on-error", "skip")
    assert status == 0 and (out + err).count("unreadable record") == 1
    assert "skipped 1 unreadable record:" in err and "c.jsonl:2: not JSON" in err
    assert call("info", tmp_path / "ix")[1].count("unreadable record") == 1


def test_count_prob_ntd(call: Call, index: Path) -> None:
    assert call("count", index, "the cat")[:2] == (0, "3\n")
    assert call("count", index, "cat", "dog", "cow")[1] == "3\tcat\n1\tdog\n0\tcow\n"
    assert call("count", index, "--ids", "99 97 116")[1] == "3\n"
    found = json.loads(call("prob", index, "xxthe cat", " ", "--json")[1])
    assert found["prob"] == 2 / 3 and found["suffix_length"] == len("the cat")
    whole = json.loads(call("prob", index, "xx the cat", " ", "--whole", "--json")[1])
    assert whole["prob"] is None and whole["context_count"] == 0
    assert "unknown" in call("prob", index, "xx the cat", " ", "--whole")[1]
    found = json.loads(call("ntd", index, "the cat", "--json")[1])
    assert [(r["text"], r["count"]) for r in found["next"]] == [(" ", 2), ("<end>", 1)]
    assert "3 occurrences of the last 7 tokens" in call("ntd", index, "the cat")[1]


def test_search_and_attribute(call: Call, index: Path) -> None:
    found = json.loads(call("search", index, "dog", "--json")[1])
    assert found["count"] == 1 and found["passages"][0]["text"] == TEXTS[2]
    assert found["passages"][0]["metadata"]["line"] == 3
    found = json.loads(call("search", index, "cat|dog", "ran", "--json", "-n", 9)[1])
    assert {p["document"] for p in found["passages"]} == {1}
    assert "1 found" in call("search", index, "a dog")[1]
    found = json.loads(call("attribute", index, "one cat sat on it", "--json")[1])
    spans = [(s["text"], s["count"]) for s in found["spans"]]
    assert spans == [("e cat sat on ", 1)] and 0 < found["creativity"] < 1
    found = json.loads(
        call(
            "attribute",
            index,
            "one cat sat on it",
            "--words",
            "--delimiters",
            " ",
            "--min-length",
            3,
            "--json",
        )[1]
    )
    assert found["spans"] == []
    assert "creativity" in call("attribute", index, "a cat")[1]


def test_info_and_check(call: Call, index: Path) -> None:
    found = json.loads(call("info", index, "--json")[1])
    fences = 8 * -(-found["tokens"] // 16) / found["tokens"]
    assert found["documents"] == 3 and found["width"] == 2
    assert found["bytes_per_token"] == round(2 + 1 + fences, 3)
    assert call("check", index)[1] == f"{index}: whole\n"
    assert json.loads(call("check", index, "--deep", "--json")[1])["is_whole"] is True
    file = index / manifest.read_manifest(index).folder / "suffixes.00000.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    status, out, _ = call("check", index)
    assert status == 1 and "suffixes.00000.bin: changed" in out and "1 problem" in out
    file.unlink()
    status, out, _ = call("check", index, "--json")
    assert status == 1 and json.loads(out)["findings"][0]["problem"] == "missing"


def test_bad_input_is_one_line_and_status_2(
    call: Call, index: Path, corpus: Path, tmp_path: Path
) -> None:
    def refused(*words: Any) -> str:
        status, out, err = call(*words)
        assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, err
        return err

    assert "--overwrite" in refused("build", index, corpus)
    assert "no such folder" in refused("count", tmp_path / "none", "a")
    assert "expected token ids" in refused("count", index, "--ids", "cat")
    assert "built with tokenizer 'bytes'" in refused("count", index, "a", "--tokenizer", "reasoner")
    assert "2GB" in refused("build", tmp_path / "new", corpus, "--memory", "much")
    assert "64MB" in refused("build", tmp_path / "new", corpus, "--memory", "1MB")
    assert "--width" in refused("build", tmp_path / "new", corpus, "--width", "3")
    assert "use existing files or folders" in refused(
        "build", tmp_path / "new", tmp_path / "no.txt"
    )
    corpus.write_text("no json\n")
    assert "c.jsonl:1" in refused("build", tmp_path / "new", corpus, "--tokenizer", "bytes")


@pytest.fixture(scope="module")
def fm_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FM-index of the embedded tokenizer."""
    folder = tmp_path_factory.mktemp("fm")
    (folder / "c.txt").write_text(TEXTS[0])
    assert main(["index", "fm", "build", str(folder / "fm"), str(folder / "c.txt")]) == 0
    return folder / "fm"


@pytest.mark.parametrize(
    "words",
    [
        ("count", "INDEX", "a", "caf\udce9"),
        ("prob", "INDEX", "a", "caf\udce9"),
        ("ntd", "INDEX", "caf\udce9"),
        ("search", "INDEX", "a", "caf\udce9|b"),
        ("attribute", "INDEX", "caf\udce9"),
        ("attribute", "INDEX", "a", "--delimiters", "caf\udce9"),
        ("fm", "count", "FM", "a", "caf\udce9"),
        ("fm", "locate", "FM", "caf\udce9"),
    ],
    ids=" ".join,
)
def test_texts_that_are_not_utf_8_are_refused(
    call: Call, index: Path, fm_index: Path, words: tuple[str, ...]
) -> None:
    status, _, err = call(*({"INDEX": index, "FM": fm_index}.get(w, w) for w in words))
    said = (
        "error: 'caf\\udce9' is not UTF-8 text: byte 0xe9 after 3 characters; encode it in UTF-8\n"
    )
    assert (status, err) == (2, said)


def test_what_standard_input_cannot_give_is_refused(
    call: Call, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream, said in (
        (io.TextIOWrapper(io.BytesIO(b"caf\xe9")), "standard input is not UTF-8 text: byte 0xe9"),
        (None, "standard input is closed"),
    ):
        monkeypatch.setattr(sys, "stdin", stream)
        status, out, err = call("attribute", index, "-")
        assert (status, out) == (2, "") and err.startswith(f"error: {said}")


def test_records_left_out_are_told(call: Call, corpus: Path, tmp_path: Path) -> None:
    corpus.write_text(corpus.read_text() + "no json\n")
    words = ("--tokenizer", "bytes", "--on-error", "skip", "--json")
    status, out, err = call("build", tmp_path / "new", corpus, *words)
    assert status == 0 and json.loads(out)["skipped"]["count"] == 1
    assert "1 unreadable record" in err and "c.jsonl:4" in err


def test_sizes() -> None:
    assert read_size("2GB") == read_size("2 GiB") == 2 << 30
    assert read_size("500mb") == 500 << 20 and read_size("1000") == 1000
    for wrong in ("", "GB", "2XB", "two"):
        with pytest.raises(ConfigError, match="size"):
            read_size(wrong)


def test_progress_tells_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun.cli import index_show

    now = iter([0.0, 5.0, 20.0, 21.0])
    monkeypatch.setattr(index_show.time, "monotonic", lambda: next(now))
    with Bars(is_terminal=False) as bars:
        for done in (0, 1_000_000, 2_000_000, 3_000_000):
            bars.report("sort", done, 8_000_000)
    assert capsys.readouterr().err == "sort: 2.0 of 8.0 M tokens, 60 s left\n"
    monkeypatch.undo()
    with Bars(is_terminal=True) as bars:
        bars.report("tokenise", 10, 20)
        assert bars.bars.tasks[0].total == 20


def test_help_and_queries_need_no_torch(index: Path) -> None:
    code = (
        "import sys; from forerun.cli.main import main; main(sys.argv[1:]); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for words in (
        ["index", "--help"],
        ["index", "build", "--help"],
        ["index", "count", str(index), "cat"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True
        )
        assert done.stdout.splitlines()[-1] == "[]", done.stderr
