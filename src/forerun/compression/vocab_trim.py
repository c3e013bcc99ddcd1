"""Reduces the head of a draft model to the tokens that its target uses most.

Goel et al., "VocabTrim: Vocabulary Pruning for Efficient Speculative Decoding in LLMs", 2025.
Tokens are counted in texts that the target generates; the head keeps the k most frequent ones and
all special tokens, the input embedding stays whole. Verification is unchanged, with q = 0 for other
tokens, so the output stays exact for every k. k is the size with the largest memory-bound speed-up
on held-out prompts:

    MBSU = tau / (c gamma + 1),  c = bytes that the draft reads per step / those of the target

An embedding is looked up row by row, so its bytes count in neither; those of a head count whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, ModelError
from forerun.models.paths import is_gguf
from forerun.models.vocab_map import VocabMap
from forerun.registry import File, ModelName
from forerun.tasks.file import FileTask
from forerun.utils.files import write_folder
from forerun.utils.text import counted

if TYPE_CHECKING:
    import torch

    from forerun.api import Model
    from forerun.core.growing import Path as Tokens
    from forerun.core.records import Sequence
    from forerun.runner.model_runner import ModelRunner

T = TypeVar("T")
SOURCES = "target", "draft", "raw"
MAX_SHRINK = 64  # of the sizes that `keep=auto` tries: V, V / 2, V / 4 and so on
MIN_HELD_OUT = 16  # prompts to measure sizes on; a quarter of those that are given
WEIGHTS = ".safetensors", ".bin", ".gguf"
OF_THE_WHOLE = "README.md", "draft.json", "plan.json"  # about the draft with its whole head
CARD = """# {name} with a reduced head

A copy of the draft model `{name}` with a head of {kept:,} of {vocab:,} tokens (VocabTrim), counted
in {about}. Row j of the head is token j + d2t[j]; t2d says which tokens have a row.

