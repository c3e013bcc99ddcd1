"""JSON documents that a JSON Schema describes.

Without a schema any JSON object is allowed. Keywords that llguidance does not know are refused with
their path, so that a valid text is a valid document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from forerun.constraints._grammar_constraint import GrammarConstraint, text_of
from forerun.errors import ConfigError, DataError, in_a_line
from forerun.registry import File
from forerun.utils.files import parsed

OPTIONS = "x-guidance"  # of llguidance, in a schema
ANY_OBJECT = {"type": "object"}
PREFACE = re.compile("line .*, column .*: failed to compile JSON schema: ")
UNKNOWN = re.compile(r"Unimplemented keys: (\[.*\])")
# keywords of which the values are schemas by name, or data
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
DATA = {"enum", "const", "default", "examples"}


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
        if found := UNKNOWN.search(message):
            names = json.loads(found.group(1))
            paths = [path for name in names for path in _paths(self.schema, name)]
            return (
                f"the schema has keywords that are not supported: {', '.join(paths or names)}; "
                "leave them out"
            )
        return f"the JSON schema cannot be used: {PREFACE.sub('', message)}"


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
    if isinstance(given, Mapping) and OPTIONS in given:
        raise DataError(
            f"{where} has {OPTIONS!r}, which would change how llguidance reads its keywords; leave "
            "it out"
        )
    return given


def _paths(schema: Any, keyword: str, at: str = "#") -> Iterator[str]:
    """JSON pointers of a keyword in a schema."""
    if isinstance(schema, list):
        for i, one in enumerate(schema):
            yield from _paths(one, keyword, f"{at}/{i}")
    if not isinstance(schema, Mapping):
        return
    for name, value in schema.items():
        here = f"{at}/{name}"
        if name == keyword:
            yield here
        elif name in NAMED and isinstance(value, Mapping):
            for key, one in value.items():
                yield from _paths(one, keyword, f"{here}/{key}")
        elif name not in DATA:
            yield from _paths(value, keyword, here)
