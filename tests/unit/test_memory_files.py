"""What --memory accepts: regular files, and one process at a time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command import Call

import forerun
from forerun.errors import ConfigError, DataError
from forerun.state import array_file, drafter_files

SOURCE = Path(__file__).parents[2] / "src"
Generate = Callable[[Path], tuple[int, str]]
HOLD = """
import sys, forerun
from forerun.core.sampling import Sampling
model = forerun.load("reasoner")
with model.memory(sys.argv[1], drafter="stand"):
    model.generate(["Ann has 3 pens."], Sampling(max_new_tokens=8), drafter="stand")
    print("held", flush=True)
    sys.stdin.readline()
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(SOURCE)}


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process within a memory block of the file."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    call = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(call, env=environment(), **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            if process.poll() is None:
                process.stdin.write("\n")


@pytest.fixture
def generate(call: Call) -> Generate:
    """`forerun generate --memory` in this process; gives its status and standard error."""

    def run(path: Path) -> tuple[int, str]:
        words = ("--max-new-tokens", 8, "--prompt", "Ann has 3 pens.", "--drafter", "stand")
        status, _, err = call("generate", *words, "--memory", path)
        return status, err

    return run


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "socket"])
def test_only_files_hold_memories(tmp_path: Path, kind: str, generate: Generate) -> None:
    """Nothing is read from them, so nothing waits."""
    path = tmp_path / "memory"
    listener = socket.socket(socket.AF_UNIX)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        listener.bind(str(path))
    else:
        path.symlink_to("/dev/null")
    says = f"expected a file, but .* is a {kind}; give the name of a file"
    for call in (array_file.check_place, array_file.read, array_file.read_origin):
        with pytest.raises(DataError, match=says):
            call(path)
    status, said = generate(path)
    assert status == 2 and f"is a {kind}" in said
    assert not Path("/dev/null").is_file() and path.exists()
    listener.close()


def test_two_processes_cannot_use_one_memory_file(tmp_path: Path, generate: Generate) -> None:
    path, link = tmp_path / "memory", tmp_path / "link"
    link.symlink_to(path)
    with holder(path) as process:
        for name in (path, link):
            status, said = generate(name)
            assert status == 2
            assert f"is in use by process {process.pid}" in said
            assert "Traceback" not in said
        model = forerun.load("reasoner")
        with pytest.raises(ConfigError, match="is in use by process"):
            model.memory(path, drafter="stand").__enter__()
        with model.memory(tmp_path / "other", drafter="stand"):
            model.generate(["Ann has 3 pens."], drafter="stand")
        with pytest.raises(ConfigError, match="is in use by process"):
            drafter_files.merge([tmp_path / "other"], path)
    assert process.returncode == 0
    assert generate(path)[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "memory", "other"]


@pytest.mark.slow
def test_a_killed_process_leaves_no_lock(tmp_path: Path, generate: Generate) -> None:
    path = tmp_path / "memory"
    with holder(path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert generate(path)[0] == 0
    assert [p.name for p in tmp_path.iterdir()] == ["memory"]


def test_a_failed_block_frees_the_file(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(b"no memory")
    model = forerun.load("reasoner")
    for _ in range(2):
        with pytest.raises(DataError, match="cut off"):
            model.memory(path, drafter="stand").__enter__()
    assert [p.name for p in tmp_path.iterdir()] == ["memory"]
