"""Errors for public names that this release renamed; to be removed with the next release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def refuse(module: str, names: dict[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that raises ImportError for an old name and names the new one."""

    def missing(name: str) -> NoReturn:
        if name in names:
            raise ImportError(f"{module}.{name} was renamed in this release; use {names[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing
