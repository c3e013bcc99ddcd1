"""Compiled searches in a suffix array: intervals of ranks, next tokens, longest matches.

A query is int64 ids; an interval [left, right) holds the ranks of all suffixes that begin with it.
Nothing is written but what is returned, so any number of threads may search.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from forerun.ngrams.index.build.sparse_index import narrow
from forerun.ngrams.index.build.suffix_array import Shard, pointer
from forerun.ngrams.tables.logits.kernels import Arrays
from forerun.utils.jit import bare

END = -1  # the next token where the text ends


@bare
def compare(text: np.ndarray, at: int, query: np.ndarray, low: int, high: int) -> int:
    """-1, 0 or 1: the suffix at `at` is below query[low:high], begins with it, or is above."""
    for k in range(min(high - low, len(text) - at)):
        token, wanted = np.int64(text[at + k]), query[low + k]
        if token != wanted:
            return -1 if token < wanted else 1
    return 0 if len(text) - at >= high - low else -1


@bare
def bucket(shard: Shard, token: int) -> tuple[int, int]:
    """Ranks among which suffixes with that first token are."""
    b = min(token >> shard.shift, len(shard.buckets) - 2)
    return shard.buckets[b], shard.buckets[b + 1]


@bare
def find_within(
    shard: Shard, query: np.ndarray, low: int, high: int, left: int, right: int
) -> tuple[int, int]:
    """The interval of query[low:high] within [left, right); empty at its place if there is none."""
    text, table, width = shard.text, shard.table, shard.width
    left, below, above, right = narrow(shard, query, low, high, left, right)
    if below < above:  # a fence stands inside the interval
        first = first_not_below(shard, query, low, high, left, below)
        return first, first_above(shard, query, low, high, above, right)
    while left < right:  # until any hit
        middle = (left + right) // 2
        order = compare(text, pointer(table, width, middle), query, low, high)
        if order < 0:
            left = middle + 1
        elif order > 0:
            right = middle
        else:
            first = first_not_below(shard, query, low, high, left, middle)
            return first, first_above(shard, query, low, high, middle + 1, right)
    return left, left


@bare
def first_not_below(
    shard: Shard, query: np.ndarray, low: int, high: int, left: int, right: int
) -> int:
    """The first rank of [left, right) whose suffix is not below query[low:high]; else `right`."""
    while left < right:
        middle = (left + right) // 2
        at = pointer(shard.table, shard.width, middle)
        if compare(shard.text, at, query, low, high) < 0:
            left = middle + 1
        else:
            right = middle
    return left


@bare
def first_above(shard: Shard, query: np.ndarray, low: int, high: int, left: int, right: int) -> int:
    """The first rank of [left, right) whose suffix is above query[low:high]; else `right`."""
    while left < right:
        middle = (left + right) // 2
        at = pointer(shard.table, shard.width, middle)
        if compare(shard.text, at, query, low, high) > 0:
            right = middle
        else:
            left = middle + 1
    return left


@bare
def find(shard: Shard, query: np.ndarray, low: int, high: int) -> tuple[int, int]:
    """The interval of query[low:high]; all ranks for an empty one."""
    if low == high:
        return 0, len(shard.text)
    if query[low] < 0:
        return 0, 0
    left, right = bucket(shard, query[low])
    return find_within(shard, query, low, high, left, right)


@njit(cache=True, nogil=True)
def find_many(
    shard: Shard, queries: np.ndarray, starts: np.ndarray, first: int, out: np.ndarray
) -> None:
    """Intervals of queries[starts[i]:starts[i + 1]] for len(out) queries from `first`. [m, 2]."""
    for i in range(len(out)):
        left, right = find(shard, queries, starts[first + i], starts[first + i + 1])
        out[i, 0] = left
        out[i, 1] = right


@bare
def longest_suffix(shard: Shard, query: np.ndarray, low: int, high: int) -> tuple[int, int, int]:
    """The longest suffix of query[low:high] that occurs: its length and interval.

    Counts fall with length, so doubling and then halving finds it in O(log) searches.
    """
    known, left, right = 0, 0, len(shard.text)
    absent, step = high - low + 1, 1
    while absent - known > 1:
        length = min(known + step, high - low) if absent > high - low else (known + absent) // 2
        a, b = find(shard, query, high - length, high)
        if a < b:
            known, left, right, step = length, a, b, 2 * step
        else:
            absent = length
    return known, left, right


@bare
def longest_of(index: Arrays, query: np.ndarray) -> tuple[int, int, int]:
    """`longest_suffix` of a whole query, for callers in Python; index: a Shard."""
    return longest_suffix(Shard(*index), query, 0, len(query))


@njit(cache=True, nogil=True)
def longest_suffixes(
    shard: Shard, queries: np.ndarray, starts: np.ndarray, first: int, out: np.ndarray
) -> None:
    """Length and interval for every query from `first`. int64 [m, 3]."""
    for i in range(len(out)):
        length, left, right = longest_suffix(
            shard, queries, starts[first + i], starts[first + i + 1]
        )
        out[i, 0], out[i, 1], out[i, 2] = length, left, right


@bare
def next_token(shard: Shard, rank: int, length: int) -> int:
    """The token `length` after the suffix at a rank; END where the text ends or a separator is."""
    at = pointer(shard.table, shard.width, rank) + length
    if at >= len(shard.text):
        return END
    return np.int64(shard.text[at])  # type: ignore[return-value]


@njit(cache=True, nogil=True)
def next_tokens(
    shard: Shard, length: int, left: int, right: int, unit: int, ids: np.ndarray, counts: np.ndarray
) -> int:
    """Next tokens of an interval of `length`-token matches, ascending; returns how many.

    An interval whose ends agree is one token's. With unit 1 counts are exact; else an interval of
    fewer than 4 units is read once per unit. Counts add up to right - left in any case.
    """
    lefts, rights = np.empty(64, np.int64), np.empty(64, np.int64)  # intervals that wait
    lefts[0], rights[0] = left, right
    waiting, size = 1 if left < right else 0, 0
    while waiting:
        waiting -= 1
        a, b = lefts[waiting], rights[waiting]
        low = next_token(shard, a, length)
        if low == next_token(shard, b - 1, length):
            size = credit(ids, counts, size, low, b - a)
        elif b - a < 4 * unit:
            while a < b:
                c = min(a + unit, b)
                size = credit(ids, counts, size, next_token(shard, (a + c) // 2, length), c - a)
                a = c
        else:
            middle = (a + b) // 2
            lefts[waiting], rights[waiting] = middle, b
            lefts[waiting + 1], rights[waiting + 1] = a, middle
            waiting += 2
    return size


@bare
def credit(ids: np.ndarray, counts: np.ndarray, size: int, token: int, count: int) -> int:
    """Adds to the last entry if it is the token's, else makes one; the new size."""
    if size and ids[size - 1] == token:
        counts[size - 1] += count
        return size
    ids[size], counts[size] = token, count
    return size + 1


