"""A neural model mixed with unbounded n-grams of a corpus: accuracy and perplexity.

    python benchmarks/interpolation.py [--data-dir ../shared/data] [--windows 60]

Texts: solved problems of the reasoning task under the embedded reasoner, and books and code under
stories260K, which was trained on neither. A text is cut into windows of the model's context: the
first 80 % are the corpus, the next 10 % fit the weights, the last 10 % are evaluated. Windows of
the corpus that share too much with the last 20 % are left out and counted.

First table: next tokens predicted right, by the longest suffix (at most 64 tokens) and by 5-grams,
for all windows of each text's last part. Second table: perplexity and accuracy of the model alone,
with two weights, and with a forest if scikit-learn is installed. cut: (PPL - PPL mixed) / PPL, and
over PPL - 1.
"""

from __future__ import annotations

import gzip
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import scripts

import forerun
from forerun.core.dice import SeededDice
from forerun.core.records import Sequence
from forerun.core.sampling import Sampling, log_softmax
from forerun.errors import ConfigError
from forerun.ngrams.index.query.engine import Index
from forerun.ngrams.index.query.interpolate import (
    Cases,
    Forest,
    Removed,
    TwoWeights,
    Weigh,
    cases_of,
    decontaminated,
)
from forerun.ngrams.index.query.results import Next
from forerun.ngrams.tables.logits.prompt_logits import prompt_rows
from forerun.tasks.reasoning import ReasoningTask

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from convert_stories260k import convert  # noqa: E402 - it lies among the tests

CONTEXT, WINDOW = 64, 448  # tokens of the longest suffix that is looked for; of a window
PROBLEMS, HELD = 4000, 400
SUFFIXES = (0, 3, 5, 9, 17, 1 << 30)
TEXTS = {
    "don_quixote": "don_quixote_pg996.txt.gz",
    "sherlock": "sherlock.txt.gz",
    "shakespeare": "tinyshakespeare.txt.gz",
    "python": "python_code.tar.gz",
}


@dataclass
class Text:
    """A corpus and what is held out of it, as documents of ids, under one model."""

    name: str
    model: Any
    corpus: list[list[int]]
    fit: list[list[int]]
    evaluate: list[list[int]]
    removed: Removed


def text_of(path: Path) -> str:
    """The text of a file; of an archive, of all its files."""
    if ".tar" not in path.suffixes:
        return gzip.open(path, "rt").read()
    with tarfile.open(path) as archive:
        files = [archive.extractfile(entry) for entry in archive if entry.isfile()]
        return "".join(file.read().decode() for file in files if file)


def made(name: str, model: Any, corpus: Any, fit: Any, evaluate: Any) -> Text:
    """A Text, decontaminated."""
    removed = Removed()
    kept = list(decontaminated(corpus, [*fit, *evaluate], removed))
    return Text(name, model, kept, fit, evaluate, removed)


def problems() -> Text:
    """The reasoning task: training problems, and held-out ones to fit on and to evaluate."""
    model = forerun.load("reasoner")

    def documents(split: str, count: int) -> list[list[int]]:
        task = ReasoningTask(split)
        examples = [task.example(i) for i in range(count)]
        return [model.tokenizer.encode(e.prompt + e.reference) for e in examples]

    held = documents("heldout", HELD)
    return made(
        "problems", model, documents("train", PROBLEMS), held[: HELD // 2], held[HELD // 2 :]
    )


def book(name: str, file: Path, model: Any) -> Text:
    """A text in windows: the first 80 % are the corpus, the last 10 % are evaluated."""
    ids = model.tokenizer.encode(text_of(file), special=False)
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW, WINDOW)]
    a, b = len(windows) * 8 // 10, len(windows) * 9 // 10
    return made(name, model, windows[:a], windows[a:b], windows[b:])


def some(documents: list[list[int]], count: int) -> list[list[int]]:
    """Documents at even distances."""
    return [documents[i] for i in np.linspace(0, len(documents) - 1, count).astype(int)]


def rows_of(model: Any, document: list[int]) -> np.ndarray:
    """log P of the model for every token of a document but the first, float32 [n - 1, V]."""
    lead = model.tokenizer.encode("")  # what the model expects before a text
    whole = [*lead, *document]
    seq = Sequence(whole, len(whole), Sampling(), SeededDice(0), limit=0)
    rows = [log_softmax(row) for _, part in prompt_rows(model.target, seq) for row in part]
    return np.array(rows[len(lead) :], np.float32)


