"""From the end of a text to the most frequent continuations in a datastore, as a counted tree.

In a suffix array all places of a match stand together, sorted by what follows, so a node of the
tree is an interval of ranks and its count that interval's length. The best node comes next: the
largest count, ties to the shorter path, then to the lower id, then to the parent that came first.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
from numba import njit

from forerun.ngrams import searching
from forerun.ngrams.answers import Match
from forerun.ngrams.infini import Index
from forerun.ngrams.searching import END, next_token
from forerun.ngrams.suffix_array import Shard

LEFT, RIGHT, TOKEN, PARENT, DEPTH = 0, 1, 2, 3, 4  # columns of what waits
NO_IDS, NO_SHARES = np.empty(0, np.int64), np.empty(0)
READS = 64


class Found(NamedTuple):
    """Continuations of a match, surest first; parents[i] < i, -1 is the text's end."""

    tokens: np.ndarray  # int32 [n]
    parents: np.ndarray  # int32 [n]
    counts: np.ndarray  # int64 [n], places of the match that go on like this
    match: int  # tokens of the suffix that was found; 0: none
    places: int  # where it was found


class Firsts(NamedTuple):
    """Tokens that a continuation may begin with, and what each multiplies its counts by."""

    ids: np.ndarray  # int64 [k]
    weights: np.ndarray  # float64 [k], more than 0


NOTHING = Found(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64), 0, 0)
ANY = Firsts(NO_IDS, NO_SHARES)


class Waiting(NamedTuple):
    """Nodes that may come next, best first: places [drafted, waiting) of the first two."""

    scores: np.ndarray  # float64 [n], count x weight of the first token
    slots: np.ndarray  # int64 [n], where in the other two the node stands
    weights: np.ndarray  # float64 [n]
    rows: np.ndarray  # int64 [n, 5]


class Wish(NamedTuple):
    """What a tree may be. A continuation rarer than 1 in `reads` of its places may be missed."""

    nodes: int
    depth: int
    reads: int = READS


def retrieve(
    index: Index,
    tokens: Many[int],
    wish: Wish,
    *,
    lengths: tuple[int, int] = (2, 16),
    firsts: Firsts | None = None,
    bypass: int = 0,
) -> Found:
    """The most frequent continuations of the longest suffix of `tokens` that occurs.

    lengths: of a match, least and most. A shorter one is taken where nothing follows the longest.
    firsts: what continuations may begin with, unless the match has `bypass` tokens or more (and
    `bypass` is not 0). Of several shards, the rarest continuations of each may be counted short.
    """
    query = index.ids(tokens[-lengths[1] :])
    match, _ = index.longest_suffix(query)
    while match >= lengths[0]:
        places = index.find(query[len(query) - match :])
        allowed = None if 0 < bypass <= match else firsts
        found = _at(index, match, places, wish, allowed)
        goes_on = len(found[0]) or (allowed and len(_at(index, match, places, wish, None)[0]))
        if goes_on:
            return Found(*found, match, places.count)
        match -= 1
    return NOTHING


Part = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, parents, counts


def _at(index: Index, match: int, places: Match, wish: Wish, firsts: Firsts | None) -> Part:
    """What goes on from these places, in all shards."""
    if firsts is not None:
        firsts = _as_stored(index, firsts)
        if not len(firsts.ids):
            return NOTHING[:3]
    shards = zip(index.shards, places.intervals, strict=True)
    parts = [
        _of_shard(index, shard, match, interval, wish, firsts or ANY)
        for shard, interval in shards
        if interval[0] < interval[1]
    ]
    return parts[0] if len(parts) == 1 else added(parts, firsts or ANY, wish.nodes)


def _of_shard(
    index: Index,
    shard: Shard,
    match: int,
    interval: tuple[int, int],
    wish: Wish,
    firsts: Firsts,
) -> Part:
    tokens, parents = np.empty(wish.nodes, np.int32), np.empty(wish.nodes, np.int32)
    counts = np.empty(wish.nodes, np.int64)
    end = index.eos if index.eos != index.separator else END
    size = continuations(
        shard, match, *interval, wish, firsts, index.separator, end, tokens, parents, counts
    )
    return tokens[:size], parents[:size], counts[:size]