@bare
def most_next(count: int, unit: int, most: int) -> int:
    """How many entries `next_tokens` may write: an interval of 2 units or more gives 4 at most."""
    return min(most, count, 4 * (count // unit) + 8)


@njit(cache=True, nogil=True)
def next_tokens_many(
    shard: Shard, matches: np.ndarray, units: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Next tokens of every match (length, left, right) int64 [m, 3]: ids, counts, starts [m + 1].

    most: different next tokens that there can be.
    """
    room = np.int64(0)
    for i in range(len(matches)):
        room += most_next(matches[i, 2] - matches[i, 1], units[i], most)
    ids, counts = np.empty(room, np.int64), np.empty(room, np.int64)
    starts = np.zeros(len(matches) + 1, np.int64)
    for i in range(len(matches)):
        at = starts[i]
        size = next_tokens(
            shard, matches[i, 0], matches[i, 1], matches[i, 2], units[i], ids[at:], counts[at:]
        )
        starts[i + 1] = at + size
    return ids[: starts[-1]], counts[: starts[-1]], starts


@njit(cache=True, nogil=True)
def common(text: np.ndarray, at: int, query: np.ndarray, low: int, high: int) -> int:
    """How many tokens the suffix at `at` shares with the beginning of query[low:high]."""
    k = 0
    most = min(high - low, len(text) - at)
    while k < most and np.int64(text[at + k]) == query[low + k]:
        k += 1
    return k


@njit(cache=True, nogil=True)
def longest_prefixes(shard: Shard, query: np.ndarray, longest: int, out: np.ndarray) -> None:
    """For every position of a query, how many tokens from there on occur somewhere. int64 [n].

    The place of the rest of the query among the suffixes is found once; the longest match is with
    one of the two neighbours of that place.
    """
    text, table, width = shard.text, shard.table, shard.width
    for low in range(len(query)):
        high = min(len(query), low + longest)
        out[low] = 0
        if query[low] < 0 or len(text) == 0:
            continue
        left, right = bucket(shard, query[low])
        left, right, _, _ = narrow(shard, query, low, high, left, right)
        left = first_not_below(shard, query, low, high, left, right)
        for rank in (left - 1, left):
            if 0 <= rank < len(text):
                here = common(text, pointer(table, width, rank), query, low, high)
                out[low] = max(out[low], here)


@bare
def clean(query: np.ndarray, eos: int, separator: int, absent: int) -> None:
    """In place: the end id becomes the separator, what can be no id becomes `absent`."""
    for i in range(len(query)):
        token = query[i]
        if token == eos:
            query[i] = separator
        elif token < 0 or token >= separator:
            query[i] = absent