def places(documents: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Contexts of the n-grams and the tokens that came, for all positions but documents' first."""
    contexts = [d[max(0, i - CONTEXT) : i] for d in documents for i in range(1, len(d))]
    return contexts, [token for d in documents for token in d[1:]]


def best(found: Next) -> int:
    """The likeliest next token."""
    return int(found.ids[np.argmax(found.counts)])


def accuracy(text: Text, index: Index) -> None:
    """The rows of the first table for one text."""
    contexts, tokens = places(text.evaluate)
    free, truth = index.infgram_many(contexts), np.array(tokens)
    five = index.infgram_many([context[-4:] for context in contexts])
    right = np.array([best(f) for f in free]) == truth
    right_five = np.array([best(f) for f in five]) == truth
    length = np.array([f.suffix_length for f in free])
    sparse = np.array([f.is_sparse for f in free])
    by_length = [
        f"{right[inside].mean():.1%} ({inside.mean():.0%})" if inside.any() else "-"
        for inside in ((length >= a) & (length < b) for a, b in pairwise(SUFFIXES))
    ]
    cells = [text.name, f"{index.tokens:,}", f"{len(truth):,}", f"{right.mean():.1%}"]
    cells += [f"{right_five.mean():.1%}", *by_length]
    cells += [f"{right[sparse].mean():.1%} ({sparse.mean():.0%})", f"{right[~sparse].mean():.1%}"]
    print("| " + " | ".join(cells) + " |", flush=True)


@dataclass
class Half:
    """Held-out windows as seen by both models."""

    cases: Cases
    logp: np.ndarray  # float32 [m, V]
    found: list[Next]
    tokens: np.ndarray

    def right(self, weigh: Weigh | None) -> float:
        """Share of positions with the right most probable token."""
        if weigh is None:
            return float((self.logp.argmax(axis=1) == self.tokens).mean())
        w, count = weigh(self.cases.features), 0
        for row, one, weight, token in zip(self.logp, self.found, w, self.tokens, strict=True):
            mixed = (1 - weight) * np.exp(row.astype(np.float64))
            inside = one.ids < len(mixed)
            mixed[one.ids[inside]] += weight * one.probs[inside]
            count += int(mixed.argmax()) == token
        return count / len(self.tokens)


def half(text: Text, index: Index, documents: list[list[int]]) -> Half:
    """What both models say of some windows."""
    logp = np.concatenate([rows_of(text.model, document) for document in documents])
    contexts, tokens = places(documents)
    truth = np.array(tokens)
    neural = np.exp(logp[np.arange(len(truth)), truth].astype(np.float64))
    cases, found = cases_of(index, contexts, tokens, neural)
    return Half(cases, logp, found, truth)


def perplexity(text: Text, index: Index, windows: int) -> None:
    """The rows of the second table for one text."""
    fit = half(text, index, some(text.fit, windows))
    held = half(text, index, some(text.evaluate, windows))
    two = TwoWeights.fit(fit.cases)
    ways: dict[str, Weigh | None] = {
        "alone": None,
        f"two weights: {two.sparse:.2f} sparse, {two.other:.2f} other": two,
    }
    try:
        ways["forest"] = Forest.fit(fit.cases)
    except ConfigError as missing:
        print(missing, file=sys.stderr)
    alone = held.cases.perplexity()
    for name, weigh in ways.items():
        mixed = held.cases.perplexity(weigh)
        cut = f"{(alone - mixed) / alone:.1%}, {(alone - mixed) / (alone - 1):.1%}"
        cells = [text.name, name, f"{mixed:.3f}", cut if weigh else "", f"{held.right(weigh):.1%}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def texts(data: Path, folder: Path) -> list[Text]:
    """All that can be had."""
    found = [problems()]
    source = data / "models" / "stories260K"
    if not source.is_dir():
        print(f"no {source}: books and stories260K are left out; give --data-dir", file=sys.stderr)
        return found
    convert(source / "stories260K.bin", source / "tok512.bin", folder)
    model = forerun.load(str(folder))
    return found + [book(name, data / "corpora" / file, model) for name, file in TEXTS.items()]


def main() -> None:
    parser = scripts.parser(__doc__)
    here = Path(__file__).parents[2] / "shared" / "data"
    parser.add_argument("--data-dir", type=Path, default=here)
    parser.add_argument(
        "--windows",
        type=scripts.count,
        default=60,
        help="windows to fit on, and as many to evaluate",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = texts(options.data_dir, Path(name))
    indexes = [Index.of(text.corpus) for text in found]
    for text in found:
        r = text.removed
        print(
            f"{text.name}: {r.documents} of {r.of_documents} windows of the corpus left out "
            f"({r.tokens:,} of {r.of_tokens:,} tokens): they share 80 % of their 13-grams with "
            "what is held out"
        )
    spans = [f"suffix {a} to {b - 1}" if b < 100 else f"{a} +" for a, b in pairwise(SUFFIXES)]
    head = ["text", "corpus", "positions", "unbounded", "5-gram", *spans, "sparse", "other"]
    print("\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for text, index in zip(found, indexes, strict=True):
        accuracy(text, index)
    head = ["text", "weights", "perplexity", "cut", "right"]
    print("\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for text, index in zip(found, indexes, strict=True):
        perplexity(text, index, options.windows)


if __name__ == "__main__":
    scripts.run(main)
