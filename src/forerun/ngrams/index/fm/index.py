"""An FM-index of token ids: the queries of a suffix array in less than half of its bytes.

Ferragina and Manzini, "Opportunistic data structures with applications", 2000; with reversed text
as in Bevilacqua et al., "Autoregressive Search Engines", 2022. The text is

    eos document eos document ... eos document eos

and is indexed in reverse, so a pattern is extended at its right end: with the next token c, (l, r)
becomes (C[c] + rank_c(l), C[c] + rank_c(r)). Its count is r - l. The symbols of the Burrows-Wheeler
transform (BWT) in [l, r) are the next tokens. The text is not stored: locate and extract walk the
BWT from every `sample`-th position.

Laws: counts, continuations and positions equal those of a suffix array; the counts of a pattern's
continuations add up to its own count, except at the text's end; extract returns the documents.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from functools import cached_property
from pathlib import Path

import numpy as np

from forerun.core.records import Snapshot
from forerun.errors import ConfigError, DataError
from forerun.ngrams.index.build.suffix_array import pack, pointer_width, suffix_array, unpack
from forerun.ngrams.index.build.verify import FAST, OFF, check_mode
from forerun.ngrams.index.fm import kernels, wavelet
from forerun.ngrams.index.fm.wavelet import Wavelet
from forerun.state import array_file
from forerun.state.array_file import Origin
from forerun.utils.numbers import token_ids, whole

KIND = "fm-index"
ID_LIMIT = 1 << 24  # ids must be smaller: they index a table
SAMPLE = 32  # one position in SAMPLE is stored: memory against speed of locate and extract
Ids = Many[int] | np.ndarray
Interval = tuple[int, int]  # rows [l, r) of the sorted rotations


class FMIndex:
    """Index with counts, continuations, positions and documents; made by `of` or `load`.

    eos: the id between documents; in patterns it matches a document border. extra: further arrays
    of the file. origin: the hash of the tokenizer's vocabulary, if known.
    """

    def __init__(
        self,
        rows: kernels.Rows,
        ids: np.ndarray,
        starts: np.ndarray,
        eos: int,
        *,
        origin: Origin | None = None,
        extra: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.rows, self.ids, self.starts, self.eos = rows, ids, starts, eos
        self.origin, self.extra = origin or Origin(), dict(extra or {})
        self.length = int(starts[-1]) + 1  # tokens, separators included
        self._symbols = np.zeros(int(ids[-1]) + 1, np.int64)  # 0: does not occur
        self._symbols[ids] = np.arange(1, len(ids) + 1)

    @classmethod
    def of(
        cls, documents: Iterable[Ids], eos: int, *, sample: int = SAMPLE, tokenizer: str = ""
    ) -> FMIndex:
        """Indexes documents of token ids. Raises DataError for missing or invalid documents."""
        eos = whole("eos", eos, 0, ID_LIMIT - 1)
        parts = [np.array([eos], np.int64)]
        for number, document in enumerate(documents):
            part = _checked(document, number, eos)
            parts += [part, parts[0]]
        if len(parts) == 1:
            raise DataError("expected documents to index, got none; pass at least one")
        starts = np.cumsum([0] + [len(part) + 1 for part in parts[1::2]])
        return cls.of_text(np.concatenate(parts), starts, eos, sample=sample, tokenizer=tokenizer)

    @classmethod
    def of_text(
        cls,
        text: np.ndarray,
        starts: np.ndarray,
        eos: int,
        *,
        sample: int = SAMPLE,
        tokenizer: str = "",
    ) -> FMIndex:
        """Indexes a text [n] with an eos at every position of `starts` [documents + 1]."""
        sample = whole(f"sample (usually {SAMPLE})", sample)
        ids, symbols = np.unique(text, return_inverse=True)
        symbols = symbols[::-1].astype(np.uint16 if len(ids) < (1 << 16) - 2 else np.uint32)
        symbols += 1
        order = suffix_array(symbols, len(ids))
        bwt = np.empty(len(text) + 1, symbols.dtype)
        marks = wavelet.empty_blocks(1, len(bwt))
        kept = np.empty(len(text) // sample + 1, np.int64)
        kernels.transform(symbols, order, sample, bwt, marks[0], kept)
        del order
        rows = kernels.make_rows(
            wavelet.make(bwt, len(ids).bit_length()), len(bwt), marks, kept, sample
        )
        origin = Origin(tokenizer=tokenizer)
        return cls(rows, ids.astype(np.int64), starts.astype(np.int64), eos, origin=origin)

    # queries

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(self.starts) - 1

    @property
    def all(self) -> Interval:
        """The rows of the empty pattern."""
        return 0, self.length + 1

    @property
    def largest_id(self) -> int:
        """The largest id of any document."""
        return int(self.ids[-1])

    def symbol(self, token: int) -> int:
        """The symbol of an id; 0 if it does not occur."""
        return int(self._symbols[token]) if 0 <= token < len(self._symbols) else 0

    def extend(self, interval: Interval, token: int) -> Interval:
        """The rows of a pattern extended by a token on the right; (0, 0) if there are none."""
        symbol = self.symbol(operator.index(token))
        if not symbol or interval[0] >= interval[1]:
            return 0, 0
        return kernels.step(self.rows, symbol, interval[0], interval[1])

    def find(self, pattern: Ids) -> Interval:
        """The rows of a pattern; (0, 0) if it does not occur."""
        return kernels.find(self.rows, self._symbols, token_ids(pattern), 0, self.length + 1)

    def count(self, pattern: Ids) -> int:
        """The number of occurrences of a pattern."""
        left, right = self.find(pattern)
        return right - left

    def next(self, pattern: Ids) -> tuple[np.ndarray, np.ndarray]:
        """The ids after a pattern, ascending, and their counts. int64 [m] each."""
        return self.next_in(self.find(pattern))

    def next_in(self, interval: Interval) -> tuple[np.ndarray, np.ndarray]:
        """`next` for the rows of a pattern."""
        capacity = max(0, min(interval[1] - interval[0], len(self.ids) + 1))
        found, counts = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
        size = wavelet.symbols(self.rows.transform, interval[0], interval[1], found, counts)
        first = 1 if size and found[0] == 0 else 0  # the text's end is not a token
        return self._ids_of(found[first:size]), counts[first:size]

    def locate(self, interval: Interval, limit: int | None = None) -> np.ndarray:
        """The end position of each occurrence, in row order. int64 [m].

        A pattern of m tokens begins m before it. limit: most occurrences.
        """
        left, right = interval
        most = right - left if limit is None else whole("limit", limit, 0)
        out = np.empty(max(0, min(most, right - left)), np.int64)
        kernels.locate(self.rows, left, self.length, out)
        if len(out) and not 0 <= int(out.min()) <= int(out.max()) <= self.length:
            raise damaged("a position is not in the text")
        return out

    def document_of(self, positions: np.ndarray) -> np.ndarray:
        """The document per position, int64 [m]. The eos before a document belongs to it."""
        found = np.searchsorted(self.starts, positions, side="right") - 1
        return np.minimum(found, self.num_documents - 1)

    def extract(self, document: int) -> np.ndarray:
        """The ids of a document, int64. Raises DataError for a number out of range."""
        if document not in range(self.num_documents) or isinstance(document, float):
            raise DataError(f"there is no document {document}; use 0 to {self.num_documents - 1}")
        return self.text(int(self.starts[document]) + 1, int(self.starts[document + 1]))

    def text(self, start: int, stop: int) -> np.ndarray:
        """The ids at positions [start, stop) of the text, with eos between documents. int64."""
        is_whole = not isinstance(start, float) and not isinstance(stop, float)
        if not (is_whole and 0 <= start <= stop <= self.length):
            raise DataError(f"range {start}..{stop} is invalid; use a range in 0..{self.length}")
        at = self.length - start  # position in the reversed text
        known = -(-at // self.rows.sample)
        row = 0 if known >= len(self._rows_kept) else int(self._rows_kept[known])
        skip = (self.length if known >= len(self._rows_kept) else known * self.rows.sample) - at
        out = np.empty(stop - start, np.int64)
        kernels.walk(self.rows, row, skip, out)
        return self._ids_of(out)

    def _ids_of(self, symbols: np.ndarray) -> np.ndarray:
        """The ids of symbols. Raises DataError for a symbol of no id."""
        if len(symbols) and not 1 <= int(symbols.min()) <= int(symbols.max()) <= len(self.ids):
            raise damaged("a symbol of its text has no token id")
        return self.ids[symbols - 1]

    @cached_property
    def _rows_kept(self) -> np.ndarray:
        """The row per stored position, in position order."""
        flags = np.empty(self.length + 1, np.bool_)
        kernels.read_bits(self.rows.marks[0], flags)
        kept, found = self.rows.kept, np.flatnonzero(flags)
        is_right = len(found) == len(kept) and 0 <= kept.min() <= kept.max() < len(kept)
        if not is_right:
            raise damaged("its stored positions do not fit its text")
        out = np.empty(len(kept), np.int64)
        out[kept] = found
        return out

    # size and file

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the file per array."""
        arrays = self._arrays()
        return {name: array.nbytes for name, array in arrays.items() if name not in self.extra}

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the file per token, separators included."""
        return sum(self.nbytes.values()) / self.length

    def _arrays(self) -> dict[str, np.ndarray]:
        width = pointer_width(len(self.rows.kept))
        arrays = {
            "transform": self.rows.transform.blocks,
            "zeros": self.rows.transform.zeros,
            "marks": self.rows.marks,
            "kept": pack(self.rows.kept, width),
            "ids": self.ids.astype(np.uint32),
            "starts": pack(self.starts, pointer_width(self.length)),
        }
        return arrays | self.extra

    def save(self, path: Path | str) -> None:
        """Writes one file atomically. Raises DataError, CapacityError."""
        settings = {"eos": self.eos, "sample": self.rows.sample, "length": self.length}
        counts = {"documents": self.num_documents, "kept": len(self.rows.kept)}
        array_file.write(path, Snapshot(KIND, self._arrays(), settings, counts), self.origin)

    @classmethod
    def load(cls, path: Path | str, tokenizer: str = "", *, verify: str = FAST) -> FMIndex:
        """Loads an index file into memory.

        tokenizer: the expected tokenizer hash. verify: "full" and "fast" compare the file with its
        checksum, "off" checks sizes only. Raises DataError for a damaged file, ConfigError for
        another tokenizer.
        """
        check_mode(verify)
        snapshot, origin = array_file.read(path, KIND, verify=verify != OFF)
        try:
            index = cls._of_arrays(dict(snapshot.arrays), snapshot, origin)
        except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise damaged(f"{path}: {error!r}") from None
        index.check_tokenizer(tokenizer, path)
        return index

    @classmethod
    def _of_arrays(
        cls, arrays: dict[str, np.ndarray], snapshot: Snapshot, origin: Origin
    ) -> FMIndex:
        """The index of a file's arrays. Raises ValueError for shapes that do not fit."""
        settings, num_kept = snapshot.settings, int(snapshot.counts["kept"])
        eos, length, sample = (int(settings[name]) for name in ("eos", "length", "sample"))
        blocks, marks = arrays.pop("transform"), arrays.pop("marks")
        zeros = arrays.pop("zeros").astype(np.int64)
        kept = unpack(arrays.pop("kept"), pointer_width(num_kept)).astype(np.int64)
        starts = unpack(arrays.pop("starts"), pointer_width(length)).astype(np.int64)
        ids = arrays.pop("ids").astype(np.int64)
        _check_shapes(blocks, marks, zeros, length + 1, sample)
        _check_values(ids, starts, kept, num_kept, length)
        bwt = Wavelet(wavelet.aligned(blocks), zeros)
        rows = kernels.make_rows(bwt, length + 1, wavelet.aligned(marks), kept, sample)
        return cls(rows, ids, starts, eos, origin=origin, extra=arrays)

    def check_tokenizer(self, tokenizer: str, where: Path | str = "memory") -> None:
        """Raises ConfigError if the index was built with a tokenizer of another hash."""
        built = self.origin.tokenizer
        if tokenizer and built and tokenizer != built:
            raise ConfigError(
                f"the index in {where} was built with a tokenizer of another vocabulary "
                f"({built[:12]}, here {tokenizer[:12]}); use that tokenizer, or build a new index"
            )


