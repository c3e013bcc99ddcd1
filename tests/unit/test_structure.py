"""Imports run down the list of folders, never up, and no two files import each other."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import forerun

ROOT = Path(forerun.__file__).parent
ROOT_MODULES = {"__init__", "__main__", "api", "registry", "catalog", "errors"}
LAYERS = (  # top to bottom; a layer imports itself and what stands below it
    ("__main__",),
    ("cli",),
    ("serving",),
    ("integrations",),
    ("bench",),
    ("lossless",),
    ("training",),
    ("compression",),
    ("retrieval",),
    ("search",),
    ("tasks",),
    ("__init__",),
    ("api",),
    ("drafters", "growers", "verifiers", "controllers", "constraints", "targets"),
    ("longcontext",),
    ("ngrams.index",),
    ("ngrams.tables",),
    ("state",),
    ("engine",),
    ("models",),
    ("runner",),
    ("registry",),
    ("catalog",),
    ("core",),
    ("utils",),
    ("assets",),
    ("errors",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


@cache
def modules() -> dict[str, Path]:
    """Every module by its name below `forerun`, `__init__` for the package itself."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = path
    return found


@cache
def imports() -> dict[str, set[str]]:
    """The modules that each module imports, at its head or inside a function."""
    return {name: _imports(name, path) for name, path in modules().items()}


def _imports(name: str, path: Path) -> set[str]:
    found: set[str] = set()
    for node in _executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            package = _package(name, path, node)
            names = [f"{package}.{alias.name}" for alias in node.names]
        for full in names:
            parts = full.split(".")
            if parts[0] != "forerun":
                continue
            known = [".".join(parts[1:end]) for end in range(len(parts), 1, -1)]
            found |= {next((one for one in known if one in modules()), "__init__")}
    return found - {name}


def _executed(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """Imports of a file, without those for type checkers only."""
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for part in node.body
        for inner in ast.walk(part)
    }
    kinds = (ast.Import, ast.ImportFrom)
    return [n for n in ast.walk(tree) if isinstance(n, kinds) and id(n) not in hidden]


def _package(name: str, path: Path, node: ast.ImportFrom) -> str:
    """What a `from` import reads, as an absolute name."""
    if not node.level:
        return node.module or ""
    parts = ["forerun", *name.split(".")]
    base = parts if path.stem == "__init__" else parts[:-1]
    base = base[: len(base) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def rank(name: str) -> int:
    """The layer of a module, 0 at the top."""
    parts = name.split(".")
    keys = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((RANK[key] for key in keys if key in RANK), 0 if name == "ngrams" else -1)


def circles() -> list[list[str]]:
    """Groups of modules that import each other, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(imports()[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            group, stack[at:] = stack[at:], []
            if len(group) > 1:
                found.append(sorted(group))

    for name in imports():
        if name not in index:
            visit(name)
    return found


def test_every_folder_has_a_layer() -> None:
    assert [name for name in modules() if rank(name) < 0] == []


def test_no_modules_import_each_other() -> None:
    assert circles() == []


def test_imports_run_downwards() -> None:
    upward = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in sorted(others)
        if rank(other) < rank(name)
    ]
    assert upward == []


def test_the_root_holds_only_what_the_layout_names() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} == ROOT_MODULES
