"""Reads recorded prompts and samples from JSON or JSON lines, also gzip-compressed.

A record is an object with a prompt and a text or a list of texts; common field names are detected.
Records with one text each are grouped by prompt, so the output of `forerun generate --out` works.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import DataError
from forerun.models.tokenizer import Tokenizer
from forerun.utils.files import parsed

PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input")
THOUGHTS = ("thinking", "reasoning", "reasoning_content")
TEXTS = (
    *("text", "output", "outputs", "response", "responses", "completion", "completions"),
    *("generated_text", "samples", "code", "answer", "solution"),
)
GZIP = b"\x1f\x8b"


@dataclass
class Recording:
    """One prompt and its samples, in file order."""

    prompt: str
    texts: list[str]


@dataclass(frozen=True)
class Trace:
    """A prompt and its samples as token ids; the prompt is not empty."""

    prompt: list[int]
    samples: list[list[int]]


def read_recordings(
    paths: Many[Path], prompt_field: str = "", text_fields: Many[str] = ()
) -> list[Recording]:
    """All prompts of the files. text_fields: several fields are joined, as thoughts and answer.

    Raises DataError with file and record.
    """
    found: list[Recording] = []
    for path in paths:
        singles: dict[str, Recording] = {}  # one prompt in two files is two recordings
        for number, record in enumerate(_records(path), start=1):
            where = f"{path} record {number}"
            prompt = _prompt(where, record, prompt_field)
            texts = _texts(where, record, text_fields)
            if len(texts) == 1 and prompt in singles:
                singles[prompt].texts += texts
                continue
            found.append(Recording(prompt, texts))
            if len(texts) == 1:
                singles[prompt] = found[-1]
    return found


def to_traces(
    recordings: Many[Recording], tokenizer: Tokenizer, max_tokens: int | None = None
) -> list[Trace]:
    """Token ids; samples are cut to `max_tokens`, empty ones dropped."""
    traces = []
    for recording in recordings:
        prompt = tokenizer.encode(recording.prompt) or [0]
        samples = [tokenizer.encode(text, special=False)[:max_tokens] for text in recording.texts]
        traces.append(Trace(prompt, [sample for sample in samples if sample]))
    return [trace for trace in traces if trace.samples]


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model folder, hub id or name, or of a single tokenizer.json (.gz).

    Raises ModelError, DataError.
    """
    from forerun.models.paths import located

    path = Path(located(name)).expanduser()
    alone = path if path.is_file() else path / "tokenizer.json.gz"
    if not alone.is_file():
        return Tokenizer.load(str(path) if path.is_dir() else name)
    from tokenizers import Tokenizer as Inner
    from transformers import PreTrainedTokenizerFast

    try:
        inner = Inner.from_str(_text(alone))
    except Exception as cause:  # the Rust side raises Exception itself
        raise DataError(f"{alone} is not a tokenizer.json ({cause}); use a model folder") from None
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner))


def _text(path: Path) -> str:
    """UTF-8 text of a file, decompressed if necessary. Raises DataError."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data.startswith(GZIP) else data
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at {error.start}") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {path}: {reason}; check the path") from None


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file: JSON lines, a list, or an object with a list of objects in it."""
    text = _text(path)
    try:
        values = [parsed(text)]
    except ValueError as error:
        values = list(_lines(path, text, error))
    if len(values) == 1:
        values = _unwrapped(values[0])
    objects = [value for value in values if isinstance(value, dict)]
    if not objects or len(objects) < len(values):
        raise DataError(
            f"{path} must contain only JSON objects, one per line or in a list, each with a prompt "
            "and its texts"
        )
    yield from objects


def _lines(path: Path, text: str, whole: ValueError) -> Iterator[Any]:
    """The values of JSON lines. whole: the error of the text as one value.

    Raises DataError with the line.
    """
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    for number, line in lines:
        try:
            yield parsed(line)
        except ValueError as error:
            if number == lines[0][0] and isinstance(error, json.JSONDecodeError):
                both = f"{whole}; nor is line {number} by itself: {error.msg}"
                raise _no_json(path, both) from None
            raise _no_json(f"{path} line {number}", error) from None


def _no_json(where: Path | str, error: ValueError | str) -> DataError:
    return DataError(
        f"{where} is not JSON: {error}; write one object per line, such as "
        '{"prompt": "...", "text": "..."}'
    )


def _unwrapped(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        for inner in value.values():
            if isinstance(inner, list) and inner and all(isinstance(v, dict) for v in inner):
                return inner
    return [value]


def _prompt(where: str, record: dict[str, Any], name: str) -> str:
    names = [name] if name else [known for known in PROMPTS if known in record]
    value = record.get(names[0]) if names else None
    if not isinstance(value, str):
        raise DataError(
            f"{where} has no text in {name or ', '.join(PROMPTS)}; select the prompt with "
            f"--prompt-field, one of: {', '.join(record)}"
        )
    return value


def _texts(where: str, record: dict[str, Any], names: Many[str]) -> list[str]:
    """The samples of a record: fields of equal length, joined sample by sample."""
    if not names:
        answers = [known for known in TEXTS if _as_texts(record.get(known))][:1]
        thoughts = [known for known in THOUGHTS if _as_texts(record.get(known))][:1]
        names = [*thoughts, *answers]
    columns = [_as_texts(record.get(name)) for name in names]
    if not columns or not all(columns) or len({len(column) for column in columns}) > 1:
        raise DataError(
            f"{where} has no text or list of texts in {' + '.join(names) or ', '.join(TEXTS)}; "
            f"select the texts with --text-field, one of: {', '.join(record)}"
        )
    return ["\n".join(filter(None, parts)) for parts in zip(*columns, strict=True)]


def _as_texts(value: Any) -> list[str]:
    """A text or a list of texts as a list, null as ""; [] for other values."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not all(v is None or isinstance(v, str) for v in value):
        return []
    return [v or "" for v in value]
