"""Fixtures: servers that several tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tiny import make_tiny

from served import Served, command

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a chat template."""
    folder = make_tiny(tmp_path_factory.mktemp("serving") / "tiny", context=512)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tiny_long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with room for answers that take a while."""
    return make_tiny(tmp_path_factory.mktemp("serving") / "long", context=8192)


@pytest.fixture
def tiny_model(tiny_chat: Path) -> Any:
    import forerun

    return forerun.load(tiny_chat, max_seqs=8)


@pytest.fixture(scope="session")
def reasoner() -> Iterator[Served]:
    """The embedded reasoner, served by the command."""
    with command("reasoner", "--max-seqs", 8) as served:
        yield served


@pytest.fixture(scope="session")
def drafting_reasoner() -> Iterator[Served]:
    """The same behind a controller that drafts on every machine, however busy."""
    with command("reasoner", "--max-seqs", 8, "--controller", "fixed") as served:
        yield served


@pytest.fixture(scope="session")
def drafting(tiny_chat: Path) -> Iterator[Served]:
    """A server whose controller drafts on every machine, however short a pass is."""
    with command(tiny_chat, "--max-seqs", 8, "--name", "tiny", "--controller", "fixed") as served:
        yield served


@pytest.fixture(scope="session")
def chat(drafting: Served) -> Served:
    """The tiny model, served by the command: the same server."""
    return drafting
