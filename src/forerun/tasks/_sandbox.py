"""Runs generated Python code and its tests in a limited child process.

The child has its own temporary folder, an environment of three variables, limits on time, memory
and file size, and no network. `_sandbox_child` sets the limits that a process sets itself. Where
the kernel has Landlock, it refuses changes of files outside the folder; an audit hook refuses them
everywhere. Reading is open. It does not stop code written to break out.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from forerun.errors import ConfigError

CHILD = Path(__file__).with_name("_sandbox_child.py")
LAUNCH = (sys.executable, "-I", "-S", str(Path(__file__).with_name("_landlock.py")))
ENVIRONMENT = {"LC_CTYPE": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
MAX_VERDICT_BYTES = 4096
PROBE_SECONDS = 10.0
# prefixes of the child's command, the strictest first
ISOLATIONS = (
    "unshare --user --map-root-user --net --pid --fork --kill-child --mount-proc",
    "unshare --user --map-root-user --net --pid --fork --kill-child",
    "unshare --user --map-root-user --net",
    "unshare --net",
)


@dataclass(frozen=True)
class Limits:
    """Limits of one run."""

    wall_seconds: float = 30.0  # well above cpu_seconds, for busy machines
    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30  # address space
    file_bytes: int = 1 << 20  # per file


@dataclass(frozen=True)
class Verdict:
    """Whether the tests ran to the end without an error; otherwise the reason."""

    passed: bool
    reason: str = ""


def check_supported() -> None:
    """Raises ConfigError on systems without resource limits."""
    if os.name != "posix":
        raise ConfigError(
            "this task runs generated code, which needs Linux or macOS (resource limits); use "
            "another task"
        )


def run_tests(program: str, tests: str, limits: Limits | None = None) -> Verdict:
    """Runs the program and then its tests in a child process; passed if neither raises."""
    check_supported()
    limits = limits or Limits()
    token = secrets.token_hex(16)  # sent by the child only after the last test
    request = {"program": program, "tests": tests, "token": token, "limits": asdict(limits)}
    with tempfile.TemporaryDirectory(prefix="forerun-sandbox-") as folder:
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(request).encode())
            file.seek(0)
            process = _started(folder, file.fileno())
        try:
            process.wait(limits.wall_seconds)
        except subprocess.TimeoutExpired:
            return Verdict(False, f"more than {limits.wall_seconds:g} s")
        finally:
            said = _ended(process)
    if said == f"{token} passed":
        return Verdict(True)
    return Verdict(False, said or f"no verdict (exit status {process.returncode})")


def _started(folder: str, request: int) -> subprocess.Popen[bytes]:
    """Starts the child in a new session, so that all its processes can be killed."""
    return subprocess.Popen(
        [*isolation(), *write_limit(isolation(), folder), sys.executable, "-I", str(CHILD)],
        stdin=request,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=ENVIRONMENT,
        start_new_session=True,
    )


def _ended(process: subprocess.Popen[bytes]) -> str:
    """Kills the child's process group; returns the start of its output."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout
    with process.stdout as pipe:
        os.set_blocking(pipe.fileno(), False)  # an escaped process may keep the pipe open
        with suppress(BlockingIOError):
            return os.read(pipe.fileno(), MAX_VERDICT_BYTES).decode("utf-8", "replace")
    return ""


@cache
def isolation() -> tuple[str, ...]:
    """The strictest prefix that works; empty if `unshare` is missing or not allowed."""
    for text in ISOLATIONS:
        prefix = tuple(text.split())
        command = [*prefix, sys.executable, "-I", "-S", "-c", "print('works')"]
        with suppress(OSError, subprocess.TimeoutExpired):
            found = subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS)
            if found.stdout == b"works\n":
                return prefix
    return ()


def write_limit(prefix: tuple[str, ...], folder: str) -> tuple[str, ...]:
    """What is put before a command so that it changes files in the folder only; empty if unable.

    `prefix` is the isolation in which the command will run.
    """
    return (*LAUNCH, folder) if has_landlock(prefix) else ()


@cache
def has_landlock(prefix: tuple[str, ...]) -> bool:
    """Whether a command under the prefix can write in its folder and not outside, by Landlock."""
    with tempfile.TemporaryDirectory(prefix="forerun-probe-") as outside:
        inside = Path(outside) / "inside"
        inside.mkdir()
        probe = (
            "import os\nos.mkfifo('a')\ntry: os.mkfifo('../b')\n"
            "except PermissionError: print('works')"
        )
        command = [*prefix, *LAUNCH, str(inside), sys.executable, "-I", "-S", "-c", probe]
        with suppress(OSError, subprocess.TimeoutExpired):
            found = subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, cwd=inside)
            return found.stdout == b"works\n"
    return False
