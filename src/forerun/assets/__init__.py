"""What ships with forerun: the reasoner, its draft, and the catalog's data."""

from __future__ import annotations

from pathlib import Path

MODELS = ("reasoner", "draft")


def embedded(name: str) -> str:
    """The folder of a model that ships with forerun, or the name itself."""
    return str(Path(__file__).parent / name) if name in MODELS else name
