"""Checks of method pages against the code: option tables and example commands.

Every table of the section Options names its part in the first cell of its header,
"drafter `stand`" for a registered part or "`forerun.search.superposed.Settings`" for any other
callable, and has one row per option: name, default, meaning.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TABLE = re.compile(
    r"^\| (?:(?P<kind>[a-z]+) )?`(?P<name>[\w.]+)` \| default \| meaning \|\n"
    r"\|[-:| ]+\|\n(?P<rows>(?:\|.*\n?)*)",
    re.MULTILINE,
)
ROW = re.compile(r"^\| `(\w+)` \| (.*?) \| .+ \|$")
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
PARTS = {"-d": "drafter"} | {f"--{k}": k for k in ("drafter", "verifier", "controller")}
UNSHOWN = (str, bool, int, float, tuple, type(None))  # defaults of other types have no text


def section(text: str, name: str) -> str:
    """The text of one section of a page."""
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found.group(1) if found else ""


def expected(kind: str | None, name: str) -> Mapping[str, inspect.Parameter]:
    """The options a user can write: of a registered part, or the keywords of a callable."""
    from forerun import registry

    if kind:
        return registry.text_options(registry.get(kind, name))
    module, _, attribute = name.rpartition(".")
    signature = inspect.signature(getattr(importlib.import_module(module), attribute))
    taken = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    only = [p for p in taken if p.kind is p.KEYWORD_ONLY] or taken
    return {p.name: p for p in only if p.name not in registry.NOT_TEXT}


def shown(default: Any) -> str | None:
    """A default as users write it; None where a text cannot say it."""
    if default is inspect.Parameter.empty:
        return "required"
    if not isinstance(default, UNSHOWN):
        return None
    if default is None or default == ():
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return "+".join(str(value) for value in default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def wrong_options(page: Path) -> Iterator[str]:
    """One line for every option that a table leaves out, invents, or gives another default."""
    options = section(page.read_text("utf-8"), "Options")
    if options.count("| default | meaning |") != len(TABLE.findall(options)):
        yield f"{page.name}: a table of Options must begin '| KIND `name` | default | meaning |'"
    for table in TABLE.finditer(options):
        yield from _wrong_rows(page.name, table)


def _wrong_rows(where: str, table: re.Match[str]) -> Iterator[str]:
    kind, name = table["kind"], table["name"]
    try:
        known = expected(kind, name)
    except (LookupError, ImportError, AttributeError, ValueError) as error:
        yield f"{where}: the table of {name!r} names no part: {error}"
        return
    found = {}
    for line in table["rows"].splitlines():
        if row := ROW.match(line):
            found[row[1]] = row[2].strip("`")
        else:
            yield f"{where}: not a row of options: {line}"
    yield from (f"{where}: {name} has an option {o!r}" for o in known.keys() - found)
    yield from (f"{where}: {name} has no option {o!r}" for o in found.keys() - known)
    for option in found.keys() & known.keys():
        default = shown(known[option].default)
        if default is not None and found[option] != default:
            yield f"{where}: {name}:{option} is {default!r} unless given, not {found[option]!r}"


def undocumented(methods: list[Path]) -> list[str]:
    """One line for every part of a working method with options that no table lists.

    A part has its own table on some page, or all its options stand in the tables of its method.
    """
    from forerun import catalog, registry

    tables = {page.stem: _tables(page) for page in methods}
    own = {name for found in tables.values() for name in found}
    kinds = {package.rpartition(".")[2]: kind for kind, (package, *_) in registry.KINDS.items()}
    wrong = set()
    for row in catalog.rows():
        files = (file.split("/") for file in row.files if row.state != catalog.MISSING)
        parts = [(kinds[f[0]], f[1]) for f in files if len(f) == 2 and f[0] in kinds]
        listed = {option for options in tables.get(row.name, {}).values() for option in options}
        for kind, name in parts:
            if (kind, name) in own or name not in registry.names(kind):
                continue
            if not registry.text_options(registry.get(kind, name)).keys() <= listed:
                wrong.add(f"no page lists the options of {kind} {name!r} ({row.doc})")
    return sorted(wrong)


def _tables(page: Path) -> dict[tuple[str | None, str], set[str]]:
    """The option names of a page by (kind, part)."""
    options = section(page.read_text("utf-8"), "Options")
    return {
        (t["kind"], t["name"]): {r[1] for line in t["rows"].splitlines() if (r := ROW.match(line))}
        for t in TABLE.finditer(options)
    }


def commands(text: str) -> Iterator[list[str]]:
    """The words of every forerun command in the code blocks of a page."""
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["forerun"]:
                yield words[1:]


def wrong_commands(page: Path) -> Iterator[str]:
    """One line for every command that does not parse, or names an unknown part or option."""
    from forerun import registry
    from forerun.cli import main

    for words in commands(page.read_text("utf-8")):
        try:
            _parse(main.build(), words)
            for option, value in zip(words, words[1:], strict=False):
                if option in PARTS:
                    registry.resolve(PARTS[option], value)
        except Exception as error:
            said = getattr(error, "message", None) or error
            yield f"{page.name}: forerun {' '.join(words)}: {said}"


def _parse(command: Any, words: list[str]) -> None:
    """Parses a command line down to its last subcommand, without running it."""
    context = command.make_context("forerun", list(words))
    rest = [*getattr(context, "_protected_args", []), *context.args]
    if rest and hasattr(command, "resolve_command"):
        _, inner, words = command.resolve_command(context, rest)
        _parse(inner, words)
