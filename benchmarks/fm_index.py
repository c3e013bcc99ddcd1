"""The FM-index compared with the suffix array: bytes per token and query times.

    python benchmarks/fm_index.py [--tokens 1000000 10000000] [--data FOLDER]

Text: the books of FOLDER/corpora in tokens of Phi-3 (32,064 ids), one document per paragraph. Where
they end, random runs of 12 tokens on average are spliced. Queries: n-grams of 1 to 8 tokens, half
of them from the last tenth of the real text, which is held out. Both indexes are in memory and take
turns query by query. Answers are compared before anything is timed.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import scripts
from tokenizers import Tokenizer

from forerun.ngrams.index.build.shards import shard_of
from forerun.ngrams.index.fm.index import FMIndex
from forerun.ngrams.index.query.engine import Index

END = 65535  # the separator of 2-byte tokens
BOOKS = ("don_quixote_pg996", "sherlock", "tinyshakespeare")
TOKENIZER = "tokenizers/phi3/tokenizer.json.gz"
RUN = 12  # mean tokens of a spliced run


def real_tokens(data: Path) -> np.ndarray:
    """The books as uint16 ids, a separator before every paragraph."""
    raw = gzip.decompress((data / TOKENIZER).read_bytes())
    tokenizer, parts = Tokenizer.from_buffer(raw), []
    for book in BOOKS:
        text = gzip.decompress((data / f"corpora/{book}.txt.gz").read_bytes()).decode()
        texts = [" ".join(t.split()) for t in text.replace("\r", "").split("\n\n") if t.strip()]
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            parts.append(np.array([END, *encoding.ids], np.uint16))
    return np.concatenate(parts)


def corpus_of(real: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Real text, then spliced runs of it; begins with a separator."""
    parts, have = [real[:size]], min(len(real), size)
    while have < size:
        lengths = np.minimum(rng.geometric(1 / RUN, 100_000), 200)
        starts = rng.integers(0, len(real) - 200, len(lengths))
        shift = np.repeat(starts - np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths)
        parts.append(real[shift + np.arange(lengths.sum())])
        have += len(parts[-1])
    return np.concatenate(parts)[:size]


def queries_of(
    text: np.ndarray, held: np.ndarray, count: int, rng: np.random.Generator
) -> list[list[int]]:
    """n-grams of 1 to 8 tokens within a document, every other one from held-out text."""
    out: list[list[int]] = []
    while len(out) < count:
        source, length = (held if len(out) % 2 else text), 1 + len(out) // 2 % 8
        at = int(rng.integers(0, len(source) - length))
        if END not in (found := source[at : at + length].tolist()):
            out.append(found)
    return out


def both(text: np.ndarray) -> tuple[FMIndex, Index, dict[str, float]]:
    """The two indexes of a text that begins with a separator, and how long each was built."""
    start = perf_counter()
    array = Index([shard_of(text)], eos=END - 1)
    middle = perf_counter()
    borders = np.append(np.flatnonzero(text == END), len(text))
    fm = FMIndex.of_text(np.append(text, np.uint16(END)), borders, END)
    return fm, array, {"fm": perf_counter() - middle, "array": middle - start}


def check(fm: FMIndex, array: Index, queries: list[list[int]]) -> None:
    """Both must answer alike; `ntd` names the separator by its own end id."""
    for query in queries:
        follow = array.ntd(query, None)
        ids = np.where(follow.ids == array.eos, END, follow.ids)
        order = np.argsort(ids)
        tokens, counts = fm.next(query)
        assert fm.count(query) == array.count(query)
        assert (tokens == ids[order]).all() and (counts == follow.counts[order]).all()


def turns(
    asks: dict[str, Callable[[Any], Any]], queries: list[Any]
) -> dict[str, tuple[float, float]]:
    """p50 and p99 in microseconds; every query is asked of all, the first one in turn."""
    times: dict[str, list[float]] = {name: [] for name in asks}
    for i, query in enumerate(queries):
        for name in sorted(asks, reverse=bool(i % 2)):
            start = perf_counter()
            asks[name](query)
            times[name].append(1e6 * (perf_counter() - start))
    return {n: (float(np.quantile(t, 0.5)), float(np.quantile(t, 0.99))) for n, t in times.items()}


def report(text: np.ndarray, held: np.ndarray, num_queries: int) -> None:
    """The rows of one size."""
    rng = np.random.default_rng(1)
    fm, array, seconds = both(text)
    queries = queries_of(text, held, num_queries, rng)
    check(fm, array, queries[:400])
    shard, size = array.shards[0], len(text)
    array_bytes = (shard.text.nbytes + shard.table.nbytes + shard.buckets.nbytes) / size
    print(f"\n## {size:,} tokens, {len(fm.ids):,} different ids\n")
    print(f"build: FM-index {seconds['fm']:.1f} s, suffix array {seconds['array']:.1f} s")
    parts = ", ".join(f"{name} {n / size:.3f}" for name, n in fm.nbytes.items())
    print(f"bytes per token: FM-index {fm.bytes_per_token:.2f} ({parts})")
    print(f"                 suffix array {array_bytes:.2f} with its text\n")
    exact = [q for q in queries if array.count(q) <= 1000]
    held_rows = [rows for q in exact if (rows := fm.find(q))[0] < rows[1]]
    tables = {
        "count": (queries, {"fm": fm.count, "array": array.count}),
        "continuations (<= 1000 places)": (
            exact,
            {"fm": fm.next, "array": lambda q: array.ntd(q, None)},
        ),
        "locate one": (held_rows, {"fm": lambda rows: fm.locate(rows, 1)}),
        "extract 100 tokens": (
            rng.integers(0, size - 100, 500).tolist(),
            {"fm": lambda at: fm.text(at, at + 100)},
        ),
    }
    print("| us | FM p50 | FM p99 | array p50 | array p99 |\n|---|---|---|---|---|")
    for name, (asked, asks) in tables.items():
        for ask in asks.values():
            ask(asked[0])
        found = turns(asks, asked)
        row = [f"{v:.1f}" for key in ("fm", "array") for v in found.get(key, ())]
        print(f"| {name} | {' | '.join(row + ['-'] * (4 - len(row)))} |")


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--tokens", type=scripts.count, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--queries", type=scripts.count, default=4000)
    options = parser.parse_args()
    for name in (TOKENIZER, *(f"corpora/{book}.txt.gz" for book in BOOKS)):
        if not (here := options.data / name).exists():
            scripts.skip(f"there is no {here}; give --data a folder that has it")
    real = real_tokens(options.data)
    cut = len(real) * 9 // 10
    for size in options.tokens:
        text = corpus_of(real[:cut], size, np.random.default_rng(0))
        report(text, real[cut:], options.queries)


if __name__ == "__main__":
    scripts.run(main)
