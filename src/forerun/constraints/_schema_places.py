"""Places in a JSON Schema as JSON pointers, for errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# keywords of which the values are schemas by name, lists of schemas, one schema, or data
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
LISTS = {"anyOf", "allOf", "oneOf", "prefixItems", "items"}
SINGLE = {"items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not"}
DATA = {"enum", "const", "default", "examples"}
SHARED = ("$schema", "$id", "$defs", "definitions")  # what references need, at the root
MAX_PARTS, MAX_CHARS = 500, 1 << 20  # that are compiled to find a place
ROOT = "#"


def paths(schema: Any, keyword: str) -> Iterator[str]:
    """JSON pointers of a keyword in a schema."""
    stack: list[tuple[str, Any, bool]] = [(ROOT, schema, False)]
    while stack:
        at, value, has_names = stack.pop()
        if isinstance(value, list):
            found = [(f"{at}/{i}", one, False) for i, one in enumerate(value)]
        elif not isinstance(value, Mapping):
            continue
        elif has_names:
            found = [(_below(at, name), one, False) for name, one in value.items()]
        else:
            if keyword in value:
                yield _below(at, keyword)
            found = [
                (_below(at, name), one, name in NAMED)
                for name, one in value.items()
                if name != keyword and name not in DATA
            ]
        stack += reversed(found)


def place_of(schema: Any, message: str, message_of: Callable[[Any], str]) -> str:
    """The JSON pointer of the smallest part of a schema that has the same error alone.

    message_of: the error of a schema; "" for none.
    """
    if not isinstance(schema, Mapping):
        return ROOT
    shared = {name: schema[name] for name in SHARED if name in schema}
    num_parts = num_chars = 0

    def has_error(part: Any) -> bool:
        nonlocal num_parts, num_chars
        num_parts += 1
        if num_parts > MAX_PARTS or num_chars > MAX_CHARS:
            return False
        text = json.dumps(part)
        if '"$ref"' in text and isinstance(part, Mapping):
            part = shared | dict(part)
            text = json.dumps(part)
        num_chars += len(text)
        return num_chars <= MAX_CHARS and message_of(part) == message

    at, here = ROOT, schema
    while isinstance(here, Mapping):
        inner = next(((path, one) for path, one in _schemas(here) if has_error(one)), None)
        if inner is None:
            keywords = (name for name, value in here.items() if has_error({name: value}))
            name = next(keywords, None)
            return at if name is None else _below(at, name)
        at, here = f"{at}/{inner[0]}", inner[1]
    return at


def _schemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside one, with the rest of their pointers; definitions first."""
    for name in sorted(schema, key=lambda name: name not in SHARED):
        value = schema[name]
        if name in NAMED and isinstance(value, Mapping):
            for key, one in value.items():
                yield f"{name}/{_escaped(key)}", one
        elif name in LISTS and isinstance(value, list):
            for i, one in enumerate(value):
                yield f"{name}/{i}", one
        elif name in SINGLE:
            yield name, value


def _below(at: str, name: str) -> str:
    return f"{at}/{_escaped(name)}"


def _escaped(name: str) -> str:
    """A name as part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
