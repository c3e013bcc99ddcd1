"""JSON documents that a JSON Schema describes.

Without a schema any JSON object is allowed. Keywords that llguidance does not know are refused, so
that a valid text is a valid document. Errors name the place in the schema as a JSON pointer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from forerun.constraints._compiled import refusal_of
from forerun.constraints._grammar_constraint import GrammarConstraint, text_of
from forerun.constraints._schema_places import ROOT, paths, place_of
from forerun.errors import ConfigError, DataError, in_a_line
from forerun.registry import File
from forerun.utils.files import parsed

OPTIONS = "x-guidance"  # of llguidance, in a schema
ANY_OBJECT = {"type": "object"}
PREFACE = re.compile("line .*, column .*: failed to compile JSON schema: ")
UNKNOWN = re.compile(r"Unimplemented keys: (\[.*\])")
TOO_LARGE = "schema too large"  # an error of the whole
UNKNOWN_OPTION = ". Enable "  # begins the advice to set an option that users do not have


class JsonSchema(GrammarConstraint):
    """Allows the documents of a schema.

    schema: a mapping, JSON text, or a pydantic model; or file: a JSON file. whitespace: whether
    spaces and line breaks may stand between tokens of JSON.
    """

    def __init__(self, schema: Any = None, *, file: File | None = None, whitespace: bool = True):
        if schema is not None and file is not None:
            raise ConfigError("a JSON schema comes as a value or from a file, not both")
        given = text_of(file) if file else ANY_OBJECT if schema is None else schema
        self.schema: Any = _schema_of(given, str(file or "the schema"))
        self.whitespace = whitespace

    def source(self) -> str:
        schema = self.schema
        if not self.whitespace and isinstance(schema, Mapping):
            schema = {OPTIONS: {"whitespace_flexible": False}} | dict(schema)
        return f"start: %json {json.dumps(schema)}"

    def explained(self, message: str) -> str:
        """The message of llguidance, with the paths of the keywords that it does not know."""
        if unknown := UNKNOWN.search(message):
            names = json.loads(unknown[1])
            found = [path for name in names for path in paths(self.schema, name)]
            return (
                f"the schema has keywords that are not supported: {', '.join(found or names)}; "
                "leave them out"
            )
        reason = PREFACE.sub("", message)
        is_local = not reason.endswith(TOO_LARGE)
        place = place_of(self.schema, reason, _message_of) if is_local else ROOT
        where = "" if place == ROOT else f"; at {place}"
        return f"the JSON schema cannot be used: {reason.partition(UNKNOWN_OPTION)[0]}{where}"


def _message_of(schema: Any) -> str:
    """The error of llguidance for a schema; "" for none."""
    return PREFACE.sub("", refusal_of(f"start: %json {json.dumps(schema)}"))


def _schema_of(given: Any, where: str) -> Any:
    """A schema as JSON values. where: its name in errors. Raises DataError."""
    if hasattr(given, "model_json_schema"):  # pydantic
        given = given.model_json_schema()
    elif isinstance(given, str | bytes):
        try:
            given = parsed(given if isinstance(given, str) else given.decode())
        except ValueError as error:
            raise DataError(
                f"{where} is no JSON: {in_a_line(error)}; a schema looks like "
                '{"type": "object", "properties": {"name": {"type": "string"}}}'
            ) from None
    if not isinstance(given, Mapping | bool):
        raise DataError(
            f"{where}: a JSON schema is an object, got {given!r:.80}; give JSON, or in Python a "
            "mapping or a pydantic model"
        )
    if (place := next(paths(given, OPTIONS), None)) is not None:
        raise DataError(
            f"{where} has {OPTIONS!r}, which would change how llguidance reads its keywords; leave "
            f"{place} out"
        )
    return given
