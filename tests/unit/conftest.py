"""Fixtures of all that calls the command line, reads reports, or changes the number of threads."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Call
from report_page import Page
from sample_run import write_run
from tiny import make_tiny

from forerun.bench.report import write_report
from forerun.bench.results import Record
from forerun.cli.main import main


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("cli") / "other", vocab=300)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command line in this process; gives status, standard output, standard error."""

    def run(*words: Any) -> tuple[int, str, str]:
        status = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def generate(call: Call, tiny: Path) -> Call:
    """`forerun generate` on the tiny model, few tokens."""
    return lambda *words: call("generate", "-m", tiny, "--max-new-tokens", 8, *words)


@pytest.fixture
def refuses(call: Call) -> Callable[..., str]:
    """Runs a command line that must end in one line of error and status 2; gives that line."""

    def run(*words: Any) -> str:
        status, out, err = call(*words)
        lines = [line for line in err.splitlines() if not line.startswith("#")]
        assert status == 2 and len(lines) == 1 and lines[0].startswith("error: "), err
        assert out == ""
        return lines[0]

    return run


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a text on standard input."""

    def put(text: str) -> None:
        stream = io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stream)

    return put


@pytest.fixture(scope="session")
def packed_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GGUF file that `shop` sells in three packages."""
    from pull_shop import make_gguf

    return make_gguf(tmp_path_factory.mktemp("packed"))


@pytest.fixture
def shop(packed_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model that `forerun pull` can fetch without a network."""
    from pull_shop import open_shop

    from forerun.models.downloads import downloads

    yield open_shop(tmp_path, packed_gguf, monkeypatch)
    downloads.cache_clear()


@pytest.fixture
def threads():
    """Restores torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., tuple[Page, str]]:
    """Page and Markdown of records with changes to the plan."""

    def make(made: list[Record] | None = None, **changes: object) -> tuple[Page, str]:
        html, text, *_ = write_report(write_run(tmp_path / "run", made, **changes))
        return Page(html.read_text(encoding="utf-8")), text.read_text(encoding="utf-8")

    return make
