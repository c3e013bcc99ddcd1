"""`forerun methods`: the catalog as a table, or one method with its parts and options."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import catalog, registry
from forerun.catalog import Row
from forerun.cli.options import Json
from forerun.cli.output import console, print_json
from forerun.errors import UnknownName

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = {catalog.WORKS: "green", catalog.PARTIAL: "yellow", catalog.MISSING: "dim"}
TITLES = {"Baselines": "baseline", "Published systems": "system", "Other methods": "method"}
YES_NO = {True: "yes", False: "no", None: "-"}

Name = Annotated[
    str | None, typer.Argument(help="A method, or a drafter, grower, verifier, controller.")
]


def command(name: Name = None, is_json: Json = False) -> None:
    """List the catalog, or explain one method."""
    if name is None:
        _list(is_json)
        return
    try:
        found = explain(catalog.get(name))
    except UnknownName:
        found = explain_part(name)
    if is_json:
        print_json(found)
    else:
        _show(found)


def explain(row: Row) -> dict[str, Any]:
    """All that is known of a system: its row, and the options of the parts that exist."""
    parts = {}
    for kind, spec in row.parts.items():
        is_there = registry.is_registered(kind, spec)
        parts[kind] = {"spec": spec, "options": options_of(kind, spec) if is_there else None}
    files = {file: catalog.is_built(file) for file in row.files}
    return row.to_dict() | {
        "paper": str(row.paper) if row.paper else None,
        "parts": parts,
        "files": files,
        "example": example(row) if row.state != catalog.MISSING else None,
    }


def explain_part(name: str) -> dict[str, Any]:
    """A registered part that is not a row of the catalog. Raises UnknownName with the nearest."""

    wanted = name.strip().lower().replace("-", "_")
    homes = {part: kind for kind in registry.KINDS for part in registry.names(kind)}
    if wanted not in homes:
        known = {*homes, *(row.name for row in catalog.rows())}
        raise UnknownName.of("method", name, known, "`forerun methods` lists all")
    kind = homes[wanted]
    text = (inspect.getdoc(registry.get(kind, wanted)) or "").partition("Raises ")[0]
    note, _, about = (" ".join(piece.split()) for piece in text.replace("`", "").partition("\n\n"))
    parts = {kind: {"spec": wanted, "options": options_of(kind, wanted)}}
    found = {"name": wanted, "title": f"{wanted} ({kind})", "note": note, "parts": parts}
    return found | ({"about": about} if about else {})


def options_of(kind: str, spec: str) -> dict[str, str]:
    """Option -> default, from the constructor; options that users cannot write are left out."""
    known = registry.written(registry.get(kind, registry.parse(spec)[0]))
    return {
        name: "required" if p.default is inspect.Parameter.empty else _default(p.default)
        for name, p in known.items()
    }


def example(row: Row) -> str:
    """A call that uses the method."""
    if not row.parts:
        return ""
    flags = " ".join(f"--{kind} {spec}" for kind, spec in row.parts.items())
    return f'forerun generate --model MODEL --prompt "..." -n 16 --temperature 0.6 {flags}'


def _default(value: Any) -> str:
    """As users write it: tuples with +, objects by their kind."""
    if isinstance(value, tuple) and all(isinstance(v, str | int | float) for v in value):
        return "+".join(map(str, value))
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


def _table(title: str, rows: list[Row]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    widths = {"name": 16, "system": 8, "year": 4, "arXiv": 10, "state": 7, "lossless": 8}
    for column, width in (widths | {"trains": 6}).items():  # a narrow terminal cuts the system
        table.add_column(column, no_wrap=True, min_width=width)
    for row in rows:
        paper = row.paper
        year, arxiv = (str(paper.year), paper.arxiv) if paper else ("", "")
        state = f"[{COLOURS[row.state]}]{row.state}[/]"
        table.add_row(
            row.name, row.title, year, arxiv, state, YES_NO[row.lossless], YES_NO[row.trains]
        )
    return table


def _show(found: dict[str, Any]) -> None:
    out = console()
    out.print(f"[bold]{found['title']}[/]", soft_wrap=True)
    facts = {"paper": found.get("paper"), "note": found["note"], "options": found.get("about")}
    if "state" in found:
        facts |= {
            "state": found["state"],
            "lossless": YES_NO[found["lossless"]],
            "trains": YES_NO[found["trains"]],
        }
    for label, fact in facts.items():
        if fact:
            out.print(f"  {label:9} {fact}", markup=False, soft_wrap=True)
    for file, is_there in found.get("files", {}).items():
        out.print(f"  file      {file} {'' if is_there else '(missing)'}", markup=False)
    for kind, part in found["parts"].items():
        out.print(f"  {kind:9} {part['spec']}", markup=False, soft_wrap=True)
        if part["options"] is None:
            out.print("            (missing)", markup=False)
        for option, default in (part["options"] or {}).items():
            out.print(f"            {option} = {default}", markup=False, soft_wrap=True)
    if found.get("state") not in (None, catalog.MISSING):
        out.print(f"  page      {found['doc']}", markup=False)
    if found.get("example"):
        out.print(f"  example   {found['example']}", markup=False, soft_wrap=True)
