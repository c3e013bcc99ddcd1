"""Random JSON schemas of realistic shapes, drawn by hypothesis; always the same ones."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

Schema = dict[str, Any]
Strategy = st.SearchStrategy[Any]
KEYS = ["id", "name", "ünïcode", "a b", "x-y", "数", 'quo"te', "back\\slash", "$ref_not", "", "/~"]
PATTERNS = ["^[a-c]{1,3}$", r"^\d\d-\d$", "^(é|ß)$", "^[^<>]{2}$", "x", "^a|b$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration"]
UNSUPPORTED: list[Schema] = [
    {"not": {"type": "string"}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"const": 1}},
    {"type": "object", "propertyNames": {"maxLength": 3}},
    {"if": {"type": "string"}, "then": {"maxLength": 2}},
]
WORDS = {"not", "uniqueItems", "contains", "propertyNames", "if", "then"}  # of UNSUPPORTED
VALUES = st.none() | st.booleans() | st.integers(-99, 99) | st.text('aö "\\/', max_size=6)


def random_schemas(count: int) -> list[Schema]:
    """`count` different schemas of objects; some have keywords that are not supported."""
    found: dict[str, Schema] = {}

    @settings(
        max_examples=3 * count,
        database=None,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(_documents())
    def collect(schema: Schema) -> None:
        found.setdefault(json.dumps(schema), schema)

    collect()
    assert len(found) >= count
    return list(found.values())[:count]


@st.composite
def _documents(draw: st.DrawFn) -> Schema:
    found = draw(_objects(2))
    if draw(st.integers(0, 4)) == 0:  # a definition that is used twice
        found["$defs"] = {"leaf": draw(_leaves())}
        found["properties"] |= dict.fromkeys(("first", "second"), {"$ref": "#/$defs/leaf"})
    return found


@st.composite
def _objects(draw: st.DrawFn, depth: int) -> Schema:
    names = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True))
    found: Schema = {"type": "object", "additionalProperties": False}
    found["properties"] = {name: draw(_schemas(depth - 1)) for name in names}
    if wanted := draw(st.lists(st.sampled_from(names), unique=True)):
        found["required"] = wanted
    return found


def _schemas(depth: int) -> Strategy:
    if not depth:
        return _leaves()
    below = _schemas(depth - 1)
    unions = st.fixed_dictionaries({"anyOf": st.lists(below, min_size=1, max_size=3)})
    return st.one_of(_leaves(), _leaves(), _objects(depth), _arrays(below), unions)


@st.composite
def _arrays(draw: st.DrawFn, items: Strategy) -> Schema:
    least = draw(st.integers(0, 2))
    most = least + draw(st.integers(0, 2))
    return {"type": "array", "items": draw(items), "minItems": least, "maxItems": most}


@st.composite
def _leaves(draw: st.DrawFn) -> Schema:
    if draw(st.integers(0, 29)) == 17:  # hypothesis prefers 0
        return draw(st.sampled_from(UNSUPPORTED))
    low, span = draw(st.integers(-50, 50)), draw(st.integers(1, 200))
    least = draw(st.integers(0, 2))
    found: Schema = draw(
        st.sampled_from(
            [
                {"type": "string", "minLength": least, "maxLength": least + span % 9},
                {"type": "string", "pattern": draw(st.sampled_from(PATTERNS))},
                {"type": "string", "format": draw(st.sampled_from(FORMATS))},
                {"type": "integer", "minimum": low, "exclusiveMaximum": low + span},
                {"type": "number", "exclusiveMinimum": low - 0.5, "maximum": low + span / 4},
                {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 2 + span % 7},
                {"type": ["boolean", "null"]},
                {"enum": draw(st.lists(VALUES, min_size=1, max_size=4))},
                {"const": draw(VALUES | st.fixed_dictionaries({"a": st.lists(VALUES)}))},
            ]
        )
    )
    return found
