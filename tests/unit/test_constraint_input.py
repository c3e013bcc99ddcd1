"""Bad constraints on the command line and in Python: refused before a model is loaded, by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun.cli.main import main
from forerun.constraints.json_schema import JsonSchema
from forerun.constraints.python import Predicate
from forerun.constraints.regex import Regex
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, DataError

SHORT = ["generate", "-p", "Ann has 12", "--seed", "1", "--max-new-tokens", "6"]
FILES = {
    "text.json": "{not json",
    "array.json": "[1, 2]",
    "keyword.json": '{"properties": {"b": {"not": {"type": "string"}}}}',
    "reference.json": '{"$ref": "#/$defs/nope"}',
    "false.json": "false",
    "large.json": json.dumps({"title": "x" * (1 << 20)}),
    "empty.lark": "",
    "second.lark": 'start: "a"\nb: (\n',
    "option.lark": 'start: "a"\n%llguidance {\n"no_forcin": true}\n',
    "empty_language.lark": "start: start\n",
    "no_letter.lark": "start: NEVER\nNEVER: /[^\\s\\S]/\n",
    "open.gbnf": 'root ::= "a" | (\n',
    "rule.gbnf": "root ::= thing\n",
    "syntax.py": "def prefix(text:\n",
    "other.py": "x = 1\n",
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.json").write_bytes(b'{"title": "\xe9"}')
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--regex", ""], "a regular expression must be a text that is not empty, got ''"),
        (["--regex", "a("], "the regular expression 'a(' cannot be used: unclosed group"),
        (["--regex", "(?=a)b"], "look-around, including look-ahead and look-behind"),
        (["--json-schema", "no.json"], "no.json cannot be read: No such file"),
        (["--json-schema", "."], "cannot be read: Is a directory; check the path"),
        (["--json-schema", "text.json"], "text.json is no JSON: Expecting property name"),
        (["--json-schema", "latin.json"], "latin.json is not UTF-8 text; save it as UTF-8"),
        (["--json-schema", "array.json"], "array.json: a JSON schema is an object, got [1, 2]"),
        (["--json-schema", "keyword.json"], "not supported: #/properties/b/not; leave them out"),
        (["--json-schema", "reference.json"], "cannot be used: Pointer '/$defs/nope' does not"),
        (["--json-schema", "false.json"], "Unsatisfiable schema: schema is false"),
        (["--json-schema", "large.json"], "at most 1048576 are compiled"),
        (["--grammar", "empty.lark"], "empty.lark cannot be used: no start rule found; name"),
        (["--grammar", "second.lark"], "second.lark cannot be used: line 2, column "),
        (
            ["--grammar", "option.lark"],
            "option.lark cannot be used: line 2: unknown option 'no_forcin' of %llguidance; did "
            "you mean 'no_forcing'?",
        ),
        (["--grammar", "empty_language.lark"], "lark cannot be used: it allows no text at all"),
        (["--constraint", "grammar:file=no_letter.lark"], "it allows no text at all; correct it"),
        (["--grammar", "open.gbnf"], "the grammar is no GBNF: Expected ')' at line 2"),
        (["--grammar", "rule.gbnf"], "the grammar is no GBNF: Rule 'thing' not found"),
        (["--choice", "yes|"], "one or more texts that are not empty, got 'yes|'"),
        (["--choice", ""], "one or more texts that are not empty, got ''"),
        (["--choice", "a", "--constraint-start", ""], "constraint_start must be a non-empty text"),
        (["--constraint-start", "x"], "constraint_start='x' needs a constraint"),
        (["--constraint", "python:file=syntax.py"], "syntax.py gives no predicate (SyntaxError"),
        (["--constraint", "python:file=other.py"], "define prefix(text: bytes) -> bool in it"),
        (["--constraint", "regex:pattern=a("], "the regular expression 'a(' cannot be used"),
        (
            ["--constraint", "regex:pattern=[0-9]{1,3}"],
            "option '3}' of 'regex' has no value; write 3}=VALUE, or join the values of a list by "
            "+, as in 4+3+2; a comma begins the next option, so give a value with commas as "
            "--regex PATTERN, or in Python as Regex(PATTERN)",
        ),
        (
            ["--constraint", "regex:pattern=a,b=c"],
            "give a value with commas as --regex PATTERN",
        ),
        (
            ["--constraint", 'json_schema:schema={"type": "object", "properties": {}}'],
            "give a value with commas as --json-schema FILE, or in Python as JsonSchema(...)",
        ),
        (["--constraint", "json_schema:file=text.json"], "text.json is no JSON"),
    ],
)
def test_bad_constraints_are_refused_before_a_model_is_loaded(
    files: None,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forerun.cli.loading.load", lambda *_, **__: pytest.fail("loaded"))
    assert main([*SHORT, *words]) == 2
    shown = capsys.readouterr()
    assert message in shown.err and not shown.out


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start: a\na: "1" a\n', "it was cut after 6 tokens"),  # endless forced text
        ("regex:pattern=[0-9]{50}", "it was cut after 6 tokens; raise --max-new-tokens"),
        ("def prefix(text):\n    raise ValueError('an error')\n", "ValueError: an error"),
        ("def prefix(text):\n    return False\n", "no allowed token can follow"),
    ],
)
def test_texts_that_are_not_valid_are_named(
    grammar: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They end with status 0, as all finished texts, and say so; JSON has `valid`."""
    words = ["--constraint", grammar]
    if grammar.startswith("start"):
        (tmp_path / "grammar.lark").write_text(grammar)
        words = ["--grammar", str(tmp_path / "grammar.lark")]
    if grammar.startswith("def"):
        (tmp_path / "rule.py").write_text(grammar)
        words = ["--constraint", f"python:file={tmp_path / 'rule.py'}"]
    assert main([*SHORT, *words]) == 0
    assert f"the text is not valid: {message}" in capsys.readouterr().err
    assert main([*SHORT, *words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)["constraint"]
    assert record["valid"] is False and ("rror" in message) == ("error" in record)


def test_a_marker_that_never_comes_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--choice", "yes|no", "--constraint-start", "ZZZ"]
    assert main([*SHORT, *words]) == 0
    assert "the marker 'ZZZ' did not come; raise --max-new-tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    "grammar", ['e: e "+" "1" | "1"\nstart: e\n', 'root ::= e\ne ::= e "1" | "1"']
)
def test_left_recursion_is_served(
    grammar: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("left.gbnf" if "::=" in grammar else "left.lark")
    path.write_text(grammar)
    assert main([*SHORT, "--grammar", str(path)]) == 0
    assert set(capsys.readouterr().out.strip()) <= {"1", "+"}


def test_schemas_from_classes() -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    assert JsonSchema(Person).schema["required"] == ["name", "age"]
    for wrong in (int, object(), 3, ["a"]):
        with pytest.raises(DataError, match="object, got .* a pydantic model"):
            JsonSchema(wrong)
    with pytest.raises(ConfigError, match="not empty, got None"):
        Regex(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_sampling", [False, True])
def test_schemas_in_place_of_constraints_are_named(is_sampling: bool) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str

    schema = {"type": "object"}
    for given, fix in (
        (Person, "write JsonSchema(Person), with from forerun.constraints.json_schema import"),
        (schema, "write JsonSchema({'type': 'object'})"),
        (json.dumps(schema), "write JsonSchema(text) for a schema"),
        ("[0-9]{1,3}", "Regex(text) for a regular expression"),
    ):
        options: Any = {"sampling": Sampling(constraint=given)} if is_sampling else {}
        options = options or {"constraint": given}
        with pytest.raises(ConfigError, match=re.escape(fix)):
            forerun.generate("x", max_new_tokens=3, **options)
    with pytest.raises(ConfigError, match=r"JsonSchema\(Person\)"):
        forerun.generate("x", constraint=[Regex("a"), Person], max_new_tokens=3)


def test_predicates_that_take_no_text_are_refused(tmp_path: Path) -> None:
    async def later(text: bytes) -> bool:
        return True

    alone = "is called with the text's bytes alone, but takes"
    for test, said in (
        (3, "must be a function of the text's bytes, got 3; write"),
        (lambda: True, f"{alone} (): too many positional arguments; write"),
        (lambda text, more: True, f"{alone} (text, more): missing a required argument: 'more'"),
        (lambda *, text: True, f"{alone} (*, text): "),
        (later, "is an async function, which returns no bool; write"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"prefix {said}")):
            Predicate(test)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=re.escape(f"complete {said}")):
            Predicate(lambda text: True, test)  # type: ignore[arg-type]
    (tmp_path / "p.py").write_text("def prefix(text, more): return True\n")
    with pytest.raises(ConfigError, match=f"prefix of .*p.py {alone}"):
        Predicate(file=str(tmp_path / "p.py"))
    Predicate(bytes.isdigit, re.compile(b"[0-9]+").fullmatch)  # type: ignore[arg-type]
    Predicate(lambda text, *, more=1: True)


def test_a_predicate_that_raises_is_reported_also_for_a_valid_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the empty text is left, and it is allowed."""
    code = "def prefix(text):\n    raise ValueError('boom')\ndef complete(text):\n    return True\n"
    (tmp_path / "pred.py").write_text(code)
    command = ["generate", "--prompt", "Hi", "--max-new-tokens", "4"]
    assert main([*command, "--constraint", f"python:file={tmp_path / 'pred.py'}"]) == 0
    assert "the constraint failed on other texts" in (said := capsys.readouterr().err)
    assert "ValueError: boom" in said
