"""`forerun methods`: list the catalog or the methods of a kind, or explain one method."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import catalog, registry
from forerun.catalog import Row
from forerun.cli.options import Json
from forerun.cli.output import console, notice, print_json
from forerun.errors import UnknownName
from forerun.utils.text import joined

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLOURS = {catalog.WORKS: "green", catalog.PARTIAL: "yellow", catalog.MISSING: "dim"}
TITLES = {"Baselines": "baseline", "Published systems": "system", "Other methods": "method"}
YES_NO = {True: "yes", False: "no", None: "-"}

Name = Annotated[str | None, typer.Argument(help="Name of a method.")]
KindName = Annotated[
    str | None, typer.Option("--kind", help=f"Kind of methods: {', '.join(registry.KINDS)}.")
]


def command(name: Name = None, kind: KindName = None, is_json: Json = False) -> None:
    """List the catalog or the methods of a kind, or explain one method."""
    if name is None:
        _list(is_json) if kind is None else _list_kind(kind, is_json)
        return
    row = catalog.find(name) if kind is None else None
    found = explain_part(name, kind) if row is None else explain(row)
    if is_json:
        print_json(found)
    else:
        _show(found)


def explain(row: Row) -> dict[str, Any]:
    """A system's catalog row, the options of its parts, and commands that make and use it."""
    is_there = row.state != catalog.MISSING
    return row.to_dict() | {
        "paper": str(row.paper) if row.paper else None,
        "parts": _parts(row.parts),
        "lossy": _parts(row.lossy),
        "files": {file: catalog.is_built(file) for file in row.files},
        "pages": [row.doc] if is_there else [],
        "example": example(row.parts) if is_there else None,
        "lossy_example": example({**row.parts, **row.lossy}) if row.lossy and is_there else None,
    }


