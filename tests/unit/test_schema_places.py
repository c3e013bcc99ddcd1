"""Errors of JSON schemas name the place as a JSON pointer."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.cli.main import main
from forerun.constraints import _schema_places
from forerun.constraints.json_schema import JsonSchema
from forerun.errors import DataError
from forerun.models.paths import located
from forerun.models.tokenizer import Tokenizer

pytest.importorskip("llguidance")


def within(**part: Any) -> dict[str, Any]:
    """A schema with a part under a name that JSON pointers escape."""
    return {"type": "object", "properties": {"good": {"type": "string"}, "a/b~c": part}}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (within(type="strin"), "Invalid type: strin; at #/properties/a~1b~0c/type"),
        (within(format="zip"), "Unknown format: zip; at #/properties/a~1b~0c/format"),
        (within(type="string", format="zip"), "; at #/properties/a~1b~0c/format"),
        (within(pattern="("), "unclosed group; at #/properties/a~1b~0c/pattern"),
        (within(items={"enum": 5}), "enum must be an array; at #/properties/a~1b~0c/items/enum"),
        (within(minLength=-1), "got -1; at #/properties/a~1b~0c/minLength"),
        (within(**{"not": {}}), "not supported: #/properties/a~1b~0c/not; leave"),
        ({"anyOf": [{}, {"allOf": [{"type": "x"}]}]}, "; at #/anyOf/1/allOf/0/type"),
        ({"prefixItems": [{}, {"type": 5}]}, "; at #/prefixItems/1/type"),
        ({"additionalProperties": 5}, "schema must be an object or boolean; at #/additional"),
        ({"properties": 5}, "properties must be an object; at #/properties"),
        ({"type": "strin"}, "Invalid type: strin; at #/type"),
        # a reference is no mistake, but what it refers to
        (
            {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"format": "zip"}}},
            "; at #/$defs/x/format",
        ),
        ({"properties": {"a": {"$ref": "#/$defs/y"}}, "$defs": {"x": {}}}, "properties/a/$ref"),
        # no smaller part has the mistake
        ({"minLength": 5, "maxLength": 3, "type": "string"}, "maxLength (3)"),
        # data and names look like keywords
        ({"const": {"type": "x"}, "properties": {"type": {"type": "x"}}}, "#/properties/type/type"),
        # the advice of llguidance to set an option of ours is left out
        ({"oneOf": [{"type": "string"}, {}]}, "oneOf constraints are not supported; at #/oneOf"),
    ],
)
def test_places(schema: dict[str, Any], said: str) -> None:
    tokenizer = Tokenizer.load(located("reasoner"))
    messages = set[str]()
    for use in (lambda one: one.check(), lambda one: one.bind(tokenizer, tokenizer.vocab_size)):
        with pytest.raises(DataError) as caught:
            use(JsonSchema(schema))
        messages.add(str(caught.value))
    assert len(messages) == 1 and said in messages.pop()


def test_options_of_llguidance_are_refused_anywhere() -> None:
    schema = {"properties": {"a/b": {"x-guidance": {"lenient": True}}}}
    with pytest.raises(DataError, match="leave #/properties/a~1b/x-guidance out"):
        JsonSchema(schema)
    JsonSchema({"properties": {"x-guidance": {}}, "default": {"x-guidance": 1}})


def test_work_to_find_a_place_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {f"k{i}": {"type": "string"} for i in range(100)}
    schema = {"properties": many | {"last": {"type": "x"}}}
    with pytest.raises(DataError, match="#/properties/last/type"):
        JsonSchema(schema).check()
    for limit in ("MAX_CHARS", "MAX_PARTS"):
        with monkeypatch.context() as patch:
            patch.setattr(_schema_places, limit, 50)
            with pytest.raises(DataError, match="Invalid type: x$"):
                JsonSchema(schema).check()


def test_deep_schemas_have_places() -> None:
    schema: Any = {"type": "x"}
    for _ in range(60):
        schema = {"items": schema}
    with pytest.raises(DataError, match="Invalid type: x; at #(/items){60}/type"):
        JsonSchema(schema).check()
    for _ in range(400):
        schema = {"anyOf": [schema]}
    assert next(_schema_places.paths(schema, "type")).endswith("/items/type")


def test_the_command_names_the_place(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"properties": {"a/b": {"format": "zip"}}}')
    assert main(["generate", "-p", "x", "--json-schema", str(file)]) == 2
    assert "Unknown format: zip; at #/properties/a~1b/format" in capsys.readouterr().err
