"""`forerun chat` as a person meets it: in a pseudo-terminal, with colours, keys and Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny import make_tiny

SOURCE = Path(__file__).parents[2] / "src"
UP, CTRL_C, CTRL_D = "\x1b[A", "\x03", "\x04"
CHAT = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal
os.execv(sys.executable, [sys.executable, "-m", "forerun.cli.main", "chat", *sys.argv[1:]])
"""


class Person:
    """Types into the chat's terminal and reads what it shows."""

    def __init__(self, *words: str, **environment: str) -> None:
        self._end, theirs = pty.openpty()
        env = os.environ | {"PYTHONPATH": str(SOURCE), "TERM": "xterm-256color"} | environment
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHAT, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""

    def types(self, text: str) -> None:
        os.write(self._end, text.encode())

    def sees(self, pattern: str, seconds: float = 60.0) -> str:
        """Waits for something; what was shown up to its end, since the last call."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < end, f"no {pattern!r} in {self.shown!r}"
            if select.select([self._end], [], [], 0.1)[0]:
                self.shown += os.read(self._end, 65536).decode("utf-8", "replace")
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._end)


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    """Someone who chats with a random model that repeats itself and hardly ends."""
    model = make_tiny(tmp_path / "model", context=8192)
    law = ("--temperature", "0", "--drafter", "prompt_lookup", "--max-new-tokens", "8000")
    law += ("--controller", "fixed")  # drafts at once, whatever a pass costs here
    person = Person(str(model), *law, FORERUN_CACHE=str(tmp_path / "cache"))
    yield person
    person.close()


def test_a_conversation_at_a_terminal(person: Person) -> None:
    person.sees(r"/help lists commands")
    person.sees(r"too small to gain from drafts .* run: forerun demo")
    person.sees("> ")
    person.types("the cat sat on the mat and the cat\n")
    person.sees("the cat\r\n")  # the line as it was typed
    person.sees(r"\x1b\[32m[^\x1b]+")  # an accepted draft, in colour
    person.types(CTRL_C)
    person.sees("stopped")
    person.sees("> ")
    person.types("/history\n")
    assert "user: the cat sat on the mat and the cat" in person.sees(r"assistant: ")
    person.sees("> ")
    person.types(UP + "\n")  # the line before
    person.sees("/history")
    person.sees("user: the cat")
    person.sees("> ")
    person.types("/drafter stnd\n")
    person.sees("did you mean 'stand'")
    person.sees("> ")
    person.types(CTRL_D)
    assert person.process.wait(30) == 0
