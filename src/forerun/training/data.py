"""Training data on disk and in batches: tokenised documents in shards, batched by length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from forerun.errors import DataError
from forerun.utils.files import write_atomically

WIDTH_STEP = 32


@dataclass(frozen=True)
class Documents:
    """Token ids of many documents end to end, where each starts, how much of it is prompt."""

    tokens: np.ndarray  # uint16 (total,)
    starts: np.ndarray  # int64 (num + 1,)
    prompts: np.ndarray  # int64 (num,) prompt length in tokens

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.prompts)

    def lengths(self) -> np.ndarray:
        """Tokens per document (num,)."""
        return np.diff(self.starts)

    def document(self, i: int) -> np.ndarray:
        """Token ids of the i-th document."""
        return self.tokens[self.starts[i] : self.starts[i + 1]]


@dataclass(frozen=True)
class Micro:
    """Documents side by side, padded on the right; a step's weights sum to 1."""

    tokens: torch.Tensor  # int64 (rows, width)
    weights: torch.Tensor  # float32 (rows, width), of the token at that place as a target
    num_tokens: int  # without padding

    def to(self, device: torch.device) -> Micro:
        """The same on another device."""
        tokens = self.tokens.to(device, non_blocking=True)
        return Micro(tokens, self.weights.to(device, non_blocking=True), self.num_tokens)


def save_documents(path: Path, documents: list[tuple[list[int], int]]) -> None:
    """Writes (token ids, prompt length) pairs as one shard."""
    tokens = np.concatenate([np.asarray(ids, dtype=np.uint16) for ids, _ in documents])
    starts = np.cumsum([0] + [len(ids) for ids, _ in documents], dtype=np.int64)
    prompts = np.asarray([prompt for _, prompt in documents], dtype=np.int64)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, tokens=tokens, starts=starts, prompts=prompts)

    write_atomically(path, write)


def load_documents(paths: list[Path]) -> Documents:
    """All shards as one set of documents."""
    if not paths:
        raise DataError(
            "expected shards of training data, found none; run the recipe from its start"
        )
    parts = []
    for path in paths:
        try:
            with np.load(path) as shard:
                parts.append((shard["tokens"], shard["starts"], shard["prompts"]))
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{path} is not a readable shard ({error}); delete it to have it made anew"
            ) from error
    offsets = np.cumsum([0] + [len(tokens) for tokens, _, _ in parts])
    starts = [s[:-1] + offset for (_, s, _), offset in zip(parts, offsets, strict=False)]
    tokens = np.concatenate([tokens for tokens, _, _ in parts])
    return Documents(
        tokens, np.concatenate([*starts, offsets[-1:]]), np.concatenate([p for _, _, p in parts])
    )


@dataclass(frozen=True)
class Batches:
    """Steps of `accumulate` micro-batches of up to `budget` padded tokens, decided by the seed."""

    documents: Documents
    budget: int = 4096
    accumulate: int = 2
    pool: int = 4096
    prompt_weight: float = 0.1
    pad: int = 0
    seed: int = 0

    def steps(self, start: int = 0) -> Iterator[list[Micro]]:
        """Endless steps from number `start` on; all documents before one again."""
        step, epoch = 0, 0
        while True:
            groups = self._groups(epoch)
            for at in range(0, len(groups) - self.accumulate + 1, self.accumulate):
                if step >= start:
                    yield self._collate(groups[at : at + self.accumulate])
                step += 1
            epoch += 1

    def _groups(self, epoch: int) -> list[np.ndarray]:
        """Document indices of an epoch's micro-batches, alike in length within one."""
        rng = np.random.default_rng((self.seed, epoch))
        order, lengths = rng.permutation(len(self.documents)), self.documents.lengths()
        groups = []
        for at in range(0, len(order), self.pool):
            pool = order[at : at + self.pool]
            pool = pool[np.argsort(-lengths[pool], kind="stable")]
            groups.extend(_cut(pool, lengths[pool], self.budget))
        if len(groups) < self.accumulate:
            groups = groups * self.accumulate
        return [groups[i] for i in rng.permutation(len(groups))]

    def _collate(self, groups: list[np.ndarray]) -> list[Micro]:
        micros = [self._micro(group) for group in groups]
        total = sum(float(m.weights.sum()) for m in micros)
        return [Micro(m.tokens, m.weights / total, m.num_tokens) for m in micros]

    def _micro(self, group: np.ndarray) -> Micro:
        lengths = self.documents.lengths()[group]
        tokens = np.full((len(group), _width(int(lengths.max()))), self.pad, dtype=np.int64)
        weights = np.zeros(tokens.shape, dtype=np.float32)
        for row, i in enumerate(group):
            ids, prompt = self.documents.document(i), self.documents.prompts[i]
            tokens[row, : len(ids)] = ids
            weights[row, 1:prompt] = self.prompt_weight
            weights[row, max(prompt, 1) : len(ids)] = 1.0
        return Micro(torch.from_numpy(tokens), torch.from_numpy(weights), int(lengths.sum()))


def _cut(pool: np.ndarray, lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Runs of a pool sorted from long to short, as many rows as fit at the first's width."""
    groups, start = [], 0
    while start < len(pool):
        rows = max(1, budget // _width(int(lengths[start])))
        groups.append(pool[start : start + rows])
        start += rows
    return groups


def _width(length: int) -> int:
    """Padded width: few distinct ones, since each new shape costs a kernel set-up."""
    return -(-(length - 1) // WIDTH_STEP) * WIDTH_STEP + 1
