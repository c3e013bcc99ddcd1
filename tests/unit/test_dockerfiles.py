"""Dockerfiles name what is in the repository, and nothing runs as root."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from forerun.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile*"))
HOSTS = {"download.pytorch.org"}  # torch's builds without CUDA are nowhere else


def lines(file: Path) -> list[tuple[str, str]]:
    """Instructions and their arguments, continued lines joined, comments dropped."""
    text = "\n".join(x for x in file.read_text().splitlines() if not x.startswith("#"))
    joined = text.replace("\\\n", " ").splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in joined if line.strip()]


def test_there_are_two() -> None:
    assert [file.name for file in FILES] == ["Dockerfile", "Dockerfile.cuda"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_is_copied_is_there_and_extras_exist(file: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for word, rest in lines(file):
        if word == "COPY" and not rest.startswith("--from"):
            assert all((ROOT / name).exists() for name in rest.split()[:-1]), rest
        for names in re.findall(r"'\.\[([\w,]+)\]'", rest):
            assert set(names.split(",")) <= set(extras)
    copied = " ".join(rest for word, rest in lines(file) if word == "COPY")
    assert all(name in copied for name in ("pyproject.toml", "setup.py", "constraints.txt", "src"))
    assert set(re.findall(r"https://([\w.]+)", file.read_text())) <= HOSTS


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_last_user_is_not_root_and_the_entry_is_a_command(file: Path) -> None:
    found = lines(file)
    users = [rest for word, rest in found if word == "USER"]
    assert users == ["forerun"] and any("useradd" in rest for _, rest in found)
    assert {rest.split()[0] for word, rest in found if word == "FROM"} == {"python:3.11-slim"}
    (entry,) = (json.loads(rest) for word, rest in found if word == "ENTRYPOINT")
    (words,) = (json.loads(rest) for word, rest in found if word == "CMD")
    assert entry[0] == "forerun" and entry[1] in COMMANDS and words[0] == "reasoner"


def test_extras_that_pages_and_messages_name_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    files = [ROOT / "README.md", *FILES, *(ROOT / "docs").rglob("*.md")]
    files += (ROOT / "src").rglob("*.py")
    named = {
        name
        for file in files
        for names in re.findall(r"(?:'\.|forerun)\[([a-z,]+)\]'", file.read_text("utf-8"))
        for name in names.split(",")
    }
    assert {"cuda", "quant", "serve"} <= named <= set(extras)
