"""Standard streams that are closed or full, arguments that no file could hold, no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from command import Call, python

from forerun.cli import verify
from forerun.cli.output import console

GENERATE = 'generate -m "$TINY" -p "the cat" --max-new-tokens 2 -d none --nodes 0'
CLOSED = "error: standard output is closed; send it somewhere, as > FILE or > /dev/null\n"
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def shell(words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command line of `forerun`, with the redirections of a shell."""
    paths = os.pathsep.join(sys.path)
    return subprocess.run(
        ["sh", "-c", f'"$PYTHON" -m forerun {words}'],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("words", ["methods", "--help", "generate -m no/such -p a --out new.jsonl"])
def test_a_closed_output_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = shell(f"{words} >&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", CLOSED)
    assert [*tmp_path.iterdir()] == []


def test_what_is_said_to_a_closed_error_stream_goes_nowhere(
    tmp_path: Path, tiny_folder: Path
) -> None:
    """Neither to standard output nor into the file that is opened next."""
    out = tmp_path / "samples.jsonl"
    done = shell(f'{GENERATE} --json --out "$OUT" 2>&-', TINY=str(tiny_folder), OUT=str(out))
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == out.read_text()
    assert done.stdout.startswith("{") and done.stdout.count("\n") == 1
    assert shell("methods stnd 2>&-").returncode == 2
    assert shell("methods stnd >&- 2>&-").returncode == 2


@needs_full
@pytest.mark.parametrize("words", ["methods", "methods --json", "--help"])
def test_a_full_output_is_named(words: str) -> None:
    done = shell(f"{words} > /dev/full")
    said = "error: standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)


@needs_full
def test_a_full_error_stream_is_no_other_error() -> None:
    assert shell("methods stnd 2> /dev/full").returncode == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "-p", "a", "--out", "a\udcff.jsonl"], "argument 'a\\udcff.jsonl' is not"),
        (["generate", "-p", "a", "--tenant", "\udcff"], "argument '\\udcff' is not UTF-8 text"),
        (["memory", "info", "\udcff"], "byte 0xff after 0 characters"),
        (["index", "build", "ix\udcff", "a.txt"], "byte 0xff after 2 characters"),
    ],
)
def test_arguments_that_no_file_could_hold_are_refused(
    call: Call, words: list[str], said: str
) -> None:
    status, out, err = call(*words)
    assert (status, out, err.count("\n")) == (2, "", 1) and said in err


def test_numbas_compiler_is_asked_for() -> None:
    said = "forerun needs Numba's compiler, and NUMBA_DISABLE_JIT turns it off; unset that variable"
    done = shell("generate -p a", NUMBA_DISABLE_JIT="1")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {said}\n")
    code = (
        "import os; os.environ['NUMBA_DISABLE_JIT'] = '1'; from forerun import compiled\n"
        "try:\n    compiled.cold()\nexcept ValueError as error:\n    print(error)"
    )
    assert python(code) == f"{said}\n"


def test_many_lines_of_verify_are_counted_and_failures_come_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cases = [SimpleNamespace(number=i, passed=i % 25 != 7) for i in range(100)]

    def shown(count: int) -> list[str]:
        verify._show_each(console(), cases[:count], lambda case: f"case {case.number}")
        return capsys.readouterr().out.splitlines()

    assert shown(verify.SHOWN) == [f"  case {i}" for i in range(verify.SHOWN)]
    lines = shown(100)
    assert lines[:5] == [f"  case {i}" for i in (7, 32, 57, 82, 0)]
    assert len(lines) == verify.SHOWN + 1
    assert lines[-1] == "  ... and 60 more, 0 of them failed; --json tells of each"
    for case in cases:
        case.passed = False
    assert shown(100)[-1] == "  ... and 60 more, 60 of them failed; --json tells of each"


def test_what_a_program_prints_stays_in_order() -> None:
    code = "from forerun.cli.main import main; print(1); main(['--version']); print(2)"
    first, shown, last = python(code).splitlines()
    assert (first, last) == ("1", "2") and shown.startswith("forerun ")