It only drafts, in forerun: `--drafter draft_model:model=FOLDER`. transformers, vLLM and llama.cpp
need the draft with its whole head.
"""


class VocabTrim:
    """Writes a copy of a draft model with a smaller head, as `forerun compress vocab-trim`.

    calibrate: prompts as JSON lines, or one as a text file; in the target's chat template, if it
    has one.
    model: target that the draft serves.
    keep: number of tokens in addition to the special ones, or auto: the size with the highest MBSU.
    source: what is counted, answers of the target or of the draft, or raw for the prompts.
    tokens: maximum length of a generated text.
    temperature: of the generated texts.
    gamma: length of a draft in the measurements.
    """

    spellings: ClassVar[Mapping[str, str]] = {"model": "-m", "temperature": "-t"}
    minimums: ClassVar[Mapping[str, float]] = {"tokens": 1, "temperature": 0, "gamma": 1}

    def __init__(
        self,
        *,
        calibrate: File,
        model: ModelName = "reasoner",
        keep: str = "auto",
        source: str = "target",
        tokens: int = 128,
        temperature: float = 0.0,
        gamma: int = 4,
    ) -> None:
        if keep != "auto" and not (keep.isdecimal() and int(keep)):
            raise ConfigError(f"keep must be auto or a number of tokens above 0, got {keep!r}")
        if source not in SOURCES:
            raise ConfigError(f"source must be one of {', '.join(SOURCES)}, got {source!r}")
        if min(tokens, gamma) < 1:
            raise ConfigError(f"tokens and gamma must be at least 1, got {tokens} and {gamma}")
        self.calibrate, self.model, self.keep, self.source = calibrate, model, keep, source
        self.sampling = Sampling(temperature=temperature, max_new_tokens=tokens, seed=0)
        self.gamma = gamma

    def trim(self, source: Path, out: Path) -> Iterator[str]:
        """Reads the draft in `source`, writes the smaller one to `out`; yields lines of a report.

        Raises ModelError for a draft that cannot be reduced.
        """
        from forerun.api import load
        from forerun.models.draft_link import load_draft

        task = FileTask(self.calibrate)
        target = load(self.model)
        prompts = [target.prompt_ids(task.example(i).prompt) for i in range(len(task))]
        draft = load_draft(str(source), "auto", "auto", 256, target.tokenizer)
        if getattr(draft, "model", None) is None or not hasattr(draft, "head_map"):
            raise ModelError(f"{source} runs on transformers, so its head cannot be reduced")
        if draft.head_map is not None:
            raise ModelError(f"{source} has a reduced head already; use the original draft")
        fit, held_out = split(prompts)
        always = always_kept(target)
        size = int(self.keep) if self.keep != "auto" else 0
        if size + len(always) >= draft.vocab_size:
            raise ConfigError(
                f"keep {size:,} and {len(always)} special tokens leave nothing to remove of "
                f"{draft.vocab_size:,} tokens; use a smaller number, or auto"
            )
        counts = self.count(target, draft, fit)
        different = np.count_nonzero(counts)
        yield f"counted {counts.sum():,} tokens, {different:,} of them different"
        if self.keep == "auto":
            if len(held_out) < MIN_HELD_OUT:
                yield (
                    f"only {counted(len(held_out), 'prompt')} to measure sizes on; give "
                    f"{4 * MIN_HELD_OUT} or more to --calibrate, or --keep a number"
                )
            sweep = self.sweep(target, draft, counts, always, held_out)
            yield from (str(point) for point in sweep)
            size = best(sweep).size
        elif size > different:
            yield (
                f"{size - different:,} of the {size:,} tokens to keep do not occur in the counted "
                "texts; give a smaller --keep or more prompts"
            )
        kept = top_tokens(counts, size, always)
        texts = "prompts" if self.source == "raw" else f"answers of the {self.source} to prompts"
        about = f"{len(fit)} {texts} of {Path(self.calibrate).name}"
        write_trimmed(source, out, kept, draft.vocab_size, about)
        yield f"{out}: a head of {len(kept):,} of {draft.vocab_size:,} tokens"

    def count(self, target: Model, draft: ModelRunner, prompts: Many[list[int]]) -> np.ndarray:
        """How often each token occurs in the calibration texts, int64 [V]."""
        from forerun.api import Model

        if self.source == "raw":
            texts: Iterable[list[int]] = prompts
        else:
            writer = target
            if self.source == "draft":
                writer = Model(draft, target.tokenizer)
            found = writer.generate(prompts, self.sampling, drafter="none")
            texts = [sample.tokens for result in found for sample in result.samples]
        counts = np.zeros(draft.vocab_size, np.int64)
        for ids in texts:
            known = np.array([i for i in ids if i < len(counts)], np.int64)
            counts += np.bincount(known, minlength=len(counts))
        return counts

    def sweep(
        self,
        target: Model,
        draft: ModelRunner,
        counts: np.ndarray,
        always: Many[int],
        prompts: Many[list[int]],
    ) -> list[Point]:
        """tau and MBSU of each size on these prompts."""
        vocab, points = draft.vocab_size, []
        for shrink in (1 << i for i in range(MAX_SHRINK.bit_length())):
            if vocab // shrink < 1:
                break
            kept = top_tokens(counts, vocab // shrink, always)
            tau = self.tau(target, ReducedHead(draft, kept), prompts)
            c = bytes_read(draft, len(kept)) / bytes_read(target.target)
            points.append(Point(vocab // shrink, len(kept), tau, c, mbsu(tau, c, self.gamma)))
        return points

    def tau(self, target: Model, draft: ReducedHead, prompts: Many[list[int]]) -> float:
        """Tokens per target pass with drafts of gamma tokens."""
        from forerun.drafters.draft_model import DraftModel
        from forerun.engine.stats import Stats

        total = Stats()
        for result in target.generate(
            prompts,
            self.sampling,
            drafter=DraftModel(model=draft, tokenizer=target.tokenizer),  # type: ignore[arg-type]
            controller=f"fixed:nodes={self.gamma},depth={self.gamma}",
        ):
            total.add(result.stats)
        return total.tau


@dataclass(frozen=True)
class Point:
    """One size of the head: tokens by frequency, rows with the special ones, and what it gives."""

    size: int
    rows: int
    tau: float
    c: float
    mbsu: float

    def __str__(self) -> str:
        return f"k {self.size:,}: tau {self.tau:.3f}, c {self.c:.3f}, MBSU {self.mbsu:.3f}"


class ReducedHead:
    """A loaded draft model that gives the logits of some tokens only."""

    exits = None  # a sorted draft is measured with all its layers

    def __init__(self, inner: ModelRunner, kept: np.ndarray) -> None:
        self.inner, self._kept = inner, kept
        self.head_map = VocabMap.subset(kept, inner.vocab_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def rows_at(self, requests: Many[tuple[Sequence, Tokens]]) -> torch.Tensor:
        """As `Runner.rows_at`: logits [n, k]."""
        return self.inner.rows_at(requests)[:, self._kept]


def mbsu(tau: float, c: float, gamma: int) -> float:
    """Memory-bound speed-up: tokens per target pass over the cost of a step in target passes."""
    return tau / (c * gamma + 1)


def best(points: Iterable[Point]) -> Point:
    """The size with the largest MBSU; of equal ones the smallest head."""
    return max(points, key=lambda point: (point.mbsu, -point.rows))


def bytes_read(model: Any, rows: int | None = None) -> int:
    """Bytes of weights that one step reads; rows: of a reduced head."""
    decoder = model.model
    if not hasattr(decoder, "linears"):  # of transformers
        table = decoder.get_input_embeddings().weight
        own = {id(weight): weight.nbytes for weight in decoder.parameters()}
        is_tied = decoder.config.get_text_config().tie_word_embeddings
        return sum(own.values()) - (0 if is_tied else table.nbytes)
    whole = sum(part.nbytes for part in [*decoder.linears(), *decoder.norms()])
    head = decoder.head
    return whole if rows is None else whole - head.nbytes + head.nbytes * rows // head.shape[0]


def split(prompts: list[T]) -> tuple[list[T], list[T]]:
    """Prompts to count in, and every fourth one to measure on, of fewer than four the last one.

    A single one serves both.
    """
    if len(prompts) < 4:
        return prompts[:-1] or prompts, prompts[-1:]
    return [prompt for i, prompt in enumerate(prompts) if i % 4 != 3], prompts[3::4]


def always_kept(target: Model) -> list[int]:
    """End tokens and all other special tokens: chat markers too."""
    return sorted({*target.tokenizer.eos_ids, *target.tokenizer.specials})


def top_tokens(counts: np.ndarray, size: int, always: Many[int]) -> np.ndarray:
    """The `size` most frequent tokens and those always kept, ascending; of equal ones the first."""
    order = np.argsort(-counts, kind="stable")[:size]
    known = [token for token in always if token < len(counts)]
    return np.union1d(order, np.array(known, np.int64)).astype(np.int64)


def write_trimmed(
    source: Path, out: Path, kept: np.ndarray, vocab: int, about: str = "given tokens"
) -> None:
    """Writes a checkpoint with the rows `kept` of its head, and d2t and t2d, all or nothing.

    about: where the tokens come from, for the card. Raises CapacityError if the disk has no room.
    """
    import torch
    from safetensors.torch import save_file

    from forerun.models.shards import shard_files, tensors
    from forerun.models.weight_map import canonical

    if any(map(is_gguf, shard_files(source))):
        raise ModelError(f"{source} is a GGUF file; give the checkpoint in safetensors")
    held = dict(tensors(shard_files(source)))
    by_name = {canonical(name): name for name in held}
    table = by_name.get("embed_tokens.weight") or by_name.get("wte.weight")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    full = held.pop("lm_head.weight", None)
    if full is None:
        if table is None:
            raise ModelError(f"{source} has neither a head nor an embedding that it is tied to")
        full = held[table]
    head = VocabMap.subset(kept, vocab)
    held["lm_head.weight"] = full[torch.from_numpy(kept)].contiguous()
    held["d2t"], held["t2d"] = torch.from_numpy(head.d2t), torch.from_numpy(head.t2d)
    config |= {"tie_word_embeddings": False, "draft_vocab_size": len(kept)}

    def write(part: Path) -> None:
        for path in source.iterdir():
            is_left_out = path.name in OF_THE_WHOLE or path.name.endswith(".index.json")
            if path.is_file() and path.suffix not in WEIGHTS and not is_left_out:
                shutil.copyfile(path, part / path.name)
        card = CARD.format(name=source.name, kept=len(kept), vocab=vocab, about=about)
        (part / "README.md").write_text(card, encoding="utf-8")
        save_file(held, part / "model.safetensors", metadata={"format": "pt"})
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    write_folder(out, write)
