"""Random JSON schemas of realistic shapes, from a fixed seed."""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]
KEYS = ["id", "name", "ünïcode", "a b", "x-y", "数", 'quo"te', "back\\slash", "$ref_not"]
PATTERNS = ["^[a-c]{1,3}$", r"^\d\d-\d$", "^(é|ß)$", "^[^<>]{2}$"]
UNSUPPORTED: list[Schema] = [
    {"not": {"type": "string"}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"const": 1}},
    {"type": "object", "propertyNames": {"maxLength": 3}},
    {"if": {"type": "string"}, "then": {"maxLength": 2}},
]


def random_schemas(count: int, supported: float = 0.97) -> list[Schema]:
    """`count` schemas; about `supported` of their leaves have keywords that are supported."""
    dice = Random(49)
    return [_document(dice, supported) for _ in range(count)]


def _document(dice: Random, supported: float) -> Schema:
    found = _object(dice, 2, supported)
    if dice.random() < 0.2:  # a definition that is used twice
        found["$defs"] = {"leaf": _leaf(dice, supported)}
        found["properties"] |= dict.fromkeys(("first", "second"), {"$ref": "#/$defs/leaf"})
    return found


def _object(dice: Random, depth: int, supported: float) -> Schema:
    names = dice.sample(KEYS, dice.randint(1, 3))
    properties = {name: _schema(dice, depth - 1, supported) for name in names}
    found: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if dice.random() < 0.7:
        found["required"] = [name for name in names if dice.random() < 0.8]
    return found


def _schema(dice: Random, depth: int, supported: float) -> Schema:
    kind = dice.choice(["leaf", "leaf", "object", "array", "any"]) if depth else "leaf"
    if kind == "object":
        return _object(dice, depth, supported)
    if kind == "any":
        return {"anyOf": [_schema(dice, depth - 1, supported) for _ in range(dice.randint(1, 3))]}
    if kind == "array":
        least = dice.randint(0, 2)
        items = _schema(dice, depth - 1, supported)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + 1}
    return _leaf(dice, supported)


def _leaf(dice: Random, supported: float) -> Schema:
    if dice.random() > supported:
        return dice.choice(UNSUPPORTED)
    low = dice.randint(-50, 50)
    leaves: list[Schema] = [
        {"type": "string", "minLength": dice.randint(0, 1), "maxLength": dice.randint(1, 9)},
        {"type": "string", "pattern": dice.choice(PATTERNS)},
        {"type": "string", "format": dice.choice(["date", "time", "uuid", "ipv4"])},
        {"type": "integer", "minimum": low, "exclusiveMaximum": low + dice.randint(1, 200)},
        {"type": "number", "minimum": -1.5, "maximum": dice.choice([0, 2.25])},
        {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": dice.randint(2, 7)},
        {"type": ["boolean", "null"]},
        {"enum": dice.sample(["a", 1, None, "ö", True, "with space"], dice.randint(1, 4))},
        {"const": dice.choice(["fixed", 7, None, {"a": [1]}])},
    ]
    return dice.choice(leaves)