def _parts(specs: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The spec of each kind, with its options if it is registered."""
    return {
        kind: {
            "spec": spec,
            "options": options_of(kind, spec) if registry.is_registered(kind, spec) else None,
        }
        for kind, spec in specs.items()
    }


def explain_part(name: str, kind: str | None = None) -> dict[str, Any]:
    """A registered method, in the given kind or in all kinds that have it. Raises UnknownName."""
    wanted = name.strip().lower().replace("-", "_")
    kinds = registry.KINDS if kind is None else [kind]
    homes = [kind for kind in kinds if wanted in registry.names(kind)]
    if not homes and kind is not None:
        registry.get(kind, wanted)  # raises UnknownName
    if not homes:
        known = {part for kind in kinds for part in registry.names(kind)}
        known |= {row.name for row in catalog.rows()}
        raise UnknownName.of("method", name, known, "`forerun methods` lists all")
    text = (inspect.getdoc(registry.get(homes[0], wanted)) or "").partition("Raises ")[0]
    note, _, about = (" ".join(piece.split()) for piece in text.replace("`", "").partition("\n\n"))
    parts = _parts(dict.fromkeys(homes, wanted))
    for kind, part in parts.items():
        cls: Any = registry.get(kind, wanted)
        part["lossless"] = getattr(cls, "lossless", None)  # of kinds that decide it
    pages = [row.doc for kind in homes for row in catalog.rows_with(registry.file_of(kind, wanted))]
    title = f"{wanted} ({', '.join(homes)})"
    found = {"name": wanted, "title": title, "note": note, "parts": parts}
    found["pages"] = list(dict.fromkeys(pages))
    return found | ({"about": about} if about else {})


def options_of(kind: str, spec: str) -> dict[str, str]:
    """Option -> default, for the options that text can express."""
    known = registry.text_options(registry.get(kind, registry.parse(spec)[0]))
    return {
        name: "required" if p.default is inspect.Parameter.empty else _default(p.default)
        for name, p in known.items()
    }


def example(parts: Mapping[str, str]) -> str:
    """A command line that uses these parts."""
    if not parts:
        return ""
    if spec := parts.get("search"):
        name, given = registry.parse(spec)
        flags = " ".join(f"--{option.replace('_', '-')} {v}" for option, v in given.items())
        return f'forerun search {name} --model MODEL --prompt "..." {flags}'
    flags = " ".join(f"--{kind} {spec}" for kind, spec in parts.items())
    is_embedded = "target" in parts  # such targets use the embedded models
    model = "reasoner" if is_embedded else "MODEL"
    return f'forerun generate --model {model} --prompt "..." -n 16 --temperature 0.6 {flags}'


def _default(value: Any) -> str:
    """A default as users write it: tuples with +, objects by their type."""
    if isinstance(value, tuple) and all(isinstance(v, str | int | float) for v in value):
        return "+".join(map(str, value)) or "none"
    plain = value is None or isinstance(value, str | int | float)
    return (
        str(value).lower()
        if value is None or isinstance(value, bool)
        else (str(value) if plain else f"the default {type(value).__name__.lower()}")
    )


def _list(is_json: bool) -> None:
    if is_json:
        print_json([row.to_dict() for row in catalog.rows()])
        return
    systems = [row for row in catalog.rows() if row.kind == "system"]
    out = console()
    for title, kind in TITLES.items():
        if some := [row for row in catalog.rows() if row.kind == kind]:
            out.print(_table(title, some))
    counts = [
        f"{sum(row.state == state for row in systems)} {state}"
        for state in (catalog.WORKS, catalog.PARTIAL, catalog.MISSING)
    ]
    out.print(f"{len(systems)} systems: {', '.join(counts)}. `forerun methods NAME` explains one.")
    out.print("`forerun methods --kind KIND` lists the methods of a kind, e.g. drafter or search.")


def _list_kind(kind: str, is_json: bool) -> None:
    """Prints the methods of a kind, one per line. Raises UnknownName."""
    found = {name: registry.summary(kind, name) for name in registry.names(kind)}
    if is_json:
        print_json([{"name": name, "kind": kind, "summary": text} for name, text in found.items()])
        return
    if not found:
        notice(f"there is no {kind} yet")
    for name, text in found.items():
        typer.echo(f"{name:20} {text}")


def _table(title: str, rows: list[Row]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    widths = {"name": 16, "system": 8, "year": 4, "arXiv": 10, "state": 7, "lossless": 8}
    for column, width in (widths | {"trains": 6}).items():  # narrow terminals cut "system"
        table.add_column(column, no_wrap=True, min_width=width)
    for row in rows:
        paper = row.paper
        year, arxiv = (str(paper.year), paper.arxiv) if paper else ("", "")
        state = f"[{COLOURS[row.state]}]{row.state}[/]"
        lossless = "partly" if row.lossy else YES_NO[row.lossless]
        table.add_row(row.name, row.title, year, arxiv, state, lossless, YES_NO[row.trains])
    return table


def _show(found: dict[str, Any]) -> None:
    out = console()
    out.print(f"[bold]{found['title']}[/]", soft_wrap=True)
    lossy = found.get("lossy", {})
    facts = {"paper": found.get("paper"), "note": found["note"], "options": found.get("about")}
    if "state" in found:
        facts |= {
            "state": found["state"],
            "lossless": YES_NO[found["lossless"]] + _lossy_note(lossy),
            "trains": YES_NO[found["trains"]],
        }
    else:
        laws = [part["lossless"] for part in found["parts"].values()]
        facts |= {"lossless": " ".join(YES_NO[law] for law in laws if law is not None)}
    for label, fact in facts.items():
        if fact:
            out.print(f"  {label:9} {fact}", markup=False, soft_wrap=True)
    for file, is_there in found.get("files", {}).items():
        out.print(f"  file      {file}{'' if is_there else ' (missing)'}", markup=False)
    for kind, part in found["parts"].items():
        _show_part(out, kind, part, part["spec"])
    for kind, part in lossy.items():
        _show_part(out, kind, part, f"{part['spec']} (optional, lossy)")
    for page in found["pages"]:
        out.print(f"  page      {page}", markup=False)
    commands = {"make": "make", "example": "example", "lossy": "lossy_example"}
    for label, key in commands.items():
        if found.get(key):
            out.print(f"  {label:9} {found[key]}", markup=False, soft_wrap=True)


def _lossy_note(lossy: Mapping[str, dict[str, Any]]) -> str:
    """The optional parts that make a lossless method lossy, for the line "lossless"."""
    named = [f"{kind} {registry.parse(part['spec'])[0]}" for kind, part in lossy.items()]
    return f"; no with {joined(named, 'or')}" if named else ""


def _show_part(out: Console, kind: str, part: dict[str, Any], title: str) -> None:
    out.print(f"  {kind:9} {title}", markup=False, soft_wrap=True)
    if part["options"] is None:
        out.print("            (missing)", markup=False)
    for option, default in (part["options"] or {}).items():
        out.print(f"            {option} = {default}", markup=False, soft_wrap=True)
