"""Ctrl-C in commands, wherever it falls."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lines import at_line

from forerun.utils.signals import KIN, answered, uninterrupted

SOURCE = Path(__file__).parents[2] / "src"


LAST = "interrupted; what was printed or written by then stays\n"


def ended(code: str, stderr: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that runs some code to its end."""
    call, env = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        call, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60
    )


FROM_C = """
import ctypes, signal, sys
from unittest.mock import patch
from forerun.cli.main import main

called_back = ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))
with patch("forerun.cli.options.check_parts", lambda **parts: called_back()):
    sys.exit(main(["generate", "--prompt", "a", "--max-new-tokens", "1"]))
"""


def test_ctrl_c_that_a_callback_from_c_drops_ends_the_command() -> None:
    """As where kernels are loaded: without what the callback was to give they would crash."""
    done = ended(FROM_C)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", LAST)


AT_ONCE = """
import signal
from forerun.cli._signals import ending_at_once

with ending_at_once("over"):
    signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("code", [AT_ONCE, FROM_C])
def test_ctrl_c_ends_also_where_nothing_can_be_said(code: str) -> None:
    with open("/dev/full", "w") as full:
        assert ended(code, full).returncode == 130


IN_A_FINALIZER = """
import signal, sys, time
from unittest.mock import patch
from forerun.cli.main import main

came = signal.SIGINT
{before}

class Dies:
    def __del__(self):
        signal.raise_signal(came)

def work(args):
    try:
        Dies()
        {then}
    finally:
        print("cleaned up")
    return 0

with patch("forerun.cli.main._run", work):
    sys.exit(main(["methods"]))
"""


IN_THE_BACKGROUND = "came = signal.SIGTERM; signal.signal(signal.SIGINT, signal.SIG_IGN)"
FINALIZERS = {
    "a command that sleeps": ("", "time.sleep(60)"),
    "one at its end": ("", "pass"),
    "SIGTERM in a job in the background": (IN_THE_BACKGROUND, "time.sleep(60)"),
    "a system whose threads take no signals": (
        "del signal.pthread_kill",
        "[time.sleep(0.1) for _ in range(600)]",
    ),
}


@pytest.mark.parametrize("which", FINALIZERS)
def test_ctrl_c_that_falls_into_a_finalizer_ends_the_command_as_elsewhere(which: str) -> None:
    """Blocks end as they should."""
    before, then = FINALIZERS[which]
    status = 143 if before == IN_THE_BACKGROUND else 130
    began = time.monotonic()
    done = ended(IN_A_FINALIZER.format(before=before, then=then))
    assert (done.returncode, done.stdout, done.stderr) == (status, "cleaned up\n", LAST)
    assert time.monotonic() - began < 30


HELD = """
import signal
from forerun.cli._signals import kin_of_ctrl_c
from forerun.utils.signals import uninterrupted

{before}
try:
    with kin_of_ctrl_c():
        with uninterrupted(), uninterrupted():
            signal.raise_signal(signal.{first})
            signal.raise_signal(signal.{second})
            print("saved")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("before", ["", "signal.signal(signal.SIGINT, signal.SIG_IGN)"])
@pytest.mark.parametrize(("first", "second"), [("SIGTERM", "SIGHUP"), ("SIGHUP", "SIGINT")])
def test_what_must_not_be_divided_is_not_by_any_of_them(
    before: str, first: str, second: str
) -> None:
    done = ended(HELD.format(before=before, first=first, second=second))
    assert (done.returncode, done.stdout) == (0, "saved\ninterrupted\n"), done.stderr


def test_who_answers_in_a_way_of_their_own_does_so_after_the_block() -> None:
    before = "signal.signal(signal.SIGTERM, lambda *_: print('heard'))"
    done = ended(HELD.format(before=before, first="SIGTERM", second="SIGTERM"))
    assert (done.returncode, done.stdout) == (0, "saved\nheard\nheard\n"), done.stderr


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Who answers Ctrl-C and its kin in a way of their own."""
    found = list[int]()
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, *KIN)}
    for kind in before:
        signal.signal(kind, lambda number, _: found.append(number))
    yield found
    for kind, handler in before.items():
        signal.signal(kind, handler)


def test_what_came_in_a_block_that_fails_is_answered_too(heard: list[int]) -> None:
    with pytest.raises(ZeroDivisionError), uninterrupted():
        signal.raise_signal(KIN[0])
        raise ZeroDivisionError
    assert heard == [KIN[0]]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt) as caught, uninterrupted():
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError
    assert isinstance(caught.value.__context__, ZeroDivisionError)


@pytest.mark.parametrize("first_is_ctrl_c", [True, False])
def test_all_who_answer_are_asked_whatever_one_of_them_raises(
    heard: list[int], first_is_ctrl_c: bool
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    came = [signal.SIGINT, KIN[0]]
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        for kind in came if first_is_ctrl_c else reversed(came):
            signal.raise_signal(kind)
    assert heard == [KIN[0]]


def test_an_interrupt_at_the_end_of_a_block_leaves_no_signal_unheard(heard: list[int]) -> None:
    """At every line of what gives the signals back to who answers them."""
    kinds, code = [signal.SIGINT, *KIN], answered.__wrapped__.__code__  # type: ignore[attr-defined]
    own = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        raise ZeroDivisionError

    for number in itertools.count(2):  # at the first it is not over yet
        try:
            with answered(lambda _: pytest.fail("the block is over")):
                sys.settrace(at_line(number, interrupt, code))
            break
        except ZeroDivisionError:
            pass
        finally:
            sys.settrace(None)
        for kind in kinds:
            signal.raise_signal(kind)
            signal.signal(kind, own)
        assert heard == kinds
        heard.clear()
    assert number > 4


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_who_ends_a_command_otherwise_is_answered_as_ctrl_c(
    tmp_path: Path, name: str, ignores: bool
) -> None:
    """What was learned is saved; so it is in a job in the background, which ignores Ctrl-C."""
    memory = tmp_path / "a.mem"
    call = [sys.executable, "-m", "forerun", "generate", "--prompt", "a", "-n", "100000", "--json"]
    process = subprocess.Popen(
        [*call, "--drafter", "stand", "--memory", str(memory)],
        env=os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignores else None,  # type: ignore[arg-type]
    )
    try:
        assert process.stdout and process.stdout.readline().startswith("{")
        process.send_signal(getattr(signal, name))
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + getattr(signal, name) and memory.exists(), said
