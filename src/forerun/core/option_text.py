"""Specs as text: `name:key=value,key=value`, and the typed value of each option."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

from forerun.errors import ConfigError

# how to give a value with commas, for methods of which texts often have them
WITH_COMMAS = {
    "regex": "--regex PATTERN, or in Python as Regex(PATTERN)",
    "choice": "--choice TEXT, or in Python as Choice(TEXT)",
    "json_schema": "--json-schema FILE, or in Python as JsonSchema(...)",
    "grammar": "--grammar FILE, or in Python as Grammar(TEXT)",
}
MAX_NUMBER = 2**31 - 1  # largest value of an option: kernels count in 32 bits


def parse(spec: str) -> tuple[str, dict[str, str]]:
    """Splits "name:key=value,key=value" into the name and the texts of its options.

    Raises ConfigError for a missing value or a repeated key.
    """
    name, _, rest = spec.strip().partition(":")
    given: dict[str, str] = {}
    for piece in filter(None, rest.split(",")):
        key, equals, value = piece.partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not value:
            fix = f"write {key}=VALUE"
            if given:
                fix += ", or join the values of a list by +, as in 4+3+2"
            fix += comma_hint(name) if given else ""
            if key.isidentifier() and key[0].isupper():
                fix += "; a class from another package needs an entry point (docs/add_a_method.md)"
            raise ConfigError(f"option {key!r} of {name!r} has no value; {fix}")
        key = key.replace("-", "_")
        if key in given:
            raise ConfigError(
                f"option {key!r} of {name!r} is given twice, as {given[key]} and as {value}; "
                "write it once"
            )
        given[key] = value
    return name.strip().replace("-", "_"), given


def comma_hint(name: str) -> str:
    """How to give a method a value with commas, as the end of an error; "" for most methods."""
    how = WITH_COMMAS.get(name.strip().replace("-", "_"))
    return f"; a comma begins the next option, so give a value with commas as {how}" if how else ""


BOOLEANS = {"true": True, "false": False}


def typed_value(text: str, parameter: inspect.Parameter) -> Any:
    """The value of a text. Raises ValueError for a wrong type or a number beyond MAX_NUMBER."""
    value = _value(text, parameter)
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int | float) and not abs(number) <= MAX_NUMBER:  # also true of nan
            raise ValueError(
                f"option {parameter.name} takes numbers from -{MAX_NUMBER} to {MAX_NUMBER}, "
                f"got {text!r}"
            )
    return value


def _value(text: str, parameter: inspect.Parameter) -> Any:
    """The text as one of the parameter's annotated types; a tuple is written a+b+c."""
    kinds = type_names(parameter)
    if "None" in kinds and text.lower() == "none":
        return None
    if "bool" in kinds and text.lower() in BOOLEANS:
        return BOOLEANS[text.lower()]
    for kind, convert in (("int", int), ("float", float)):
        if kind in kinds:
            with suppress(ValueError):
                return convert(text)
    inner = next((kind for kind in kinds if kind.startswith("tuple")), None)
    if inner:
        with suppress(ValueError):
            return tuple(map(piece_type(inner), text.split("+")))
    plain = {"bool", "int", "float", "None", inner}
    if not plain.issuperset(kinds):
        return text
    raise ValueError(f"option {parameter.name} takes {_describe_types(kinds)}, got {text!r}")


def type_names(parameter: inspect.Parameter) -> list[str]:
    """The types of an annotation as written, "int | None" as ["int", "None"]."""
    given = parameter.annotation
    text = given.__name__ if isinstance(given, type) else str(given)
    return [kind.strip() for kind in text.split("|")]


def piece_type(kind: str) -> type:
    """The type of a tuple's elements."""
    if "int" in kind or "TokenId" in kind:
        return int
    return float if "float" in kind else str


def _describe_types(kinds: list[str]) -> str:
    """What users may write for a parameter of these types."""
    words = {"bool": "true or false", "int": "a whole number", "float": "a number", "None": "none"}
    found = [text for kind, text in words.items() if kind in kinds]
    if inner := next((kind for kind in kinds if kind.startswith("tuple")), None):
        is_whole = piece_type(inner) is int
        found.append(
            "whole numbers joined by + (4+3+2)" if is_whole else "numbers joined by + (0.5+0.1)"
        )
    return " or ".join(found)
