"""The standard streams as commands find them: closed, on a full disk, or with no reader left."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

NO_UTF8 = re.compile(r"[\udc80-\udcff]")  # bytes that are none, as Python holds those of arguments


class _Output(io.FileIO):
    """Standard output, whose errors say what could not be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = "standard output"
            raise


class _AtOnce(io.BufferedWriter):
    """Writes all of what it is given, or raises; a bare file may write a part, or nothing."""

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.flush()
        return written


@contextmanager
def usable() -> Iterator[bool]:
    """All streams can be written to in the block; gives whether standard output was open before.

    What is written to a closed one goes nowhere: files that are opened must not get its number.
    """
    before = sys.stdout, sys.stderr
    if sys.stdout is None:
        sys.stdout = _nowhere(1)
    elif sys.stdout is sys.__stdout__:
        sys.stdout = _named(sys.stdout)
    if sys.stderr is None:
        sys.stderr = _nowhere(2)
    try:
        yield before[0] is not None
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        sys.stdout, sys.stderr = before


def end(line: str, status: int) -> int:
    """The last line of a process, on standard error; returns its status.

    What is left in a standard output that cannot be written is dropped.
    """
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()
    with suppress(OSError):  # there is no other place to say it
        print(line, file=sys.stderr)
    return status


def drop_output() -> None:
    """Sends what is left of standard output nowhere."""
    _lead_nowhere(sys.stdout.fileno())


def _named(stream: Any) -> TextIO:
    """The same stream, whose errors say what it is.

    In UTF-8 bytes that are none, as of files' names, are written as \\udcff, which JSON reads.
    """
    stream.flush()
    is_utf8 = codecs.lookup(stream.encoding).name == "utf-8"
    kind = _AtOnce if stream.write_through else io.BufferedWriter
    return io.TextIOWrapper(
        kind(_Output(stream.fileno(), "w", closefd=False)),
        stream.encoding,
        "backslashreplace" if is_utf8 else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _nowhere(number: int) -> TextIO:
    """A stream that leads nowhere, in place of what has this number."""
    _lead_nowhere(number)
    return open(number, "w", closefd=False)


def _lead_nowhere(number: int) -> None:
    """What is written to this number goes nowhere from now on."""
    null = os.open(os.devnull, os.O_WRONLY)
    if null != number:
        os.dup2(null, number)
        os.close(null)
