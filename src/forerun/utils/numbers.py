"""Checks of numbers that callers pass: whole numbers, finite numbers, token ids."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from forerun.errors import ConfigError, DataError

SHOWN = 80  # characters of a rejected value that an error quotes


def whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """An int in [least, most] from an int or a NumPy integer. Raises ConfigError."""
    try:
        number = operator.index(value)
        is_right = number >= least and (most is None or number <= most)
    except TypeError:
        is_right = False
    if not is_right or isinstance(value, bool):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} must be a whole number {limits}, got {value!r:.{SHOWN}}")
    return number


def finite(
    name: str, value: Any, low: float = -math.inf, high: float = math.inf, *, is_open: bool = False
) -> float:
    """A finite float in [low, high]; `is_open`: above `low`. Raises ConfigError."""
    try:
        number = float(value)
        is_right = math.isfinite(number) and low <= number <= high
    except (OverflowError, TypeError, ValueError):
        is_right = False
    if not is_right or (is_open and number == low):
        if high < math.inf:
            shown = f"in {'(' if is_open else '['}{low:g}, {high:g}]"
        elif low > -math.inf:
            shown = f"a finite number {'above' if is_open else 'of at least'} {low:g}"
        else:
            shown = "a finite number"
        raise ConfigError(f"{name} must be {shown}, got {value!r:.{SHOWN}}")
    return number


def token_ids(given: Any) -> np.ndarray:
    """Token ids as a new int64 array [n]. Raises DataError for fractions, texts and nested lists.

    Ids are not compared with a vocabulary.
    """
    try:
        found = np.array(given)
        if found.size and found.dtype.kind not in "iu":
            raise TypeError(f"its elements are {found.dtype}, not integers")
        if found.dtype.kind == "u" and found.size and int(found.max()) > np.iinfo(np.int64).max:
            raise OverflowError("an id exceeds 64 bits")
        ids = found.astype(np.int64)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"expected a list of token ids, got {given!r:.{SHOWN}} ({error}); use integers"
        ) from None
    if ids.ndim != 1:
        raise DataError(f"expected a list of token ids, got an array of shape {ids.shape}")
    return ids
