"""The cache folder of forerun; everything in it can be computed or downloaded again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$FORERUN_CACHE, else $XDG_CACHE_HOME/forerun, else ~/.cache/forerun; it may not exist yet."""
    own, base = os.environ.get("FORERUN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(base) if base else Path.home() / ".cache") / "forerun"
