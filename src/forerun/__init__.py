"""forerun makes language models decode faster without changing what they say.

>>> import forerun
>>> model = forerun.load()  # the reasoner that ships with forerun; a folder, a hub id, a .gguf file
>>> model = forerun.load(forerun.pull("smollm2"))  # a real model, fetched once
>>> results = model.generate("...", n=16, temperature=0.6)
>>> result = forerun.generate("...", temperature=0.6)  # the same in one call, for one prompt
>>> [row.name for row in forerun.methods() if row.state == "works"]
"""

from __future__ import annotations

import importlib

from forerun.utils.moved import watch_imports
from forerun.utils.version import __version__ as __version__

TYPE_CHECKING = False  # true for type checkers: `typing` itself takes longer than the rest
if TYPE_CHECKING:
    from forerun.api import Model, Result, generate, load
    from forerun.catalog import rows as methods
    from forerun.core.sampling import Sampling
    from forerun.engine.engine import Engine
    from forerun.engine.generation import Event, Sample
    from forerun.engine.stats import Stats
    from forerun.errors import ForerunError
    from forerun.models.pull import pull

__all__ = [
    "Engine",
    "Event",
    "ForerunError",
    "Model",
    "Result",
    "Sample",
    "Sampling",
    "Stats",
    "generate",
    "load",
    "methods",
    "pull",
]

_HOMES = {  # imported when first used: `import forerun` stays cheap
    "Engine": "forerun.engine.engine:Engine",
    "Event": "forerun.engine.generation:Event",
    "ForerunError": "forerun.errors:ForerunError",
    "Model": "forerun.api:Model",
    "Result": "forerun.api:Result",
    "Sample": "forerun.engine.generation:Sample",
    "Sampling": "forerun.core.sampling:Sampling",
    "Stats": "forerun.engine.stats:Stats",
    "generate": "forerun.api:generate",
    "load": "forerun.api:load",
    "methods": "forerun.catalog:rows",
    "pull": "forerun.models.pull:pull",
}

watch_imports()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    module, _, there = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), there)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
