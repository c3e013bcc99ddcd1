"""Kernels for the most frequent continuations of a match in a suffix array.

The occurrences of a match are contiguous in the suffix array and sorted by continuation. A tree
node is an interval of ranks, and its count is the interval's length. Nodes are added best first: by
count, then shorter path, lower id, earlier parent.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.ngrams.index.build.suffix_array import Shard
from forerun.ngrams.index.query.kernels import END, find, longest_suffix, next_token
from forerun.ngrams.tables.logits.kernels import Arrays
from forerun.ngrams.tables.logits.top_k import select_top
from forerun.utils.jit import compiled, kernel

LEFT, RIGHT, TOKEN, PARENT, DEPTH = 0, 1, 2, 3, 4  # columns of Queue.rows
READS = 64


class FirstTokens(NamedTuple):
    """Allowed first tokens of a continuation, and factors for their counts."""

    ids: np.ndarray  # int64 [k]
    weights: np.ndarray  # float64 [k], more than 0


class TreeLimits(NamedTuple):
    """Limits of a tree. A continuation of a share below 1 / `reads` may be missed."""

    nodes: int
    depth: int
    reads: int = READS


class Queue(NamedTuple):
    """Priority queue of candidate nodes, best first, at [drafted, filled) of scores and slots."""

    scores: np.ndarray  # float64 [n], count x weight of the first token
    slots: np.ndarray  # int64 [n], the node's index into weights and rows
    weights: np.ndarray  # float64 [n]
    rows: np.ndarray  # int64 [n, 5]


@compiled
def retrieve(
    index: Arrays,
    query: np.ndarray,
    shortest: int,
    limit_values: Arrays,
    allowed: Arrays,
    is_bound: bool,
    bypass: int,
    ends: tuple[int, int],
    tree: Arrays,
) -> tuple[int, int, int]:
    """Writes the best continuations of the longest suffix of query [n] that has continuations.

    Returns their number, the length of the match and its occurrences. is_bound: only `allowed`
    first tokens, unless the match has at least `bypass` tokens (0: no bypass). index, limit_values,
    allowed: fields of Shard, TreeLimits, FirstTokens. ends, tree: see `continuations`.
    """
    shard, limits, firsts = Shard(*index), TreeLimits(*limit_values), FirstTokens(*allowed)
    queue = new_queue(limits.nodes)
    return retrieve_in(shard, query, shortest, limits, firsts, is_bound, bypass, ends, tree, queue)


@kernel
def retrieve_in(
    shard: Shard,
    query: np.ndarray,
    shortest: int,
    limits: TreeLimits,
    firsts: FirstTokens,
    is_bound: bool,
    bypass: int,
    ends: tuple[int, int],
    tree: Arrays,
    queue: Queue,
) -> tuple[int, int, int]:
    """`retrieve` with a given queue."""
    match, left, right = longest_suffix(shard, query, 0, len(query))
    while match >= shortest:
        prunes = is_bound and not 0 < bypass <= match
        size = continue_in(shard, match, left, right, limits, firsts, prunes, ends, tree, queue)
        following = size
        if prunes and not size:  # other first tokens may follow
            following = continue_in(
                shard, match, left, right, limits, firsts, False, ends, tree, queue
            )
        if following:
            return size, match, right - left
        match -= 1
        left, right = find(shard, query, len(query) - match, len(query))
    return 0, 0, 0


@compiled
def continuations(
    index: Arrays,
    length: int,
    left: int,
    right: int,
    limit_values: Arrays,
    allowed: Arrays,
    prunes: bool,
    ends: tuple[int, int],
    tree: Arrays,
) -> int:
    """Writes the best continuations of the match at ranks [left, right); returns their number.

    prunes: only first tokens of `allowed`. ends: the separator, and the id that replaces it, or
    END. Counts are exact. index, limit_values, allowed: fields of Shard, TreeLimits, FirstTokens.
    tree: tokens int32, parents int32, counts int64 [n >= nodes].
    """
    shard, limits, firsts = Shard(*index), TreeLimits(*limit_values), FirstTokens(*allowed)
    queue = new_queue(limits.nodes)
    return continue_in(shard, length, left, right, limits, firsts, prunes, ends, tree, queue)


@compiled
def new_queue(size: int) -> Queue:
    """An empty queue."""
    return Queue(np.empty(size), np.arange(size), np.empty(size), np.empty((size, 5), np.int64))


@kernel
def continue_in(
    shard: Shard,
    length: int,
    left: int,
    right: int,
    limits: TreeLimits,
    firsts: FirstTokens,
    prunes: bool,
    ends: tuple[int, int],
    tree: Arrays,
    queue: Queue,
) -> int:
    """`continuations` with a given queue."""
    (separator, end), (tokens, parents, counts) = ends, tree
    skip = separator if end == END else END  # not drafted: no id for a document's end
    drafted = 0
    if prunes:
        filled = push_allowed(shard, length, left, right, firsts, skip, queue)
    else:
        filled = push_next(shard, length, left, right, limits.reads, END, 1, 1.0, skip, queue, 0, 0)
    while drafted < filled:
        slot = queue.slots[drafted]
        row = queue.rows[slot]
        is_end = row[TOKEN] == separator
        tokens[drafted] = end if is_end else row[TOKEN]
        parents[drafted], counts[drafted] = row[PARENT], row[RIGHT] - row[LEFT]
        drafted += 1
        if not is_end and row[DEPTH] < limits.depth:
            weight, below = queue.weights[slot], row[DEPTH] + 1
            at, left, right = length + row[DEPTH], row[LEFT], row[RIGHT]
            filled = push_next(
                shard, at, left, right, limits.reads, drafted - 1, below, weight, skip,
                queue, drafted, filled,
            )  # fmt: skip
    return drafted


@compiled
def likeliest(ids: np.ndarray, probs: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64 [k <= most] and values of the largest positive probabilities; ties: the first."""
    places, values = np.empty(most, np.int32), np.empty(most)
    select_top(probs, places, values)
    count = 0
    while count < most and values[count] > 0:
        count += 1
    return ids[places[:count]].astype(np.int64), values[:count]


