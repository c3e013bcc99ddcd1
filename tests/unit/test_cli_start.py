"""The first second of a command: Ctrl-C, what is imported, a word while a model loads."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import Call, python

import forerun
from forerun.cli import loading
from forerun.cli.loading import EARLY_INTERRUPT
from forerun.utils import jit_cache

INTERRUPTING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""  # Ctrl-C while a module is looked for, in any command of this interpreter


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m forerun` in a process of its own."""
    paths = [environment.pop("first", ""), *sys.path]
    return subprocess.run(
        [sys.executable, "-m", "forerun", *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("forerun.cli", "interrupted before anything was begun"),
        ("typer", "interrupted before anything was begun"),
        ("forerun.errors", "interrupted before anything was begun"),
        ("forerun.cli.methods", "interrupted; what was printed or written by then stays"),
        ("forerun.catalog", "interrupted; what was printed or written by then stays"),
    ],
)
def test_ctrl_c_at_the_start_is_one_line(tmp_path: Path, module: str, said: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    done = run("methods", first=str(tmp_path), INTERRUPT_AT=module)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said + "\n")


# shells call both 130; Python ends by the signal itself if a text that `exec` ran was interrupted
ENDED = (130, -signal.SIGINT)
COMMANDS = {
    "generate": ("generate", "-p", "a", "-n", "3000"),
    "chat": ("chat",),
    "bench": ("bench", "run", "--methods", "plain,stand", "--tasks", "reasoning", "--out", "run"),
}


