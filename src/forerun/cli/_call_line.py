"""The command line that repeats a call."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import typer

from forerun.cli._stdio import NOT_UTF8
from forerun.cli.output import notice

MAX_SHOWN_CHARS = 200  # of an option's value in notices


def announce(ctx: typer.Context, **changed: Any) -> None:
    """Prints the call on standard error, with long values shortened."""
    notice(f"# {call_line(ctx, MAX_SHOWN_CHARS, **changed)}")


def call_line(ctx: typer.Context, max_chars: int = sys.maxsize, /, **changed: Any) -> str:
    """The command line that repeats this call: every option that is not at its default.

    max_chars: longer values are cut.
    """
    words = [ctx.command_path]
    for param in ctx.command.params:
        value = changed.get(str(param.name), ctx.params.get(str(param.name)))
        if value is None or value == param.default or value in ((), []) or param.name == "help":
            continue
        flag = max(param.opts, key=len)
        if value is True:
            words.append(flag)
        else:
            many = value if isinstance(value, list | tuple) else [value]
            join = "=" if flag.startswith("--") else " "
            words += [f"{flag}{join}{_quoted(str(v), max_chars)}" for v in many if v is not False]
    return " ".join(words)


def _quoted(text: str, max_chars: int = sys.maxsize) -> str:
    """The text, quoted for the shell on one line of UTF-8."""
    if len(text) > max_chars:
        text = f"{text[:max_chars]}... ({len(text) - max_chars} more characters)"
    if "\n" not in text and not NOT_UTF8.search(text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    escaped = NOT_UTF8.sub(lambda byte: f"\\x{ord(byte[0]) - 0xDC00:02x}", escaped)
    return f"$'{escaped}'"
