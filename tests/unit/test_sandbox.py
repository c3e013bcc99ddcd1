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
        monkeypatch.setattr(_sandbox, "has_landlock", lambda prefix: False)
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
    assert found.reason.startswith("PermissionError: no ") or "is not available" in found.reason


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


# writers that raise no audit event, or none with the path; {} is a path outside the folder
SILENT_WRITERS = (
    "import os; os.mkfifo({})",
    "import posix; posix.mkfifo({})",
    "import os, stat; os.mknod({}, 0o600 | stat.S_IFREG)",
    "import sys; del sys.modules['posix']\nimport posix; posix.mkfifo({})",
    "import sqlite3; sqlite3.connect({}).execute('create table t (a)').close()",
    "import _sqlite3; _sqlite3.connect({}).execute('create table t (a)').close()",
    "import sqlite3; sqlite3.connect(':memory:').execute('vacuum into ?', ({},))",
    "import dbm.gnu; dbm.gnu.open({}, 'c')",
    "import dbm.ndbm; dbm.ndbm.open({}, 'c')",
    "import dbm.dumb; dbm.dumb.open({}, 'c').close()",
    "import shelve; shelve.open({}, 'c').close()",
    "import readline; readline.write_history_file({})",
    "import tkinter; tkinter.Tcl().eval('open ' + {} + ' w')",
    "import faulthandler; faulthandler.enable(open({}, 'w'))",
    "import os; os.setxattr(os.path.dirname({}), 'user.forerun', b'1')",
    "import bz2; bz2.open({}, 'w').close()",
    "import _xxsubinterpreters as x; x.run_string(x.create(), 'open(' + repr({}) + ', \"w\")')",
)


@pytest.mark.parametrize("code", SILENT_WRITERS)
@pytest.mark.parametrize("landlock", [True, False])
def test_writers_without_audit_events_write_nothing_outside(
    code: str, landlock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not landlock:
        monkeypatch.setattr(_sandbox, "has_landlock", lambda prefix: False)
    run_tests(code.replace("{}", repr(str(tmp_path / "new"))), "")
    assert list(tmp_path.iterdir()) == []
    assert not os.listxattr(tmp_path)


@pytest.mark.parametrize("module", ["multiprocessing.shared_memory", "_posixshmem"])
def test_no_shared_memory(module: str) -> None:
    name = f"/forerun-test-{os.getpid()}"
    shared = Path("/dev/shm") / name[1:]
    code = {
        "_posixshmem": f"import os, _posixshmem as s; s.shm_open({name!r}, os.O_CREAT | os.O_RDWR)",
        "multiprocessing.shared_memory": f"from multiprocessing import shared_memory as s\n"
        f"s.SharedMemory({name!r}, create=True, size=8)",
    }[module]
    try:
        assert not run_tests(f"{SOLUTION}\n{code}", TESTS).passed
        assert not shared.exists()
    finally:
        shared.unlink(missing_ok=True)


@pytest.mark.parametrize("isolated", [True, False])
def test_landlock_alone_stops_native_writers(isolated: bool, tmp_path: Path) -> None:
    """Without the audit hook: native code writes in the folder only, and reads everywhere."""
    prefix = isolation() if isolated else ()
    if not _sandbox.has_landlock(prefix):
        pytest.skip("this kernel has no Landlock")
    (tmp_path / "kept").write_text("kept")
    folder = tmp_path / "folder"
    folder.mkdir()
    code = """
import ctypes, os, sqlite3
libc = ctypes.CDLL(None, use_errno=True)
outside = {
    "fifo": lambda path: os.mkfifo(path),
    "creat": lambda path: libc.creat(path.encode(), 0o600) < 0 and os.stat(path),
    "database": lambda path: sqlite3.connect(path).execute("create table t (a)"),
    "truncate": lambda path: os.truncate("../kept", 0),
    "rename": lambda path: os.rename("../kept", "mine"),
    "remove": lambda path: os.remove("../kept"),
}
for name, write in outside.items():
    write(name) if name in ("fifo", "database") else None
    try: write(os.path.abspath("../" + name))
    except (OSError, sqlite3.Error): continue
    print("written:", name)
print(open("../kept").read())
open("/dev/null", "w").write("x")
"""
    command = [*prefix, *_sandbox.write_limit(prefix, str(folder)), sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert (found.stdout, found.stderr) == ("kept\n", "")
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "folder"}
    assert {path.name for path in folder.iterdir()} == {"fifo", "database"}


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


def test_the_environment_is_three_variables(either: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_TEST", "1")
    found = run_tests("import os", f"assert dict(os.environ) == {_sandbox.ENVIRONMENT}, os.environ")
    assert found.passed, found.reason
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
