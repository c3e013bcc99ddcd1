"""Plain-text books as passages with titles, and questions about passages, by fixed rules.

A chapter is what stands below a line "CHAPTER IV." (the next paragraph is its title) or "IV. NAME".
A passage is a run of whole sentences of at least 40 words; its title is the first ten words of its
chapter's. Of a passage with three sentences or more, one of 8 to 40 words is taken out. Questions:

    held_out: the sentence that was taken out, which stands nowhere in the index
    cloze: a sentence of the passage, each word left out with probability 1/2, at least four left

Both in lower case and without punctuation.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from forerun.errors import DataError
from forerun.retrieval.passages import Passage

HEADING = re.compile(r"^\s*(CHAPTER )?[IVXLC]+\.?(?P<title> [^a-z]{4,})?\s*$")
PASSAGE_WORDS, TITLE_WORDS, CHAPTER_WORDS = 40, 10, 300
LISTED = 3  # so many headings without text, one after the other, are a list of contents
SHORTEST, LONGEST = 8, 40  # words of a sentence to ask with
LEFT = 4  # words of a question at least
FEWEST = 3  # sentences of a passage that can spare one
FRONT = "Front matter"


class Question(NamedTuple):
    """A query and the passage that it is about."""

    text: str
    passage: int
    kind: str  # "cloze" or "held_out"


def passages_of(book: str, seed: int = 0) -> list[Passage]:
    """The passages of a book, in order. Raises DataError if no chapter is found."""
    rng, out = np.random.default_rng(seed), []
    for title, text in chapters(book):
        for sentences in _runs(_sentences(text)):
            taken = _one_to_take(sentences, rng)
            rest = [s for i, s in enumerate(sentences) if i != taken]
            held = "" if taken is None else sentences[taken]
            out.append(Passage(title, " ".join(rest), held))
    if not out:
        raise DataError('no chapters found; expected lines such as "CHAPTER IV." or "IV. A TITLE"')
    return out


def chapters(book: str) -> list[tuple[str, str]]:
    """Titles and texts of chapters, in order; a list of contents and what follows it are none."""
    lines = book.replace("\r\n", "\n").partition("\n*** END")[0].split("\n")
    at = [i for i, line in enumerate(lines) if HEADING.match(line)]
    out, latest, listed = [], FRONT, 0
    for start, stop in pairwise([*at, len(lines)]):
        found = HEADING.match(lines[start])
        title, text = (found["title"] if found else None) or "", "\n".join(lines[start + 1 : stop])
        if not title and "CHAPTER" in lines[start]:
            title, _, text = text.strip().partition("\n\n")
        latest = " ".join(title.split()[:TITLE_WORDS]).strip(" .,;:").capitalize() or latest
        is_listed = len(text.split()) < CHAPTER_WORDS
        if not is_listed and listed >= LISTED:
            latest = FRONT
        elif not is_listed:
            out.append((latest, text))
        listed = listed + 1 if is_listed else 0
    return out


def cloze(sentence: str, rng: np.random.Generator) -> str:
    """A sentence's words, each left out with probability 1/2; at least four stay."""
    words = plain(sentence).split()
    chances = rng.random(len(words))
    keep = chances < max(0.5, np.sort(chances)[min(LEFT, len(words)) - 1] + 1e-12)
    return " ".join(word for word, kept in zip(words, keep, strict=True) if kept)


def plain(text: str) -> str:
    """Lower case, words only."""
    return " ".join(re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower().replace("’", "'")))


def askable(body: str) -> list[str]:
    """The sentences of a passage that a question can be made of."""
    return [s for s in _sentences(body) if SHORTEST <= len(plain(s).split()) <= LONGEST]


def questions(
    passages: list[Passage], numbers: np.ndarray, rng: np.random.Generator
) -> list[Question]:
    """One question of each kind about each of the passages that allow it."""
    out = []
    for number in numbers.tolist():
        passage = passages[number]
        if sentences := askable(passage.body):
            chosen = sentences[int(rng.integers(len(sentences)))]
            out.append(Question(cloze(chosen, rng), number, "cloze"))
        if passage.held_out:
            out.append(Question(plain(passage.held_out), number, "held_out"))
    return out


def split(count: int, evaluated: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of passages whose questions are for training, and those for evaluation."""
    order = np.random.default_rng(seed).permutation(count)
    return np.sort(order[evaluated:]), np.sort(order[:evaluated])


def _sentences(text: str) -> list[str]:
    found = re.split(r"(?<=[.!?;])[\"'”’]?\s+", " ".join(text.split()))
    return [s for s in found if s]


def _runs(sentences: list[str]) -> list[list[str]]:
    """Sentences in runs of enough words; what is left over joins the last run."""
    runs: list[list[str]] = []
    run: list[str] = []
    for sentence in sentences:
        run.append(sentence)
        if sum(len(s.split()) for s in run) >= PASSAGE_WORDS:
            runs.append(run)
            run = []
    if run and runs:
        runs[-1] += run
    return runs


def _one_to_take(sentences: list[str], rng: np.random.Generator) -> int | None:
    fit = [i for i, s in enumerate(sentences) if SHORTEST <= len(plain(s).split()) <= LONGEST]
    return int(rng.choice(fit)) if len(sentences) >= FEWEST and fit else None
