"""Output shared by subcommands: text, JSON lines, result files."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import CapacityError, DataError
from forerun.utils.files import write_advice
from forerun.utils.text import counted

if TYPE_CHECKING:
    from rich.console import Console

    from forerun.constraints._report import Report
    from forerun.engine.generation import Sample
    from forerun.engine.stats import Stats

SHOWN_TEXTS, SHOWN_CHARS = 5, 60  # of particles
WIDE_COLUMNS = 200  # width without a terminal, so that a row stays on one line
STYLES = {"cyan": 36, "dim": 2}  # ANSI codes


def console(*, stderr: bool = False) -> Console:
    """A rich console: colours on a terminal, plain wide text elsewhere."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDE_COLUMNS
    return Console(file=stream, highlight=False, emoji=False, width=width)


def print_styled(text: str, style: str, *, stderr: bool = False) -> None:
    """Prints a line in a style, "cyan" or "dim", on a terminal with colours; plain elsewhere."""
    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        text = f"\x1b[{STYLES[style]}m{text}\x1b[0m"
    print(text, file=stream, flush=True)


def notice(text: str) -> None:
    """Prints a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Prints one line of JSON on standard output."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


class Results:
    """A file of JSON lines; each is written whole or not at all.

    A context manager: removes a new file without lines at the end. Raises DataError for an existing
    file, CapacityError if a line cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.count = path, 0
        self._file: int | None = None
        if path is None:
            return
        if path.is_file() and path.stat().st_size:
            raise DataError(f"{path} exists and is not empty; give --out another name")
        self._is_new = not path.exists()
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise DataError(
                f"cannot write {path}: {error.strerror}; give --out another place"
            ) from None

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line, whole or not at all."""
        if self._file is None:
            return
        start = os.lseek(self._file, 0, os.SEEK_END) if os.path.isfile(self.path or "") else None
        line = json.dumps(record, ensure_ascii=False) + "\n"
        left = line.encode(errors="backslashreplace")  # \udcff is valid JSON
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            if start is not None:
                os.ftruncate(self._file, start)
            raise CapacityError(
                f"cannot write {self.path}: {error.strerror}; {self._kept(error)}"
            ) from None
        self.count += 1

    def close(self) -> None:
        """Closes the file; removes it if it is new and empty."""
        if self._file is None:
            return
        is_empty = not self.count and not os.fstat(self._file).st_size
        os.close(self._file)
        self._file = None
        if self.path and self._is_new and is_empty:
            with suppress(OSError):
                self.path.unlink()

    def _kept(self, error: OSError) -> str:
        if not self.count:
            return f"nothing was written before; {write_advice(error)}, or give --out another place"
        are = "is" if self.count == 1 else "are"
        return f"the {counted(self.count, 'result')} written before {are} kept"


def sample_record(sample: Sample, prompt: str | list[int], seed: int, call: str) -> dict[str, Any]:
    """A finished sample as JSON, with all that is needed to repeat it."""
    record: dict[str, Any] = {
        "prompt_index": sample.prompt_index,
        "index": sample.index,
        "prompt": prompt,
        "text": sample.text,
        "tokens": sample.tokens,
        "finish": sample.finish,
        "lossless": sample.lossless,
        "seed": seed,
        "stats": sample.stats.to_dict(),
        "call": call,
    }
    if sample.logprobs is not None:
        record["logprobs"] = [
            {str(token): round(value, 6) for token, value in top.items()} for top in sample.logprobs
        ]
    if sample.constraint is not None:
        record["constraint"] = sample.constraint.to_dict()
    return record


def logprob_lines(sample: Sample, decode: Callable[[list[int]], str]) -> list[str]:
    """One line per token: its log-probability, then the likeliest other tokens."""

    def shown(token: int) -> str:
        return repr(decode([token]) or f"id {token}")  # special tokens have no text

    lines = ["log-probability and token, then other likely ones:"]
    for token, top in zip(sample.tokens, sample.logprobs or [], strict=True):
        others = [f"{shown(t)} {value:.2f}" for t, value in top.items() if t != token]
        lines.append(f"{top[token]:8.2f} {shown(token):14} {'  '.join(others)}".rstrip())
    return lines


def invalid_reason(sample: Sample) -> str:
    """Why a constraint does not allow a finished text, as a line."""
    reason = sample.constraint.error or sample.constraint.missing
    if sample.finish == "length":
        reason = reason or f"it was cut after {counted(len(sample.tokens), 'token')}"
        reason += "; raise --max-new-tokens"
    default = "no allowed token can follow; check constraints, stop texts and banned tokens"
    return f"the text is not valid: {reason or default}"


def particle_lines(report: Report) -> list[str]:
    """The particles of a sample as text: how many, and the shares of their texts."""
    from forerun.constraints._report import by_text

    particles = report.particles or ()
    if report.logw == -math.inf:
        return ["no particle reached an allowed text; more particles or tokens may help"]
    shares = by_text(particles)
    lines = [
        f"{counted(len(shares), 'text')} among {counted(len(particles), 'particle')}; "
        f"log probability of allowed texts: {report.logw:.2f}"
    ]
    for text, weight in list(shares.items())[:SHOWN_TEXTS]:
        shown = text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."
        lines.append(f"{weight:8.3f}  {shown!r}")
    return lines


def stats_lines(stats: Stats, num_samples: int, seconds: float) -> list[str]:
    """Statistics as text; definitions in docs/structure.md."""
    cut = f", {counted(stats.cut, 'token')} cut off by stop strings" if stats.cut else ""
    lines = [
        f"{counted(num_samples, 'sample')}, {counted(stats.generated, 'token')} in "
        f"{seconds:.1f} s: {stats.generated / max(seconds, 1e-9):.1f} tokens/s",
        f"tau {stats.tau:.2f} tokens per pass ({counted(stats.passes, 'pass', 'passes')}{cut}), "
        f"acceptance {stats.acceptance_rate:.1%} of {stats.drafted} drafted, "
        f"{stats.examined_rate:.1%} of {stats.examined} examined",
        "time " + time_split(stats),
    ]
    if stats.per_position:
        shown = [f"{i}: {rate:.2f}" for i, rate in enumerate(stats.per_position[:10], start=1)]
        lines.append("accepted at depth, share of all passes: " + "  ".join(shown))
    return lines


def time_split(stats: Stats) -> str:
    """Shares of the engine's time by phase, as text."""
    total = sum(stats.seconds.values()) or 1.0
    names = {"draft": "draft", "forward": "target pass", "verify": "verify", "other": "other"}
    return ", ".join(
        f"{label} {stats.seconds.get(name, 0.0) / total:.0%}" for name, label in names.items()
    )
