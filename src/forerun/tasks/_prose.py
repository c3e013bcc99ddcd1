"""Random English text in ASCII: reports and stories with a cast, a place and things."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from ._reasoning_words import PEOPLE, capital


def _list(text: str) -> list[str]:
    return text.split(", ")


PLACES = _list(
    "the mill, the harbour, the town hall, the school, the north bridge, the market, the library, "
    "the old station, the clinic, the river bank, the orchard, the workshop, the museum, the ferry "
    "landing, the bakery, the brick yard, the lighthouse, the stables, the greenhouse, the archive"
)
THINGS = _list(
    "lanterns, ropes, ledgers, barrels, windows, maps, letters, boats, clocks, carts, blankets, "
    "engines, ladders, bells, saws, keys, benches, kites, tents, pumps, drums, mirrors, crates, "
    "lenses, wheels, baskets, shutters, chairs, kettles, tiles"
)
GROUPS = _list(
    "the council, the rowing club, the night shift, the gardeners, the teachers, the volunteers, "
    "the builders, the harbour office, the choir, the farmers, the fire brigade, the printers, "
    "the surveyors, the drivers, the cooks, the owners"
)
QUALITIES = _list(
    "broken, heavy, narrow, bright, damp, quiet, crowded, steep, empty, rusty, warm, distant, "
    "painted, tall, smooth, patched, dusty, borrowed, locked, wooden"
)
MONTHS = _list(
    "January, February, March, April, May, June, July, August, September, October, November, "
    "December"
)
DOINGS = _list(
    "repair the roof, count the stock, open the gate, move the fence, dry the nets, paint the "
    "hall, clear the path, sort the mail, lower the price, train the new staff, close the road, "
    "test the water, plant the hedge, print the notice, lend the tools, widen the door"
)
CAUSES = _list(
    "the rain had not stopped, the money came late, nobody had the key, the wind had turned, the "
    "train was full, the wood was still wet, a part was missing, the bell rang early, the map was "
    "wrong, two of them were ill, the light was poor, the river had risen"
)

REPORT = (
    "In {month} {group} counted {n} {things} at {place}.",
    "{Group} asked {p} to {doing} before the end of {month}.",
    "Of the {n} {things} that were ordered, {m} arrived {quality}.",
    "The cost came to {n} dollars, and {p} paid {m} of them at once.",
    "{Place} stayed closed for {m} days because {cause}.",
    "Nobody at {place} had seen so many {things} since {year}.",
    "{p} wrote that the {quality} {things} should be kept at {place}.",
    "A second visit in {month} found {m} {things}, most of them {quality}.",
    "{Group} and {group2} could not agree who was to {doing}.",
    "The plan of {year} had promised {n} {things} and a {quality} room.",
    "It took {p} and {q} {m} weeks to {doing}.",
    "Every visitor to {place} now signs a list, which holds {n} names.",
    "When {cause}, {group} sent {m} {things} to {place}.",
    "The {quality} part of {place} was built in {year} for {n} dollars.",
    "Some of {group} would rather {doing} than wait until {month}.",
    "{p} keeps the {things} in {m} rows and checks them each {month}.",
    "By {year} the number of {things} had fallen from {n} to {m}.",
    "{q} reports that {place} needs {m} more {things} by {month}.",
    "Since {month} {group} have met at {place} once a week.",
    "The {things} were {quality}, though {p} had been told otherwise.",
)
STORY = (
    "{p} carried the {things} to {place} and set them down with care.",
    "Nobody spoke, because {cause}.",
    '"We should {doing}," said {p}, "before {q} comes back."',
    "At {place} the air was {quality} and smelled of smoke.",
    "{q} looked at the {quality} {things} and laughed.",
    "It was {month}, and {cause}.",
    "{p} had not been to {place} since {year}.",
    '"How many {things} are left?" asked {q}. "{m}, or fewer," said {p}.',
    "Behind {place} a {quality} light moved from window to window.",
    "They walked for {m} miles without a word.",
    "{p} thought of {q}, who had once tried to {doing} alone.",
    "The {things} were gone, and so was {q}.",
    "Someone had left a {quality} coat on the steps of {place}.",
    '"Listen," whispered {p}. "That is no {quality} dream."',
    "In the end it was {q} who found the way to {place}.",
    "All night {p} counted {things} and could not sleep.",
    "{Group} had warned them, but {cause}.",
    "{q} ran, dropped the {things}, and ran again.",
    "A letter from {place} lay on the table, {quality} and unopened.",
    '"Give me until {month}," said {q}, "and I will {doing}."',
    "The old man of {place} shook his head at the {things}.",
    "When {p} woke up, {m} of the {things} had been moved.",
)


class Scene:
    """The cast, place and things that recur in a text."""

    def __init__(self, rng: random.Random, templates: Sequence[str]) -> None:
        self.rng, self.templates = rng, templates
        self.cast = rng.sample(PEOPLE, 3)
        self.places, self.things = rng.sample(PLACES, 3), rng.sample(THINGS, 4)
        self._last: deque[str] = deque(maxlen=len(templates) // 2)

    def sentence(self) -> str:
        """A sentence; recent templates are not repeated."""
        template = self.rng.choice([t for t in self.templates if t not in self._last])
        self._last.append(template)
        return capital(template.format(**self._slots()))

    def paragraph(self, num_sentences: int) -> str:
        """Sentences in a row."""
        return " ".join(self.sentence() for _ in range(num_sentences))

    def text(self, num_characters: int) -> str:
        """Paragraphs of 3 to 6 sentences, cut after a sentence: at most so many characters."""
        paragraphs: list[list[str]] = []
        used = 0
        while True:
            paragraphs.append([])
            used += 1  # two line breaks replace a space
            for _ in range(self.rng.randint(3, 6)):
                sentence = self.sentence()
                used += len(sentence) + 1
                if used > num_characters + 2:
                    return "\n\n".join(" ".join(p) for p in paragraphs if p)
                paragraphs[-1].append(sentence)

    def _slots(self) -> dict[str, object]:
        p, q = self.rng.sample(self.cast, 2)
        group, group2 = self.rng.sample(GROUPS, 2)
        place = self._mostly(self.places, PLACES)
        return {
            "p": p,
            "q": q,
            "group": group,
            "Group": capital(group),
            "group2": group2,
            "place": place,
            "Place": capital(place),
            "things": self._mostly(self.things, THINGS),
            "quality": self.rng.choice(QUALITIES),
            "month": self.rng.choice(MONTHS),
            "doing": self.rng.choice(DOINGS),
            "cause": self.rng.choice(CAUSES),
            "n": self.rng.randint(40, 999),
            "m": self.rng.randint(3, 39),
            "year": self.rng.randint(1850, 2020),
        }

    def _mostly(self, own: Sequence[str], all_of_them: Sequence[str]) -> str:
        return self.rng.choice(own if self.rng.random() < 0.7 else all_of_them)


def words(text: str) -> list[str]:
    """The parts of a text between spaces."""
    return text.split()


def similarity(text: str, reference: str, split: Callable[[str], list[str]] = words) -> float:
    """Share of pieces that agree in order, 2 M / (a + b); of the text only its first b pieces.

    What a model writes after the asked passage costs nothing, what it leaves out does.
    """
    from difflib import SequenceMatcher

    wanted = split(reference)
    return SequenceMatcher(None, split(text)[: len(wanted)], wanted, autojunk=False).ratio()


def found(text: str, sentences: Sequence[str]) -> float:
    """Share of the sentences that are in the text, word for word."""
    flat = " ".join(words(text))
    return sum(" ".join(words(s)) in flat for s in sentences) / len(sentences)
