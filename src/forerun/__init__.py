"""forerun makes language models decode faster without changing what they say.

>>> import forerun
>>> model = forerun.load()  # the reasoner that ships with forerun; or a folder, or a hub id
>>> results = model.generate("...", n=16, temperature=0.6, drafter="stand")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.engine.api import Model, Result, Sample, load
    from forerun.engine.loop import Engine
    from forerun.errors import ForerunError
    from forerun.sampling import Sampling

__version__ = "0.1.0"
__all__ = ["Engine", "ForerunError", "Model", "Result", "Sample", "Sampling", "load"]

_HOMES = {  # imported when first used: `import forerun` stays cheap
    "Engine": "forerun.engine.loop",
    "ForerunError": "forerun.errors",
    "Model": "forerun.engine.api",
    "Result": "forerun.engine.api",
    "Sample": "forerun.engine.api",
    "Sampling": "forerun.sampling",
    "load": "forerun.engine.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
