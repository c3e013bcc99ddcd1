"""Tokenised documents and batches: the input of the training loop.

A batch has documents of similar length, up to a number of padded tokens. The documents of a step
depend on the seed and the step number only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.errors import DataError
from forerun.utils.files import write_atomically

WIDTH_STEP = 32  # tokens
FIELDS = ("top_ids", "top_logp", "tail_logp", "features")  # optional rows per token of records


class Stacked:
    """Arrays [n, ...] of several shards as one; slices are read on demand."""

    def __init__(self, parts: Many[Any]) -> None:
        self.parts = list(parts)  # arrays, or slices of safetensors files
        lengths = [_shape(part)[0] for part in self.parts]
        self.starts = np.cumsum([0, *lengths])
        self.shape = (int(self.starts[-1]), *_shape(self.parts[0])[1:])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop); they must be in one shard."""
        i = int(np.searchsorted(self.starts, start, side="right")) - 1
        first = int(self.starts[i])
        return self.parts[i][int(start) - first : int(stop) - first]


def _shape(part: Any) -> tuple[int, ...]:
    return tuple(part.get_shape() if hasattr(part, "get_shape") else part.shape)


@dataclass(frozen=True)
class Documents:
    """Concatenated token ids of documents, with start and prompt length of each."""

    tokens: np.ndarray  # integers (total,)
    starts: np.ndarray  # int64 (num + 1,)
    prompts: np.ndarray  # int64 (num,) prompt length in tokens
    mask: np.ndarray | None = None  # bool (total,): tokens to learn; None: all after the prompt
    rows: dict[str, Stacked] = field(default_factory=dict)  # FIELDS by name, (total, ...)
    numbers: np.ndarray | None = None  # int64 (num,): number of the prompt of each record

    @classmethod
    def of(cls, documents: Iterable[tuple[Many[int], int]]) -> Documents:
        """Documents of (token ids, prompt length) pairs."""
        pairs = [(np.asarray(ids), prompt) for ids, prompt in documents]
        tokens = np.concatenate([ids for ids, _ in pairs]) if pairs else np.zeros(0, np.int64)
        starts = np.cumsum([0, *(len(ids) for ids, _ in pairs)], dtype=np.int64)
        prompts = np.asarray([prompt for _, prompt in pairs], dtype=np.int64)
        return cls(tokens.astype(smallest_type(tokens)), starts, prompts)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.prompts)

    def lengths(self) -> np.ndarray:
        """Tokens per document (num,)."""
        return np.diff(self.starts)

    def document(self, i: int) -> np.ndarray:
        """Token ids of the i-th document."""
        return self.tokens[self.starts[i] : self.starts[i + 1]]

    def is_learned(self, i: int) -> np.ndarray:
        """Mask of the tokens to learn in the i-th document, bool [n]."""
        if self.mask is not None:
            return self.mask[self.starts[i] : self.starts[i + 1]]
        return np.arange(self.starts[i + 1] - self.starts[i]) >= self.prompts[i]

    def rows_of(self, name: str, i: int) -> np.ndarray:
        """A field of the i-th document, [n, ...]."""
        return self.rows[name].rows(self.starts[i], self.starts[i + 1])

    def part(self, first: int, stop: int) -> Documents:
        """Documents [first, stop)."""
        at, end = int(self.starts[first]), int(self.starts[stop])
        assert not self.rows, "records with teacher rows are not cut; select them when reading"
        return Documents(
            self.tokens[at:end],
            self.starts[first : stop + 1] - at,
            self.prompts[first:stop],
            None if self.mask is None else self.mask[at:end],
            numbers=None if self.numbers is None else self.numbers[first:stop],
        )


