"""Standard streams that are closed or full, names and texts that are not UTF-8, no compiler."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from command import Call, python

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


@pytest.mark.slow
def test_files_may_have_any_name(tmp_path: Path, tiny_folder: Path) -> None:
    """Also one that is not UTF-8; what is printed is, and the call that is told finds the file."""
    name = os.fsencode(tmp_path) + b"/caf\xe9"
    Path(os.fsdecode(name + b".txt")).write_text("the cat sat")
    environment = {"TINY": str(tiny_folder), "NAME": os.fsdecode(name)}
    asked = '-m "$TINY" --max-new-tokens 4 -d stand --prompt-file "$NAME.txt" --json'
    asked += ' --out "$NAME.jsonl" --memory "$NAME.mem"'
    done = shell(f"generate {asked}", **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == Path(os.fsdecode(name + b".jsonl")).read_text()
    record = json.loads(done.stdout)
    assert record["prompt"] == "the cat sat" and "caf\\xe9.txt'" in record["call"]
    for encoding in ("utf-8:strict", "utf-8:surrogateescape"):
        environment["PYTHONIOENCODING"] = encoding
        told = json.loads(shell('memory info "$NAME.mem" --json', **environment).stdout)
        assert told["file"].endswith("/caf\udce9.mem")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--name", "a\udce9"], "--name must be text in UTF-8, got 'a\\udce9'"),
        (["index", "build", "ix\udce9", "a.txt"], "expected a folder with a name in UTF-8"),
        (["seal", "build", "run\udce9", "a.jsonl"], "expected a folder with a name in UTF-8"),
        (["train", "reasoner", "--out", "a\udce9"], "expected a folder with a name in UTF-8"),
    ],
)
def test_what_could_not_be_read_or_saved_is_refused_before_any_work(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = call(*words)
    assert (status, out, err.count("\n")) == (2, "", 1) and said in err
    assert [*tmp_path.iterdir()] == []


def test_a_name_that_a_file_cannot_hold_is_told_with_what_to_do(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("caf\udce9.txt").write_text("the cat")
    words = ("bench", "run", "--methods", "plain", "--tasks", "file:caf\udce9.txt", "--out", "run")
    status, out, err = call(*words)
    assert (status, out) == (2, "") and "byte 0xe9 after " in err
    assert err.endswith("cannot be written; rename the file, or give the text in UTF-8\n")


def test_numbas_compiler_is_asked_for() -> None:
    said = "forerun needs Numba's compiler, but NUMBA_DISABLE_JIT disables it; unset that variable"
    done = shell("generate -p a", NUMBA_DISABLE_JIT="1")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {said}\n")
    code = (
        "import os; os.environ['NUMBA_DISABLE_JIT'] = '1'; "
        "from forerun.utils import jit_cache as compiled\n"
        "try:\n    compiled.uncompiled_kernels()\nexcept ValueError as error:\n    print(error)"
    )
    assert python(code) == f"{said}\n"


UNBUFFERED = """
import sys
from unittest.mock import patch
from forerun.cli.main import main

def work(args):
    print("one")
    sys.stdin.readline()
    return 0

with patch("forerun.cli.main._run", work):
    main(["methods"])
"""


def test_unbuffered_output_comes_at_once() -> None:
    """As `python -u` and PYTHONUNBUFFERED ask."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", UNBUFFERED],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None and process.stdin is not None
        assert select.select([process.stdout], [], [], 20)[0], "it waits for its input"
        assert process.stdout.readline() == "one\n"
        process.stdin.write("\n")


MUCH = """
import sys
from unittest.mock import patch
from forerun.cli.main import main

def work(args):
    for i in range(4000):
        print(i, "x" * 100)
    return 0

with patch("forerun.cli.main._run", work):
    sys.exit(main(["methods"]))
"""


@pytest.mark.parametrize("flags", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_what_a_pipe_that_does_not_wait_has_no_room_for_is_an_error(flags: list[str]) -> None:
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    done = subprocess.run(
        [sys.executable, *flags, "-c", MUCH],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""},
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    os.close(ours)
    said = "error: write could not complete without blocking\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_what_a_program_prints_stays_in_order() -> None:
    code = "from forerun.cli.main import main; print(1); main(['--version']); print(2)"
    first, shown, last = python(code).splitlines()
    assert (first, last) == ("1", "2") and shown.startswith("forerun ")
