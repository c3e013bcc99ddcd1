"""Reads the constraint of a request from `response_format` and from vLLM's fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from forerun.constraints.base import Constraint
from forerun.constraints.choice import Choice
from forerun.constraints.grammar import Grammar
from forerun.constraints.json_schema import JsonSchema
from forerun.constraints.regex import Regex
from forerun.errors import ConfigError, DataError
from forerun.serving.errors import bad
from forerun.serving.schemas import Shared, StructuredOutputs

MAX_CHARS = 1 << 20  # of a schema, a regular expression or a grammar
UNSUPPORTED = "unsupported_value"
T = TypeVar("T")


class Wanted(NamedTuple):
    """A constraint, and the field of the request that it comes from."""

    param: str
    constraint: Constraint


def wanted(request: Shared) -> Wanted | None:
    """The constraint of a request. Raises ApiError 400 if it is invalid, or for two of them."""
    found = [*_of_format(request), *_of_vllm(request)]
    if len(found) > 1:
        (first, _), (second, _) = found[:2]
        raise bad(f"{first} and {second} both constrain the text; leave one of them out", second)
    return next((Wanted(param, made(param, make)) for param, make in found), None)


Source = tuple[str, Callable[[], Constraint]]


def made(param: str, make: Callable[[], T]) -> T:
    """What `make` returns. Raises ApiError 400 for the field `param`."""
    try:
        return make()
    except (ConfigError, DataError) as error:
        raise bad(f"{param}: {error}", param) from None


def json_schema(schema: Any, whitespace: bool = True) -> JsonSchema:
    """A constraint on JSON documents. Raises DataError for a schema that is too large."""
    text = schema if isinstance(schema, str) else as_json(schema)
    check_size(text, "the schema")
    if schema is False:
        raise DataError("the schema false allows no document; correct it")
    return JsonSchema({} if schema is True else schema, whitespace=whitespace)


def as_json(schema: Any) -> str:
    """A schema as text. Raises DataError for numbers that JSON does not have."""
    try:
        return json.dumps(schema, allow_nan=False)
    except ValueError:
        raise DataError("the schema has a number that is NaN or infinite; correct it") from None


def check_size(text: str, what: str) -> None:
    """Raises DataError for a text above MAX_CHARS."""
    if len(text) > MAX_CHARS:
        raise DataError(f"{what} has {len(text)} characters, but at most {MAX_CHARS} are compiled")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError(f"{what} has half of a surrogate pair; correct its encoding") from None


def _of_format(request: Shared) -> Iterator[Source]:
    given = request.response_format
    if given is None:
        return
    if given.type == "json_object":
        yield "response_format", JsonSchema
    if given.type != "json_schema":
        if given.json_schema is not None:
            raise bad(
                f"response_format.json_schema needs the type json_schema, got {given.type}",
                "response_format.json_schema",
            )
        return
    if given.json_schema is None or given.json_schema.schema_ is None:
        where = "response_format.json_schema"
        raise bad(f"{where} needs a schema", where)
    schema = given.json_schema.schema_
    yield "response_format.json_schema.schema", lambda: json_schema(schema)


def _of_vllm(request: Shared) -> Iterator[Source]:
    prefix = "structured_outputs"
    given = request.structured_outputs or StructuredOutputs()
    if given.structural_tag is not None:
        where = f"{prefix}.structural_tag"
        raise bad(f"{where} is not supported by this server; use tools", where, UNSUPPORTED)
    may_space = not given.disable_any_whitespace
    if given.json_object:
        yield f"{prefix}.json_object", lambda: JsonSchema(whitespace=may_space)
    yield from _of_values(
        (f"{prefix}.json", f"{prefix}.regex", f"{prefix}.choice", f"{prefix}.grammar"),
        (given.json_, given.regex, given.choice, given.grammar),
        may_space,
    )
    yield from _of_values(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        (
            request.guided_json,
            request.guided_regex,
            request.guided_choice,
            request.guided_grammar,
        ),
        True,
    )


def _of_values(
    names: tuple[str, ...], values: tuple[Any, ...], may_space: bool
) -> Iterator[Source]:
    """The constraints of a JSON schema, a regular expression, a choice and a grammar."""
    makers: tuple[Callable[[Any], Constraint], ...] = (
        lambda value: json_schema(value, may_space),
        _regex,
        _choice,
        _grammar,
    )
    for name, value, make in zip(names, values, makers, strict=True):
        if value is not None:
            yield name, lambda make=make, value=value: make(value)  # type: ignore[misc]


def _regex(pattern: str) -> Regex:
    check_size(pattern, "the regular expression")
    return Regex(pattern)


def _choice(options: list[str]) -> Choice:
    check_size("".join(options), "the choice")
    return Choice(options)


def _grammar(text: str) -> Grammar:
    check_size(text, "the grammar")
    if not text.strip():
        raise DataError("the grammar is empty; give it a rule")
    return Grammar(text)
