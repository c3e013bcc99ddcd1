"""Splits plain-text books into titled passages and makes questions about them, by fixed rules.

A chapter begins at a line "CHAPTER IV." (its title is the next paragraph) or "IV. NAME". A passage
is a run of whole sentences with at least 40 words; its title is the first ten words of the
chapter's title. One sentence of 8 to 40 words is removed from passages of three or more sentences.
Kinds of questions:

    held_out: the removed sentence, which is not in the index
    cloze: a sentence of the passage; each word is dropped with probability 1/2, at least four stay

Questions are in lower case and without punctuation.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from forerun.errors import DataError
from forerun.retrieval.passages import Passage
from forerun.utils.numbers import whole

HEADING = re.compile(r"^\s*(CHAPTER )?[IVXLC]+\.?(?P<title> [^a-z]{4,})?\s*$")
MIN_PASSAGE_WORDS, MAX_TITLE_WORDS, MIN_CHAPTER_WORDS = 40, 10, 300
MIN_CONTENTS_HEADINGS = 3  # consecutive headings without text that form a table of contents
MIN_SENTENCE_WORDS, MAX_SENTENCE_WORDS = 8, 40  # of a sentence used as a question
MIN_QUESTION_WORDS = 4
MIN_HELD_OUT_SENTENCES = 3  # sentences of a passage from which one is removed
FRONT_MATTER = "Front matter"


class Question(NamedTuple):
    """A query and the passage it refers to."""

    text: str
    passage: int
    kind: str  # "cloze" or "held_out"


def passages_of(book: str, seed: int = 0) -> list[Passage]:
    """The passages of a book, in order. Raises DataError if no chapter is found."""
    rng, out = np.random.default_rng(seed), []
    for title, text in chapters(book):
        for sentences in _runs(_sentences(text)):
            removed = _removed_sentence(sentences, rng)
            rest = [s for i, s in enumerate(sentences) if i != removed]
            held_out = "" if removed is None else sentences[removed]
            out.append(Passage(title, " ".join(rest), held_out))
    if not out:
        raise DataError('no chapters found; expected lines such as "CHAPTER IV." or "IV. A TITLE"')
    return out


def chapters(book: str) -> list[tuple[str, str]]:
    """Titles and texts of chapters, in order, without a table of contents and the text after it."""
    lines = book.replace("\r\n", "\n").partition("\n*** END")[0].split("\n")
    at = [i for i, line in enumerate(lines) if HEADING.match(line)]
    out, latest, num_listed = [], FRONT_MATTER, 0
    for start, stop in pairwise([*at, len(lines)]):
        found = HEADING.match(lines[start])
        title, text = (found["title"] if found else None) or "", "\n".join(lines[start + 1 : stop])
        if not title and "CHAPTER" in lines[start]:
            title, _, text = text.strip().partition("\n\n")
        latest = " ".join(title.split()[:MAX_TITLE_WORDS]).strip(" .,;:").capitalize() or latest
        is_listed = len(text.split()) < MIN_CHAPTER_WORDS
        if not is_listed and num_listed >= MIN_CONTENTS_HEADINGS:
            latest = FRONT_MATTER
        elif not is_listed:
            out.append((latest, text))
        num_listed = num_listed + 1 if is_listed else 0
    return out


def cloze(sentence: str, rng: np.random.Generator, share: float = 0.5) -> str:
    """The words of a sentence, each kept with probability `share`; at least four stay."""
    words = plain(sentence).split()
    draws = rng.random(len(words))
    keep = draws < max(share, np.sort(draws)[min(MIN_QUESTION_WORDS, len(words)) - 1] + 1e-12)
    return " ".join(word for word, kept in zip(words, keep, strict=True) if kept)


def plain(text: str) -> str:
    """Lower case, words only."""
    return " ".join(re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower().replace("’", "'")))


def question_sentences(body: str) -> list[str]:
    """The sentences of a passage with a suitable length for a question."""
    return [s for s in _sentences(body) if _fits_question(s)]


def questions(
    passages: list[Passage], numbers: np.ndarray, rng: np.random.Generator
) -> list[Question]:
    """One question of each kind per passage, where possible."""
    out = []
    for number in numbers.tolist():
        passage = passages[number]
        if sentences := question_sentences(passage.body):
            chosen = sentences[int(rng.integers(len(sentences)))]
            out.append(Question(cloze(chosen, rng), number, "cloze"))
        if passage.held_out:
            out.append(Question(plain(passage.held_out), number, "held_out"))
    return out


def split(count: int, evaluated: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Passage numbers for training questions and for evaluation questions."""
    whole("count", count)
    whole("evaluated", evaluated, 0)
    order = np.random.default_rng(seed).permutation(count)
    return np.sort(order[evaluated:]), np.sort(order[:evaluated])


def _sentences(text: str) -> list[str]:
    found = re.split(r"(?<=[.!?;])[\"'”’]?\s+", " ".join(text.split()))
    return [s for s in found if s]


def _runs(sentences: list[str]) -> list[list[str]]:
    """Runs of sentences with enough words; remaining sentences join the last run."""
    runs: list[list[str]] = []
    run: list[str] = []
    for sentence in sentences:
        run.append(sentence)
        if sum(len(s.split()) for s in run) >= MIN_PASSAGE_WORDS:
            runs.append(run)
            run = []
    if run and runs:
        runs[-1] += run
    return runs


def _fits_question(sentence: str) -> bool:
    return MIN_SENTENCE_WORDS <= len(plain(sentence).split()) <= MAX_SENTENCE_WORDS


def _removed_sentence(sentences: list[str], rng: np.random.Generator) -> int | None:
    """The index of the sentence to hold out, or None."""
    fit = [i for i, s in enumerate(sentences) if _fits_question(s)]
    return int(rng.choice(fit)) if len(sentences) >= MIN_HELD_OUT_SENTENCES and fit else None
