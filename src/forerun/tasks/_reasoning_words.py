"""Words of the reasoning task: settings, names, and the alternation grammar `[a|b]`."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
_ALTERNATIVE = re.compile(r"\[([^\[\]]*)\]")

FRACTIONS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 6: "a sixth"}

PEOPLE = [
    "Ann",
    "Ben",
    "Cara",
    "Dan",
    "Eve",
    "Finn",
    "Gus",
    "Hana",
    "Ivan",
    "Jill",
    "Kofi",
    "Lena",
    "Max",
    "Nina",
    "Omar",
    "Pia",
    "Rosa",
    "Sam",
    "Tara",
    "Uma",
    "Vera",
    "Will",
    "Yara",
    "Zoe",
]
COLOURS = ["red", "blue", "green", "white", "black", "brown", "grey", "gold"]
SIDES = ["north", "south", "east", "west", "old", "new", "upper", "lower"]


@dataclass(frozen=True)
class Setting:
    """The vocabulary of one kind of story."""

    units: tuple[str, ...]  # plural nouns
    subjects: tuple[str, ...]
    groups: tuple[str, ...]  # "4 bags of 12 marbles"
    verb: str  # third person: "has"
    now: str  # after an event: "now has"
    base: str  # after an auxiliary: "have"
    aux: str  # "does" or "did"
    gain: str  # alternatives, third person
    lose: str
    give: str = ""  # alternatives; empty: nothing changes hands
    price: str = ""  # alternatives with {n} and {one}; empty: no question of worth
    worth: str = "worth"


def _the(words: list[str], noun: str) -> tuple[str, ...]:
    return tuple(f"the {word} {noun}" for word in words)


_ITEMS = [
    "marbles",
    "apples",
    "coins",
    "cards",
    "stamps",
    "shells",
    "books",
    "pens",
    "stickers",
    "beads",
]
_GOODS = [
    "nails",
    "bolts",
    "buttons",
    "bricks",
    "tiles",
    "candles",
    "plates",
    "cups",
    "screws",
    "lamps",
]
_STOCK = ["sheep", "goats", "hens", "ducks", "trees", "plants", "pots", "roses"]

SETTINGS: tuple[Setting, ...] = (
    Setting(
        units=tuple(_ITEMS),
        subjects=tuple(PEOPLE),
        groups=("bags", "packs", "jars", "sets"),
        verb="has",
        now="now has",
        base="have",
        aux="does",
        gain="[finds|buys|gets|wins]",
        lose="[loses|sells|uses|drops]",
        give="[gives|hands|sends|passes]",
        price="[Each of the {u} is worth {n} dollars.|One of the {u} costs {n} dollars.]",
    ),
    Setting(
        units=tuple(_GOODS),
        subjects=_the(COLOURS, "box") + _the(COLOURS, "shelf") + _the(COLOURS, "crate"),
        groups=("rows", "packs", "trays", "layers"),
        verb="holds",
        now="now holds",
        base="hold",
        aux="does",
        gain="[receives|gets|takes in]",
        lose="[loses|is short of]",
        give="[passes|gives]",
        price="[Each of the {u} weighs {n} grams.|One of the {u} has a weight of {n} grams.]",
        worth="weight",
    ),
    Setting(
        units=tuple(_STOCK),
        subjects=_the(SIDES, "farm") + _the(SIDES, "garden") + _the(SIDES, "shop"),
        groups=("rows", "groups", "lots"),
        verb="has",
        now="now has",
        base="have",
        aux="does",
        gain="[buys|gets|adds]",
        lose="[sells|loses]",
        give="[sends|sells|lends]",
        price="[Each of the {u} is worth {n} dollars.|All {u} sell for {n} dollars apiece.]",
    ),
    Setting(
        units=("hours",),
        subjects=tuple(PEOPLE),
        groups=("days", "shifts", "weeks"),
        verb="worked",
        now="has now worked",
        base="work",
        aux="did",
        gain="[works|puts in|adds]",
        lose="[takes back|has to cancel]",
        price="[Each hour pays {n} dollars.|The pay is {n} dollars per hour.]",
        worth="pay",
    ),
    Setting(
        units=("dollars", "points"),
        subjects=tuple(PEOPLE),
        groups=("weeks", "rounds", "months"),
        verb="saved",
        now="has now saved",
        base="save",
        aux="did",
        gain="[earns|adds|collects]",
        lose="[spends|pays out|loses]",
        give="[gives|lends|sends]",
    ),
    Setting(
        units=("miles", "pages", "laps"),
        subjects=tuple(PEOPLE),
        groups=("days", "trips", "parts"),
        verb="did",
        now="has now done",
        base="do",
        aux="did",
        gain="[does|adds|completes]",
        lose="[takes off|strikes out]",
        price="[Each of the {u} takes {n} minutes.|One of the {u} needs {n} minutes.]",
        worth="time",
    ),
)

WORTH_UNITS = {"worth": "dollars", "weight": "grams", "pay": "dollars", "time": "minutes"}


def prefer(rng: random.Random, options: Sequence[T]) -> T:
    """One of the options; the n-th has weight 1/n^2."""
    return rng.choices(options, [1 / (n * n) for n in range(1, len(options) + 1)])[0]


def vary(rng: random.Random, template: str, **slots: object) -> str:
    """The template with every `[a|b]` resolved at random (innermost first) and `{slot}`s filled."""
    while "[" in template:
        template = _ALTERNATIVE.sub(lambda m: prefer(rng, m.group(1).split("|")), template)
    return template.format(**slots)


def capital(text: str) -> str:
    """The text with its first letter upper case."""
    return text[:1].upper() + text[1:]


def number(rng: random.Random, low: int, high: int) -> int:
    """A whole number in [low, high]; every number of digits is equally likely."""
    if high <= low:
        return low
    length = rng.randint(len(str(low)), len(str(high)))
    return rng.randint(max(low, 10 ** (length - 1)), min(high, 10**length - 1))
