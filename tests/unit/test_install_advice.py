"""How messages and pages say to install extras: from a clone, since no index has forerun yet."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from forerun.errors import install_extra

ROOT = Path(__file__).parents[2]
EXTRAS = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
)


def texts() -> dict[Path, str]:
    """The text of every page and module."""
    folders = ("src", "docs", "benchmarks", "examples")
    found = [path for name in folders for path in (ROOT / name).rglob("*")]
    found = [path for path in found if path.suffix in (".py", ".md")]
    return {path: path.read_text() for path in [*found, ROOT / "README.md"]}


def test_no_text_installs_forerun_from_an_index() -> None:
    wrong = re.compile(r"pip install [`'\"]?forerun\b")
    assert not [path for path, text in texts().items() if wrong.search(text)]


def test_every_extra_that_is_named_exists() -> None:
    named = re.compile(r"'\.\[([a-z,]+)\]'|install_extra\(([^)]*)\)")
    found = set()
    for path, text in texts().items():
        if path.name == "errors.py":
            continue
        for one in named.finditer(text):
            found |= set(re.findall(r"[a-z]+", one[1] or one[2]))
    assert {"serve", "constraints", "ray", "index"} <= found <= EXTRAS


def test_the_advice_names_the_command_and_the_place() -> None:
    assert install_extra("serve", "ray") == "run pip install '.[serve,ray]' in a clone of forerun"
