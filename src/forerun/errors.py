"""Every exception that forerun raises on purpose.

ForerunError                 base: catch this one to catch them all
├── ConfigError              an option, or a pair of parts, that cannot work (also a ValueError)
│   ├── UnknownName          no such method or option; names the nearest (also a KeyError)
│   └── LawError             the target's logits are no law: NaN or infinite
├── ModelError               a checkpoint or tokenizer that cannot be loaded
├── DataError                a prompt file, record or corpus that cannot be read
└── CapacityError            prompt, context or memory does not fit
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NEAR = 0.7  # of difflib's ratio: a slip in four letters still counts, "eagle" is no "seal"
SHORT = 2 / 3  # of names of up to three letters, so that a slip in three counts


class ForerunError(Exception):
    """Base of all errors that a user can cause and mend."""


class ConfigError(ForerunError, ValueError):
    """An option has a value that cannot work, or two parts do not fit together."""


class UnknownName(ConfigError, KeyError):
    """A name that is not registered."""

    __str__ = Exception.__str__  # KeyError would print the repr

    @classmethod
    def of(cls, kind: str, name: str, known: Iterable[str], listing: str = "") -> UnknownName:
        """The house message: what came, the nearest known names, or all, where they are listed."""
        known = sorted(known)
        hint = meant(name, known, f"known: {', '.join(known)}")
        return cls(f"unknown {kind} {name!r}; {hint}" + (f" ({listing})" if listing else ""))


def meant(name: str, known: Iterable[str], otherwise: str) -> str:
    """The question after the nearest known names; `otherwise`, if all are far."""
    near = nearest(name, known)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else otherwise


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """What may have been meant, the nearest first; none if all are far."""
    pairs = [(one.lower(), one) for one in known]
    lowered = dict.fromkeys(low for low, _ in pairs)
    cutoff = NEAR if len(name) > 3 else SHORT
    near = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=cutoff)
    return [one for found in near for low, one in pairs if low == found]


class LawError(ConfigError):
    """The target's logits are NaN or infinite: its number type or its weights are at fault."""


def in_a_line(cause: BaseException, most: int = 300) -> str:
    """What another library's error says, on one line of at most so many characters."""
    words = " ".join(str(cause).split())
    return words if len(words) <= most else words[:most] + " ..."


class ModelError(ForerunError):
    """A model folder, its weights or its tokenizer cannot be used."""


class DataError(ForerunError):
    """Input data cannot be read or has the wrong form."""


class CapacityError(ForerunError):
    """Something does not fit into the context or into memory."""
