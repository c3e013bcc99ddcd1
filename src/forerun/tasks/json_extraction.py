"""JSON extraction: turn the facts of a paragraph into a JSON object with a given schema.

Records are drawn from a seed; they alternate between vacancies, orders, events and flats. Score:
share of fields with the right value and type; 0.0 without a valid JSON object.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from forerun.utils import files

from ._json_records import KINDS
from .base import Example, Generated, plain_text

WORDING = (
    "{text}\n\nExtract the facts of this text as a JSON object with exactly these fields:\n\n"
    "{schema}\n\nAnswer with the JSON object and nothing else."
)
ARTICLES = ("a ", "an ", "the ")


class JsonExtractionTask(Generated):
    """Texts of four alternating kinds, with eight or nine fields each."""

    def make(self, i: int, rng: random.Random) -> Example:
        """The category is the kind of text."""
        record = KINDS[i % len(KINDS)](rng)
        lines = (f'  "{name}": {kind}' for name, kind in record.schema.items())
        schema = "{\n" + ",\n".join(lines) + "\n}"
        turns = (WORDING.format(text=record.text, schema=schema),)
        answer = json.dumps(record.values)
        return Example(
            "",
            plain_text(turns),
            answer,
            reference=answer,
            category=record.kind,
            turns=turns,
            source=record.text,
        )

    def score(self, example: Example, text: str) -> float:
        """Share of the fields that are right."""
        found, wanted = json_object(text), json.loads(example.answer)
        if found is None:
            return 0.0
        right = (name in found and is_same(found[name], value) for name, value in wanted.items())
        return sum(right) / len(wanted)

    def read(self, text: str) -> str | None:
        """The object in one form, for votes among samples."""
        found = json_object(text)
        return None if found is None else json.dumps(found, sort_keys=True)


def json_object(text: str) -> dict[str, Any] | None:
    """The first JSON object in a text; None if it is invalid or repeats a key."""
    start = text.find("{")
    if start < 0:
        return None
    decoder = json.JSONDecoder(object_pairs_hook=files.unique_keys)
    try:
        found, _ = decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return found


def is_same(found: Any, wanted: Any) -> bool:
    """Whether two values agree; ignores case, spaces and articles of texts, and order of lists."""
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return False
        return sorted(map(_plain, found)) == sorted(map(_plain, wanted))
    if isinstance(wanted, str):
        return isinstance(found, str) and _plain(found) == _plain(wanted)
    if isinstance(wanted, bool) or wanted is None:
        return found is wanted
    return isinstance(found, int | float) and not isinstance(found, bool) and found == wanted


def _plain(text: Any) -> str:
    words = re.sub(r"\s+", " ", str(text)).strip().casefold()
    return next((words.removeprefix(a) for a in ARTICLES if words.startswith(a)), words)