def _as_stored(index: Index, firsts: Firsts) -> Firsts:
    """The end id is a separator in the text."""
    return Firsts(np.where(firsts.ids == index.eos, index.separator, firsts.ids), firsts.weights)


def added(parts: Many[Part], allowed: Firsts, nodes: int) -> Part:
    """One counted tree of several: counts of equal paths add up, the best `nodes` stay."""
    counts: dict[tuple[int, ...], int] = {}
    for tokens, parents, found in parts:
        paths: list[tuple[int, ...]] = []
        for token, parent, count in zip(
            tokens.tolist(), parents.tolist(), found.tolist(), strict=True
        ):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
            counts[paths[-1]] = counts.get(paths[-1], 0) + count
    weight = dict(zip(allowed.ids.tolist(), allowed.weights.tolist(), strict=True))
    best = sorted(
        counts,
        key=lambda path: (-counts[path] * weight.get(path[0], 1.0), len(path), path[-1], path),
    )[:nodes]
    place = {path: i for i, path in enumerate(best)} | {(): -1}
    return (
        np.array([path[-1] for path in best], np.int32),
        np.array([place[path[:-1]] for path in best], np.int32),
        np.array([counts[path] for path in best], np.int64),
    )


@njit(cache=True, nogil=True)
def continuations(
    shard: Shard,
    length: int,
    left: int,
    right: int,
    wish: Wish,
    firsts: Firsts,
    separator: int,
    end: int,
    tokens: np.ndarray,
    parents: np.ndarray,
    counts: np.ndarray,
) -> int:
    """Writes the best continuations of the matches at ranks [left, right); returns how many.

    end: the id that a separator stands for, END if there is none. Counts are exact.
    """
    room = len(tokens)
    skip = separator if end == END else END  # where no token says that a document ends
    queue = Waiting(np.empty(room), np.arange(room), np.empty(room), np.empty((room, 5), np.int64))
    drafted = 0
    if len(firsts.ids):
        waiting = named(shard, length, left, right, firsts, skip, queue)
    else:
        waiting = split(shard, length, left, right, wish.reads, END, 1, 1.0, skip, queue, 0, 0)
    while drafted < waiting:
        slot = queue.slots[drafted]
        row = queue.rows[slot]
        is_end = row[TOKEN] == separator
        tokens[drafted] = end if is_end else row[TOKEN]
        parents[drafted], counts[drafted] = row[PARENT], row[RIGHT] - row[LEFT]
        drafted += 1
        if not is_end and row[DEPTH] < wish.depth:
            weight, below = queue.weights[slot], row[DEPTH] + 1
            at, left, right = length + row[DEPTH], row[LEFT], row[RIGHT]
            waiting = split(
                shard, at, left, right, wish.reads, drafted - 1, below, weight, skip,
                queue, drafted, waiting,
            )  # fmt: skip
    return drafted


@njit(cache=True, nogil=True)
def named(
    shard: Shard, length: int, left: int, right: int, firsts: Firsts, skip: int, queue: Waiting
) -> int:
    """Puts the first tokens that are allowed and occur into the queue; returns how many."""
    waiting = 0
    for i in range(len(firsts.ids)):
        token = firsts.ids[i]
        low = bound(shard, length, left, right, token)
        high = bound(shard, length, low, right, token + 1)
        if low < high and token != skip:
            waiting = push(queue, 0, waiting, firsts.weights[i], low, high, token, END, 1)
    return waiting


