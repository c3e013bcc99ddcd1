"""Standard streams that may be closed, on a full disk, or without a reader."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

NOT_UTF8 = re.compile(r"[\udc80-\udcff]")  # surrogates: bytes of arguments that are not UTF-8


class _Output(io.FileIO):
    """Standard output; its errors have "standard output" as the file name."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = "standard output"
            raise


class _WholeWriter(io.BufferedWriter):
    """Writes all bytes or raises, unlike a bare file."""

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.flush()
        return written


@contextmanager
def usable() -> Iterator[bool]:
    """Replaces closed streams by the null device; yields whether standard output was open.

    Without this a file opened later would get the number of a closed stream.
    """
    before = sys.stdout, sys.stderr
    if sys.stdout is None:
        sys.stdout = _null_stream(1)
    elif sys.stdout is sys.__stdout__:
        sys.stdout = _with_clear_errors(sys.stdout)
    if sys.stderr is None:
        sys.stderr = _null_stream(2)
    try:
        yield before[0] is not None
    finally:
        with suppress(OSError):
            sys.stdout.flush()
        sys.stdout, sys.stderr = before


def end(line: str, status: int) -> int:
    """Prints the last line of a process on standard error; returns the status.

    Drops the buffer of a standard output that cannot be written.
    """
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()
    with suppress(OSError):  # standard error is closed too
        print(line, file=sys.stderr)
    return status


def drop_output() -> None:
    """Redirects standard output to the null device."""
    _redirect_to_null(sys.stdout.fileno())


def _with_clear_errors(stream: Any) -> TextIO:
    """The same stream; its errors have a file name.

    In UTF-8, bytes that are not UTF-8, as in file names, are written as \\udcff, valid in JSON.
    """
    stream.flush()
    is_utf8 = codecs.lookup(stream.encoding).name == "utf-8"
    kind = _WholeWriter if stream.write_through else io.BufferedWriter
    return io.TextIOWrapper(
        kind(_Output(stream.fileno(), "w", closefd=False)),
        stream.encoding,
        "backslashreplace" if is_utf8 else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _null_stream(number: int) -> TextIO:
    """A stream to the null device, under this file number."""
    _redirect_to_null(number)
    return open(number, "w", closefd=False)


def _redirect_to_null(number: int) -> None:
    """Redirects a file number to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    if null != number:
        os.dup2(null, number)
        os.close(null)
