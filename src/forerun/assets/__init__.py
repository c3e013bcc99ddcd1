"""What ships with forerun: the reasoner, its draft, and the catalog's data."""

from __future__ import annotations

from pathlib import Path

MODELS = ("reasoner", "draft")
PROBLEM = "Problem: {text}\nSolution:\n"  # the only form that the embedded models learned


def embedded(name: str) -> str:
    """The folder of a model that ships with forerun, or the name itself."""
    return str(Path(__file__).parent / name) if name in MODELS else name


def is_embedded(model: str) -> bool:
    """Whether a model's name or folder is one that ships with forerun."""
    return Path(embedded(model)).resolve().parent == Path(__file__).resolve().parent


def as_problem(text: str) -> str:
    """A text in the form that the embedded models learned; unchanged if it has that form."""
    question = text.strip()
    is_problem = question.startswith("Problem:")
    question = question.removeprefix("Problem:").strip()
    if not question or (is_problem and "Solution:" in question):
        return text
    return PROBLEM.format(text=question)
