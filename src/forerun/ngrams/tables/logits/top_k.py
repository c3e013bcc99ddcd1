"""Numba kernels for the largest entries of a row of probabilities or logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from forerun.utils.jit import compiled, kernel

BLOCK, LANES = 1024, 64  # entries of a block, and entries compared at once within it


@kernel
def has_above(part: np.ndarray, least: float) -> bool:
    """Whether an entry exceeds `least`; without early exit, so that it is vectorised."""
    found = False
    for i in range(len(part)):
        found |= part[i] > least
    return found


@kernel
def largest_of(part: np.ndarray, lanes: np.ndarray) -> Any:
    """The largest entry without NaN; -inf if there is none. lanes [LANES]: scratch."""
    lanes[:] = -np.inf
    whole = len(part) // LANES * LANES
    for start in range(0, whole, LANES):
        for j in range(LANES):  # vectorised
            lanes[j] = part[start + j] if part[start + j] > lanes[j] else lanes[j]
    for i in range(whole, len(part)):
        lanes[0] = part[i] if part[i] > lanes[0] else lanes[0]
    half = LANES // 2
    while half:
        for j in range(half):
            lanes[j] = lanes[j + half] if lanes[j + half] > lanes[j] else lanes[j]
        half //= 2
    return lanes[0]


@compiled
def select_top(row: np.ndarray, ids: np.ndarray, probs: np.ndarray) -> None:
    """Writes the K largest positive entries of row [V], falling, then zeros; ties: lowest ids."""
    values = np.zeros(len(ids), row.dtype)
    ids[:] = 0
    select_above(row, ids, values)
    probs[:] = values


@compiled
def select_above(row: np.ndarray, ids: np.ndarray, values: np.ndarray) -> None:
    """`select_into` with its own scratch arrays."""
    tops = np.empty(-(-len(row) // BLOCK), row.dtype)
    bounds, lanes = np.empty(len(ids), row.dtype), np.empty(LANES, row.dtype)
    select_into(row, ids, values, tops, bounds, lanes)


@kernel
def select_into(
    row: np.ndarray,
    ids: np.ndarray,
    values: np.ndarray,
    tops: np.ndarray,
    bounds: np.ndarray,
    lanes: np.ndarray,
) -> None:
    """Writes the K largest entries of row [V] above the initial `values`, falling, and their ids.

    Ties: lowest ids. A vectorised pass finds the largest entry of every block. The K-th largest of
    these is a lower bound, so only blocks that reach it are searched, about K. Scratch arrays of
    the row's type: tops [V / BLOCK], bounds [K], lanes [LANES].
    """
    entries, vocab, least = len(ids), len(row), values[0]
    num = -(-vocab // BLOCK)
    bounds[:] = -np.inf
    for k in range(num):
        tops[k] = largest_of(row[k * BLOCK : (k + 1) * BLOCK], lanes)
        if tops[k] > bounds[entries - 1]:
            insert(bounds, tops[k])
    bound = bounds[entries - 1]  # -inf if there are fewer than K blocks
    for k in range(num):
        if tops[k] < bound or tops[k] <= least:
            continue
        stop = min((k + 1) * BLOCK, vocab)
        for start in range(k * BLOCK, stop, LANES):
            if not has_above(row[start : min(start + LANES, stop)], least):
                continue
            for i in range(start, min(start + LANES, stop)):
                if row[i] > least:
                    at = insert(values, row[i])
                    for j in range(entries - 1, at, -1):
                        ids[j] = ids[j - 1]
                    ids[at] = i
                    least = values[entries - 1]


@kernel
def insert(falling: np.ndarray, value: Any) -> int:
    """Inserts a value into a falling array, after equal ones; drops the last; returns the index."""
    at = len(falling) - 1
    while at > 0 and value > falling[at - 1]:
        falling[at] = falling[at - 1]
        at -= 1
    falling[at] = value
    return at
