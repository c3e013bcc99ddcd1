"""Reads prompts from options, text files, JSON lines and standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence as Many
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

from forerun.assets import as_problem, is_embedded
from forerun.core.sampling import Sampling, from_json
from forerun.errors import ConfigError, DataError, UnknownName
from forerun.utils.files import check_text, parsed

STDIN = "-"
MAX_PROMPT_BYTES = 1 << 30  # of one input: an endless one would fill the memory
READ_BYTES = 1 << 20  # per read
RESULT_FIELDS = {"index", "text", "tokens", "finish", "stats"}  # mark a line of --out


@dataclass(frozen=True)
class Job:
    """One prompt with its sampling and id."""

    prompt: str | list[int]
    sampling: Sampling
    id: str | None = None


def read_jobs(prompts: Many[str], file: Path | None, sampling: Sampling) -> list[Job]:
    """Prompts of the options, then of the file; standard input if there are none.

    "-" as a prompt or as the file is standard input.
    """
    if not prompts and file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError("there is no prompt; give --prompt, --prompt-file, or pipe text in")
        prompts = [STDIN]
    if [*prompts, str(file)].count(STDIN) > 1:
        raise ConfigError(f"{STDIN!r} is given twice; standard input can be read only once")
    jobs: list[Job] = []
    for prompt in prompts:
        jobs += _from_stdin(sampling) if prompt == STDIN else [_from_option(prompt, sampling)]
    if file is not None:
        jobs += _from_stdin(sampling) if str(file) == STDIN else _from_file(file, sampling)
    return jobs


def as_shown(model: str, prompt: str | list[int]) -> str | list[int]:
    """The prompt in the form that the embedded models learned; unchanged for other models."""
    is_text = isinstance(prompt, str) and is_embedded(model)
    return as_problem(prompt) if is_text else prompt  # type: ignore[arg-type]


def from_stdin() -> str:
    """All of standard input. Raises DataError if it is closed, too large or not text."""
    if sys.stdin is None:
        raise DataError("standard input is closed; give the text by an option or in a file")
    return _read("standard input", getattr(sys.stdin, "buffer", sys.stdin))


def _read(where: str, opened: IO[Any]) -> str:
    """All of a file. Raises DataError if it is too large or not text."""
    pieces, size = [opened.read(0)], 0
    while piece := opened.read(READ_BYTES):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_PROMPT_BYTES:
            raise DataError(
                f"{where} has more than {MAX_PROMPT_BYTES >> 20} MiB; split it into several files"
            )
    data = pieces[0].join(pieces)
    return data if isinstance(data, str) else _decoded(where, data)


def _decoded(where: str, data: bytes) -> str:
    """Text of UTF-8 bytes, without byte order mark and Windows line ends. Raises DataError."""
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        what = f"byte 0x{data[error.start]:02x} after {error.start} bytes"
        raise DataError(f"{where} is not UTF-8 text: {what}; save it as UTF-8") from None


def _from_option(prompt: str, sampling: Sampling) -> Job:
    if not prompt.strip():
        raise DataError(
            "--prompt is empty or blank; write a text after it, or - for standard input"
        )
    check_text("--prompt takes UTF-8, but what came", prompt)
    return Job(prompt, sampling)


def _from_stdin(sampling: Sampling) -> list[Job]:
    """Prompts of standard input: JSON lines if the first line is an object with a prompt."""
    text = from_stdin()
    jobs = _jobs("standard input", text, is_jsonl(text), sampling)
    if not jobs:
        raise DataError(
            "standard input is empty or blank: it holds no prompt; pipe a text in, or give "
            "--prompt TEXT or --prompt-file FILE"
        )
    return jobs


def _from_file(file: Path, sampling: Sampling) -> list[Job]:
    try:
        with file.open("rb") as opened:
            text = _read(str(file), opened)
    except OSError as error:
        raise DataError(
            f"cannot read prompt file {file}: {error.strerror}; check the path"
        ) from None
    is_lines = file.suffix == ".jsonl"
    jobs = _jobs(str(file), text, is_lines, sampling)
    if not jobs:
        form = "write one JSON object per line" if is_lines else "write the prompt into it"
        raise DataError(f"prompt file {file} is empty or blank: it holds no prompt; {form}")
    return jobs


def is_jsonl(text: str) -> bool:
    """Whether the first line that is not blank is a JSON object with a prompt."""
    first = text.lstrip().partition("\n")[0]
    try:
        record = json.loads(first) if first.startswith("{") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and "prompt" in record


def _jobs(where: str, text: str, is_lines: bool, sampling: Sampling) -> list[Job]:
    """The prompts of a text; none if it is empty."""
    if not is_lines:
        text = _without_last_break(text)
        return [Job(text, sampling)] if text.strip() else []
    lines = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return [_job(f"{where} line {i}", line, sampling) for i, line in lines]


def _job(where: str, line: str, sampling: Sampling) -> Job:
    """A line such as {"prompt": "...", "temperature": 0.6, "n": 4, "id": "q1"}."""
    try:
        record = parsed(line)
    except ValueError as error:
        raise DataError(
            f'{where} is not JSON: {error}; write an object per line, such as {{"prompt": "..."}}'
        ) from None
    check_text(where, json.dumps(record, ensure_ascii=False))
    prompt = record.pop("prompt", None) if isinstance(record, dict) else None
    if prompt is None or not _is_prompt(prompt):
        raise DataError(f'{where} needs an object with "prompt": a text or a list of token ids')
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise DataError(f"{where} has an empty prompt; expected a text or a list of token ids")
    name = record.pop("id", None)
    if record.keys() >= RESULT_FIELDS:  # a line of --out: only its prompt is used
        record = {}
    known = {f.name for f in fields(Sampling)}
    for key in record:
        if key not in known:
            raise UnknownName.of(f"field in {where}:", key, known | {"prompt", "id"})
    try:
        given = replace(sampling, **from_json(record))
        return Job(prompt, given, None if name is None else str(name))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _is_prompt(prompt: Any) -> bool:
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    return isinstance(prompt, str) or is_ids


def _without_last_break(text: str) -> str:
    """The text without the last line break, which editors and `echo` add."""
    return text.removesuffix("\n").removesuffix("\r")
