"""Splits an answer into content and tool calls while its text grows.

Text is never lost: what does not become a call is content. Only the markup of calls, and the
whitespace around it, is dropped.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from forerun.serving.structured.tools import BEGIN, END

MAX_HEAD_CHARS = 256  # from the begin of a call to its arguments; more is no call
HEAD = re.compile(
    rf'\s*{BEGIN}\s*{{\s*"name"\s*:\s*"([^"\\<]*)"\s*,\s*"arguments"\s*:\s*(?={{)', re.ASCII
)
STRUCTURE = re.compile(r'["{}\[\]]')
IN_STRING = re.compile(r'["\\]')


class Content(NamedTuple):
    """Text outside calls."""

    text: str


class Begin(NamedTuple):
    """A call begins. number: its place among the calls of the answer."""

    number: int
    name: str


class Arguments(NamedTuple):
    """The next part of a call's arguments, JSON text."""

    number: int
    text: str


Part = Content | Begin | Arguments


class ToolParser:
    """The parser of one answer.

    start: text before which there are no calls; it is content. holds: whether a call is given out
    once its arguments are whole, as a stop string may cut it before.
    """

    def __init__(self, start: str | None = None, *, holds: bool = False) -> None:
        self.num_calls = 0
        self.is_whole = True  # whether the last call that began has the end of its arguments
        self._rest = ""
        self._holds, self._held = holds, list[Part]()
        self._call = ""  # text of the last call so far
        self._start = start
        self._read = self._free if start is None else self._before_start
        self._arguments = JsonEnd()

    def feed(self, text: str) -> list[Part]:
        """The parts that new text completes."""
        self._rest += text
        found: list[Part] = []
        while (more := self._read()) is not None:
            found += more
        return _joined(found)

    def finish(self, reason: str = "length") -> list[Part]:
        """The last parts, at the end of the text.

        A call that is held back is content if the text was stopped in it.
        """
        if self._read == self._tail:
            return []
        if self._held and reason == "stop":
            self.num_calls -= 1
            return [Content(self._call)]
        if self._held:
            return _joined(self._held)
        rest, self._rest = self._rest, ""
        if not rest or (self.num_calls and not rest.strip()):  # markup
            return []
        self.is_whole = False  # the text was cut in the head of another call
        return [Content(rest)]

    # Each state takes what it can from the rest. None: more text is needed.

    def _before_start(self) -> list[Part] | None:
        assert self._start is not None
        at = self._rest.find(self._start)
        if at < 0:
            return self._take_content(len(self._rest) - _overlap(self._rest, self._start))
        self._read = self._free
        return self._take_content(at + len(self._start)) or []

    def _free(self) -> list[Part] | None:
        at = self._rest.find(BEGIN)
        end = len(self._rest) - _overlap(self._rest, BEGIN) if at < 0 else at
        content = self._take_content(len(self._rest[:end].rstrip()))
        if at < 0:
            return content
        self._read = self._head
        return content or []

    def _head(self) -> list[Part] | None:
        found = HEAD.match(self._rest)
        length = len((found[0] if found else self._rest).lstrip())
        if length > MAX_HEAD_CHARS or (found is None and END in self._rest):  # no call after all
            self._read = self._free
            return self._take_content(self._rest.find(BEGIN) + len(BEGIN))
        if found is None:
            return None
        self._rest = self._rest[found.end() :]
        self._read, self._arguments, self.is_whole = self._inside, JsonEnd(), False
        self.num_calls += 1
        self._call = found[0]
        return self._given([Begin(self.num_calls - 1, found[1])])

    def _inside(self) -> list[Part] | None:
        if not self._rest:
            return None
        count = self._arguments.feed(self._rest)
        text, self._rest = self._rest[:count], self._rest[count:]
        self._call += text
        if self._arguments.is_over:
            self._read, self.is_whole = self._tail, True
        return self._given([Arguments(self.num_calls - 1, text)])

    def _tail(self) -> list[Part] | None:
        at = self._rest.find(END)
        if at < 0:
            return None
        self._rest = self._rest[at + len(END) :]
        self._read = self._free
        return []

    def _given(self, parts: list[Part]) -> list[Part]:
        """Parts of a call, together with those held back; none yet if they are held back too."""
        self._held += parts
        if self._holds and not self.is_whole:
            return []
        given, self._held = self._held, []
        return given

    def _take_content(self, count: int) -> list[Part] | None:
        """The first characters as content; None if there are none."""
        if count <= 0:
            return None
        text, self._rest = self._rest[:count], self._rest[count:]
        return [Content(text)]


class JsonEnd:
    """Finds the end of a JSON object or array in text that comes in pieces."""

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        self._is_string = self._is_escaped = False

    def feed(self, text: str) -> int:
        """The number of characters that belong to the value."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (IN_STRING if self._is_string else STRUCTURE).search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            self._step(found[0])
            if self.is_over:
                return at
        return at

    def _step(self, mark: str) -> None:
        if mark == '"':
            self._is_string = not self._is_string
        elif mark == "\\":
            self._is_escaped = True
        else:
            self._depth += 1 if mark in "{[" else -1
            self.is_over = self._depth == 0


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of a text with which the marker begins."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def _joined(parts: list[Part]) -> list[Part]:
    """The parts, with neighbours of one kind as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + part.text)
        elif isinstance(part, Arguments) and isinstance(last, Arguments):
            found[-1] = Arguments(part.number, last.text + part.text)
        else:
            found.append(part)
    return found