def damaged(problem: str) -> DataError:
    """The error for contradictory data of an index."""
    return DataError(
        f"the FM-index is damaged: {problem}; restore it from a copy, or build it again"
    )


def _check_shapes(
    blocks: np.ndarray, marks: np.ndarray, zeros: np.ndarray, rows: int, sample: int
) -> None:
    """Raises ValueError unless the bit vectors have a bit per row."""
    shape = (rows // wavelet.BITS + 1, wavelet.WORDS)
    levels = len(zeros)
    if blocks.shape != (levels, *shape) or marks.shape != (1, *shape):
        raise ValueError(f"bit vectors of shapes {blocks.shape} and {marks.shape} for {rows} rows")
    if {blocks.dtype, marks.dtype} != {np.dtype(np.uint64)} or not 1 <= levels <= 25 or sample < 1:
        raise ValueError(f"{levels} levels of {blocks.dtype} words, sample {sample}")


def _check_values(
    ids: np.ndarray, starts: np.ndarray, kept: np.ndarray, num_kept: int, length: int
) -> None:
    """Raises ValueError unless ids and positions are in range and ascend."""
    if not len(ids) or ids[0] < 0 or ids[-1] >= ID_LIMIT or (np.diff(ids) <= 0).any():
        raise ValueError("its token ids do not ascend")
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != length - 1 or (np.diff(starts) < 1).any():
        raise ValueError("its documents do not ascend")
    if len(kept) != num_kept or not num_kept or kept.min() < 0 or kept.max() >= num_kept:
        raise ValueError("its stored positions are out of range")


def _checked(document: Ids, number: int, eos: int) -> np.ndarray:
    try:
        part = token_ids(document)
    except DataError as error:
        raise DataError(f"document {number}: {error}") from None
    if len(part) == 0:
        raise DataError(f"document {number} is empty; leave it out")
    if part.min() < 0 or part.max() >= ID_LIMIT or (part == eos).any():
        raise DataError(
            f"document {number}: expected ids in 0..{ID_LIMIT - 1} without eos={eos}, got "
            f"{part.min()}..{part.max()}; remove eos from the document, or use another eos"
        )
    return part
