"""Numba kernels that find the largest entries of laws."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from forerun.utils.jit import bare

STRETCH, PIECE = 1024, 64  # entries of a row that are looked at together


@bare
def has_above(part: np.ndarray, least: float) -> bool:
    """Whether an entry exceeds `least`. Without a way out, so that it is vectorised."""
    found = False
    for i in range(len(part)):
        found |= part[i] > least
    return found


@bare
def largest_of(part: np.ndarray, lanes: np.ndarray) -> Any:
    """The largest entry, NaN not counted; -inf without any. lanes [PIECE] is room to work in."""
    lanes[:] = -np.inf
    whole = len(part) // PIECE * PIECE
    for start in range(0, whole, PIECE):
        for j in range(PIECE):  # vectorised: no entry waits for another
            lanes[j] = part[start + j] if part[start + j] > lanes[j] else lanes[j]
    for i in range(whole, len(part)):
        lanes[0] = part[i] if part[i] > lanes[0] else lanes[0]
    half = PIECE // 2
    while half:
        for j in range(half):
            lanes[j] = lanes[j + half] if lanes[j + half] > lanes[j] else lanes[j]
        half //= 2
    return lanes[0]


@njit(cache=True, nogil=True)
def select_rows(rows: np.ndarray, ids: np.ndarray, probs: np.ndarray) -> None:
    """`select_top` of every row of [n, V]; ids and probs [n, K]."""
    for i in range(len(rows)):
        select_top(rows[i], ids[i], probs[i])


@njit(cache=True, nogil=True)
def select_top(row: np.ndarray, ids: np.ndarray, probs: np.ndarray) -> None:
    """The K largest positive entries of row [V], falling; ties: the lowest ids; then zeros."""
    held = np.zeros(len(ids), row.dtype)
    ids[:] = 0
    select_above(row, ids, held)
    probs[:] = held


@njit(cache=True, nogil=True)
def select_above(row: np.ndarray, ids: np.ndarray, held: np.ndarray) -> None:
    """`select_into` with room of its own."""
    tops = np.empty(-(-len(row) // STRETCH), row.dtype)
    bounds, lanes = np.empty(len(ids), row.dtype), np.empty(PIECE, row.dtype)
    select_into(row, ids, held, tops, bounds, lanes)


@bare
def select_into(
    row: np.ndarray,
    ids: np.ndarray,
    held: np.ndarray,
    tops: np.ndarray,
    bounds: np.ndarray,
    lanes: np.ndarray,
) -> None:
    """The K largest entries of row [V] above what `held` begins with, falling, and their ids.

    Ties: the lowest ids. One pass, vectorised, finds the largest entry of every stretch. The K-th
    largest of those bounds the result from below, so only stretches that reach it are looked into,
    about K of them; there pieces are compared with the K-th largest so far. tops [V / STRETCH],
    bounds [K], lanes [PIECE]: room to work in, of the row's type.
    """
    entries, vocab, least = len(ids), len(row), held[0]
    num = -(-vocab // STRETCH)
    bounds[:] = -np.inf
    for k in range(num):
        tops[k] = largest_of(row[k * STRETCH : (k + 1) * STRETCH], lanes)
        if tops[k] > bounds[entries - 1]:
            insert(bounds, tops[k])
    bound = bounds[entries - 1]  # -inf where there are fewer
    for k in range(num):
        if tops[k] < bound or tops[k] <= least:
            continue
        stop = min((k + 1) * STRETCH, vocab)
        for start in range(k * STRETCH, stop, PIECE):
            if not has_above(row[start : min(start + PIECE, stop)], least):
                continue
            for i in range(start, min(start + PIECE, stop)):
                if row[i] > least:
                    at = insert(held, row[i])
                    for j in range(entries - 1, at, -1):
                        ids[j] = ids[j - 1]
                    ids[at] = i
                    least = held[entries - 1]


@bare
def insert(falling: np.ndarray, value: Any) -> int:
    """Puts a value among larger ones and equal ones before it; the last one goes."""
    at = len(falling) - 1
    while at > 0 and value > falling[at - 1]:
        falling[at] = falling[at - 1]
        at -= 1
    falling[at] = value
    return at
