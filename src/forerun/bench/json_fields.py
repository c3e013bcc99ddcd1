"""Dataclasses from JSON objects, with a clear error for a missing, unknown or ill-typed field."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from forerun.errors import DataError

MAX_SHOWN_CHARS = 100  # of a wrong value in a message
TYPE_WORDS = {  # singular, plural
    float: ("a number", "numbers"),
    int: ("a whole number", "whole numbers"),
    str: ("a text", "texts"),
    bool: ("true or false", "true or false"),
    list: ("a list", "lists"),
    NoneType: ("null", "null"),
}

T = TypeVar("T")
_types = cache(get_type_hints)


def from_dict(cls: type[T], value: Any, where: str) -> T:
    """The dataclass of a JSON object; dataclasses inside lists stay plain objects.

    Raises DataError with `where` and the field.
    """
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object, got {shown(value)}")
    types = _types(cls)  # type: ignore[arg-type]
    for name in value:
        if name not in types:
            raise DataError(f"{where}: unknown field {name!r}; written by another version?")
    for spec in fields(cls):  # type: ignore[arg-type]
        if spec.name not in value:
            if spec.default is MISSING and spec.default_factory is MISSING:
                raise DataError(f"{where}: field {spec.name!r} is missing")
        elif not has_type(value[spec.name], types[spec.name]):
            raise DataError(
                f"{where}: field {spec.name!r} takes {type_in_words(types[spec.name])}, got "
                f"{shown(value[spec.name])}"
            )
    return cls(**value)


def has_type(value: Any, kind: Any) -> bool:
    """Whether a JSON value has an annotated type, one level deep; an int is a float too."""
    if isinstance(kind, UnionType):
        return any(has_type(value, one) for one in get_args(kind))
    if kind is Any:
        return True
    outer = get_origin(kind) or kind
    if outer is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, outer) or (outer is int and isinstance(value, bool)):
        return False
    inner = get_args(kind)
    if outer is list and inner and not is_dataclass(inner[0]):
        return all(has_type(item, inner[0]) for item in value)
    if outer is dict and inner:
        return all(has_type(item, inner[1]) for item in value.values())
    return True


def type_in_words(kind: Any, is_plural: bool = False) -> str:
    """An annotated type in words: "a list of whole numbers", "a number or null"."""
    if isinstance(kind, UnionType):
        return " or ".join(type_in_words(one, is_plural) for one in get_args(kind))
    word = TYPE_WORDS.get(get_origin(kind) or kind, ("an object", "objects"))[is_plural]
    inner = [one for one in get_args(kind)[-1:] if one is not Any]
    return word + "".join(f" of {type_in_words(one, True)}" for one in inner)


def shown(value: Any) -> str:
    """A value as JSON, shortened for a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + " ..."
