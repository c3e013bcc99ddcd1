"""Compiles the kernels of the default methods in another process while a command works."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from forerun.utils import jit_cache

LAST_COMPILED = (  # by a first run with the default methods
    ("forerun.ngrams.tables.suffix.kernels", "append"),
    ("forerun.verifiers._rejection", "judge_node"),
    ("forerun.controllers._tree_size", "choose"),
)
PROMPT = "Problem: Tom has 3 apples and buys 4 more. How many apples has he?\nSolution:\n"
RUN = ("generate", "--max-new-tokens", "48", "--temperature", "0.6", "--seed", "1")
STOP_SECONDS = 5.0  # until a process that does not end is killed


@contextmanager
def compiling_meanwhile() -> Iterator[None]:
    """A block during which the embedded model decodes a short text in another process.

    At the end of the block waits for that process; Ctrl-C ends the wait and the process. An
    exception in the block ends the process.
    """
    process = None if _are_ready() else _start()
    try:
        yield
    except BaseException:
        _stop(process)
        raise
    _finish(process)


def _finish(process: subprocess.Popen[bytes] | None) -> None:
    if process is None or process.poll() is not None:
        return
    from forerun.cli.output import notice

    notice("compiling kernels, once; Ctrl-C leaves it to the first run")
    try:
        process.wait()
    except KeyboardInterrupt:
        _stop(process)


def _stop(process: subprocess.Popen[bytes] | None) -> None:
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _are_ready() -> bool:
    return all(
        jit_cache.is_ready(getattr(importlib.import_module(module), name))
        for module, name in LAST_COMPILED
    )


def _start() -> subprocess.Popen[bytes] | None:
    command = [sys.executable, "-m", "forerun", *RUN, "--prompt", PROMPT]
    null = subprocess.DEVNULL
    try:
        return subprocess.Popen(
            command, stdin=null, stdout=null, stderr=null, start_new_session=True
        )
    except OSError:
        return None  # the first run compiles them
