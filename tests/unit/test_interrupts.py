"""Ctrl-C, SIGTERM and SIGHUP: one exit status, saved files, blocks that are not divided."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forerun
from forerun.utils.signals import delayed_interrupt, ignored_by_children

SOURCE = Path(forerun.__file__).parents[1]


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), delayed_interrupt():
        signal.raise_signal(signal.SIGINT)
        done.append("saved")
    assert done == ["saved"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_does_not_wait() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), delayed_interrupt():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("never")
    assert not done


def test_an_interrupt_in_a_block_that_fails_is_raised_too() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, delayed_interrupt():
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError
    assert isinstance(caught.value.__context__, ZeroDivisionError)


def test_a_handler_of_the_caller_is_called_after_the_block() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with delayed_interrupt():
            signal.raise_signal(signal.SIGTERM)
            assert not came
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_child_processes_ignore_ctrl_c() -> None:
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    with ignored_by_children():
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "True\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("name", "ignores_ctrl_c"),
    [("SIGTERM", True), pytest.param("SIGINT", False, marks=pytest.mark.slow)],
)
def test_a_signal_ends_a_command_and_saves_what_was_learned(
    tmp_path: Path, name: str, ignores_ctrl_c: bool
) -> None:
    """Also in a background job of a shell, which ignores Ctrl-C."""
    memory = tmp_path / "a.mem"
    call = [sys.executable, "-m", "forerun", "generate", "--prompt", "a", "-n", "100000", "--json"]
    process = subprocess.Popen(
        [*call, "--drafter", "stand", "--memory", str(memory)],
        env=os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_IGN if ignores_ctrl_c else signal.default_int_handler
        ),
    )
    try:
        assert process.stdout and process.stdout.readline().startswith("{")
        process.send_signal(getattr(signal, name))
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + getattr(signal, name) and memory.exists(), said
    assert said.splitlines()[-1].startswith("interrupted") and "Traceback" not in said
