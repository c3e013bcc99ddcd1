"""Problems for constrained decoding: a prompt, a constraint, and checks that do not use it.

Kinds: `schemas` (JSON schemas of schemas.json), `functions` (calls of functions.json), `extraction`
(the task json_extraction with a schema), `sql` (questions of the shared data with select.lark),
`sygus` (program synthesis of "Grammar-Aligned Decoding"), `patterns` (regular expressions), and
`molecules` (a subset of SMILES).
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jsonschema

from constraints import molecules, sql
from forerun.constraints.base import Constraint
from forerun.constraints.grammar import EBNF, LARK, Grammar
from forerun.constraints.json_schema import JsonSchema
from forerun.constraints.regex import Regex
from forerun.tasks.json_extraction import JsonExtractionTask

FOLDER = Path(__file__).parent
SYGUS = "prompts/gad_sygus_grammars.tar.gz"
SYGUS_SUITES = {"bv4": "(define-fun inv", "SLIA": "(define-fun f"}
TYPES = {
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "string or null": {"type": ["string", "null"], "maxLength": 60},
    "list of strings": {
        "type": "array",
        "items": {"type": "string", "maxLength": 60},
        "maxItems": 4,
    },
}
NO_STATEMENT = re.compile("syntax|incomplete|unrecognized|one statement|null char")  # of SQLite
FIELD = re.compile(r'^  "(\w+)": (.+?),?$', re.MULTILINE)
PATTERNS = {  # name -> request, expression, an example
    "date": (
        "A date in 2024, as YYYY-MM-DD.",
        r"2024-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
        "2024-02-29",
    ),
    "phone": (
        "A telephone number in Spain.",
        r"\+34 [6-9][0-9]{2} [0-9]{3} [0-9]{3}",
        "+34 612 345 678",
    ),
    "iban": ("An IBAN of a Belgian bank.", r"BE[0-9]{2}( [0-9]{4}){3}", "BE71 0961 2345 6769"),
    "colour": ("The hex code of a dark green.", r"#[0-9a-f]{6}", "#0b4d2a"),
    "email": (
        "An e-mail address of Clara Grant.",
        r"[a-z0-9._]{1,20}@[a-z0-9]([a-z0-9-]{0,15}[a-z0-9])?\.(com|org|net)",
        "clara.grant@example.org",
    ),
    "time": ("The time of a late dinner.", r"([01][0-9]|2[0-3]):[0-5][0-9]", "21:30"),
    "version": (
        "The version of a release candidate.",
        r"[0-9]\.[0-9]{1,2}\.[0-9]{1,2}-rc[1-9]",
        "2.10.0-rc1",
    ),
    "licence plate": ("A licence plate.", r"[A-Z]{1,3}-[A-Z]{1,2} [1-9][0-9]{0,3}", "B-XY 123"),
}
MOLECULES = ("ethanol", "benzene", "acetic acid", "caffeine", "cyclohexane", "glycine")

Check = Callable[[str], bool]
Score = Callable[[str], float]


@dataclass(frozen=True)
class Problem:
    """One problem.

    prompt: a message of a user, or the whole prompt if `is_raw`. check: whether a text is valid, by
    other means than the constraint. score: whether a valid text is right, if that can be checked.
    """

    kind: str
    name: str
    prompt: str
    constraint: Constraint
    check: Check
    score: Score | None = None
    is_raw: bool = False
    max_tokens: int = 256
    schema: Any = None  # the JSON schema, where the constraint is one: peers take it as it is
    grammar: str | None = None  # the same for Lark


def schemas() -> Iterator[Problem]:
    for one in json.loads((FOLDER / "schemas.json").read_text()):
        prompt = (
            f"{one['request']} Answer with a JSON document of this schema:\n{_short(one['schema'])}"
        )
        yield _json("schemas", one["name"], prompt, one["schema"])


def functions() -> Iterator[Problem]:
    given = json.loads((FOLDER / "functions.json").read_text())
    schema = {"anyOf": [_call_schema(tool) for tool in given["tools"]]}
    for i, one in enumerate(given["requests"]):
        prompt = (
            f"You can call these functions:\n{_short(given['tools'])}\n\n{one['text']}\n"
            'Answer with one call: {"name": ..., "arguments": {...}}.'
        )
        call = {"name": one["name"], "arguments": one["arguments"]}
        yield _json("functions", f"call {i}", prompt, schema, partial(_is_call, call))


def extraction(num: int = 40) -> Iterator[Problem]:
    task = JsonExtractionTask(seed=49, size=num)
    for i in range(num):
        example = task.example(i)
        properties = {
            name: TYPES.get(kind, {"type": "string", "maxLength": 60})
            for name, kind in FIELD.findall(example.turns[0])
        }
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        schema["additionalProperties"] = False
        score = partial(task.score, example)
        yield _json("extraction", example.id, example.turns[0], schema, score)


def text_to_sql(data: Path) -> Iterator[Problem]:
    template = (FOLDER / "select.lark").read_text()
    for i, question in enumerate(sql.questions(data)):
        database = question.database
        grammar = database.grammar(template)
        prompt = (
            f"{database.script}\n\n{question.text}\nAnswer with one SQLite SELECT statement and "
            "nothing else."
        )
        yield Problem(
            "sql",
            f"sql {i}",
            prompt,
            Grammar(grammar, notation=LARK),
            partial(_parses, database),
            partial(_compiles, database),
            max_tokens=160,
            grammar=grammar,
        )


def sygus(data: Path, suite: str = "bv4") -> Iterator[Problem]:
    """The problems of a suite, from the shortest prompt to the longest."""
    files = _sygus_files(data)
    names = [name for name in files if name.startswith(f"prompts/{suite}/")]
    for name in sorted(names, key=lambda name: (len(files[name]), name)):
        stem = Path(name).stem
        grammar = files.get(f"examples/sygus/{suite}/{stem}.ebnf")
        if grammar is not None:
            check = partial(_is_expression, SYGUS_SUITES[suite])
            constraint = Grammar(grammar, notation=EBNF)
            yield Problem(
                "sygus", f"{suite} {stem}", files[name], constraint, check, is_raw=True,
                max_tokens=128, grammar=grammar,
            )  # fmt: skip


def patterns() -> Iterator[Problem]:
    for name, (request, expression, _) in PATTERNS.items():
        compiled = re.compile(expression)

        def check(text: str, compiled: re.Pattern[str] = compiled) -> bool:
            return compiled.fullmatch(text) is not None

        prompt = f"{request} Answer with it and nothing else."
        yield Problem("patterns", name, prompt, Regex(expression), check, max_tokens=48)


def molecule_problems() -> Iterator[Problem]:
    grammar = (FOLDER / "molecule.lark").read_text()
    for name in MOLECULES:
        yield Problem(
            "molecules",
            name,
            f"Write the SMILES string of {name}, and nothing else.",
            Grammar(grammar, notation=LARK),
            molecules.is_closed,
            lambda text: float(molecules.has_valid_valences(text)),
            max_tokens=64,
            grammar=grammar,
        )


def problems(kind: str, data: Path | None) -> Iterator[Problem]:
    """All problems of a kind; none if they need data that is missing."""
    own: dict[str, Callable[[], Iterator[Problem]]] = {
        "schemas": schemas,
        "functions": functions,
        "extraction": extraction,
        "patterns": patterns,
        "molecules": molecule_problems,
    }
    if kind in own:
        return own[kind]()
    needs = {"sql": (sql.FILE, text_to_sql), "sygus": (SYGUS, sygus)}
    file, make = needs[kind]
    return make(data) if data is not None and (data / file).exists() else iter(())


KINDS = ("schemas", "functions", "extraction", "patterns", "molecules", "sql", "sygus")


def _json(kind: str, name: str, prompt: str, schema: Any, score: Score | None = None) -> Problem:
    """A problem with a schema as its constraint, checked by the package jsonschema."""
    check = partial(is_document, schema)
    return Problem(kind, name, prompt, JsonSchema(schema), check, score, schema=schema)


def is_document(schema: Any, text: str) -> bool:
    """Whether a text is a JSON document of a schema, formats included."""
    try:
        document = json.loads(text)
    except ValueError:
        return False
    return validator(_short(schema)).is_valid(document)


@lru_cache(maxsize=128)
def validator(schema: str) -> Any:
    checker = jsonschema.FormatChecker()
    return jsonschema.Draft202012Validator(json.loads(schema), format_checker=checker)


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call_schema(tool: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool["name"]}, "arguments": tool["parameters"]},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _is_call(wanted: dict[str, Any], text: str) -> float:
    """1.0 for the function with all expected arguments; more optional ones may be there."""
    try:
        found = json.loads(text)
    except ValueError:
        return 0.0
    given = found.get("arguments", {})
    same = all(
        _plain(given.get(name)) == _plain(value) for name, value in wanted["arguments"].items()
    )
    return float(found.get("name") == wanted["name"] and same)


def _plain(value: Any) -> Any:
    return value.strip().rstrip(".").lower() if isinstance(value, str) else value


def _parses(database: sql.Database, text: str) -> bool:
    """Whether SQLite finds no mistake of syntax in a statement."""
    problem = database.problem(text)
    is_whole = text.lstrip().upper().startswith("SELECT") and text.rstrip().endswith(";")
    return is_whole and not NO_STATEMENT.search(problem)


def _compiles(database: sql.Database, text: str) -> float:
    """1.0 if SQLite compiles a statement, so all its names exist."""
    return float(_parses(database, text) and not database.problem(text))


def _is_expression(start: str, text: str) -> bool:
    """Whether a text is one S-expression with this beginning."""
    depths, depth = [], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        depths.append(depth)
    return text.startswith(start) and depths[-1] == 0 and min(depths[:-1], default=0) > 0


@lru_cache(maxsize=2)
def _sygus_files(data: Path) -> dict[str, str]:
    """The grammars and prompts of the archive, by path."""
    with tarfile.open(data / SYGUS) as archive:
        members = [one for one in archive if one.name.endswith((".ebnf", ".txt"))]
        return {one.name: archive.extractfile(one).read().decode() for one in members}  # type: ignore[union-attr]
