"""SEAL compared with BM25 on passages of a book: accuracy@k, R-precision, generated n-grams.

    python benchmarks/seal.py [--out FOLDER] [--book FILE[.gz]] [--minutes 10] [--questions 100]

Splits a book into passages and trains the generator in FOLDER (an interrupted training continues;
--minutes 0 only evaluates; without FOLDER nothing is kept). Questions are clozes of a sentence of
the passage, and sentences taken out of it (`forerun/retrieval/books.py`); they were not trained on.
Relevant for accuracy is the passage, for R-precision all passages of its chapter. Intervals: 95 %,
by resampling questions. SEAL's rows are one generation, ranked in three ways. "bodies" drops
titles, which name chapters here, and all but a tenth of the single tokens, the paper's share. "own
n-grams off" also drops the query's word n-grams. "free" also drops the constraint, and then the
n-grams that do not occur.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import numpy as np
import scripts

from forerun.retrieval.bm25 import BM25
from forerun.retrieval.books import Question, passages_of, questions, split
from forerun.retrieval.measures import accuracy, interval, r_precision
from forerun.retrieval.passages import Passage, write_passages
from forerun.retrieval.seal import SCORES, Generated, Options, Seal, top_ngrams
from forerun.training import plans
from forerun.training.recipes import seal as recipe

CUTS, VECTOR = (1, 5, 20, 100), 768  # k of accuracy; numbers of a dense vector
EVALUATED = 200


class StepReport:
    """Prints a line at every fiftieth report of the training loop."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, title: str, share: float, note: str) -> None:
        self.count += 1
        if self.count % 50 == 0:
            print(f"{title}  {share:.0%}  {note}", flush=True)


def cell(values: list[float]) -> str:
    """A mean in percent and its interval."""
    mean, low, high = (100 * v for v in interval(values))
    return f"{mean:.0f} ({low:.0f}-{high:.0f})"


def row(name: str, ranked: list[np.ndarray], asked: list[Question], passages: list[Passage]) -> str:
    """A line of the table."""
    chapters: dict[str, set[int]] = {}
    for number, passage in enumerate(passages):
        chapters.setdefault(passage.title, set()).add(number)
    pairs = list(zip(ranked, asked, strict=True))
    cells = [cell([accuracy(r, {q.passage}, k) for r, q in pairs]) for k in CUTS]
    cells.append(cell([r_precision(r, chapters[passages[q.passage].title]) for r, q in pairs]))
    return f"| {name} | {' | '.join(cells)} |"


def generated(seal: Seal, asked: list[Question]) -> tuple[list[Generated], float]:
    """What is said about every question, and seconds per question."""
    start = perf_counter()
    said = list(seal.generate([q.text for q in asked]))
    return said, (perf_counter() - start) / len(asked)


def compare(
    kind: str, asked: list[Question], seals: dict[str, Seal], passages: list[Passage]
) -> None:
    """The table of one kind of question, and an example."""
    print(f"\n## {kind}: {len(asked)} questions about {len(passages)} passages\n")
    print("| % | " + " | ".join(f"@{k}" for k in CUTS) + " | R-precision of chapter |")
    print("|---|" + "---|" * (len(CUTS) + 1))
    most = len(passages)
    print(row("BM25", list(BM25(passages).search([q.text for q in asked], most)), asked, passages))
    notes, example = [], None
    for name, seal in seals.items():
        said, seconds = generated(seal, asked)
        share = np.mean([s.occurring / max(1, s.num_generated) for s in said])
        sizes = [len(s.grams.lengths) for s in said]
        for score in SCORES:
            start = perf_counter()
            ranked = [seal.rank(one, score).documents for one in said]
            each = (perf_counter() - start) / len(asked)
            print(row(f"{name}, {score}", ranked, asked, passages))
            candidates = np.mean([len(r) for r in ranked])
            notes.append(
                f"{name}, {score}: {candidates:.0f} candidates, ranked in {1e3 * each:.0f} ms"
            )
        notes.append(
            f"{name}: {np.mean(sizes):.0f} n-grams that occur per question, {100 * share:.0f} % of "
            f"what the model said, {1e3 * seconds:.0f} ms"
        )
        example = example or said[0]
    print("\n" + "\n".join(notes))
    show(seals["SEAL"], asked[0], example)


def show(seal: Seal, question: Question, said: Generated | None) -> None:
    """The weightiest n-grams of one question."""
    assert said is not None
    print(f"\n{question.text!r}, about: {seal.passages.passage(question.passage)}\n")
    for text, count, logp, weight in top_ngrams(said.grams, seal, 12):
        print(f"  {weight:7.1f}  F {count:4}  log P {logp:6.2f}  {text!r}")
    for number in seal.rank(said).documents[:3].tolist():
        print(f"  found {number}: {seal.passages.passage(number)}")


def main() -> None:
    here = Path(__file__).parents[2] / "shared" / "data" / "corpora" / "sherlock.txt.gz"
    parser = scripts.parser(__doc__)
    parser.add_argument("--out", type=Path, help="folder of the generator; default: temporary")
    parser.add_argument("--book", type=Path, default=here)
    parser.add_argument("--minutes", type=scripts.measure, default=10.0)
    parser.add_argument(
        "--questions", type=scripts.count, default=100, help="maximum questions of each kind"
    )
    options = parser.parse_args()
    if find_spec("bm25s") is None:
        scripts.skip("it needs the package bm25s; pip install '.[retrieval]'")
    if not options.book.exists():
        scripts.skip(f"there is no {options.book}; give --book a text")
    with tempfile.TemporaryDirectory() as folder:
        measure(options, options.out or Path(folder))


def measure(options: argparse.Namespace, out: Path) -> None:
    """Trains the generator in `out`, then all tables."""
    out.mkdir(parents=True, exist_ok=True)
    raw = options.book.read_bytes()
    raw = gzip.decompress(raw) if options.book.suffix == ".gz" else raw
    passages = passages_of(raw.decode())
    file = out / "passages.jsonl"
    write_passages(file, passages)
    if options.minutes:
        seal = recipe.Seal(passages=file, minutes=options.minutes, evaluated=EVALUATED)
        seal.train(out / "run", resume=plans.has_run(out / "run"), watch=StepReport())
    generator, index = recipe.load(out / "run")
    fm, dense = sum(index.index.nbytes.values()), 4 * VECTOR * len(passages)
    print(
        f"{len(passages)} passages, {index.index.length} tokens; index {fm} bytes, text included "
        f"({index.index.bytes_per_token:.2f} per token); dense vectors of {VECTOR} floats: {dense}"
    )
    _, evaluated = split(len(passages), EVALUATED)
    asked = questions(passages, evaluated, np.random.default_rng(1))
    bodies = Options(titles=False, top_tokens=generator.tokenizer.vocab_size // 10)
    own_off = replace(bodies, query_grams=False)
    ways = {
        "SEAL": Options(),
        "bodies": bodies,
        "own n-grams off": own_off,
        "free": replace(own_off, constrained=False),
    }
    seals = {name: Seal(generator, index, how) for name, how in ways.items()}
    for kind in ("cloze", "held_out"):
        some = [q for q in asked if q.kind == kind][: options.questions]
        compare(kind, some, seals, passages)


if __name__ == "__main__":
    scripts.run(main)
