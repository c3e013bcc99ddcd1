"""The most frequent continuations of a match in a suffix array, in one call.

All places of a match stand together, sorted by what follows, so a node of the tree is an interval
of ranks and its count that interval's length. The best node comes next: the largest count, ties to
the shorter path, then to the lower id, then to the parent that came first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from forerun.ngrams.index.build.suffix_array import Shard
from forerun.ngrams.index.query.kernels import END, find, longest_suffix, next_token
from forerun.ngrams.tables.logits.kernels import Arrays
from forerun.ngrams.tables.logits.top_k import select_top
from forerun.utils.jit import bare

LEFT, RIGHT, TOKEN, PARENT, DEPTH = 0, 1, 2, 3, 4  # columns of what waits
READS = 64


class Firsts(NamedTuple):
    """Tokens that a continuation may begin with, and what each multiplies its counts by."""

    ids: np.ndarray  # int64 [k]
    weights: np.ndarray  # float64 [k], more than 0


class Wish(NamedTuple):
    """What a tree may be. A continuation rarer than 1 in `reads` of its places may be missed."""

    nodes: int
    depth: int
    reads: int = READS


class Waiting(NamedTuple):
    """Nodes that may come next, best first: places [drafted, waiting) of the first two."""

    scores: np.ndarray  # float64 [n], count x weight of the first token
    slots: np.ndarray  # int64 [n], where in the other two the node stands
    weights: np.ndarray  # float64 [n]
    rows: np.ndarray  # int64 [n, 5]


@njit(cache=True, nogil=True)
def retrieve(
    index: Arrays,
    query: np.ndarray,
    shortest: int,
    wishes: Arrays,
    allowed: Arrays,
    is_bound: bool,
    bypass: int,
    ends: tuple[int, int],
    tree: Arrays,
) -> tuple[int, int, int]:
    """Writes the best continuations of the longest suffix of query [n] that something follows.

    Returns how many there are, the length of the match and its places. is_bound: only what is
    `allowed` may follow, unless the match has `bypass` tokens or more (and `bypass` is not 0). The
    tuples: a Shard, a Wish, Firsts; the last two as in `continuations`.
    """
    shard, wish, firsts = Shard(*index), Wish(*wishes), Firsts(*allowed)
    queue = new_queue(wish.nodes)
    return retrieve_in(shard, query, shortest, wish, firsts, is_bound, bypass, ends, tree, queue)


@bare
def retrieve_in(
    shard: Shard,
    query: np.ndarray,
    shortest: int,
    wish: Wish,
    firsts: Firsts,
    is_bound: bool,
    bypass: int,
    ends: tuple[int, int],
    tree: Arrays,
    queue: Waiting,
) -> tuple[int, int, int]:
    """`retrieve` with a queue to work in."""
    match, left, right = longest_suffix(shard, query, 0, len(query))
    while match >= shortest:
        prunes = is_bound and not 0 < bypass <= match
        size = continue_in(shard, match, left, right, wish, firsts, prunes, ends, tree, queue)
        following = size
        if prunes and not size:  # what is not allowed may follow
            following = continue_in(
                shard, match, left, right, wish, firsts, False, ends, tree, queue
            )
        if following:
            return size, match, right - left
        match -= 1
        left, right = find(shard, query, len(query) - match, len(query))
    return 0, 0, 0


@njit(cache=True, nogil=True)
def continuations(
    index: Arrays,
    length: int,
    left: int,
    right: int,
    wishes: Arrays,
    allowed: Arrays,
    prunes: bool,
    ends: tuple[int, int],
    tree: Arrays,
) -> int:
    """Writes the best continuations of the matches at ranks [left, right); returns how many.

    prunes: they begin with a token of `allowed`. ends: the separator, and the id that it stands
    for, END if there is none. Counts are exact. The tuples: a Shard, a Wish, Firsts; tokens int32,
    parents int32 and counts int64 [n >= wish.nodes].
    """
    shard, wish, firsts = Shard(*index), Wish(*wishes), Firsts(*allowed)
    queue = new_queue(wish.nodes)
    return continue_in(shard, length, left, right, wish, firsts, prunes, ends, tree, queue)


@njit(cache=True, nogil=True)
def new_queue(room: int) -> Waiting:
    """An empty one."""
    return Waiting(np.empty(room), np.arange(room), np.empty(room), np.empty((room, 5), np.int64))


@bare
def continue_in(
    shard: Shard,
    length: int,
    left: int,
    right: int,
    wish: Wish,
    firsts: Firsts,
    prunes: bool,
    ends: tuple[int, int],
    tree: Arrays,
    queue: Waiting,
) -> int:
    """`continuations` with a queue to work in."""
    (separator, end), (tokens, parents, counts) = ends, tree
    skip = separator if end == END else END  # where no token says that a document ends
    drafted = 0
    if prunes:
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
def likeliest(ids: np.ndarray, probs: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64 [k <= most] of the largest positive probabilities, and these; ties: the first."""
    places, held = np.empty(most, np.int32), np.empty(most)
    select_top(probs, places, held)
    count = 0
    while count < most and held[count] > 0:
        count += 1
    return ids[places[:count]].astype(np.int64), held[:count]


@bare
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


@bare
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


@bare
def bound(shard: Shard, length: int, left: int, right: int, token: int) -> int:
    """The first rank in [left, right) whose next token is not below `token`; else `right`."""
    while left < right:
        middle = (left + right) // 2
        if next_token(shard, middle, length) < token:
            left = middle + 1
        else:
            right = middle
    return left


@bare
def is_long(
    shard: Shard, length: int, left: int, at: int, right: int, token: int, half: int
) -> bool:
    """Whether the run of `token` around rank `at` reaches `half` ranks to either side."""
    low, high = at - half, at + half
    if low >= left and next_token(shard, low, length) == token:
        return True
    return high < right and next_token(shard, high, length) == token


@bare
def first_of(shard: Shard, length: int, left: int, at: int, token: int) -> int:
    """The first rank of the run of `token` that rank `at` belongs to, not below `left`."""
    step, high = 1, at
    while high - step >= left and next_token(shard, high - step, length) == token:
        high -= step
        step *= 2
    return bound(shard, length, max(left, high - step), high, token)


@bare
def last_of(shard: Shard, length: int, at: int, right: int, token: int) -> int:
    """One more than the last rank of that run."""
    step, low = 1, at
    while low + step < right and next_token(shard, low + step, length) == token:
        low += step
        step *= 2
    return bound(shard, length, low + 1, min(right, low + step), token + 1)


@bare
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


@bare
def is_before(queue: Waiting, at: int, score: float, token: int, depth: int) -> bool:
    """Whether a new node goes before the one that waits at a place."""
    if score != queue.scores[at]:
        return score > queue.scores[at]
    row = queue.rows[queue.slots[at]]
    return depth < row[DEPTH] or (depth == row[DEPTH] and token < row[TOKEN])
