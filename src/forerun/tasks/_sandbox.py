"""Run generated Python code and its tests in a limited child process.

The child has its own temporary folder and an empty environment, limits on time, memory and file
size, and no network. `_sandbox_child` sets the limits that a process sets for itself. This contains
careless code, such as endless loops or stray writes. It is no defence against code that was written
to break out of it.
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
    """What one run may use."""

    wall_seconds: float = 30.0  # a busy machine is slow
    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30  # of address space
    file_bytes: int = 1 << 20  # of each file it writes


@dataclass(frozen=True)
class Verdict:
    """Whether the tests ran to their end without an error, and if not, why."""

    passed: bool
    reason: str = ""


def check_supported() -> None:
    """Raises ConfigError where processes cannot be limited."""
    if os.name != "posix":
        raise ConfigError(
            "this task runs generated code, which needs Linux or macOS (resource limits); use "
            "another task here"
        )


def run_tests(program: str, tests: str, limits: Limits | None = None) -> Verdict:
    """Runs the program and then its tests in a child process; passed if neither raises."""
    check_supported()
    limits = limits or Limits()
    token = secrets.token_hex(16)  # only a child that came to the end of the tests sends it
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
    """The child, in a session of its own so that all its processes can be killed."""
    return subprocess.Popen(
        [*isolation(), sys.executable, "-I", str(CHILD)],
        stdin=request,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={},
        start_new_session=True,
    )


def _ended(process: subprocess.Popen[bytes]) -> str:
    """Kills what is left of a child's process group; the beginning of what it said."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout
    with process.stdout as pipe:
        os.set_blocking(pipe.fileno(), False)  # a process that escaped may hold the other end
        with suppress(BlockingIOError):
            return os.read(pipe.fileno(), MAX_VERDICT_BYTES).decode("utf-8", "replace")
    return ""


@cache
def isolation() -> tuple[str, ...]:
    """The strictest prefix that works here; empty where `unshare` is missing or not allowed."""
    for text in ISOLATIONS:
        prefix = tuple(text.split())
        command = [*prefix, sys.executable, "-I", "-S", "-c", "print('works')"]
        with suppress(OSError, subprocess.TimeoutExpired):
            found = subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS)
            if found.stdout == b"works\n":
                return prefix
    return ()
