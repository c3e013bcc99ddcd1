"""What all subcommands write: text for people, JSON lines for machines, results that survive."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import CapacityError, DataError

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.engine.api import Sample
    from forerun.engine.stats import Stats

WIDE = 200  # columns where nobody looks, so that a row stays a line


def console(*, stderr: bool = False) -> Console:
    """Colours on a terminal, plain wide text elsewhere."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else WIDE)


def notice(text: str) -> None:
    """A remark for people, on standard error."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One line of JSON on standard output."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block; outside the main thread it never comes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


class Results:
    """A file of JSON lines; every line that was finished stays, whatever happens later.

    Raises DataError for a file that exists, CapacityError when a line cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.count = path, 0
        self._file: int | None = None
        if path is None:
            return
        if path.is_file() and path.stat().st_size:
            raise DataError(f"{path} exists and is not empty; give --out another name")
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise DataError(f"cannot write {path}: {error.strerror}") from None

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line, whole or not at all."""
        if self._file is None:
            return
        start = os.lseek(self._file, 0, os.SEEK_END) if os.path.isfile(self.path or "") else None
        left = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            if start is not None:
                os.ftruncate(self._file, start)
            raise CapacityError(
                f"cannot write {self.path}: {error.strerror}; the {self.count} results written "
                "before are kept"
            ) from None
        self.count += 1

    def close(self) -> None:
        """Ends the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def sample_record(sample: Sample, prompt: str | list[int], seed: int, call: str) -> dict[str, Any]:
    """A finished sample with all that is needed to make it again."""
    record: dict[str, Any] = {
        "prompt_index": sample.prompt_index,
        "index": sample.index,
        "prompt": prompt,
        "text": sample.text,
        "tokens": sample.tokens,
        "finish": sample.finish,
        "seed": seed,
        "stats": sample.stats.to_dict(),
        "call": call,
    }
    if sample.logprobs is not None:
        record["logprobs"] = [
            {str(token): round(value, 6) for token, value in top.items()} for top in sample.logprobs
        ]
    return record


def stats_lines(stats: Stats, num_samples: int, seconds: float) -> list[str]:
    """Statistics for people; definitions in docs/structure.md."""
    lines = [
        f"{num_samples} {'sample' if num_samples == 1 else 'samples'}, {stats.generated} tokens in "
        f"{seconds:.1f} s: {stats.generated / max(seconds, 1e-9):.1f} tokens/s",
        f"tau {stats.tau:.2f} tokens per pass ({stats.passes} passes), acceptance "
        f"{stats.acceptance_rate:.1%} of {stats.drafted} drafted, {stats.examined_rate:.1%} of "
        f"{stats.examined} examined",
        "time " + time_split(stats),
    ]
    if stats.per_position:
        shown = [f"{i}: {rate:.2f}" for i, rate in enumerate(stats.per_position[:10], start=1)]
        lines.append("accepted at depth " + "  ".join(shown))
    return lines


def time_split(stats: Stats) -> str:
    """Shares of the engine's time by phase."""
    total = sum(stats.seconds.values()) or 1.0
    names = {"draft": "draft", "forward": "target pass", "verify": "verify", "other": "other"}
    return ", ".join(
        f"{label} {stats.seconds.get(name, 0.0) / total:.0%}" for name, label in names.items()
    )
