"""Base class of tasks that read a file, and their PATH:PART syntax."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import DataError

from .base import Example


class FromFile:
    """Examples read once from a file of the user; subclasses add a score."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.examples: list[Example] = []

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.examples)

    def example(self, i: int) -> Example:
        """The i-th example."""
        if not 0 <= i < len(self.examples):
            raise IndexError(f"example {i} of {self.path}, which has {len(self.examples)}")
        return self.examples[i]

    def read(self, text: str) -> str | None:
        """No final answer to vote on."""
        return None


def split_part(text: str) -> tuple[Path, str]:
    """Path and part of "PATH" or "PATH:PART"; paths may have colons, parts slashes."""
    path, _, part = text.rpartition(":")
    whole, file = (Path(name).expanduser() for name in (text, path))
    if path and not whole.is_file() and (file.is_file() or "/" not in part):
        return file, part
    return whole, ""


def check_unique(where: str, seen: set[str], name: str, value: str) -> str:
    """The value, if it is not in `seen`; adds it. Raises DataError."""
    if value in seen:
        raise DataError(f"{where}: {name} {value!r} occurs twice; keep one of the two")
    seen.add(value)
    return value
