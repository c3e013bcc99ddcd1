"""The standard streams as commands find them: closed, on a full disk, or with no reader left."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class _Output(io.FileIO):
    """Standard output, whose errors say what could not be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = "standard output"
            raise


@contextmanager
def standing() -> Iterator[bool]:
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


def end(line: str) -> None:
    """The last line, on standard error; what is left in a broken standard output is dropped."""
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()
    with suppress(OSError):  # there is no other place to say it
        print(line, file=sys.stderr)


def drop_output() -> None:
    """Sends what is left of standard output nowhere."""
    _nowhere(sys.stdout.fileno())


def _named(stream: Any) -> TextIO:
    """The same stream, whose errors say what it is."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False)),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _nowhere(number: int) -> TextIO:
    """A stream that leads nowhere, in place of what has this number."""
    null = os.open(os.devnull, os.O_WRONLY)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    return open(number, "w", closefd=False)
