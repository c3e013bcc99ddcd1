"""Search kernels for suffix arrays: intervals of ranks, next tokens, longest matches.

A query is an int64 array of ids. Its interval [left, right) contains the ranks of all suffixes that
begin with it. All kernels are thread-safe.
"""

from __future__ import annotations

import numpy as np

from forerun.ngrams.index.build.page_sums import BUCKETS, DOCUMENTS, touch
from forerun.ngrams.index.build.sparse_index import narrow
from forerun.ngrams.index.build.suffix_array import Shard, position, token_at
from forerun.ngrams.tables.logits.kernels import Arrays
from forerun.utils.jit import compiled, kernel

END = -1  # next token at the text's end


@kernel
def compare(shard: Shard, rank: int, query: np.ndarray, low: int, high: int) -> int:
    """-1, 0 or 1: the suffix at a rank sorts below query[low:high], begins with it, or above."""
    at, size = position(shard, rank), len(shard.text)
    for k in range(min(high - low, size - at)):
        token, wanted = token_at(shard, at + k), query[low + k]
        if token != wanted:
            return -1 if token < wanted else 1
    return 0 if size - at >= high - low else -1


@kernel
def bucket(shard: Shard, token: int) -> tuple[int, int]:
    """The ranks [left, right) of a first token's bucket, within the text."""
    b = min(token >> shard.shift, len(shard.buckets) - 2)
    touch(shard.sums, shard.seen, shard.firsts, BUCKETS, shard.buckets, b)
    touch(shard.sums, shard.seen, shard.firsts, BUCKETS, shard.buckets, b + 1)
    size = len(shard.text)
    left = max(0, min(shard.buckets[b], size))
    return left, max(left, min(shard.buckets[b + 1], size))


@kernel
def find_within(
    shard: Shard, query: np.ndarray, low: int, high: int, left: int, right: int
) -> tuple[int, int]:
    """The interval of query[low:high] within [left, right); if absent, empty at its position."""
    left, below, above, right = narrow(shard, query, low, high, left, right)
    if below < above:  # a fence is inside the interval
        first = first_not_below(shard, query, low, high, left, below)
        return first, first_above(shard, query, low, high, above, right)
    while left < right:  # until any hit
        middle = (left + right) // 2
        order = compare(shard, middle, query, low, high)
        if order < 0:
            left = middle + 1
        elif order > 0:
            right = middle
        else:
            first = first_not_below(shard, query, low, high, left, middle)
            return first, first_above(shard, query, low, high, middle + 1, right)
    return left, left


@kernel
def first_not_below(
    shard: Shard, query: np.ndarray, low: int, high: int, left: int, right: int
) -> int:
    """The first rank in [left, right) with a suffix not below query[low:high]; else `right`."""
    while left < right:
        middle = (left + right) // 2
        if compare(shard, middle, query, low, high) < 0:
            left = middle + 1
        else:
            right = middle
    return left


@kernel
def first_above(shard: Shard, query: np.ndarray, low: int, high: int, left: int, right: int) -> int:
    """The first rank in [left, right) with a suffix above query[low:high]; else `right`."""
    while left < right:
        middle = (left + right) // 2
        if compare(shard, middle, query, low, high) > 0:
            right = middle
        else:
            left = middle + 1
    return left


@kernel
def find(shard: Shard, query: np.ndarray, low: int, high: int) -> tuple[int, int]:
    """The interval of query[low:high]; all ranks for an empty query."""
    if low == high:
        return 0, len(shard.text)
    if query[low] < 0:
        return 0, 0
    left, right = bucket(shard, query[low])
    return find_within(shard, query, low, high, left, right)


@compiled
def find_many(
    shard: Shard, queries: np.ndarray, starts: np.ndarray, first: int, out: np.ndarray
) -> None:
    """Intervals of queries[starts[i]:starts[i + 1]] for i = first, first + 1, ... int64 [m, 2]."""
    for i in range(len(out)):
        left, right = find(shard, queries, starts[first + i], starts[first + i + 1])
        out[i, 0] = left
        out[i, 1] = right


