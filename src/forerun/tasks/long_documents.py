"""Long documents from a book: `long_documents:PATH` or `long_documents:PATH:CHARACTERS`.

A question follows an excerpt. Questions alternate: find the number in an inserted note, copy the
sentence with a given beginning, summarise. Score: 1.0 for the right number; the share of words that
agree for the sentence; none for a summary.
"""

from __future__ import annotations

import hashlib
import random
import re
from pathlib import Path

from forerun.errors import ConfigError, DataError

from ._file_task import FromFile, split_part
from ._lines import read_text
from ._prose import similarity
from .base import Example, plain_text

CHARACTERS = 8000  # of an excerpt, about 2000 tokens
MIN_CHARACTERS = 1000
THINGS = ("silver clock", "grey mare", "oak chest", "fishing boat", "brass lamp", "stone barn")
NAMES = ("Tobias Fenn", "Martha Lowe", "Silas Crane", "Agnes Pike", "Edmund Rusk", "Judith Marsh")
NOTE = "A note in the margin says that the {thing} was sold to {name} for {price} crowns."
FIND = (
    "According to a note in this text, for how many crowns was the {thing} sold? Answer with the "
    "number alone."
)
COPY = (
    'One sentence of this text begins with "{start}". Copy that sentence word for word, and write '
    "nothing else."
)
SUMMARISE = "Summarise this text in about 100 words."
FRAME = "Here is a part of a book.\n\n{excerpt}\n\n{question}"
KINDS = ("find", "copy", "summarise")
START_WORDS = 5  # first words of the sentence to copy, given in the question
SENTENCE_WORDS = range(12, 41)  # allowed length of that sentence
_HEADER = re.compile(r"\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG[^*]{0,200}\*\*\*")
_FOOTER = re.compile(
    r"\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG|End of (?:the )?Project Gutenberg"
)
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"”’']?\s+(?=[\"“‘A-Z])")
_ABBREVIATED = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|St|Rev|Col|[A-Z])\.$")  # not the end of a sentence
_NUMBER = re.compile(r"\d[\d,]*")


class LongDocumentsTask(FromFile):
    """Consecutive excerpts that do not overlap."""

    def __init__(self, path: str | Path, characters: int = CHARACTERS) -> None:
        super().__init__(path)
        if characters < MIN_CHARACTERS:
            raise ConfigError(
                f"excerpts of long_documents must have at least {MIN_CHARACTERS} characters, got "
                f"{characters}"
            )
        found = excerpts(paragraphs(read_text(self.path)), characters)
        if not found:
            raise DataError(
                f"{self.path} has no excerpt of {characters} characters; give a longer text, or "
                f"fewer characters, e.g. long_documents:{self.path}:{MIN_CHARACTERS}"
            )
        self.examples = [_example(self.path.name, i, excerpt) for i, excerpt in enumerate(found)]

    @classmethod
    def of_path(cls, text: str) -> LongDocumentsTask:
        """The task of the text after `long_documents:`."""
        path, characters = split_part(text)
        if characters and not characters.isdecimal():
            raise ConfigError(
                f"long_documents:PATH:CHARACTERS takes a whole number of characters, got "
                f"{characters!r}"
            )
        return cls(path, int(characters or CHARACTERS))

    def score(self, example: Example, text: str) -> float | None:
        """The score of the question's kind; None for summaries."""
        if example.category == "find":
            found = _NUMBER.search(text)
            return float(found is not None and found.group().replace(",", "") == example.answer)
        return similarity(text, example.answer) if example.category == "copy" else None


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a book, one line each, without headings and the text of Gutenberg."""
    if start := _HEADER.search(text):
        text = text[start.end() :]
    if end := _FOOTER.search(text):
        text = text[: end.start()]
    found = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [part for part in found if part and part[-1] in ".!?\"”’'" and part != part.upper()]


def excerpts(parts: list[str], characters: int) -> list[str]:
    """Runs of whole paragraphs of at most so many characters.

    Drops the last, incomplete run and paragraphs that are too long.
    """
    found: list[str] = []
    current: list[str] = []
    length = 0
    for part in parts:
        if len(part) > characters:
            continue
        if current and length + 2 + len(part) > characters:
            found.append("\n\n".join(current))
            current, length = [], 0
        length += len(part) + (2 if current else 0)
        current.append(part)
    return found


def _example(name: str, i: int, excerpt: str) -> Example:
    rng = random.Random(hashlib.sha256(f"long_documents/{i}/{excerpt}".encode()).digest())
    kind = KINDS[i % len(KINDS)]
    shown, question, answer = excerpt, SUMMARISE, ""
    if kind == "copy" and (sentence := _sentence(rng, excerpt)):
        start = " ".join(sentence.split()[:START_WORDS])
        question, answer = COPY.format(start=start), sentence
    elif kind != "summarise":
        kind = "find"
        shown, question, answer = _planted(rng, excerpt)
    turns = (FRAME.format(excerpt=shown, question=question),)
    return Example(
        f"{name}-{i}",
        plain_text(turns),
        answer,
        reference=answer,
        category=kind,
        turns=turns,
        source=excerpt,
    )


def _planted(rng: random.Random, excerpt: str) -> tuple[str, str, str]:
    """The excerpt with a note inserted after a paragraph, the question, and the number."""
    thing, name, price = rng.choice(THINGS), rng.choice(NAMES), str(rng.randint(1000, 9999))
    parts = excerpt.split("\n\n")
    parts.insert(rng.randint(1, len(parts)), NOTE.format(thing=thing, name=name, price=price))
    return "\n\n".join(parts), FIND.format(thing=thing), price


def _sentence(rng: random.Random, excerpt: str) -> str:
    """A sentence of the excerpt with a unique beginning; "" if there is none."""
    sentences = [s for part in excerpt.split("\n\n") for s in _SENTENCE_END.split(part)]
    starts = [" ".join(s.split()[:START_WORDS]) for s in sentences]
    able = [
        sentence
        for sentence, start in zip(sentences, starts, strict=True)
        if len(sentence.split()) in SENTENCE_WORDS
        and sentence[0].isupper()
        and sentence[-1] in ".!?"
        and not _ABBREVIATED.search(sentence)
        and excerpt.count(start) == 1
        and '"' not in start
    ]
    return rng.choice(able) if able else ""