@dataclass(frozen=True)
class Micro:
    """A micro-batch: documents padded on the right; the weights of a step sum to 1.

    Row t of top_ids, top_logp, tail_logp and features is computed after token t.
    """

    tokens: torch.Tensor  # int64 (rows, width)
    weights: torch.Tensor  # float32 (rows, width), loss weight of the token as a target
    num_tokens: int  # without padding
    top_ids: torch.Tensor | None = None  # int64 (rows, width, k)
    top_logp: torch.Tensor | None = None  # float32 (rows, width, k)
    tail_logp: torch.Tensor | None = None  # float32 (rows, width)
    features: torch.Tensor | None = None  # float32 (rows, width, d)
    positions: torch.Tensor | None = None  # int64 (rows, width), if a row has several documents
    source: str = ""  # name of its documents in a `Mixture`

    def to(self, device: torch.device) -> Micro:
        """The same on another device."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)


def save_documents(path: Path, documents: list[tuple[list[int], int]]) -> None:
    """Writes (token ids, prompt length) pairs as one shard."""
    made = Documents.of(documents)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, tokens=made.tokens, starts=made.starts, prompts=made.prompts)

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
                parts.append(Documents(shard["tokens"], shard["starts"], shard["prompts"]))
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{path} is not a readable shard ({error}); delete it to make it again"
            ) from error
    return joined(parts)


def joined(parts: list[Documents]) -> Documents:
    """Concatenates documents; all parts must have the same fields."""
    offsets = np.cumsum([0, *(len(part.tokens) for part in parts)])
    starts = [part.starts[:-1] + at for part, at in zip(parts, offsets, strict=False)]
    masks = [part.mask for part in parts if part.mask is not None]
    return Documents(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([*starts, offsets[-1:]]),
        np.concatenate([part.prompts for part in parts]),
        np.concatenate(masks) if masks else None,
        {
            name: Stacked([piece for part in parts for piece in part.rows[name].parts])
            for name in parts[0].rows
        },
        None if parts[0].numbers is None else np.concatenate([part.numbers for part in parts]),  # type: ignore[misc]
    )


@dataclass(frozen=True)
class Batches:
    """Steps of `accumulate` micro-batches with up to `budget` padded tokens each."""

    documents: Documents
    budget: int = 4096
    accumulate: int = 2
    pool: int = 4096  # number of documents that are sorted by length together
    prompt_weight: float = 0.1  # loss weight of tokens outside the mask
    by_text: bool = False  # every document has the same total weight, instead of every token
    pad: int = 0
    seed: int = 0
    only: np.ndarray | None = None  # indices of the documents in use; None: all

    def steps(self, start: int = 0) -> Iterator[list[Micro]]:
        """Endless batches from step `start` on; every document once per epoch."""
        step, epoch = 0, 0
        while True:
            groups = self.groups(epoch)
            for at in range(0, len(groups) - self.accumulate + 1, self.accumulate):
                if step >= start:
                    micros = [self.micro(group) for group in groups[at : at + self.accumulate]]
                    yield normalised(micros)
                step += 1
            epoch += 1

    def groups(self, epoch: int) -> list[np.ndarray]:
        """Document indices of the micro-batches of an epoch; lengths are similar within one."""
        rng = np.random.default_rng((self.seed, epoch))
        order, lengths = self.order(rng), self.documents.lengths()
        groups = []
        for at in range(0, len(order), self.pool):
            pool = order[at : at + self.pool]
            pool = pool[np.argsort(-lengths[pool], kind="stable")]
            groups.extend(_cut(pool, lengths[pool], self.budget))
        if len(groups) < self.accumulate:
            groups = groups * self.accumulate
        return [groups[i] for i in rng.permutation(len(groups))]

    def order(self, rng: np.random.Generator) -> np.ndarray:
        """The documents in use, in random order; one token alone predicts nothing and is left out.

        Raises DataError if no document is left.
        """
        used = np.arange(len(self.documents)) if self.only is None else self.only
        found = used[rng.permutation(len(used))]
        found = found[self.documents.lengths()[found] > 1]
        if not len(found):
            raise DataError(
                f"none of {len(used)} documents has two tokens or more; give more text to train on"
            )
        return found

    @cached_property
    def mean_weight(self) -> float:
        """Mean number of learned tokens: `by_text` then keeps a source's weight in a mixture."""
        used = range(len(self.documents)) if self.only is None else self.only.tolist()
        return float(np.mean([self.documents.is_learned(i).sum() for i in used]))

    def rows_of(self, group: np.ndarray) -> list[np.ndarray]:
        """The documents in each row of a micro-batch; one per row."""
        return list(group[:, None])

    def micro(self, group: np.ndarray) -> Micro:
        """A micro-batch of documents; weights are 1 or `prompt_weight`, not normalised.

        With `by_text` they are scaled in each document.
        """
        lengths, rows = self.documents.lengths(), self.rows_of(group)
        width = padded_width(max(int(lengths[row].sum()) for row in rows))
        tokens = np.full((len(rows), width), self.pad, dtype=np.int64)
        weights, positions = np.zeros(tokens.shape, np.float32), np.zeros_like(tokens)
        places = list[tuple[int, int, int]]()  # document, row, first column
        for y, row in enumerate(rows):
            starts = np.cumsum([0, *lengths[row]]).tolist()
            places += [(int(i), y, at) for i, at in zip(row, starts, strict=False)]
            positions[y, starts[-1] :] = np.arange(width - starts[-1])
        for i, y, at in places:
            part, is_learned = slice(at, at + lengths[i]), self.documents.is_learned(i)
            tokens[y, part] = self.documents.document(i)
            weights[y, part] = np.where(is_learned, 1.0, self.prompt_weight)
            weights[y, at] = 0.0  # nothing predicts the first token
            if self.by_text:
                weights[y, part] *= self.mean_weight / max(weights[y, part].sum(), 1e-9)
            positions[y, part] = np.arange(lengths[i])
        names = self.documents.rows
        fields: dict[str, Any] = {n: self._field(n, places, tokens.shape) for n in names}
        if len(rows) < len(group):
            fields["positions"] = torch.from_numpy(positions)
        return Micro(
            torch.from_numpy(tokens),
            torch.from_numpy(weights),
            int(lengths[group].sum()),
            **fields,
        )

    def _field(
        self, name: str, places: list[tuple[int, int, int]], shape: tuple[int, ...]
    ) -> torch.Tensor:
        """A field of some documents, padded with zeros."""
        stacked = self.documents.rows[name]
        kind = np.int64 if name == "top_ids" else np.float32
        found = np.zeros((*shape, *stacked.shape[1:]), dtype=kind)
        for i, row, at in places:
            rows = self.documents.rows_of(name, i)
            found[row, at : at + len(rows)] = rows
        return torch.from_numpy(found)


def normalised(micros: list[Micro]) -> list[Micro]:
    """The micro-batches of a step with weights that sum to 1 over all of them."""
    total = sum(float(micro.weights.sum()) for micro in micros)
    return [replace(micro, weights=micro.weights / max(total, 1e-9)) for micro in micros]


def smallest_type(tokens: np.ndarray) -> type:
    """The integer type for storing token ids."""
    return np.uint16 if not len(tokens) or int(tokens.max()) < 1 << 16 else np.uint32


def padded_width(length: int) -> int:
    """Padded width: a multiple of WIDTH_STEP plus 1, since each new shape costs kernel set-up."""
    return -(-(length - 1) // WIDTH_STEP) * WIDTH_STEP + 1


def _cut(pool: np.ndarray, lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Splits a pool sorted from long to short into groups that fit `budget` padded tokens."""
    groups, start = [], 0
    while start < len(pool):
        rows = max(1, budget // padded_width(int(lengths[start])))
        groups.append(pool[start : start + rows])
        start += rows
    return groups
