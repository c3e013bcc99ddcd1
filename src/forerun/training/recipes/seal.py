"""Small SEAL generator: from a question to n-grams of the passage that answers it.

Bevilacqua et al., "Autoregressive Search Engines", 2022. The paper fine-tunes BART-large; this
recipe trains a causal model of less than a million weights from scratch. Training pairs with a
question: question to span of its passage, question to title. Spans have ten words, fewer at the end
of a passage. They are drawn with probability proportional to exp(2 n), with n of their first three
words in the question; no span begins with one of the most frequent words. Pairs without a question,
for every passage: span to span, span to title, title to span. `retrieval/books` makes the
questions; passages for evaluation give none.

A small model memorises its passages unless the pairs make it copy words of the question. Therefore
every sentence gives several questions, which keep different shares of its words. Also, there are
pairs of made-up sentences: random words of the passages, which only copying predicts.
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
from forerun.training.data.documents import Batches, Documents
from forerun.training.data.tokenizer import train_tokenizer
from forerun.training.export import save
from forerun.training.language_model import LanguageModel, Size, build_model
from forerun.training.progress import Watch
from forerun.training.recipes.base import LoopRecipe
from forerun.training.renamed import refuse

CONTEXT, SPAN = 256, 10  # tokens; words
MADE_UP_WORDS = 14  # of a made-up sentence
START_WORDS = 3  # of a span; compared with the question
SHARPNESS = 2  # factor of their number, in the exponent
KEPT_SHARES = (0.3, 0.9)  # smallest and largest share of a sentence's words in a training question
SIZE = Size(hidden=128, layers=3, heads=4, kv_heads=2, inner=352)
NUM_FREQUENT = 50  # words that no span begins with
MODEL, INDEX = "model", "passages.fm"  # in the folder of a run


@dataclass(kw_only=True, eq=False)
class Seal(LanguageModel, LoopRecipe):
    """Trains a generator on passages and indexes them, for `forerun seal search`.

    passages: JSON-lines file with title and body.
    evaluated: number of passages that are kept for evaluation.
    vocabulary: vocabulary size of the trained tokenizer.
    clozes: questions per sentence.
    spans: spans per question; the paper has 10.
    titles: titles per sentence; the paper has 3 per question.
    made_up: pairs of made-up sentences per passage.
    micro_tokens: padded tokens per micro-batch; a step has two.
    """

    may_change: ClassVar[frozenset[str]] = LoopRecipe.may_change | {"passages"}
    checkpoint: ClassVar[str] = "generator.pt"

    minimums = LoopRecipe.minimums | {
        "evaluated": 1,
        "vocabulary": 300,
        "clozes": 1,
        "spans": 1,
        "titles": 0,
        "made_up": 0,
        "micro_tokens": 1,
    }

    passages: Path
    minutes: float | None = 10.0
    evaluated: int = 200
    vocabulary: int = 2048
    clozes: int = 6
    spans: int = 2
    titles: int = 1
    made_up: int = 16
    micro_tokens: int = 1024
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
        for sentence in _sentences(passage):
            asked = [cloze(sentence, rng, rng.uniform(*KEPT_SHARES)) for _ in range(recipe.clozes)]
            for question in asked:
                for span in spans(question, passage.body, recipe.spans, frequent, rng):
                    made.append(Pair(question, [ids[BODY]], span, []))
            for i in range(recipe.titles):
                question = asked[i % len(asked)]
                made.append(Pair(question, [ids[TITLE]], passage.title, ends))
    for passage in passages:
        one, other = (spans("", passage.body, 1, frequent, rng)[0] for _ in range(2))
        made.append(Pair(one, [ids[PASSAGE], ids[BODY]], other, []))
        made.append(Pair(one, [ids[PASSAGE], ids[TITLE]], passage.title, ends))
        made.append(Pair(passage.title, [ids[PASSAGE], ids[BODY]], other, []))
    for question, span in made_up(passages, recipe.made_up * len(passages), rng):
        made.append(Pair(question, [ids[BODY]], span, []))
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
    """Spans of up to ten words, drawn by how many of their first words are in a question."""
    words = body.split()
    bare = [plain(word) for word in words]
    starts = np.arange(max(1, len(words) - START_WORDS + 1))
    asked = set(question.split()) - frequent
    shared = np.array([sum(w in asked for w in bare[s : s + START_WORDS]) for s in starts], float)
    scores = SHARPNESS * shared
    scores[[bare[s] in frequent for s in starts]] -= 20
    weights = np.exp(scores - scores.max())
    chosen = rng.choice(starts, count, p=weights / weights.sum())
    return [" ".join(words[s : s + SPAN]) for s in chosen.tolist()]


def made_up(
    passages: list[Passage], count: int, rng: np.random.Generator
) -> Iterator[tuple[str, str]]:
    """Questions and spans of sentences of random words; every word of the passages alike."""
    words = np.array(sorted({word for p in passages for word in plain(p.body).split()}))
    for _ in range(count):
        sentence = " ".join(words[rng.integers(0, len(words), MADE_UP_WORDS)])
        question = cloze(sentence, rng, KEPT_SHARES[1])
        yield question, spans(question, sentence, 1, set(), rng)[0]


def _sentences(passage: Passage) -> list[str]:
    """Sentences of the passage that suit a question, and the held-out sentence."""
    held_out = [passage.held_out] if passage.held_out else []
    return [*question_sentences(passage.body), *held_out]


__getattr__ = refuse(
    __name__, {"Plan": "Seal(passages=...)", "run": "Seal(passages=...).train(out)"}
)
