"""The catalog of published systems: paper, files, parts, state.

The data is in assets/catalog.toml; no method is imported. A test derives each row's state from the
checkout: "works" if the acceptance check has a test and all files and parts exist, "missing" if
none of the files exists, otherwise "partial".
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from forerun.errors import UnknownName

WORKS, PARTIAL, MISSING = "works", "partial", "missing"
_DATA = Path(__file__).parent / "assets" / "catalog.toml"


@dataclass(frozen=True)
class Paper:
    """The paper of a system."""

    title: str
    year: int
    arxiv: str = ""
    authors: str = ""

    def __str__(self) -> str:
        who = f"{self.authors} " if self.authors else ""
        where = f", arXiv {self.arxiv}" if self.arxiv else ""
        return f'{who}{self.year}, "{self.title}"{where}'


@dataclass(frozen=True)
class Row:
    """A system of the catalog."""

    name: str  # what users type
    title: str
    paper: Paper | None
    files: tuple[str, ...]  # its own files below forerun/, without suffix
    note: str
    kind: str = "system"  # one of the 41; or "baseline", or "method": any other
    parts: Mapping[str, str] = field(default_factory=dict)  # role -> spec for `generate`
    tiny: Mapping[str, str] = field(default_factory=dict)  # the parts for small tests
    lossless: bool | None = True  # keeps the target's law; None: does not touch decoding
    lossy: Mapping[str, str] = field(default_factory=dict)  # optional parts that change the law
    make: str = ""  # command that makes a model, head or index that the parts use
    trains: bool = False
    state: str = MISSING
    check: str = ""  # acceptance check below tests/; "": papers/test_<name>.py

    @property
    def doc(self) -> str:
        """Its page, relative to the repository."""
        return f"docs/methods/{self.name}.md"

    @property
    def acceptance(self) -> str:
        """Its acceptance check, relative to the repository."""
        return f"tests/{self.check or f'papers/test_{self.name}.py'}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"doc": self.doc, "files": list(self.files)}


@cache
def rows() -> tuple[Row, ...]:
    """All rows, baselines first."""
    tables = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    return tuple(_row(name, table) for name, table in tables.items())


def get(name: str) -> Row:
    """The row of that name. Raises UnknownName with the nearest names."""
    row = find(name)
    if row is None:
        known = [row.name for row in rows()]
        raise UnknownName.of("method", name, known, "`forerun methods` lists all")
    return row


def find(name: str) -> Row | None:
    """The row of that name; ignores case and the difference of - and _."""
    wanted = name.strip().lower().replace("-", "_")
    return next((row for row in rows() if row.name == wanted), None)


def owner(file: str) -> Row | None:
    """The first row with this file, e.g. "drafters/aded", or None."""
    return next((row for row in rows() if file.lower() in row.files), None)


def rows_with(file: str) -> list[Row]:
    """All rows with this file that are at least partly built."""
    return [row for row in rows() if file.lower() in row.files and row.state != MISSING]


def is_built(file: str) -> bool:
    """Whether forerun/<file>.py (or a package of that name) exists."""
    try:
        return importlib.util.find_spec(f"forerun.{file.replace('/', '.')}") is not None
    except ModuleNotFoundError:  # the folder above is missing
        return False


def _row(name: str, table: dict[str, Any]) -> Row:
    given = {k: table.pop(k) for k in ("year", "arxiv", "authors") if k in table}
    title = table.pop("paper", None)
    if table.get("lossless") == "none":
        table["lossless"] = None
    paper = Paper(title, **given) if title else None
    return Row(name, paper=paper, files=tuple(table.pop("files")), **table)
