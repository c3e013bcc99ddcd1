"""Search methods, which choose an answer among samples, and the public names they share."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {  # name -> module, imported on first use
    "Attempt": "_scorers",
    "Likelihood": "_scorers",
    "RewardModel": "_scorers",
    "Scorer": "_scorers",
    "arithmetic": "_arithmetic",
    "last_answer": "_answers",
    "pattern": "_answers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun.search' has no attribute {name!r}")
    return getattr(importlib.import_module(f"forerun.search.{_HOMES[name]}"), name)
