"""Linear-time suffix sorting of integer texts by induced sorting (SA-IS), compiled.

Nong, Zhang and Chan, "Two Efficient Algorithms for Linear Time Suffix Array Construction", 2011.
A suffix is S if it is smaller than the one that begins a token later, else L; an S after an L is an
LMS. Sorted LMS suffixes induce all others in two scans, and are themselves sorted by recursion on a
text of names at most half as long. The text's end counts as a token below all others.

An entry is written with its sign turned (~p) where the suffix before p is of the other type. A scan
then reads the text once per suffix that it induces, next to where it has just read: types are never
stored. Everything lives in the array that becomes the result, apart from one counter per token id.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from forerun.utils.jit import bare


def sort_suffixes(text: np.ndarray, out: np.ndarray, alphabet: int) -> None:
    """Writes the sorted suffix positions of `text` [n] into `out` [n], int32 or int64.

    Ids of alphabet - 1 and above share the last counter, so they must be equal.
    """
    n = len(text)
    if n == 0:
        return
    counts, ends = np.zeros(alphabet, out.dtype), np.empty(alphabet, out.dtype)
    count_tokens(text, counts)
    num_lms = sort_lms_substrings(text, out, counts, ends)
    names = name_lms_substrings(text, out, num_lms)
    if names < num_lms:  # equal substrings: their order is that of the texts of names after them
        reduced = collect_names(out, num_lms)
        if names < 1 << 16:  # the recursion gets a text of its own: the array's tail is its room
            reduced = reduced.astype(np.uint16)
        del counts, ends
        sort_suffixes(reduced, out[:num_lms], names)
        counts, ends = np.zeros(alphabet, out.dtype), np.empty(alphabet, out.dtype)
        count_tokens(text, counts)
        ranks_to_positions(text, out, num_lms)
    induce_all(text, out, counts, ends, num_lms)


@bare
def counter(token: int, top: int) -> int:
    """Which counter is an id's."""
    return min(np.int64(token), top)  # type: ignore[return-value]


@njit(cache=True, nogil=True)
def count_tokens(text: np.ndarray, counts: np.ndarray) -> None:
    """How often each id comes; the last counter takes all ids from its own on."""
    top = len(counts) - 1
    for i in range(len(text)):
        counts[counter(text[i], top)] += 1


@njit(cache=True, nogil=True)
def bucket_starts(counts: np.ndarray, out: np.ndarray) -> None:
    """Where the suffixes that begin with each id start."""
    total = 0
    for c in range(len(counts)):
        out[c] = total
        total += counts[c]


@njit(cache=True, nogil=True)
def bucket_ends(counts: np.ndarray, out: np.ndarray) -> None:
    """Where they end."""
    total = 0
    for c in range(len(counts)):
        total += counts[c]
        out[c] = total


@njit(cache=True, nogil=True)
def induce_larger(text: np.ndarray, sa: np.ndarray, starts: np.ndarray, is_final: bool) -> None:
    """Left to right: every L suffix from the one a token later. LMS entries go unless final.

    Afterwards an entry is positive if the suffix before it is S, negative or 0 otherwise.
    """
    n, top = len(text), len(starts) - 1
    last = n - 1
    c = counter(text[last], top)
    sa[starts[c]] = ~last if last == 0 or text[last - 1] < text[last] else last
    starts[c] += 1
    for i in range(n):
        j = sa[i]
        if j > 0:
            sa[i] = ~j if is_final else 0
            p = j - 1
            token = text[p]
            c = counter(token, top)
            at = starts[c]
            starts[c] = at + 1
            sa[at] = ~p if p == 0 or text[p - 1] < token else p
        elif j < 0:
            sa[i] = ~j


@njit(cache=True, nogil=True)
def induce_smaller(text: np.ndarray, sa: np.ndarray, ends: np.ndarray, is_final: bool) -> None:
    """Right to left: every S suffix from the one a token later.

    If final, all entries end positive; else what is left are the LMS entries, negative.
    """
    top = len(ends) - 1
    for i in range(len(text) - 1, -1, -1):
        j = sa[i]
        if j > 0:
            if not is_final:
                sa[i] = 0
            p = j - 1
            token = text[p]
            c = counter(token, top)
            at = ends[c] - 1
            ends[c] = at
            if p == 0:
                sa[at] = -1 if is_final else 0
            else:
                sa[at] = ~p if text[p - 1] > token else p
        elif j < 0 and is_final:
            sa[i] = ~j