@njit(cache=True, nogil=True)
def split(
    shard: Shard,
    length: int,
    left: int,
    right: int,
    reads: int,
    parent: int,
    depth: int,
    weight: float,
    skip: int,
    queue: Waiting,
    drafted: int,
    waiting: int,
) -> int:
    """Puts what follows `length` tokens of the suffixes [left, right) into the queue.

    Equal tokens stand together. A run of `step` ranks or more covers one of any two ranks that are
    `step` apart; shorter ones are too rare, or would find no room.
    """
    room = len(queue.scores)
    rarest, done = max(1, (right - left) // reads), left
    while done < right:
        step = rarest
        if waiting == room and waiting > drafted:
            step = max(step, int(np.ceil(queue.scores[waiting - 1] / weight)))
        at = done + step - 1
        if at >= right:
            break
        token = next_token(shard, at, length)
        if step > 2 and not is_long(shard, length, done, at, right, token, step // 2):
            done = at + 1
            continue
        low = first_of(shard, length, done, at, token)
        done = last_of(shard, length, at, right, token)
        if token != END and token != skip:
            waiting = push(queue, drafted, waiting, weight, low, done, token, parent, depth)
    return waiting


@njit(cache=True, nogil=True)
def bound(shard: Shard, length: int, left: int, right: int, token: int) -> int:
    """The first rank in [left, right) whose next token is not below `token`; else `right`."""
    while left < right:
        middle = (left + right) // 2
        if next_token(shard, middle, length) < token:
            left = middle + 1
        else:
            right = middle
    return left


@njit(cache=True, nogil=True)
def is_long(
    shard: Shard, length: int, left: int, at: int, right: int, token: int, half: int
) -> bool:
    """Whether the run of `token` around rank `at` reaches `half` ranks to either side."""
    low, high = at - half, at + half
    if low >= left and next_token(shard, low, length) == token:
        return True
    return high < right and next_token(shard, high, length) == token


@njit(cache=True, nogil=True)
def first_of(shard: Shard, length: int, left: int, at: int, token: int) -> int:
    """The first rank of the run of `token` that rank `at` belongs to, not below `left`."""
    step, high = 1, at
    while high - step >= left and next_token(shard, high - step, length) == token:
        high -= step
        step *= 2
    return bound(shard, length, max(left, high - step), high, token)


@njit(cache=True, nogil=True)
def last_of(shard: Shard, length: int, at: int, right: int, token: int) -> int:
    """One more than the last rank of that run."""
    step, low = 1, at
    while low + step < right and next_token(shard, low + step, length) == token:
        low += step
        step *= 2
    return bound(shard, length, low + 1, min(right, low + step), token + 1)


@njit(cache=True, nogil=True)
def push(
    queue: Waiting,
    drafted: int,
    waiting: int,
    weight: float,
    left: int,
    right: int,
    token: int,
    parent: int,
    depth: int,
) -> int:
    """Adds a node in its place, if there is one; returns where the queue ends."""
    score, at = (right - left) * weight, waiting
    while at > drafted and is_before(queue, at - 1, score, token, depth):
        at -= 1
    room = len(queue.scores)
    if at == room:
        return waiting
    waiting = min(waiting + 1, room)
    slot = queue.slots[waiting - 1]  # free, or that of the node that drops out
    for i in range(waiting - 1, at, -1):
        queue.scores[i], queue.slots[i] = queue.scores[i - 1], queue.slots[i - 1]
    queue.scores[at], queue.slots[at], queue.weights[slot] = score, slot, weight
    row = queue.rows[slot]
    row[LEFT], row[RIGHT], row[TOKEN], row[PARENT], row[DEPTH] = left, right, token, parent, depth
    return waiting


@njit(cache=True, nogil=True)
def is_before(queue: Waiting, at: int, score: float, token: int, depth: int) -> bool:
    """Whether a new node goes before the one that waits at a place."""
    if score != queue.scores[at]:
        return score > queue.scores[at]
    row = queue.rows[queue.slots[at]]
    return depth < row[DEPTH] or (depth == row[DEPTH] and token < row[TOKEN])


def warm_up(index: Index) -> None:
    """Compiles what `retrieve` runs, for the number types of this index."""
    searching.longest_suffix(index.shards[0], NO_IDS, 0, 0)
    for firsts in (None, Firsts(np.zeros(1, np.int64), np.ones(1))):
        retrieve(index, [int(index.shards[0].text[-1])], Wish(1, 1), lengths=(1, 1), firsts=firsts)
