"""Tokenised problems of the reasoning task: their tokenizer, and shards on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from forerun.errors import ConfigError
from forerun.tasks.reasoning import ReasoningTask
from forerun.training.processes import in_processes

from .documents import Documents, load_documents, save_documents
from .tokenizer import train_tokenizer

SHARD = 8000  # problems


@dataclass(frozen=True)
class Problems:
    """The first `num` training problems of a seed, in a folder."""

    folder: Path
    seed: int
    num: int
    levels: tuple[int, ...]  # of the problems, cyclically
    num_tokenizer: int  # number of problems that the tokenizer is trained on
    vocab_size: int
    context: int

    @property
    def task(self) -> ReasoningTask:
        """The task that generates them."""
        return ReasoningTask("train", self.levels, self.seed)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The folder's tokenizer; trained on the first problems if it does not exist."""
        folder, task = self.folder / "tokenizer", self.task
        if not (folder / "tokenizer.json").exists():
            examples = (task.example(i) for i in range(self.num_tokenizer))
            texts = (e.prompt + e.reference for e in examples)
            made = train_tokenizer(texts, self.vocab_size, self.context)
            folder.mkdir(parents=True, exist_ok=True)
            made.save_pretrained(folder)
        return PreTrainedTokenizerFast.from_pretrained(folder)

    def make(self, workers: int, on_shard: Callable[[int, int], None] | None = None) -> None:
        """Writes missing and incomplete shards."""
        missing = [first for first in self._firsts() if not self._is_made(first)]
        for done, _ in enumerate(in_processes(partial(_write, self), missing, workers), 1):
            if on_shard:
                on_shard(done, len(missing))

    def check(self) -> None:
        """Raises ConfigError if the folder has shards of other problems."""
        if not self.shard(0).exists():
            return
        found = load_documents([self.shard(0)])
        made = self.tokenise(0, min(len(self.levels), len(found)))
        if any(ids != found.document(i).tolist() for i, (ids, _) in enumerate(made)):
            raise ConfigError(
                f"{self.folder} holds other problems than seed {self.seed} gives in this version; "
                "use the seed and version of that run, or choose another --out"
            )

    def documents(self) -> Documents:
        """Prompt, solution and end token of each problem."""
        return load_documents([self.shard(first) for first in self._firsts()])

    def tokenise(self, first: int, count: int) -> list[tuple[list[int], int]]:
        """(Ids of prompt, solution and end token; prompt length) of problems from `first` on."""
        tokenizer, task = self.tokenizer(), self.task
        examples = [task.example(i) for i in range(first, first + count)]
        prompts = tokenizer([e.prompt for e in examples])["input_ids"]
        solutions = tokenizer([e.reference for e in examples])["input_ids"]
        end = tokenizer.eos_token_id
        return [([*p, *s, end], len(p)) for p, s in zip(prompts, solutions, strict=True)]

    def shard(self, first: int) -> Path:
        """The shard file with first problem `first`."""
        return self.folder / "data" / f"shard-{first:07d}.npz"

    def count(self, first: int) -> int:
        """Number of problems in the shard with first problem `first`."""
        return min(SHARD, self.num - first)

    def _firsts(self) -> range:
        return range(0, self.num, SHARD)

    def _is_made(self, first: int) -> bool:
        path = self.shard(first)
        return path.exists() and len(load_documents([path])) >= self.count(first)


def _write(problems: Problems, first: int) -> None:
    made = problems.tokenise(first, problems.count(first))
    save_documents(problems.shard(first), made)
