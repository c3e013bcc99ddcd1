"""What the scripts of benchmarks/ share: options that are refused, and how a script ends."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path
from subprocess import CalledProcessError
from types import ModuleType
from typing import Any

import pytest

from forerun.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "benchmarks"
PRINTS = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import scripts
scripts.run(lambda: [print("a row") for _ in range(100_000)] and None)
"""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("scripts")


@pytest.mark.parametrize(
    ("kind", "text", "found"),
    [("count", "12", 12), ("number", "0", 0), ("measure", "0.5", 0.5), ("measure", "0", 0.0)],
)
def test_options_are_read(scripts: ModuleType, kind: str, text: str, found: Any) -> None:
    assert getattr(scripts, kind)(text) == found
    assert scripts.pattern("a|b").search("b")


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("count", "0", "expected a whole number above 0, got '0'"),
        ("count", "x", "expected a whole number above 0, got 'x'"),
        ("number", "-1", "expected a whole number not below 0, got '-1'"),
        *(
            ("measure", text, f"expected a number not below 0, got '{text}'")
            for text in ("-1", "nan", "inf", "x")
        ),
        ("pattern", "(", r"'\(' is not a regular expression: missing \)"),
    ],
)
def test_options_are_refused(scripts: ModuleType, kind: str, text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=said):
        getattr(scripts, kind)(text)


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        (None, None, ""),
        (3, 3, ""),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ConfigError("no such\nmethod"), 2, "error: no such method\n"),
        (FileNotFoundError(2, "No such file", "a"), 2, "error: [Errno 2] No such file: 'a'\n"),
        (CalledProcessError(3, "do"), 3, "error: a command ended with status 3\n"),
        (CalledProcessError(77, "do"), 1, "error: a command ended with status 77\n"),
        (CalledProcessError(-9, "do"), 137, "error: a command ended by signal SIGKILL\n"),
    ],
)
def test_a_script_ends_with_a_status_and_a_line(
    scripts: ModuleType, end: Any, status: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int | None:
        if isinstance(end, BaseException):
            raise end
        return end

    with pytest.raises(SystemExit) as caught:
        scripts.run(main)
    assert (caught.value.code, capsys.readouterr().err) == (status, said)


def test_what_is_skipped_has_a_status_of_its_own(
    scripts: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        scripts.run(lambda: scripts.skip("there is no data"))
    assert (caught.value.code, capsys.readouterr().err) == (77, "skipped: there is no data\n")


def test_a_reader_that_has_gone_is_no_mistake() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PRINTS], stdout=pipe, stderr=pipe) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
