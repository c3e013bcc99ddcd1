"""What is wrong with a body, in plain words: pydantic finds the place, we say what was expected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from forerun.serving.errors import ApiError, bad, unknown
from forerun.utils.files import once

Place = tuple[int | str, ...]
MOST = 1000  # mistakes that are looked at: a body of nothing else would take seconds
KINDS = {
    "string_type": "a text",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
EXPECTED = {
    "finite_number": "a finite number",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "{expected}",
    "too_short": "at least {min_length} element",
    "too_long": "at most {max_length} elements",
    "string_too_long": "at most {max_length} characters",
}


def of_validation(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    """The first mistake of a body that was to be a `kind`."""
    if (count := error.error_count()) > MOST:
        return bad(f"the body has {count} mistakes, too many to look for the first one")
    found = error.errors(include_url=False)
    field = found[0]["loc"][:1]
    # of the forms that a field may have, the one that nearly came is wrong in more than its type
    first = min((one for one in found if one["loc"][:1] == field), key=_rank)
    place = _place(first)
    param = ".".join(map(str, place))[:80] or None
    if first["type"] == "json_invalid":
        return bad(f"the body is not valid JSON: {_of_json(first['ctx']['error'])}")
    if first["type"] == "extra_forbidden":
        return unknown("parameter", str(place[-1]), _fields(kind, place[:-1]), param=param)
    if first["type"] == "missing":
        return bad(f"{param} is required", param)
    if first["type"] in KINDS:
        kinds = (KINDS[one["type"]] for one in found if _place(one) == place)
        expected = " or ".join(dict.fromkeys(kinds))
    elif first["type"] in EXPECTED:
        bounds = {name: _whole(value) for name, value in first.get("ctx", {}).items()}
        expected = EXPECTED[first["type"]].format_map(bounds)
    else:
        return bad(f"{param or 'the body'}: {first['msg']}", param)
    return bad(f"{param or 'the body'}: expected {expected}, got {_got(first)}", param)


def check_keys(body: bytes) -> None:
    """Raises ApiError 400 for a JSON object that has a key twice, of which pydantic sees one."""
    try:
        json.loads(body, object_pairs_hook=once, parse_int=len)  # no number is of interest
    except ValueError as error:
        raise bad(f"the body: {error}") from None


def _rank(mistake: Any) -> tuple[int, int]:
    """Misspelt names come first, wrong types last; of those the one that lies deepest."""
    kind = mistake["type"]
    rank = 0 if kind == "extra_forbidden" else 2 if kind in KINDS else 1
    return rank, -len(_place(mistake))


def _place(mistake: Any) -> Place:
    """Names and indices that lead to a mistake, without the forms that a field may have."""
    *path, last = mistake["loc"] or ("",)
    is_sure = mistake["type"] in ("extra_forbidden", "missing")  # whatever a client wrote
    return tuple(piece for piece in path if _is_name(piece)) + (
        (last,) if is_sure or _is_name(last) else ()
    )


def _is_name(piece: int | str) -> bool:
    if isinstance(piece, int) or piece.isdecimal():
        return True
    return piece not in ("str", "list") and piece.isidentifier()


def _fields(kind: type[BaseModel], place: Place) -> list[str]:
    """The fields of the object at a place."""
    for piece in place:
        field = kind.model_fields.get(str(piece))
        kind = next(_models(field.annotation), kind) if field else kind
    return list(kind.model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models within an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _of_json(cause: str) -> str:
    if "hex escape" not in cause:
        return cause
    where = cause.partition(" at ")[2]
    return f"an incomplete \\u escape, or half of a surrogate pair, which is no text, at {where}"


def _whole(bound: Any) -> Any:
    """-2.0 as -2, and large integers with all their digits."""
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _got(mistake: Any) -> str:
    """What came, shortly."""
    value, size = mistake["input"], mistake.get("ctx", {}).get("actual_length")
    if mistake["type"] == "string_too_long":
        return str(len(value))
    if mistake["type"] == "too_long":
        return "more" if size is None else str(size)
    if mistake["type"] == "too_short":
        return "an empty list"
    if isinstance(value, int) and value.bit_length() > 256:
        return "a very large number"
    if value is None or isinstance(value, int | float):
        return json.dumps(value)
    if isinstance(value, str):
        return repr(value[:40])
    return "a list" if isinstance(value, list) else "an object"
