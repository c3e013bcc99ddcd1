"""Linear-time suffix sorting of integer texts by induced sorting (SA-IS), compiled.

Nong, Zhang and Chan, "Two Efficient Algorithms for Linear Time Suffix Array Construction", 2011.
A suffix is S if it is smaller than the suffix one token later, else L; an S after an L is an LMS.
The sorted LMS suffixes induce all others in two scans. They are sorted by recursion on a text of
names at most half as long. The text's end counts as a token below all others.

An entry is stored as ~p if the suffix before p has the other type, so types need no storage. All
work is done in the result array, plus one counter per token id.
"""

from __future__ import annotations

import numpy as np

from forerun.utils.jit import compiled, kernel


def sort_suffixes(text: np.ndarray, out: np.ndarray, alphabet: int) -> None:
    """Writes the sorted suffix positions of `text` [n] into `out` [n], int32 or int64.

    Ids of alphabet - 1 and above share the last counter, so at most one such id may occur.
    """
    n = len(text)
    if n == 0:
        return
    counts, ends = np.zeros(alphabet, out.dtype), np.empty(alphabet, out.dtype)
    count_tokens(text, counts)
    num_lms = sort_lms_substrings(text, out, counts, ends)
    names = name_lms_substrings(text, out, num_lms)
    if names < num_lms:  # equal substrings are ordered by the names that follow them
        reduced = collect_names(out, num_lms)
        if names < 1 << 16:  # halves the memory of the recursion
            reduced = reduced.astype(np.uint16)
        del counts, ends
        sort_suffixes(reduced, out[:num_lms], names)
        counts, ends = np.zeros(alphabet, out.dtype), np.empty(alphabet, out.dtype)
        count_tokens(text, counts)
        ranks_to_positions(text, out, num_lms)
    induce_all(text, out, counts, ends, num_lms)


@kernel
def counter(token: int, top: int) -> int:
    """The counter index of an id."""
    return min(np.int64(token), top)  # type: ignore[return-value]


@compiled
def count_tokens(text: np.ndarray, counts: np.ndarray) -> None:
    """Counts each id; the last counter takes all larger ids too."""
    top = len(counts) - 1
    for i in range(len(text)):
        counts[counter(text[i], top)] += 1


@compiled
def bucket_starts(counts: np.ndarray, out: np.ndarray) -> None:
    """The first rank per first id."""
    total = 0
    for c in range(len(counts)):
        out[c] = total
        total += counts[c]


@compiled
def bucket_ends(counts: np.ndarray, out: np.ndarray) -> None:
    """One past the last rank per first id."""
    total = 0
    for c in range(len(counts)):
        total += counts[c]
        out[c] = total


@compiled
def induce_larger(text: np.ndarray, sa: np.ndarray, starts: np.ndarray, is_final: bool) -> None:
    """Left to right: induces every L suffix from the suffix one token later.

    LMS entries are removed unless `is_final`. Afterwards an entry is positive if the suffix before
    it is S, else negative or 0.
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


@compiled
def induce_smaller(text: np.ndarray, sa: np.ndarray, ends: np.ndarray, is_final: bool) -> None:
    """Right to left: induces every S suffix from the suffix one token later.

    With `is_final` all entries end positive; else only LMS entries remain, negative.
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


@compiled
def sort_lms_substrings(
    text: np.ndarray, sa: np.ndarray, counts: np.ndarray, ends: np.ndarray
) -> int:
    """Sorts the LMS substrings; writes their positions to the front and returns their number."""
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


@compiled
def name_lms_substrings(text: np.ndarray, sa: np.ndarray, num_lms: int) -> int:
    """Names the distinct LMS substrings by rank, from 1; returns the number of names.

    The name of position p is stored at num_lms + p // 2: two LMS positions are never adjacent.
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


@compiled
def collect_names(sa: np.ndarray, num_lms: int) -> np.ndarray:
    """The reduced text [num_lms]: names in text order, from 0, at the end of the array."""
    n = len(sa)
    at = n
    for i in range(n - 1, num_lms - 1, -1):
        if sa[i] > 0:
            at -= 1
            sa[at] = sa[i] - 1
    return sa[at:]


@compiled
def ranks_to_positions(text: np.ndarray, sa: np.ndarray, num_lms: int) -> None:
    """Replaces the LMS numbers in sa[:num_lms] by text positions."""
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


@compiled
def induce_all(
    text: np.ndarray, sa: np.ndarray, counts: np.ndarray, ends: np.ndarray, num_lms: int
) -> None:
    """Induces all suffixes from the sorted LMS suffixes at the front."""
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
