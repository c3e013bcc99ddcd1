"""Where a part runs, and the folders that it may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Setting:
    """What all parts share.

    is_smoke: no GPU is used and sizes are tiny, to see that the script runs. work: a temporary
    folder of the whole run, where `prepare` leaves the padded reasoner. out: the folder of results.
    """

    is_smoke: bool
    work: Path
    out: Path

    @property
    def device(self) -> torch.device:
        """The GPU, or the CPU in a smoke run."""
        return torch.device("cpu" if self.is_smoke else "cuda")

    @property
    def model(self) -> Path:
        """The checkpoint that parts (c) and (d) decode with."""
        return self.work / "model"
