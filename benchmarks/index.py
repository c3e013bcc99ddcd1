"""Building and querying an n-gram index, compared with infini-gram or NumPy's searchsorted.

    python benchmarks/index.py [--tokens 1000000 10000000] [--corpus FOLDER] [--peer-python PYTHON]

Text comes from --corpus (text files, also .gz and .tar.gz) in documents of 1,000 tokens. Where it
ends, random runs of 12 tokens on average are spliced, and the output says so. The last tenth of the
real text is held out; half of the prompts come from it. Each index is built by `forerun index
build` in its own process, and its peak memory is read from the system. Every query is timed alone:
once after the system dropped the files from memory, and once from memory. With --folder an index of
an earlier run is used again. The script stops if two contestants answer differently.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import scripts
from index_timing import cold_and_warm, timed

from forerun.bench.machine import num_cores
from forerun.ngrams.index.build import encoders
from forerun.ngrams.index.build import manifest as store
from forerun.ngrams.index.build.documents import Document, Reading, list_sources, read
from forerun.ngrams.index.query.engine import Index

# from a small process: what a large one starts is counted as large as itself
MEASURES = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
if status:
    sys.exit(status if status > 0 else 128 - status)  # of a signal
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
RUNS = "import sys; from forerun.cli.main import main; sys.exit(main())"
MOST_SORTED = 20_000_000  # tokens that the baseline may sort
RUN, DOCUMENT = 12, 1000  # mean tokens of a spliced run; tokens of a document


class Corpus:
    """Real text with the places where its tokens begin; the last tenth is held out."""

    def __init__(self, folder: Path, spec: str) -> None:
        encoder = encoders.load(spec)
        if not isinstance(encoder, encoders.TokenizerFile) or encoder.size > 65535:
            raise SystemExit(f"{spec} must be a tokenizer.json of at most 65,535 ids")
        texts = texts_of(folder)
        found = encoder.inner.encode_batch(texts, add_special_tokens=False)
        starts, before = [], 0
        for text, one in zip(texts, found, strict=True):
            starts.append(np.array([a for a, _ in one.offsets], np.int64) + before)
            before += len(text)
        self.text, self.starts = "".join(texts), np.concatenate(starts)
        cut = len(self.starts) - len(self.starts) // 10
        self.held = encoder.encode(self.text[self.starts[cut] :])
        self.text, self.starts = self.text[: self.starts[cut]], self.starts[: cut + 1]
        self.tokens = cut

    def write(self, file: Path, size: int) -> None:
        """About `size` tokens as JSON lines: the real text first, then spliced documents."""
        rng = np.random.default_rng(size)
        with file.open("w") as out:
            for at in range(0, min(size, self.tokens), DOCUMENT):
                a, b = self.starts[[at, min(at + DOCUMENT, self.tokens)]]
                out.write(json.dumps({"text": self.text[a:b]}) + "\n")
            for _ in range(max(0, size - self.tokens) // DOCUMENT):
                out.write(json.dumps({"text": self._spliced(rng)}) + "\n")

    def _spliced(self, rng: np.random.Generator) -> str:
        lengths = np.minimum(rng.geometric(1 / RUN, DOCUMENT // RUN), 200)
        first = rng.integers(0, self.tokens - 200, len(lengths))
        spans = zip(self.starts[first].tolist(), self.starts[first + lengths].tolist(), strict=True)
        return "".join(self.text[a:b] for a, b in spans)


def texts_of(folder: Path) -> list[str]:
    """Texts of all files of a folder; of a tar archive, of all files in it."""
    texts: list[str] = []
    for path in list_sources([folder]):
        if ".tar" in path.suffixes:
            with tarfile.open(path) as archive:
                files = [archive.extractfile(entry) for entry in archive if entry.isfile()]
                texts += [file.read().decode() for file in files if file]
        else:
            texts += [r.text for r in read([path], Reading()) if isinstance(r, Document)]
    return texts


def queries_of(index: Index, held: list[int], count: int) -> dict[str, Any]:
    """n-grams of 1 to 8 tokens and prompts of 64, half of each from held-out text."""
    text, rng = index.shards[0].text, np.random.default_rng(0)

    def draw(length: int, i: int) -> list[int]:
        source = np.asarray(held) if i % 2 else text
        while True:
            at = int(rng.integers(0, len(source) - length))
            if index.separator not in (found := source[at : at + length].tolist()):
                return found

    grams = [draw(1 + i % 8, i // 8) for i in range(count)]
    prompts = [draw(64, i) for i in range(count)]
    return {"count": grams, "ntd": grams, "infgram_ntd": prompts, "eos": index.eos}


def build(folder: Path, corpus: Corpus, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """An index of text through the command; what it took, and all its sizes."""
    source, path = folder / "corpus.jsonl", folder / "ours"
    corpus.write(source, size)
    words = ["index", "build", str(path), str(source), "--json"]
    words += ["--tokenizer", options.tokenizer, "--memory", options.memory]
    words += ["--threads", str(options.threads), "--workers", str(options.threads)]
    start = perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", MEASURES, sys.executable, "-c", RUNS, *words],
        stdout=subprocess.PIPE,
        check=True,
    )
    seconds = perf_counter() - start
    source.unlink()
    found = {"seconds": seconds, "peak": int(done.stdout) << 10, "memory": options.memory}
    (folder / "built.json").write_text(json.dumps(found))
    return found


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
        found |= cold_and_warm(name, lambda ask=ask: partial(ask, Index.open(path)), path, queries)
    index = Index.open(path)
    index.count_many(queries["count"]), index.infgram_many(queries["infgram_ntd"])  # warm
    for name, many in (("count", queries["count"] * 10), ("infgram", queries["infgram_ntd"])):
        start = perf_counter()
        getattr(index, f"{name}_many")(many)
        found[f"{name}_many"] = 1e6 * (perf_counter() - start) / len(many)
    return found


def peer(python: str, folder: Path, path: Path, queries: dict[str, Any], threads: int) -> Any:
    """Times and answers of infini-gram on the same tokens."""
    manifest = store.read_manifest(path)
    theirs = folder / "theirs"
    source = path / manifest.folder
    if not theirs.exists():
        theirs.mkdir()
        shutil.copyfile(source / store.file_name("tokens", 0), theirs / "tokenized.0")
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


def measure(size: int, corpus: Corpus, options: argparse.Namespace) -> None:
    """One size: build, queries, contestants."""
    made = max(0, size - corpus.tokens)
    print(f"\n{size:,} tokens in one shard, {made / size:.0%} of them spliced")
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder / str(size) if options.folder else Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "ours"
        if not (path / "manifest.json").exists():
            build(folder, corpus, size, options)
        show_build(path, json.loads((folder / "built.json").read_text()))
        if options.build_only:
            return
        queries = queries_of(Index.open(path), corpus.held, options.queries)
        mine, other = ours(path, queries), None
        if options.peer_python:
            other = peer(options.peer_python, folder, path, queries, options.threads)
        n = store.read_manifest(path).tokens
        if other and other["sort_seconds"] > 0.1:  # else an earlier run has sorted
            print(
                f"infini-gram {other['version']}: sorted {n / other['sort_seconds']:,.0f} tokens/s "
                f"({other['sort_seconds']:.2f} s); {other['bytes'] / n:.2f} bytes per token"
            )
        show(mine, other)
        if n <= MOST_SORTED:
            compare_sorted(Index.open(path).shards[0].text, queries["count"], mine["count"])


def show_build(path: Path, built: dict[str, Any]) -> None:
    """What the build took and what lies on disk."""
    manifest = store.read_manifest(path)
    n, seconds = manifest.tokens, manifest.build["seconds"]
    stages = ", ".join(f"{name} {took:.1f} s" for name, took in seconds.items())
    print(
        f"forerun: built {n:,} tokens in {built['seconds']:.1f} s, {n / built['seconds']:,.0f} "
        f"tokens/s ({stages}; tokenised {n / seconds['tokenise']:,.0f}, sorted "
        f"{n / seconds['sort']:,.0f} tokens/s, {manifest.build['parts'][0]} parts)"
    )
    core = manifest.bytes_of("tokens", "suffixes", "fences")
    print(
        f"peak memory of its largest process {built['peak'] / 2**20:,.0f} MB with --memory "
        f"{built['memory']}; {core / n:.2f} bytes per token, "
        f"{manifest.bytes_of() / n:.2f} with everything"
    )


def compare_sorted(text: np.ndarray, queries: list[list[int]], counts: list[int]) -> None:
    """NumPy's searchsorted on 4-grams, compared with our counts."""
    short = [i for i, q in enumerate(queries) if len(q) <= 4]
    seconds, times, answers = baseline(text, [queries[i] for i in short])
    assert answers == [counts[i] for i in short], "searchsorted counts differ from ours"
    print(row(f"searchsorted  count warm, n <= 4 ({seconds:.1f} s to sort)", times))


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
    parser = scripts.parser(__doc__)
    here = Path(__file__).parents[2] / "shared" / "data" / "corpora"
    parser.add_argument("--tokens", type=scripts.count, nargs="+", default=[1_000_000])
    parser.add_argument("--corpus", type=Path, default=here)
    parser.add_argument("--tokenizer", default="reasoner")
    parser.add_argument("--peer-python", default=os.environ.get("INFINI_GRAM_PYTHON", ""))
    parser.add_argument("--queries", type=scripts.count, default=2000, help="queries of each kind")
    parser.add_argument("--threads", type=scripts.count, default=num_cores())
    parser.add_argument("--memory", default="2GB", help="memory limit of a build")
    parser.add_argument("--folder", type=Path, help="folder of the indexes; default: temporary")
    parser.add_argument("--build-only", action="store_true", help="skip the queries")
    options = parser.parse_args()
    if not options.corpus.exists():
        scripts.skip(f"there is no {options.corpus}; give --corpus a folder of text files")
    print(f"machine: {platform.processor() or platform.machine()}, {num_cores()} cores")
    corpus = Corpus(options.corpus, options.tokenizer)
    for size in options.tokens:
        measure(size, corpus, options)


if __name__ == "__main__":
    scripts.run(main)