@njit(cache=True, nogil=True)
def sort_lms_substrings(
    text: np.ndarray, sa: np.ndarray, counts: np.ndarray, ends: np.ndarray
) -> int:
    """Sorts the LMS suffixes up to the next LMS; their positions come to the front."""
    n, top = len(text), len(counts) - 1
    sa[:] = 0
    bucket_ends(counts, ends)
    is_smaller = False
    for i in range(n - 2, -1, -1):
        a, b = text[i], text[i + 1]
        if a > b and is_smaller:  # i + 1 is S after an L
            c = counter(b, top)
            ends[c] -= 1
            sa[ends[c]] = i + 1
        is_smaller = a < b or (a == b and is_smaller)
    bucket_starts(counts, ends)
    induce_larger(text, sa, ends, False)
    bucket_ends(counts, ends)
    induce_smaller(text, sa, ends, False)
    found = 0
    for i in range(n):
        if sa[i] < 0:
            sa[found] = ~sa[i]
            found += 1
    return found


@njit(cache=True, nogil=True)
def name_lms_substrings(text: np.ndarray, sa: np.ndarray, num_lms: int) -> int:
    """Numbers the different LMS substrings by rank; returns how many there are.

    LMS positions are never neighbours: the name of p (1 and up) is left at num_lms + p // 2.
    """
    n = len(text)
    sa[num_lms:] = 0
    is_smaller, after = False, n  # `after` is the LMS to the right
    for i in range(n - 2, -1, -1):
        a, b = text[i], text[i + 1]
        if a > b and is_smaller:
            sa[num_lms + ((i + 1) >> 1)] = after - (i + 1)
            after = i + 1
        is_smaller = a < b or (a == b and is_smaller)
    names, before, before_length = 0, 0, -1
    for i in range(num_lms):
        p = counter(sa[i], n)  # in 64 bits
        length = counter(sa[num_lms + (p >> 1)], n)
        is_new = length != before_length or p + length >= n or before + length >= n
        if not is_new:
            for k in range(length + 1):
                if text[p + k] != text[before + k]:
                    is_new = True
                    break
        names += is_new
        sa[num_lms + (p >> 1)] = names
        before, before_length = p, length
    return names


@njit(cache=True, nogil=True)
def collect_names(sa: np.ndarray, num_lms: int) -> np.ndarray:
    """The names in text order, from 0: a text of its own [num_lms], at the end of the array."""
    n = len(sa)
    at = n
    for i in range(n - 1, num_lms - 1, -1):
        if sa[i] > 0:
            at -= 1
            sa[at] = sa[i] - 1
    return sa[at:]


@njit(cache=True, nogil=True)
def ranks_to_positions(text: np.ndarray, sa: np.ndarray, num_lms: int) -> None:
    """sa[:num_lms] from numbers of LMS suffixes to where these begin."""
    n = len(text)
    at, is_smaller = n, False
    for i in range(n - 2, -1, -1):
        a, b = text[i], text[i + 1]
        if a > b and is_smaller:
            at -= 1
            sa[at] = i + 1
        is_smaller = a < b or (a == b and is_smaller)
    for i in range(num_lms):
        sa[i] = sa[at + sa[i]]


@njit(cache=True, nogil=True)
def induce_all(
    text: np.ndarray, sa: np.ndarray, counts: np.ndarray, ends: np.ndarray, num_lms: int
) -> None:
    """From the sorted LMS suffixes at the front to all suffixes."""
    top = len(counts) - 1
    sa[num_lms:] = 0
    bucket_ends(counts, ends)
    for i in range(num_lms - 1, -1, -1):
        j = sa[i]
        sa[i] = 0
        c = counter(text[j], top)
        ends[c] -= 1
        sa[ends[c]] = j
    bucket_starts(counts, ends)
    induce_larger(text, sa, ends, True)
    bucket_ends(counts, ends)
    induce_smaller(text, sa, ends, True)