@kernel
def push_allowed(
    shard: Shard, length: int, left: int, right: int, firsts: FirstTokens, skip: int, queue: Queue
) -> int:
    """Pushes the allowed first tokens that occur; returns the queue's end."""
    filled = 0
    for i in range(len(firsts.ids)):
        token = firsts.ids[i]
        low = lower_bound(shard, length, left, right, token)
        high = lower_bound(shard, length, low, right, token + 1)
        if low < high and token != skip:
            filled = push(queue, 0, filled, firsts.weights[i], low, high, token, END, 1)
    return filled


@kernel
def push_next(
    shard: Shard,
    length: int,
    left: int,
    right: int,
    reads: int,
    parent: int,
    depth: int,
    weight: float,
    skip: int,
    queue: Queue,
    drafted: int,
    filled: int,
) -> int:
    """Pushes the tokens that follow `length` tokens of the suffixes [left, right).

    Equal tokens form runs of ranks. Reading every `step`-th rank finds all runs of at least `step`
    ranks; shorter runs are too rare or would not fit into the queue.
    """
    capacity = len(queue.scores)
    rarest, done = max(1, (right - left) // reads), left
    while done < right:
        step = rarest
        if filled == capacity and filled > drafted:
            step = max(step, int(np.ceil(queue.scores[filled - 1] / weight)))
        at = done + step - 1
        if at >= right:
            break
        token = next_token(shard, at, length)
        if step > 2 and not is_long_run(shard, length, done, at, right, token, step // 2):
            done = at + 1
            continue
        low = run_start(shard, length, done, at, token)
        done = run_end(shard, length, at, right, token)
        if token != END and token != skip:
            filled = push(queue, drafted, filled, weight, low, done, token, parent, depth)
    return filled


@kernel
def lower_bound(shard: Shard, length: int, left: int, right: int, token: int) -> int:
    """The first rank in [left, right) with a next token >= `token`; else `right`."""
    while left < right:
        middle = (left + right) // 2
        if next_token(shard, middle, length) < token:
            left = middle + 1
        else:
            right = middle
    return left


@kernel
def is_long_run(
    shard: Shard, length: int, left: int, at: int, right: int, token: int, half: int
) -> bool:
    """Whether the run of `token` around rank `at` extends `half` ranks to one side."""
    low, high = at - half, at + half
    if low >= left and next_token(shard, low, length) == token:
        return True
    return high < right and next_token(shard, high, length) == token


@kernel
def run_start(shard: Shard, length: int, left: int, at: int, token: int) -> int:
    """The first rank >= `left` of the run of `token` around rank `at`."""
    step, high = 1, at
    while high - step >= left and next_token(shard, high - step, length) == token:
        high -= step
        step *= 2
    return lower_bound(shard, length, max(left, high - step), high, token)


@kernel
def run_end(shard: Shard, length: int, at: int, right: int, token: int) -> int:
    """One past the last rank of the run of `token` around rank `at`."""
    step, low = 1, at
    while low + step < right and next_token(shard, low + step, length) == token:
        low += step
        step *= 2
    return lower_bound(shard, length, low + 1, min(right, low + step), token + 1)


@kernel
def push(
    queue: Queue,
    drafted: int,
    filled: int,
    weight: float,
    left: int,
    right: int,
    token: int,
    parent: int,
    depth: int,
) -> int:
    """Inserts a node into the queue unless it is full of better ones; returns the queue's end."""
    score, at = (right - left) * weight, filled
    while at > drafted and is_before(queue, at - 1, score, token, depth):
        at -= 1
    capacity = len(queue.scores)
    if at == capacity:
        return filled
    filled = min(filled + 1, capacity)
    slot = queue.slots[filled - 1]  # free, or of the dropped node
    for i in range(filled - 1, at, -1):
        queue.scores[i], queue.slots[i] = queue.scores[i - 1], queue.slots[i - 1]
    queue.scores[at], queue.slots[at], queue.weights[slot] = score, slot, weight
    row = queue.rows[slot]
    row[LEFT], row[RIGHT], row[TOKEN], row[PARENT], row[DEPTH] = left, right, token, parent, depth
    return filled


@kernel
def is_before(queue: Queue, at: int, score: float, token: int, depth: int) -> bool:
    """Whether a new node sorts before the node at an index of the queue."""
    if score != queue.scores[at]:
        return score > queue.scores[at]
    row = queue.rows[queue.slots[at]]
    return depth < row[DEPTH] or (depth == row[DEPTH] and token < row[TOKEN])
