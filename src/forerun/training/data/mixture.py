"""Packed rows, windows of running text, and mixtures of several sets of documents by tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from forerun.errors import ConfigError

from .documents import Batches, Documents, Micro, normalised, padded_width


@dataclass(frozen=True)
class PackedBatches(Batches):
    """Batches with several documents per row, of up to `width` tokens.

    Positions restart at each document. transformers derives from them that a document sees nothing
    of the others, so losses are those of unpacked documents.
    """

    width: int = 512  # tokens per row; a longer document has its own row

    def groups(self, epoch: int) -> list[np.ndarray]:
        rng = np.random.default_rng((self.seed, epoch))
        rows = self.rows_of(self.order(rng))
        num = max(1, self.budget // padded_width(self.width))
        groups = [np.concatenate(rows[at : at + num]) for at in range(0, len(rows), num)]
        return groups * self.accumulate if len(groups) < self.accumulate else groups

    def rows_of(self, group: np.ndarray) -> list[np.ndarray]:
        """The documents in each row: in the given order, a new row where the next does not fit."""
        lengths, starts, used = self.documents.lengths()[group].tolist(), [0], 0
        for i, length in enumerate(lengths):
            if used and used + length > self.width:
                starts.append(i)
                used = 0
            used += length
        return np.split(group, starts[1:])


def windows(documents: Documents, width: int, separator: int) -> Documents:
    """Running text: all documents, each followed by `separator`, cut into rows of `width` tokens.

    All tokens are learned. The last row may be shorter; a last row of one token is dropped.
    """
    pieces = [np.append(documents.document(i), separator) for i in range(len(documents))]
    text = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
    cuts = [text[at : at + width] for at in range(0, len(text), width)]
    return Documents.of((cut.tolist(), 0) for cut in cuts if len(cut) > 1)


@dataclass(frozen=True)
class Mixture:
    """Micro-batches of several sources in proportion to `shares`, counted in tokens.

    The next micro-batch is of the source that has had the fewest tokens for its share. So the order
    depends on nothing but the data, and a share is off by one micro-batch at most.
    """

    sources: Mapping[str, Batches]
    shares: Mapping[str, float]  # above 0; need not sum to 1
    accumulate: int = 2  # micro-batches per step

    def __post_init__(self) -> None:
        if set(self.shares) != set(self.sources) or not all(v > 0 for v in self.shares.values()):
            raise ConfigError(
                f"a mixture needs a share above 0 for each source, got sources "
                f"{sorted(self.sources)} and shares {dict(self.shares)}"
            )

    def steps(self, start: int = 0) -> Iterator[list[Micro]]:
        """Endless batches from step `start` on; earlier steps are counted, not made."""
        turns = self._turns()
        for step in count():
            chosen = [next(turns) for _ in range(self.accumulate)]
            if step >= start:
                yield normalised([self._micro(name, group) for name, group in chosen])

    def _micro(self, name: str, group: np.ndarray) -> Micro:
        return replace(self.sources[name].micro(group), source=name)

    def _turns(self) -> Iterator[tuple[str, np.ndarray]]:
        """The source and the documents of each micro-batch."""
        groups = {name: _endless(source) for name, source in self.sources.items()}
        lengths = {name: source.documents.lengths() for name, source in self.sources.items()}
        num_tokens = dict.fromkeys(self.sources, 0)
        while True:
            name = min(num_tokens, key=lambda name: num_tokens[name] / self.shares[name])
            group = next(groups[name])
            num_tokens[name] += int(lengths[name][group].sum())
            yield name, group


def _endless(batches: Batches) -> Iterator[np.ndarray]:
    for epoch in count():
        yield from batches.groups(epoch)
