"""Prompts and running text for the training of draft models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forerun.api import Model
from forerun.assets import MODELS
from forerun.errors import ConfigError, DataError, ModelError
from forerun.ngrams.index.build.documents import BadRecord, Reading, list_sources, read
from forerun.tasks.reasoning import MIX, ReasoningTask

from .data import Documents
from .mixture import windows

MIN_PROMPTS = 10
PIECE = 4000  # characters of a text that are tokenised at once
FORM = 'expected a JSON object per line with "prompt", and optionally "answer" and "domain"'


@dataclass(frozen=True)
class Prompt:
    """A prompt, its reference answer if there is one, and its domain for the report."""

    text: str
    answer: str = ""
    domain: str = "all"


def read_prompts(path: Path | None, num: int, model: Model) -> list[Prompt]:
    """Up to `num` prompts of a JSON-lines file; without a file, the embedded model's own task.

    Raises DataError for an unreadable file, ConfigError for too few prompts.
    """
    if path is None:
        if model.name not in MODELS:
            raise ConfigError(
                f"prompts are needed to train a draft of {model.name!r}; give a JSON-lines file "
                "with --prompts"
            )
        task = ReasoningTask("train", MIX)
        examples = [task.example(i) for i in range(num)]
        return [Prompt(e.prompt, e.reference, f"level {e.level}") for e in examples]
    found = [prompt for _, prompt in zip(range(num), _lines(path), strict=False)]
    if len(found) < MIN_PROMPTS:
        raise ConfigError(
            f"{path} has {len(found)} prompts; a draft needs at least {MIN_PROMPTS}, some of them "
            "for evaluation"
        )
    return found


def _lines(path: Path) -> Iterator[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); {FORM}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text, domain = row["prompt"], str(row.get("domain", "all"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(f"{path}:{number} is not a prompt ({error!r}); {FORM}") from error
        if not isinstance(text, str) or not text:
            raise DataError(f"{path}:{number} has the prompt {text!r}, not text; {FORM}")
        yield Prompt(text, str(row.get("answer", "")), domain)


def prompt_ids(model: Model, text: str) -> list[int]:
    """A prompt as it is served: in the model's chat template, if it has one."""
    try:
        made = model.chat_prompt(text)
    except ModelError:
        made = text
    return model.tokenizer.encode(made) if isinstance(made, str) else list(made)


def reference_answers(model: Model, prompts: list[Prompt], max_tokens: int) -> Documents:
    """The prompts with their reference answers, for training on fixed data."""
    if not all(prompt.answer for prompt in prompts):
        raise ConfigError('data "fixed" needs an "answer" for each prompt; use data "target"')
    end = sorted(model.tokenizer.eos_ids)[:1]
    pairs = []
    for prompt in prompts:
        ids, answer = prompt_ids(model, prompt.text), model.tokenizer.encode_inside(prompt.answer)
        pairs.append(([*ids, *[*answer, *end][:max_tokens]], len(ids)))
    return Documents.of(pairs)


def running_text(model: Model, path: Path, width: int, max_tokens: int) -> Documents:
    """Rows of `width` tokens of all documents below a path, up to `max_tokens` tokens.

    Raises DataError if a document cannot be read.
    """
    texts, num = list[tuple[list[int], int]](), 0
    for record in read(list_sources([path]), Reading()):
        if isinstance(record, BadRecord):
            raise DataError(f"{record.where}: {record.reason}; remove or repair it")
        cuts = range(0, len(record.text), PIECE)
        ids = [
            i for at in cuts for i in model.tokenizer.encode_inside(record.text[at : at + PIECE])
        ]
        texts.append((ids[: max_tokens - num], 0))
        num += len(texts[-1][0])
        if num >= max_tokens:
            break
    separator = sorted(model.tokenizer.eos_ids)[0] if model.tokenizer.eos_ids else 0
    found = windows(Documents.of(texts), width, separator)
    if not len(found):
        raise DataError(f"{path} has no text; give files with text")
    return found
