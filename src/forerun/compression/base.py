"""The Pruner role: a method that makes a smaller model out of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path


class Pruner(ABC):
    """Writes a pruned copy of a checkpoint. Its options are the arguments of its constructor."""

    @abstractmethod
    def prune(self, source: Path, out: Path) -> Iterator[str]:
        """Reads the model folder `source` and writes the pruned one to `out`.

        Yields lines that say what was done. Raises ModelError for a model that it cannot prune.
        """
