"""The exceptions of forerun.

ForerunError                 base class
├── ConfigError              an invalid option, or parts that do not fit (also a ValueError)
│   ├── UnknownName          unknown method or option; suggests the nearest (also a KeyError)
│   └── LawError             the target's logits are NaN or infinite
├── ModelError               a checkpoint or tokenizer that cannot be loaded
├── DataError                a prompt file, record or corpus that cannot be read
│   └── Diverged             a loss, a gradient or a weight in training is not finite
└── CapacityError            prompt, context or memory does not fit
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MIN_SIMILARITY = 0.7  # difflib ratio of a suggestion: one typo in four letters
MIN_SIMILARITY_SHORT = 2 / 3  # for names of up to three letters


class ForerunError(Exception):
    """Base class of all errors that a user can cause and fix."""


class ConfigError(ForerunError, ValueError):
    """An option has a value that cannot work, or two parts do not fit together."""


class UnknownName(ConfigError, KeyError):
    """A name that is not registered."""

    __str__ = Exception.__str__  # KeyError would print the repr

    @classmethod
    def of(cls, kind: str, name: str, known: Iterable[str], listing: str = "") -> UnknownName:
        """The error for an unknown name, with the nearest known names or all of them."""
        known = sorted(known)
        hint = did_you_mean(name, known, f"known: {', '.join(known)}")
        return cls(f"unknown {kind} {name!r}; {hint}" + (f" ({listing})" if listing else ""))


def install_extra(*extras: str) -> str:
    """How to install extras of forerun; it is on no package index yet, so from a clone."""
    return f"run pip install '.[{','.join(extras)}]' in a clone of forerun"


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """A suggestion of the nearest known names; `otherwise` if none is similar."""
    near = nearest(name, known)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else otherwise


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Similar known names, the nearest first."""
    pairs = [(one.lower(), one) for one in known]
    lowered = dict.fromkeys(low for low, _ in pairs)
    cutoff = MIN_SIMILARITY if len(name) > 3 else MIN_SIMILARITY_SHORT
    near = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=cutoff)
    return [one for found in near for low, one in pairs if low == found]


class LawError(ConfigError):
    """The target's logits are NaN or infinite: the dtype overflows or the weights are damaged."""


def in_a_line(cause: BaseException, max_chars: int = 300) -> str:
    """The message of an error on one line, cut after `max_chars` characters."""
    words = " ".join(str(cause).split())
    return words if len(words) <= max_chars else words[:max_chars] + " ..."


class ModelError(ForerunError):
    """A model folder, its weights or its tokenizer cannot be used."""


class DataError(ForerunError):
    """Input data cannot be read or has the wrong form."""


class Diverged(DataError):
    """The loss, a gradient or a weight is not finite."""


class CapacityError(ForerunError):
    """Something does not fit into the context or into memory."""