@pytest.mark.parametrize("module", ["tokenizers", pytest.param("torch.nn", marks=pytest.mark.slow)])
def test_ctrl_c_while_a_model_loads_ends_at_once(tmp_path: Path, module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    done = run(*COMMANDS["generate"], first=str(tmp_path), INTERRUPT_AT=module)
    said = [line for line in done.stderr.splitlines() if not line.startswith("#")]
    assert (done.returncode, done.stdout, said[-1]) == (130, "", EARLY_INTERRUPT)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_is_heard_at_any_moment(name: str, tmp_path: Path) -> None:
    """Extensions call Python back from C while they load, where an exception is death or lost."""
    for wait in (0.5, 0.8, 1.1, 1.4, 1.7, 2.0, 2.3, 2.6, 3.0):
        process = subprocess.Popen(
            [sys.executable, "-m", "forerun", *COMMANDS[name]],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        with process:
            time.sleep(wait)
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            if name == "chat" and not select.select([process.stderr], [], [], 5)[0]:
                process.stdin.close()  # it was asking, and Ctrl-C there clears the line
            said = process.stderr.read()
        lines = [line for line in said.splitlines() if not line.startswith("#")]
        is_asking = name == "chat" and process.returncode == 0
        ended = process.returncode in ENDED and lines and "interrupted" in lines[-1]
        assert is_asking or ended, f"after {wait} s: {process.returncode} {said}"
        assert "Traceback" not in said and "terminate" not in said


def test_the_module_is_the_command() -> None:
    assert run("--version").stdout == f"forerun {forerun.__version__}\n"
    assert run("methods", "stnd").returncode == 2


def test_nothing_slow_comes_before_the_first_handler_of_ctrl_c() -> None:
    """What `forerun.__main__` imports: ours, and what takes no time."""
    code = (
        "import sys; before = {*sys.modules}; import forerun.__main__; "
        "print(*sorted({name.partition('.')[0] for name in {*sys.modules} - before}))"
    )
    assert {*python(code).split()} <= {"__future__", "forerun", "importlib", "warnings"}


def test_a_count_in_an_fm_index_needs_no_torch(tmp_path: Path) -> None:
    text, index = tmp_path / "a.txt", tmp_path / "a.fm"
    text.write_text("one two one")
    assert run("index", "fm", "build", str(index), str(text)).returncode == 0
    printed = python(
        "import sys; from forerun.cli.main import main; "
        f"print(main(['index', 'fm', 'count', {str(index)!r}, ' two'])); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert printed.splitlines() == ["1", "0", "[]"]


def test_an_answer_needs_little_of_what_is_installed() -> None:
    """What takes longer to import than a small model takes to answer stays out."""
    code = (
        "import sys; from forerun.cli.main import main; "
        "main(['generate', '-p', 'Rosa has 3', '-n', '2', '--max-new-tokens', '3']); "
        "print([m for m in ('transformers.core_model_loading', 'torch._dynamo', 'rich') "
        "if m in sys.modules])"
    )
    assert python(code).splitlines()[-1] == "[]"


LOADS = """
import sys
from forerun.cli import loading
from forerun.cli.main import main
loading.SLOW_SECONDS = 0.0
sys.exit(main(["generate", "-m", sys.argv[1], "-p", "the cat", "--max-new-tokens", "1"]))
"""


def test_a_pipe_is_not_told_that_a_model_loads(
    call: Call, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "SLOW_SECONDS", 0.0)
    status, out, err = call("generate", "-m", tiny_folder, "-p", "the cat", "--max-new-tokens", 1)
    assert status == 0 and "loading" not in out + err


def test_a_terminal_is_told_that_a_model_loads(tiny_folder: Path) -> None:
    words = [sys.executable, "-c", LOADS, str(tiny_folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # how Linux says that the other end is closed
        pass
    assert process.wait() == 0
    os.close(ours)
    assert shown.decode().count(f"loading {tiny_folder} ...") == 1


KERNELS = """
from numba import njit
@njit(cache=True)
def twice(x):
    return 2 * x
@njit(cache=True)
def thrice(x):
    return twice(x) + x
"""


def test_compiling_is_announced_once_and_only_if_it_happens(tmp_path: Path) -> None:
    """Kernels of the user's own say nothing."""
    for name in ("foreign", "kernels_of_ours"):
        (tmp_path / f"{name}.py").write_text(KERNELS)
    code = (
        f"import sys, forerun; sys.path.append({str(tmp_path)!r}); "
        "from forerun.utils import jit_cache as compiled; "
        f"forerun.__path__.append({str(tmp_path)!r}); "
        "compiled.watch(print); compiled.watch(lambda text: print('again', text)); "
        "import foreign; foreign.thrice(1); print('so far'); "
        "import forerun.kernels_of_ours as k; k.thrice(1); k.twice(2.0); print('done')"
    )
    assert python(code).splitlines() == ["so far", jit_cache.NOTICE, "done"]
    assert python(code).splitlines() == ["so far", "done"]


GENERATE = ("generate", "-m", "TINY", "-p", "the cat", "--max-new-tokens", "8")
BUILD = ("index", "build", "ix", "c.txt", "--tokenizer", "TINY", "--overwrite")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        (*GENERATE, "-d", "stand"),
        (*GENERATE, "-d", "suffix", "--json"),
        (*GENERATE, "-d", "none", "--mix", "ix"),
        BUILD,
    ],
)
def test_the_first_call_says_once_that_it_compiles_and_the_second_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.txt").write_text("the cat sat on the mat")
    build, words = ([w.replace("TINY", str(tiny_folder)) for w in c] for c in (BUILD, command))
    assert run(*build).returncode == 0  # for --mix
    for times in (1, 0):
        done = run(*words, NUMBA_CACHE_DIR=str(tmp_path / "empty at first"))
        assert done.returncode == 0
        assert done.stderr.count(jit_cache.NOTICE) == times
        assert done.stderr.count("compiled in") == times * (command != BUILD)


@pytest.mark.slow
def test_a_mixture_is_compiled_when_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the clock of `generate` runs."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    code = (
        "import numpy as np; from forerun.utils import jit_cache as compiled; "
        "from forerun.constraints.infini import InfiniMix, Index; "
        "watch = compiled.watch(str); index = Index.of([[0, 1, 2, 0, 1]]); "
        "before = watch.num_compiled; mix = InfiniMix(index); made = watch.num_compiled; "
        "mix.logits((2, 0, 1), np.zeros(3, np.float32)); "
        "print(made > before, watch.num_compiled - made)"
    )
    assert python(code) == "True 0\n"


@pytest.mark.slow
def test_ctrl_c_while_kernels_are_compiled_ends_at_once(tmp_path: Path) -> None:
    """llvmlite's callbacks drop a KeyboardInterrupt, or die of it."""
    for wait in (0.2, 1.5, 3.0):
        process = subprocess.Popen(
            [sys.executable, "-m", "forerun", "generate", "-p", "a"],
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(sys.path),
                "NUMBA_CACHE_DIR": str(tmp_path / f"{wait}"),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stderr is not None
            while "compiling kernels" not in (line := process.stderr.readline()):
                assert line, "it ended before"
            time.sleep(wait)
            process.send_signal(signal.SIGINT)
            sent = time.monotonic()
            left = process.stderr.read()
        assert (process.returncode, left) == (130, "interrupted before anything was begun\n")
        assert time.monotonic() - sent < 30
