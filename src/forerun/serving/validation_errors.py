"""Converts pydantic's validation errors of a request body to an API error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from forerun.serving.errors import ApiError, bad, unknown


def of_validation(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    """The first error of a body of type `kind`.

    If a field has several types, the error of the type that matched furthest is used.
    """
    mistakes = error.errors(include_url=False)
    field = mistakes[0]["loc"][:1]
    first = min((one for one in mistakes if one["loc"][:1] == field), key=_rank)
    path = _path(first)
    param = ".".join(path)[:80] or None
    if first["type"] == "extra_forbidden":
        return unknown("parameter", path[-1], _fields(kind, path[:-1]), param=param)
    if first["type"] == "missing":
        return bad(f"{param} is required", param)
    message = first["msg"][:1].lower() + first["msg"][1:]
    return bad(f"{param or 'the body'}: {message}, got {_shown(first['input'])}", param)


def _rank(mistake: Any) -> tuple[bool, bool, int]:
    """The sort key of an error: unknown fields first, wrong types last, then the deepest."""
    kind = mistake["type"]
    return kind != "extra_forbidden", kind.endswith("_type"), -len(_path(mistake))


def _path(mistake: Any) -> list[str]:
    """Fields and indices of an error, without the names of types that pydantic adds."""
    *inner, last = mistake["loc"] or ("",)
    is_field = mistake["type"] in ("extra_forbidden", "missing")  # a field with any name
    return [str(piece) for piece in inner if _is_field(piece)] + (
        [str(last)] if is_field or _is_field(last) else []
    )


def _is_field(piece: int | str) -> bool:
    is_type = isinstance(piece, str) and (piece in ("str", "list") or not piece.isidentifier())
    return str(piece).isdecimal() or not is_type


def _fields(kind: type[BaseModel], path: list[str]) -> list[str]:
    """The fields of the object at a path."""
    for piece in path:
        field = kind.model_fields.get(piece)
        kind = next(_models(field.annotation), kind) if field else kind
    return [field.alias or name for name, field in kind.model_fields.items()]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The pydantic models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _shown(value: Any) -> str:
    """A value, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
