"""The sandbox of generated code: a verdict on its tests, whatever the code does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.tasks import _sandbox
from forerun.tasks._sandbox import Limits, isolation, run_tests

QUICK = Limits(wall_seconds=20.0, cpu_seconds=1)
SOLUTION = "def double(x):\n    return 2 * x\n"
TESTS = "assert double(2) == 4"


def to_every_file(data: str) -> str:
    """Code that writes to all open files, also to that of the verdict."""
    return (
        f"import os\nfor fd in range(3, 64):\n  try: os.write(fd, {data})\n  except OSError: pass\n"
    )


@pytest.fixture(params=["as here", pytest.param("bare", marks=pytest.mark.slow)])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the namespaces that this machine allows, and without any."""
    if request.param == "bare":
        monkeypatch.setattr(_sandbox, "isolation", lambda: ())
        return "bare"
    return "isolated" if isolation() else "bare"


def test_right_code_passes_and_wrong_code_says_why(either: str) -> None:
    assert run_tests(SOLUTION, TESTS).passed
    wrong = run_tests(SOLUTION, "assert double(2) == 5, 'not five'")
    assert not wrong.passed and wrong.reason == "AssertionError: not five"
    assert run_tests("def double(x:", TESTS).reason.startswith("SyntaxError")
    assert run_tests("", TESTS).reason.startswith("NameError")


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "quit()",
        "raise KeyboardInterrupt",
        pytest.param(
            "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
            marks=pytest.mark.slow,  # a second of CPU time, or a GiB
        ),
    ],
)
def test_code_that_ends_before_its_tests_fails(code: str) -> None:
    assert not run_tests(f"{SOLUTION}\n{code}", TESTS, QUICK).passed


def test_an_endless_loop_is_killed(either: str) -> None:
    assert not run_tests("while True: pass", TESTS, QUICK).passed


def test_code_that_sleeps_is_killed(either: str) -> None:
    found = run_tests("import time; time.sleep(60)", TESTS, Limits(wall_seconds=0.5))
    assert not found.passed and found.reason == "more than 0.5 s"


def test_memory_is_limited(either: str) -> None:
    found = run_tests("x = 'a' * (2 << 30)", TESTS)
    assert not found.passed and found.reason.startswith("MemoryError")
    grows = "x = []\nwhile True: x.append(bytearray(1 << 24))"
    assert not run_tests(grows, TESTS, QUICK).passed


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import os; os.system('true')",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.execv('/bin/true', ['true'])",
        "import multiprocessing as m\np = m.get_context('spawn').Process(target=print); p.start()",
        "import os; os.kill(os.getppid(), 0)",
        "import ctypes; ctypes.CDLL(None).fork()",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (9, 9))",
    ],
)
def test_no_processes_and_no_signals(code: str, either: str) -> None:
    found = run_tests(f"{SOLUTION}\n{code}", TESTS)
    assert not found.passed
    assert found.reason.startswith(("PermissionError: no ", "ImportError: ctypes is not")), found


def test_no_process_outlives_a_run(either: str) -> None:
    """A child that ignores signals is killed at its time limit, with `unshare` around it."""
    ignores = "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)"
    run_tests(f"{ignores}\ntime.sleep(60)", TESTS, Limits(wall_seconds=0.5))
    listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True).stdout
    mine = [line for line in listed.splitlines() if line.split()[0] == str(os.getpid())]
    assert mine and not any(str(_sandbox.CHILD) in line for line in mine)


def test_files_are_written_in_its_own_folder_only(tmp_path: Path, either: str) -> None:
    here = "open('a.txt', 'w').write('x')\nimport os; os.mkdir('d'); os.rename('a.txt', 'd/b')"
    assert run_tests(f"{SOLUTION}\n{here}", TESTS).passed
    target = tmp_path / "kept"
    target.write_text("kept")
    for code in (
        f"open({str(target)!r}, 'w')",
        f"open({str(target)!r}, 'r+')",
        f"import os; os.remove({str(target)!r})",
        f"import os; os.open({str(target)!r}, os.O_WRONLY)",
        f"import os; os.rename({str(target)!r}, 'mine')",
        f"import os; os.symlink({str(target)!r}, 's')",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
        f"import pathlib; pathlib.Path({str(tmp_path)!r}, 'new').touch()",
    ):
        found = run_tests(f"{SOLUTION}\n{code}", TESTS)
        assert not found.passed and found.reason.startswith("PermissionError"), (code, found)
    assert target.read_text() == "kept" and list(tmp_path.iterdir()) == [target]
    assert not run_tests("open('big', 'wb').write(bytes(1 << 21))", TESTS).passed


def test_its_folder_and_what_it_wrote_are_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sandbox.tempfile, "tempdir", str(tmp_path))
    assert run_tests("open('a', 'w').write('x')", "assert open('a').read() == 'x'").passed
    assert list(tmp_path.iterdir()) == []


def test_output_is_dropped(capfd: pytest.CaptureFixture[str], either: str) -> None:
    flood = "import sys\nfor _ in range(20000): print('x' * 500)\nsys.stderr.write('y' * 10**6)"
    assert run_tests(f"{flood}\n{SOLUTION}", TESTS).passed
    assert capfd.readouterr() == ("", "")
    every = to_every_file("b'z' * (1 << 22)")
    found = run_tests(f"{SOLUTION}\n{every}", TESTS, Limits(wall_seconds=1.0))
    assert not found.passed


def test_a_forged_verdict_does_not_pass() -> None:
    forged = to_every_file("b'passed'") + "os._exit(0)"
    assert not run_tests(forged, TESTS).passed


def test_no_network(either: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket\nsocket.create_connection({server.getsockname()!r}, 2)"
        found = run_tests(f"{SOLUTION}\n{connect}", TESTS)
        assert not found.passed and "PermissionError: no socket" in found.reason
        if either == "isolated":  # the namespace alone, without the hook
            command = [*isolation(), sys.executable, "-I", "-c", connect]
            assert subprocess.run(command, capture_output=True).returncode != 0
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_no_environment(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_TEST", "1")
    assert run_tests("import os", "assert 'SECRET_OF_TEST' not in os.environ").passed
    assert run_tests("import sys", "assert sys.flags.isolated").passed


def test_ordinary_modules_work() -> None:
    code = (
        "from __future__ import annotations\nimport collections, dataclasses, doctest, functools, "
        "hashlib, heapq, itertools, json, math, random, re, string, typing, unittest, asyncio\n"
        "@dataclasses.dataclass\nclass A:\n  x: int = 1\n"
        "if __name__ == '__main__': raise ValueError"
    )
    assert run_tests(code, "assert A().x == 1 and math.pi > 3").passed
    assert run_tests("import numpy as np", "assert np.arange(3).sum() == 3").passed


def test_a_machine_without_limits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(_sandbox.ConfigError, match="needs Linux or macOS"):
        _sandbox.check_supported()