@kernel
def longest_suffix(shard: Shard, query: np.ndarray, low: int, high: int) -> tuple[int, int, int]:
    """Length and interval of the longest suffix of query[low:high] that occurs.

    Doubling and then bisection of the length: O(log) searches.
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


@kernel
def longest_of(index: Arrays, query: np.ndarray) -> tuple[int, int, int]:
    """`longest_suffix` of a whole query, called from Python; index: the fields of a Shard."""
    return longest_suffix(Shard(*index), query, 0, len(query))


@compiled
def longest_suffixes(
    shard: Shard, queries: np.ndarray, starts: np.ndarray, first: int, out: np.ndarray
) -> None:
    """`longest_suffix` of the queries first, first + 1, ... int64 [m, 3]."""
    for i in range(len(out)):
        length, left, right = longest_suffix(
            shard, queries, starts[first + i], starts[first + i + 1]
        )
        out[i, 0], out[i, 1], out[i, 2] = length, left, right


@kernel
def next_token(shard: Shard, rank: int, length: int) -> int:
    """The token at offset `length` of the suffix at a rank; END at the text's end.

    An id above the largest one, from a damaged file that is not verified, is END too.
    """
    at = position(shard, rank) + length
    if at >= len(shard.text):
        return END
    token = token_at(shard, at)
    is_valid = token <= shard.top or token == (1 << 8 * shard.text.itemsize) - 1
    return token if is_valid else END


@compiled
def next_tokens(
    shard: Shard, length: int, left: int, right: int, unit: int, ids: np.ndarray, counts: np.ndarray
) -> int:
    """Writes the next tokens of `length`-token matches, ascending, with counts; returns the size.

    An interval with equal tokens at both ends has a single token. With unit 1 counts are exact;
    else an interval of fewer than 4 units is read once per unit. Counts sum to right - left.
    """
    lefts, rights = np.empty(64, np.int64), np.empty(64, np.int64)  # stack of intervals
    lefts[0], rights[0] = left, right
    stacked, size = 1 if left < right else 0, 0
    while stacked:
        stacked -= 1
        a, b = lefts[stacked], rights[stacked]
        low = next_token(shard, a, length)
        if low == next_token(shard, b - 1, length):
            size = add_count(ids, counts, size, low, b - a)
        elif b - a < 4 * unit:
            while a < b:
                c = min(a + unit, b)
                size = add_count(ids, counts, size, next_token(shard, (a + c) // 2, length), c - a)
                a = c
        else:
            middle = (a + b) // 2
            lefts[stacked], rights[stacked] = middle, b
            lefts[stacked + 1], rights[stacked + 1] = a, middle
            stacked += 2
    return size


@kernel
def add_count(ids: np.ndarray, counts: np.ndarray, size: int, token: int, count: int) -> int:
    """Adds to the last entry if it has the token, else appends an entry; returns the new size.

    Full arrays, only possible with an unsorted damaged file, take no more entries.
    """
    if size and (ids[size - 1] == token or size == len(ids)):
        counts[size - 1] += count
        return size
    ids[size], counts[size] = token, count
    return size + 1


@kernel
def max_next(count: int, unit: int, max_distinct: int) -> int:
    """Most entries that `next_tokens` writes: at most 4 per interval of 2 units or more."""
    return min(max_distinct, count, 4 * (count // unit) + 8)


@compiled
def next_tokens_many(
    shard: Shard, matches: np.ndarray, units: np.ndarray, max_distinct: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Next tokens of every match (length, left, right) int64 [m, 3]: ids, counts, starts [m + 1].

    max_distinct: largest number of distinct next tokens.
    """
    capacity = np.int64(0)
    for i in range(len(matches)):
        capacity += max_next(matches[i, 2] - matches[i, 1], units[i], max_distinct)
    ids, counts = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    starts = np.zeros(len(matches) + 1, np.int64)
    for i in range(len(matches)):
        at = starts[i]
        size = next_tokens(
            shard, matches[i, 0], matches[i, 1], matches[i, 2], units[i], ids[at:], counts[at:]
        )
        starts[i + 1] = at + size
    return ids[: starts[-1]], counts[: starts[-1]], starts


@kernel
def common(shard: Shard, rank: int, query: np.ndarray, low: int, high: int) -> int:
    """Length of the common prefix of the suffix at a rank and query[low:high]."""
    k, at = 0, position(shard, rank)
    limit = min(high - low, len(shard.text) - at)
    while k < limit and token_at(shard, at + k) == query[low + k]:
        k += 1
    return k


@compiled
def longest_prefixes(shard: Shard, query: np.ndarray, longest: int, out: np.ndarray) -> None:
    """Length of the longest match from every position of a query. int64 [n].

    The longest match is with one of the two neighbours of the remaining query's sort position.
    """
    size = len(shard.text)
    for low in range(len(query)):
        high = min(len(query), low + longest)
        out[low] = 0
        if query[low] < 0 or size == 0:
            continue
        left, right = bucket(shard, query[low])
        left, right, _, _ = narrow(shard, query, low, high, left, right)
        left = first_not_below(shard, query, low, high, left, right)
        for rank in (left - 1, left):
            if 0 <= rank < size:
                out[low] = max(out[low], common(shard, rank, query, low, high))


@compiled
def position_of(shard: Shard, rank: int) -> int:
    """`position`, called from Python."""
    return position(shard, rank)


@compiled
def document_at(shard: Shard, starts: np.ndarray, at: int) -> int:
    """The last document that begins at or before a position; -1 if there is none."""
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        touch(shard.sums, shard.seen, shard.firsts, DOCUMENTS, starts, middle)
        if starts[middle] <= at:
            low = middle + 1
        else:
            high = middle
    return low - 1


@kernel
def normalize_ids(query: np.ndarray, eos: int, separator: int, absent: int) -> None:
    """In place: eos becomes the separator, an invalid id becomes `absent`."""
    for i in range(len(query)):
        token = query[i]
        if token == eos:
            query[i] = separator
        elif token < 0 or token >= separator:
            query[i] = absent
