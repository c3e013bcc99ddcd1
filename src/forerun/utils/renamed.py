"""Clear errors for names that changed in a module that stayed where it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def renamed(module: str, **names: str) -> Callable[[str], Any]:
    """A `__getattr__` for a module that stayed where it was: old name -> new name.

    A new name with a dot lies in another module below `forerun`.
    """

    def look_up(name: str) -> Any:
        if new := names.get(name):
            path = f"forerun.{new}" if "." in new else new
            raise ImportError(f"{module}.{name} is now {path}; import that")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return look_up
