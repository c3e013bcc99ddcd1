"""Prompts and running text for the training of draft models."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forerun.api import Model
from forerun.assets import MODELS
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, DataError
from forerun.models.tokenizer import Tokenizer
from forerun.ngrams.index.build.documents import (
    BadRecord,
    Reading,
    list_sources,
    read,
    reading,
)
from forerun.tasks.reasoning import MIX, ReasoningTask
from forerun.training.data.documents import Batches, Documents
from forerun.training.data.mixture import PackedBatches, windows
from forerun.training.drafts.acceptance import Rows, held_out_acceptance
from forerun.training.generate import generate_records, temperatures
from forerun.training.live import LiveBatches, draw_from_module
from forerun.training.processes import all_threads, is_first_process
from forerun.training.progress import Watch, silent
from forerun.training.records import read_records
from forerun.utils.files import read_lines

log = logging.getLogger("forerun")
MIN_PROMPTS = 10
HELD_OUT = 10  # every tenth prompt is held out
MAX_HELD_TOKENS = 20_000  # of held-out prompts and answers
MAX_LOGITS = 2**27  # of a batch in an evaluation, 512 MiB in float32
GRID = (0.0, 0.6, 0.8, 1.0)  # temperatures of answers
MAX_TEXT_TOKENS = 20_000_000  # of running text that is read
MAX_TEXT_BYTES = 8 * MAX_TEXT_TOKENS  # of running text that is hashed
MAX_LIVE_TOKENS = 128  # of an answer that the draft generates
PIECE = 4000  # characters of a text that are tokenised at once
COLUMNS = {"greedy", "file", "phase", "step"}  # of reports, next to the domains
FORM = 'expected a JSON object per line with "prompt", and optionally "answer" and "domain"'


@dataclass(frozen=True)
class Prompt:
    """A prompt, its reference answer if there is one, and its domain for the report."""

    text: str
    answer: str = ""
    domain: str = "all"


@dataclass(kw_only=True)
class DraftData:
    """Prompts, the target's answers to them, and batches for each phase of training."""

    target: Model
    prompts: list[Prompt]
    folder: Path  # of the answers
    width: int = 512  # tokens per row
    max_tokens: int = 256  # of an answer
    micro_tokens: int = 4096
    micro_batches: int = 2  # per step
    by_text: bool = False  # the loss of answers is a mean over texts, not over tokens
    seed: int = 0
    _texts: dict[Path, Documents] = field(default_factory=dict, init=False, repr=False)
    _held_rows: Rows = field(default_factory=dict, init=False, repr=False)  # of the target

    def __post_init__(self) -> None:
        self.ids = [self.target.prompt_ids(prompt.text) for prompt in self.prompts]
        self.domains = {i: prompt.domain for i, prompt in enumerate(self.prompts)}
        self.kept = [i for i in range(len(self.ids)) if i % HELD_OUT]  # prompts to train on

    def generate(self, top_k: int, batch: int, watch: Watch = silent) -> None:
        """Generates the missing answers, then reads all."""
        grid = temperatures(GRID, max_new_tokens=self.max_tokens)
        how: dict[str, Any] = {"seed": self.seed, "batch": batch, "top_k": top_k, "watch": watch}
        generate_records(self.target, self.ids, self.folder, grid, **how)
        self.read()

    def read(self) -> None:
        """Reads the answers and splits them by prompt."""
        self.records = read_records(self.folder, self.target)
        self.numbers = self.records.numbers
        assert self.numbers is not None
        held = _mixed(np.flatnonzero(self.numbers % HELD_OUT == 0))
        few = np.cumsum(self.records.lengths()[held]) <= MAX_HELD_TOKENS
        self.held = np.sort(held[few] if few.any() else held[:1])
        self.trained = np.flatnonzero(self.numbers % HELD_OUT)

    @property
    def held_prompts(self) -> list[list[int]]:
        """Token ids of the held-out prompts, in random order."""
        return [self.ids[i] for i in _mixed(np.arange(0, len(self.ids), HELD_OUT))]

    def acceptance(self, draft: Any, teacher: Any) -> dict[str, float]:
        """Held-out acceptance of a draft in training, all and by domain."""
        budget = min(self.micro_tokens, MAX_LOGITS // draft.config.vocab_size)
        draft.eval()
        try:
            with all_threads():
                return held_out_acceptance(
                    draft, teacher, self.records, self.held, self.domains, budget, self._held_rows
                )
        finally:
            draft.train()

    def text(self, path: Path | None) -> Batches:
        """Batches of running text; without a path, of the target's answers with their prompts."""
        how: dict[str, Any] = {"budget": self.micro_tokens, "seed": self.seed}
        how |= {"accumulate": self.micro_batches}
        if path is None:
            return PackedBatches(self.records, width=self.width, only=self.trained, **how)
        return Batches(self.running(path), **how)

    def running(self, path: Path) -> Documents:
        """Running text in rows, read once. Raises DataError."""
        if path not in self._texts:
            tokenizer = self.target.tokenizer
            self._texts[path] = running_text(tokenizer, path, self.width, MAX_TEXT_TOKENS)
        return self._texts[path]

    def references(self) -> Documents:
        """The prompts with their reference answers. Raises ConfigError if one has none."""
        return reference_answers(self.target, self.prompts, self.max_tokens)

    def alignment(self, kind: str, module: Any) -> Batches | LiveBatches:
        """Batches of answers: "target", "fixed", "on_policy" or "mixed" (DistillSpec).

        module: the draft in training, which generates on-policy answers.
        """
        how: dict[str, Any] = {"budget": self.micro_tokens, "seed": self.seed + 1}
        how |= {"prompt_weight": 0.0, "by_text": self.by_text}
        if kind in ("target", "fixed"):
            documents, only = self.records, self.trained
            if kind == "fixed":
                documents = self.references()
                only = np.array(self.kept)
            how |= {"accumulate": self.micro_batches}
            return PackedBatches(documents, width=self.width, only=only, **how)
        sampling = Sampling(temperature=1.0, max_new_tokens=min(MAX_LIVE_TOKENS, self.max_tokens))
        draw = draw_from_module(module, self.target.tokenizer, sampling)
        if kind == "mixed":
            how |= {"answers": [self.answers(i) for i in self.kept], "share": 0.5}
        return LiveBatches([self.ids[i] for i in self.kept], draw, **how)

    def answers(self, prompt: int) -> list[list[int]]:
        """The target's answers to a prompt."""
        start, places = len(self.ids[prompt]), np.flatnonzero(self.numbers == prompt)
        return [self.records.document(int(i))[start:].tolist() for i in places]


def read_prompts(path: Path | None, num: int, model: Model) -> list[Prompt]:
    """Up to `num` prompts of a JSON-lines file; without a file, the embedded model's own task.

    Prompts that do not fit the model's context are left out, and a warning says so. Raises
    DataError for an unreadable file, ConfigError for too few prompts.
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
    found, left_out = list[Prompt](), list[int]()
    for number, prompt in _lines(path):
        if fits_context(model, prompt.text):
            found.append(prompt)
        else:
            left_out.append(number)
        if len(found) == num:
            break
    if left_out and is_first_process():
        log.warning(
            f"{path}: {len(left_out)} prompts are left out, the first in line {left_out[0]}: they "
            f"do not fit the target's context of {model.target.context} tokens"
        )
    if len(found) < MIN_PROMPTS:
        raise ConfigError(
            f"{path} has {len(found)} prompts; a draft needs at least {MIN_PROMPTS}, some of them "
            "for evaluation"
        )
    return found


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """The numbers in a fixed random order: prompts may be sorted by domain."""
    return np.random.default_rng(0).permutation(numbers)


def _lines(path: Path) -> Iterator[tuple[int, Prompt]]:
    """The prompts of a file with the numbers of their lines."""
    try:
        lines = read_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); {FORM}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number} is not JSON ({error}); {FORM}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number} is not an object; {FORM}")
        text, domain = row.get("prompt"), str(row.get("domain", "all"))
        if not isinstance(text, str) or not text:
            what = "no prompt" if text is None else f"the prompt {text!r}, which is not text"
            what = "an empty prompt" if text == "" else what
            raise DataError(f"{path}:{number} has {what}; {FORM}")
        if domain in COLUMNS:
            raise DataError(
                f"{path}:{number} has the domain {domain!r}, which is a column of the report; use "
                "another name"
            )
        yield number, Prompt(text, str(row.get("answer", "")), domain)


def content_hash(path: Path) -> str:
    """The first digits of the SHA-256 of a file. Raises DataError."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); {FORM}") from error


