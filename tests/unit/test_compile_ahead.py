"""Kernels are compiled in another process, which ends with the command that started it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from pull_shop import NAME, Shop

from forerun.cli import _compile_ahead
from forerun.cli import pull as command
from forerun.cli._compile_ahead import compiling_meanwhile
from forerun.models.tokenizer import Tokenizer

WAIT_FOR_STDIN = "import sys; sys.stdin.read()"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process in place of the compiling one; it ends when its input is closed."""
    words = [sys.executable, "-c", WAIT_FOR_STDIN]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        monkeypatch.setattr(_compile_ahead, "_are_ready", lambda: False)
        monkeypatch.setattr(_compile_ahead, "_start", lambda: process)
        yield process
        process.kill()


def test_the_end_of_the_block_waits(compiler: subprocess.Popen[bytes]) -> None:
    with compiling_meanwhile():
        assert compiler.poll() is None and compiler.stdin is not None
        compiler.stdin.close()
    assert compiler.returncode == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_block_ends_the_process(
    compiler: subprocess.Popen[bytes], error: type[BaseException]
) -> None:
    with pytest.raises(error), compiling_meanwhile():
        raise error
    assert compiler.returncode


def test_ctrl_c_ends_the_wait_and_the_process(
    compiler: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wait, calls = compiler.wait, []

    def interrupted(timeout: float | None = None) -> int:
        calls.append(timeout)
        if timeout is None:
            raise KeyboardInterrupt
        return wait(timeout)

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "wait", interrupted)
        with compiling_meanwhile():
            pass
    assert compiler.returncode and calls[0] is None
    assert "Ctrl-C leaves it to the first run" in capsys.readouterr().err


def test_a_pull_that_is_interrupted_at_the_tokenizer_leaves_no_process(
    shop: Shop, compiler: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(folder: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tokenizer, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.command(NAME)
    assert compiler.returncode


def test_kernels_that_are_compiled_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compile_ahead, "_are_ready", lambda: True)
    monkeypatch.setattr(_compile_ahead, "_start", lambda: pytest.fail("a process was started"))
    with compiling_meanwhile():
        pass
