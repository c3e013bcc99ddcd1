"""Small SEAL generator: from a question to n-grams of the passage that answers it.

Bevilacqua et al., "Autoregressive Search Engines", 2022. The paper fine-tunes BART-large; this
recipe trains a causal model of less than a million weights from scratch. Training pairs with a
question: question to span of its passage, question to title. Spans have ten words and are drawn
with probability proportional to exp(number of shared words); no span begins with one of the most
frequent words. Pairs without a question, for every passage: span to span, span to title, title to
span. `retrieval/books` makes the questions; passages for evaluation give none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from transformers import PreTrainedTokenizerFast

from forerun.errors import ConfigError
from forerun.models.tokenizer import Tokenizer
from forerun.retrieval.books import cloze, plain, question_sentences, split
from forerun.retrieval.generator import Generator
from forerun.retrieval.passages import (
    BODY,
    PASSAGE,
    SPECIAL,
    TITLE,
    TITLE_END,
    Passage,
    PassageIndex,
    encode_all,
    read_passages,
    spaced,
    special_ids,
)
from forerun.training.data import Batches, Documents
from forerun.training.export import save
from forerun.training.language_model import LanguageModel, Size, build_model
from forerun.training.progress import Watch
from forerun.training.recipes.base import LoopRecipe
from forerun.training.renamed import refuse
from forerun.training.tokenizer import train_tokenizer

CONTEXT, SPAN = 256, 10  # tokens; words
SIZE = Size(hidden=128, layers=3, heads=4, kv_heads=2, inner=352)
NUM_FREQUENT = 50  # words that no span begins with
MODEL, INDEX = "model", "passages.fm"  # in the folder of a run


@dataclass(kw_only=True, eq=False)
class Seal(LanguageModel, LoopRecipe):
    """Trains a generator on passages and indexes them, for `forerun seal search`.

    passages: JSON-lines file with title and body.
    evaluated: number of passages that are kept for evaluation.
    vocabulary: vocabulary size of the trained tokenizer.
    spans: spans per question; the paper has 10.
    titles: titles per question; the paper has 3.
    micro_tokens: padded tokens per micro-batch; a step has two.
    """

    may_change: ClassVar[frozenset[str]] = LoopRecipe.may_change | {"passages"}
    checkpoint: ClassVar[str] = "generator.pt"

    minimums = LoopRecipe.minimums | {
        "evaluated": 1,
        "vocabulary": 300,
        "spans": 1,
        "titles": 0,
        "micro_tokens": 1,
    }

    passages: Path
    minutes: float | None = 10.0
    evaluated: int = 200
    vocabulary: int = 2048
    spans: int = 5
    titles: int = 1
    micro_tokens: int = 2048
    size: Size = SIZE

    def prepare(self, out: Path, watch: Watch) -> None:
        passages = read_passages(self.passages)
        trained, _ = split(len(passages), self.evaluated, self.seed)
        if not len(trained):
            raise ConfigError(
                f"{len(passages)} passages leave none to train on after {self.evaluated} for "
                "evaluation; give more passages, or evaluate fewer"
            )
        self.inner = make_tokenizer(passages, self.vocabulary)
        tokenizer = Tokenizer(self.inner)
        PassageIndex.of(passages, tokenizer).save(out / INDEX)
        documents = pairs(passages, trained, tokenizer, self)
        self.model = build_model(self.size, self.inner, self.seed)
        pad = self.inner.pad_token_id
        self.data = Batches(documents, self.micro_tokens, pad=pad, seed=self.seed)

    def save(self, out: Path) -> None:
        save(self.model, out / MODEL, tokenizer=self.inner)


def load(folder: Path | str) -> tuple[Generator, PassageIndex]:
    """The generator and the index of a finished run."""
    generator = Generator.load(Path(folder) / MODEL)
    return generator, PassageIndex.load(Path(folder) / INDEX, generator.tokenizer)


def make_tokenizer(passages: list[Passage], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer trained on the passages, with the markers."""
    texts = (spaced(text) for p in passages for text in (p.title, p.body))
    inner = train_tokenizer(texts, vocabulary - len(SPECIAL), CONTEXT)
    inner.add_tokens(list(SPECIAL), special_tokens=True)
    return inner


@dataclass(frozen=True)
class Pair:
    """One training text: source, markers, target, and the marker after a title."""

    source: str
    markers: list[int]
    target: str
    end: list[int]


def pairs(
    passages: list[Passage], trained: np.ndarray, tokenizer: Tokenizer, recipe: Seal
) -> Documents:
    """All training pairs as documents with the source as prompt."""
    ids, rng = special_ids(tokenizer), np.random.default_rng((recipe.seed, 1))
    frequent = frequent_words(passages)
    ends = [ids[TITLE_END]]
    made: list[Pair] = []
    for number in trained.tolist():
        passage = passages[number]
        for question in _questions(passage, rng):
            for span in spans(question, passage.body, recipe.spans, frequent, rng):
                made.append(Pair(question, [ids[BODY]], span, []))
            made += [Pair(question, [ids[TITLE]], passage.title, ends)] * recipe.titles
    for passage in passages:
        one, other = (spans("", passage.body, 1, frequent, rng)[0] for _ in range(2))
        made.append(Pair(one, [ids[PASSAGE], ids[BODY]], other, []))
        made.append(Pair(one, [ids[PASSAGE], ids[TITLE]], passage.title, ends))
        made.append(Pair(passage.title, [ids[PASSAGE], ids[BODY]], other, []))
    sources = encode_all(tokenizer, [pair.source for pair in made])
    targets = encode_all(tokenizer, [pair.target for pair in made])
    return Documents.of(
        ([*source, *pair.markers, *target, *pair.end][:CONTEXT], len(source) + len(pair.markers))
        for pair, source, target in zip(made, sources, targets, strict=True)
    )


def frequent_words(passages: list[Passage]) -> set[str]:
    """The most frequent words of the passages."""
    counts = Counter(word for p in passages for word in plain(p.body).split())
    return {word for word, _ in counts.most_common(NUM_FREQUENT)}


def spans(
    question: str, body: str, count: int, frequent: set[str], rng: np.random.Generator
) -> list[str]:
    """Spans of ten words of a body, drawn by the number of words shared with a question."""
    words = body.split()
    bare = [plain(word) for word in words]
    starts = np.arange(max(1, len(words) - SPAN + 1))
    asked = set(question.split()) - frequent
    shared = np.array([word in asked for word in bare], float)
    scores = np.convolve(shared, np.ones(min(SPAN, len(words))), "valid")[: len(starts)]
    scores[[bare[s] in frequent for s in starts]] -= 20
    weights = np.exp(scores - scores.max())
    chosen = rng.choice(starts, count, p=weights / weights.sum())
    return [" ".join(words[s : s + SPAN]) for s in chosen.tolist()]


def _questions(passage: Passage, rng: np.random.Generator) -> Iterator[str]:
    """A cloze of every sentence, and the held-out sentence as it is and as a cloze."""
    for sentence in question_sentences(passage.body):
        yield cloze(sentence, rng)
    if passage.held_out:
        yield plain(passage.held_out)
        yield cloze(passage.held_out, rng)


__getattr__ = refuse(
    __name__, {"Plan": "Seal(passages=...)", "run": "Seal(passages=...).train(out)"}
)