def text_hash(path: Path) -> str:
    """The first digits of the SHA-256 of what `running_text` may read. Raises DataError."""
    total, left = hashlib.sha256(), MAX_TEXT_BYTES
    for source in list_sources([path]):
        for file in _files(source):
            with reading(file), file.open("rb") as opened:
                while left and (piece := opened.read(min(left, 1 << 20))):
                    total.update(piece)
                    left -= len(piece)
    return total.hexdigest()[:16]


def _files(source: Path) -> list[Path]:
    """A file, or the files of a dataset's folder."""
    return sorted(filter(Path.is_file, source.rglob("*"))) if source.is_dir() else [source]


def fits_context(model: Model, text: str) -> bool:
    """Whether a prompt leaves room for an answer in the target's context."""
    return len(model.prompt_ids(text)) < model.target.context


def reference_answers(model: Model, prompts: list[Prompt], max_tokens: int) -> Documents:
    """The prompts with their reference answers, for training on fixed data."""
    if not all(prompt.answer for prompt in prompts):
        raise ConfigError('data "fixed" needs an "answer" for each prompt; use data "target"')
    end = sorted(model.tokenizer.eos_ids)[:1]
    pairs = []
    for prompt in prompts:
        ids, answer = model.prompt_ids(prompt.text), model.tokenizer.encode_inside(prompt.answer)
        pairs.append(([*ids, *[*answer, *end][:max_tokens]], len(ids)))
    return Documents.of(pairs)


def running_text(tokenizer: Tokenizer, path: Path, width: int, max_tokens: int) -> Documents:
    """Rows of `width` tokens of all documents below a path, up to `max_tokens` tokens.

    Raises DataError if a document cannot be read.
    """
    texts, num = list[tuple[list[int], int]](), 0
    for record in read(list_sources([path]), Reading()):
        if isinstance(record, BadRecord):
            raise DataError(f"{record.where}: {record.reason}; remove or repair it")
        ids = list[int]()
        for at in range(0, len(record.text), PIECE):
            ids += tokenizer.encode_inside(record.text[at : at + PIECE])
            if len(ids) >= max_tokens - num:
                break
        texts.append((ids[: max_tokens - num], 0))
        num += len(texts[-1][0])
        if num >= max_tokens:
            break
    separator = min(tokenizer.eos_ids, default=0)
    found = windows(Documents.of(texts), width, separator)
    if not len(found):
        raise DataError(f"{path} has no text; give files with text")
    return found
