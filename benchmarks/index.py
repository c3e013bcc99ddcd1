"""Building and asking an n-gram index, beside the package infini-gram or NumPy's searchsorted.

    python benchmarks/index.py [--tokens 1000000 10000000] [--corpus FOLDER] [--peer-python PYTHON]

Text comes from --corpus (text files, .gz too), tokenised with --tokenizer; where it runs out, runs
of it (12 tokens on average) are spliced at random, which the output says. The last tenth of the
real text is held out: half of the prompts come from it. Every query is timed by itself: once after
the system was asked to forget the files, and once when all has been read. Nothing is asserted but
that all contestants give the same answers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from forerun.bench.machine import num_cores
from forerun.ngrams import building, encoders, sorting, store
from forerun.ngrams.documents import Document, Reading, list_sources, read
from forerun.ngrams.infini import Index

RUN = 12  # mean tokens of a spliced run
END = 65535


def real_tokens(corpus: Path, spec: str) -> np.ndarray:
    """All text of a folder as uint16 ids, a separator before every file."""
    encoder = encoders.load(spec)
    if encoder.size is None or encoder.size > END:
        raise SystemExit(f"{spec} has {encoder.size} ids; this benchmark is for 2-byte tokens")
    records = read(list_sources([corpus]), Reading())
    texts = [r.text for r in records if isinstance(r, Document)]
    start = perf_counter()
    ids = encoder.encode_batch(texts)
    seconds = perf_counter() - start
    total = sum(map(len, ids))
    print(f"tokeniser {spec}: {total} tokens, {total / seconds:,.0f} tokens/s in one call")
    return np.concatenate([np.array([END, *part], np.uint16) for part in ids])


def corpus_of(real: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Real text, then spliced runs of it, `size` tokens that begin with a separator."""
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
) -> dict[str, Any]:
    """n-grams of 1 to 8 tokens and prompts of 64, half of each from held-out text."""

    def draw(length: int, i: int) -> list[int]:
        source = held if i % 2 else text
        while True:
            at = int(rng.integers(0, len(source) - length))
            if END not in (found := source[at : at + length].tolist()):
                return found

    grams = [draw(1 + i % 8, i // 8) for i in range(count)]
    prompts = [draw(64, i) for i in range(count)]
    return {"count": grams, "ntd": grams, "infgram_ntd": prompts, "eos": END - 1}


def build(folder: Path, text: np.ndarray, threads: int) -> tuple[Path, dict[str, float]]:
    """An index of the tokens through the ordinary build; seconds of its stages."""
    source = folder / "ids.txt"
    starts = np.append(np.flatnonzero(text == END), len(text))
    with source.open("w") as file:
        for a, b in zip(starts[:-1], starts[1:], strict=True):
            if b > a + 1:
                file.write(" ".join(map(str, text[a + 1 : b].tolist())) + "\n")
    reading = Reading(split="line", is_ids=True)
    options = building.Options(tokenizer="ids", reading=reading, threads=threads, workers=1)
    sorting.warm_up(2)
    manifest = building.build(folder / "ours", [source], options)
    source.unlink()
    return folder / "ours", dict(manifest.build["seconds"])


def drop_cache(folder: Path) -> None:
    """Asks the system to forget the files' pages."""
    for file in folder.rglob("*.bin"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(ask: Any, queries: list[list[int]]) -> tuple[list[float], list[Any]]:
    """Microseconds and answer of every query."""
    times, answers = [], []
    for query in queries:
        start = perf_counter()
        answer = ask(query)
        times.append(1e6 * (perf_counter() - start))
        answers.append(answer)
    return times, answers


def ours(path: Path, queries: dict[str, Any]) -> dict[str, Any]:
    """Times and answers of our index."""
    found: dict[str, Any] = {}
    warm = Index.of([[1, 2, 3]])
    for ask in (warm.count, warm.ntd, warm.infgram_ntd):
        ask([1, 2])  # compiled before anything is timed
    Index.open(path).infgram_ntd([1, 2])
    asks = {
        "count": lambda index, q: index.count(q),
        "ntd": lambda index, q: index.ntd(q).context_count,
        "infgram_ntd": lambda index, q: index.infgram_ntd(q).suffix_length,
    }
    for name, ask in asks.items():
        drop_cache(path)  # while no mapping holds the pages
        index = Index.open(path)
        found[f"{name} cold"], found[name] = timed(partial(ask, index), queries[name])
        timed(partial(ask, index), queries[name])
        found[f"{name} warm"], _ = timed(partial(ask, index), queries[name])
        del index
    index = Index.open(path)
    index.infgram_many(queries["infgram_ntd"])
    start = perf_counter()
    index.count_many(queries["count"] * 10)
    found["count_many"] = 1e6 * (perf_counter() - start) / (10 * len(queries["count"]))
    start = perf_counter()
    index.infgram_many(queries["infgram_ntd"])
    found["infgram_many"] = 1e6 * (perf_counter() - start) / len(queries["infgram_ntd"])
    return found


def peer(python: str, folder: Path, path: Path, queries: dict[str, Any], threads: int) -> Any:
    """Times and answers of infini-gram on the same tokens."""
    manifest = store.read_manifest(path)
    theirs = folder / "theirs"
    theirs.mkdir()
    source = path / manifest.folder
    (theirs / "tokenized.0").write_bytes((source / store.file_name("tokens", 0)).read_bytes())
    starts = np.fromfile(source / store.file_name("documents", 0), "<i8") * manifest.width
    starts.astype("<u8").tofile(theirs / "offset.0")
    asked = folder / "queries.json"
    asked.write_text(json.dumps(queries))
    found: dict[str, Any] = {}
    for name in ("count", "ntd", "infgram_ntd"):  # a process each
        words = [python, str(Path(__file__).with_name("index_peer.py")), str(theirs), str(asked)]
        done = subprocess.run([*words, name, str(threads)], capture_output=True, text=True)
        if done.returncode:
            print(f"the peer failed (status {done.returncode}): {done.stderr.strip()[-300:]}")
            return None
        found = json.loads(done.stdout.splitlines()[-1]) | found  # the first one has sorted
    return found


def baseline(text: np.ndarray, queries: list[list[int]]) -> tuple[float, list[float], list[int]]:
    """Counts of up to 4 tokens by NumPy alone: sorted 8-byte keys. Seconds, times, answers."""
    start = perf_counter()
    wide = np.concatenate([text, np.zeros(3, np.uint16)]).astype(np.uint64)
    n = len(text)
    keys = np.sort(sum(wide[k : n + k] << np.uint64(48 - 16 * k) for k in range(4)))
    seconds = perf_counter() - start

    def count(query: list[int]) -> int:
        low = sum(t << 48 - 16 * k for k, t in enumerate(query))
        edges = np.array([low, low + (1 << 64 - 16 * len(query)) - 1], np.uint64)
        return int(np.searchsorted(keys, edges[1], "right") - np.searchsorted(keys, edges[0]))

    times, answers = timed(count, queries)
    return seconds, times, answers


def row(name: str, times: list[float]) -> str:
    """Median and 99th percentile."""
    return f"{name:<34}{np.median(times):10.1f}{np.percentile(times, 99):10.1f}"


def measure(size: int, real: np.ndarray, held: np.ndarray, options: argparse.Namespace) -> None:
    """One size: build, queries, contestants."""
    rng = np.random.default_rng(size)
    text = corpus_of(real, size, rng)
    queries = queries_of(text, held, options.queries, rng)
    made = max(0, size - len(real))
    print(f"\n{size:,} tokens in one shard, {made / size:.0%} of them spliced")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        path, seconds = build(folder, text, options.threads)
        manifest = store.read_manifest(path)
        n, sort = manifest.tokens, seconds["sort"]
        own = manifest.bytes_of("tokens", "suffixes")
        print(
            f"forerun: sorted {n / sort:,.0f} tokens/s ({sort:.2f} s, {options.threads} threads), "
            f"checksums and buckets {seconds['checksums']:.2f} s; {own / n:.2f} bytes per token, "
            f"{manifest.bytes_of() / n:.2f} with everything"
        )
        mine = ours(path, queries)
        other = None
        if options.peer_python:
            other = peer(options.peer_python, folder, path, queries, options.threads)
        if other:
            print(
                f"infini-gram {other['version']}: sorted {n / other['sort_seconds']:,.0f} tokens/s "
                f"({other['sort_seconds']:.2f} s); {other['bytes'] / n:.2f} bytes per token"
            )
        show(mine, other)
    short = [q for q in queries["count"] if len(q) <= 4]
    seconds_, times, answers = baseline(text, short)
    expected = [c for c, q in zip(mine["count"], queries["count"], strict=True) if len(q) <= 4]
    assert answers == expected, "searchsorted counts differ from ours"
    print(row(f"searchsorted  count warm, n <= 4 ({seconds_:.1f} s to sort)", times))


def show(mine: dict[str, Any], other: dict[str, Any] | None) -> None:
    """All times; stops if answers differ."""
    print(f"{'microseconds per query':<34}{'p50':>10}{'p99':>10}")
    for name in ("count", "ntd", "infgram_ntd"):
        for state in ("warm", "cold"):
            key = f"{name} {state}"
            print(row(f"forerun       {key}", mine[key]))
            if other:
                print(row(f"infini-gram   {key}", other[key]))
        assert other is None or other[name] == mine[name], f"answers to {name} differ"
    for key in ("count_many", "infgram_many"):
        print(f"forerun       {key:<20}{mine[key]:10.1f}   mean of a batch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).parents[2] / "shared" / "data" / "corpora"
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--corpus", type=Path, default=here)
    parser.add_argument("--tokenizer", default="reasoner")
    parser.add_argument("--peer-python", default=os.environ.get("INFINI_GRAM_PYTHON", ""))
    parser.add_argument("--queries", type=int, default=2000, help="of each kind")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--folder", type=Path, help="where indexes are built; else a temporary one")
    options = parser.parse_args()
    if not options.corpus.exists():
        raise SystemExit(f"there is no {options.corpus}; give --corpus a folder of text files")
    print(f"machine: {platform.processor() or platform.machine()}, {num_cores()} cores")
    tokens = real_tokens(options.corpus, options.tokenizer)
    cut = len(tokens) - len(tokens) // 10
    for size in options.tokens:
        measure(size, tokens[:cut], tokens[cut:], options)


if __name__ == "__main__":
    main()
