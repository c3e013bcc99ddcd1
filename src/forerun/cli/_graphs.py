"""The environment variable FORERUN_GRAPHS: whether commands run forward passes as CUDA graphs."""

from __future__ import annotations

import os

from forerun.errors import ConfigError

VARIABLE = "FORERUN_GRAPHS"


def wants_graphs() -> bool:
    """Whether CUDA graphs are on, as they are by default. Raises ConfigError."""
    value = os.environ.get(VARIABLE) or "on"
    if value not in ("on", "off"):
        raise ConfigError(
            f"{VARIABLE} must be on or off, got {value!r}; off runs forward passes on torch"
        )
    return value == "on"
