"""The child process of `_sandbox`: limits itself, runs a program and its tests, sends a verdict.

Started as `python -I FILE` with a JSON request on standard input; imports nothing of forerun. An
audit hook refuses sockets, new processes, signals, and writes outside the folder. Modules and
functions that write without an audit event are taken away. Native code of other packages is not
seen by the hook: only Landlock (`_landlock`) stops it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import types
from collections.abc import Callable
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# all audit events of these are refused
REFUSED_MODULES = ("socket", "subprocess", "pty", "sqlite3", "syslog", "ctypes")
REFUSED = frozenset(
    ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill")
    + ("os.killpg", "signal.pthread_kill", "resource.setrlimit", "resource.prlimit")
)
CHANGES_PATHS = frozenset(
    ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
    + ("os.chmod", "os.chown", "os.chflags", "os.utime", "os.setxattr", "os.removexattr")
)
# modules that write files, start processes or run code without audit events of this interpreter
UNAVAILABLE = frozenset(
    ("ctypes", "_ctypes", "_cffi_backend", "sqlite3", "_sqlite3", "_gdbm", "_dbm", "readline")
    + ("_posixshmem", "_multiprocessing", "_tkinter", "_xxsubinterpreters", "_interpreters")
    + ("_testcapi", "_testinternalcapi", "_testmultiphase")
)
# functions without audit events; their modules are not imported a second time
REMOVED = {
    "posix": ("mkfifo", "mknod", "setxattr", "removexattr", "unshare", "setns", "chroot"),
    "_signal": ("pidfd_send_signal",),
    "_posixsubprocess": (),  # fork_exec is replaced
}
MAX_REASON = 500  # characters


def main() -> None:
    """Runs the request on standard input; writes the verdict to the original standard output."""
    request = json.load(sys.stdin)
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    set_limits(**request["limits"])
    refuse_new_processes()
    remove_silent_writers()
    sys.addaudithook(guard(os.path.realpath(os.getcwd())))
    try:
        run(request["program"], request["tests"])
        verdict = f"{request['token']} passed"
    except BaseException as error:  # also SystemExit and KeyboardInterrupt
        verdict = f"{type(error).__name__}: {error}"[:MAX_REASON]
    os.write(out, verdict.encode("utf-8", "replace"))
    os._exit(0)  # without threads and exit handlers of the program


def set_limits(wall_seconds: float, cpu_seconds: int, memory_bytes: int, file_bytes: int) -> None:
    """Sets soft and hard limits of this process; the parent limits the wall time."""
    limits = {
        "RLIMIT_CPU": cpu_seconds,
        "RLIMIT_AS": memory_bytes,
        "RLIMIT_FSIZE": file_bytes,
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_NPROC": 0,
    }
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (ValueError, OSError, AttributeError):  # macOS refuses some of them
            continue


def refuse_new_processes() -> None:
    """Replaces the only way to start a process without an audit event."""
    import _posixsubprocess

    def fork_exec(*_: Any) -> None:
        raise PermissionError("no new processes in the sandbox")

    _posixsubprocess.fork_exec = fork_exec  # type: ignore[assignment]


def remove_silent_writers() -> None:
    """Takes away functions and loaded modules that change files without an audit event."""
    import signal

    for public, private in ((os, "posix"), (signal, "_signal")):
        for name in REMOVED[private]:
            for module in (public, sys.modules[private]):
                if hasattr(module, name):
                    delattr(module, name)
    for name in [name for name in sys.modules if name.partition(".")[0] in UNAVAILABLE]:
        del sys.modules[name]


def guard(folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    """The audit hook of a process that may write in one folder only."""

    def is_inside(path: Any) -> bool:
        if isinstance(path, int):  # an open file
            return True
        whole = os.path.realpath(os.fsdecode(path))
        return whole in (folder, os.devnull) or whole.startswith(folder + os.sep)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = isinstance(flags, int) and flags & WRITES
            # relative paths may start at the descriptor of another folder
            if (writes or (mode is None and os.path.isdir(path))) and not is_inside(path):
                raise PermissionError(f"no write outside the sandbox: {path!r}")
        elif event in CHANGES_PATHS:
            if not all(is_inside(arg) for arg in args if isinstance(arg, str | bytes)):
                raise PermissionError(f"no {event} outside the sandbox")
        elif event == "import":
            # the last part names the native module, whatever package it is loaded into
            if args[0].rpartition(".")[2] in UNAVAILABLE or args[0] in REMOVED:
                raise ImportError(f"{args[0]} is not available in the sandbox")
        elif event in REFUSED or event.partition(".")[0] in REFUSED_MODULES:
            raise PermissionError(f"no {event} in the sandbox")

    return hook


def run(program: str, tests: str) -> None:
    """Executes program and tests in one module that is not `__main__`."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(program, "<program>", "exec"), module.__dict__)
    exec(compile(tests, "<tests>", "exec"), module.__dict__)


if __name__ == "__main__":
    main()
