"""Hash maps and paged texts of suffix trees and automata.

A map from (owner, token) to a row is an int32 array of slots, -1 if empty, with open addressing and
linear probing. The first two columns of a row are its owner and token. A text is a linked list of
pages. A position is page number * PAGE + offset, so a step back within a page is O(1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from forerun.ngrams.tables.logits.kernels import GOLDEN, MIX_A, home
from forerun.utils.jit import compiled, kernel

OWNER, TOKEN = 0, 1  # columns of a mapped row
BEFORE, AFTER, FILL, BIRTH = 0, 1, 2, 3  # columns of `links`
LENGTH, FIRST, LAST = 0, 1, 2  # of a text's state: tokens, first page, last page
NONE = -1
PAGE = 64  # tokens


class Texts(NamedTuple):
    """P pages of texts. A text's birth number orders texts by age."""

    tokens: np.ndarray  # int32 [P, PAGE]
    links: np.ndarray  # int32 [P, 4]: previous page, next page, token count, birth of the text
    pool: np.ndarray  # int64 [3]: first page of the free list, pages ever used, pages in use


FREE, USED, LIVE = 0, 1, 2  # of a pool of pages or other rows


def new_texts(pages: int) -> Texts:
    """Empty pages."""
    return Texts(np.zeros((pages, PAGE), np.int32), np.zeros((pages, 4), np.int32), new_pool())


def new_pool() -> np.ndarray:
    """A pool without used rows."""
    return np.array([NONE, 0, 0])


def new_text() -> np.ndarray:
    """The state of an empty text."""
    return np.array([0, NONE, NONE])


def enlarged(array: np.ndarray, rows: int) -> np.ndarray:
    """A copy with more rows; new rows are 0."""
    copy = np.zeros((rows, *array.shape[1:]), array.dtype)
    copy[: len(array)] = array
    return copy


@kernel
def num_free(pool: np.ndarray, rows: int) -> int:
    """The number of free rows."""
    return rows - pool[LIVE]


@kernel
def take(pool: np.ndarray, links: np.ndarray, column: int) -> int:
    """Takes a free row. The free list is linked through `column`."""
    row = pool[FREE]
    if row == NONE:
        row = pool[USED]
        pool[USED] += 1
    else:
        pool[FREE] = links[row, column]
    pool[LIVE] += 1
    return row


@kernel
def release(pool: np.ndarray, links: np.ndarray, column: int, row: int) -> None:
    """Returns a row to the free list."""
    links[row, column] = pool[FREE]
    pool[FREE] = row
    pool[LIVE] -= 1


@kernel
def slot_of(owner: int, token: int, slots: int) -> Any:
    """The first slot of the search for (owner, token)."""
    key = (np.uint64(owner) << np.uint64(32)) ^ np.uint64(np.uint32(token))
    key = (key + np.uint64(1)) * GOLDEN
    key = (key ^ (key >> np.uint64(29))) * MIX_A
    return home(key ^ (key >> np.uint64(32)), slots)


@kernel
def find(slots: np.ndarray, rows: np.ndarray, owner: int, token: int) -> int:
    """The row of (owner, token), or -1."""
    at = slot_of(owner, token, len(slots))
    while True:
        row = slots[at]
        if row == NONE or (rows[row, OWNER] == owner and rows[row, TOKEN] == token):
            return row
        at += 1
        if at == len(slots):
            at = 0


@kernel
def slot_with(slots: np.ndarray, rows: np.ndarray, row: int, sought: int) -> int:
    """The slot with value `sought` on the search path of `row`'s key."""
    at = slot_of(rows[row, OWNER], rows[row, TOKEN], len(slots))
    while slots[at] != sought:
        at += 1
        if at == len(slots):
            at = 0
    return at


@kernel
def put(slots: np.ndarray, rows: np.ndarray, row: int) -> None:
    """Adds a row to the map; its owner and token must be new."""
    slots[slot_with(slots, rows, row, NONE)] = row


@kernel
def drop(slots: np.ndarray, rows: np.ndarray, row: int) -> None:
    """Removes a row from the map and moves others, so that probing finds them (Knuth 6.4 R)."""
    count, hole = len(slots), slot_with(slots, rows, row, row)
    at = hole
    while True:
        at += 1
        if at == count:
            at = 0
        other = slots[at]
        if other == NONE:
            break
        distance = (at - slot_of(rows[other, OWNER], rows[other, TOKEN], count)) % count
        if distance >= (at - hole) % count:  # the search for it passes the hole
            slots[hole] = other
            hole = at
    slots[hole] = NONE


@kernel
def write(texts: Texts, state: np.ndarray, birth: int, token: int) -> int:
    """Appends a token to a text, in a new page if the last is full; returns its position."""
    page, offset = state[LAST], state[LENGTH] % PAGE
    if offset == 0:
        page = take(texts.pool, texts.links, AFTER)
        texts.links[page, BEFORE] = state[LAST]
        texts.links[page, AFTER] = NONE
        texts.links[page, BIRTH] = birth
        if state[LAST] == NONE:
            state[FIRST] = page
        else:
            texts.links[state[LAST], AFTER] = page
        state[LAST] = page
    texts.tokens[page, offset] = token
    texts.links[page, FILL] = offset + 1
    state[LENGTH] += 1
    return page * PAGE + offset


@kernel
def token_at(texts: Texts, position: int) -> int:
    """The token at a position."""
    return texts.tokens[position // PAGE, position % PAGE]


@kernel
def back(texts: Texts, position: int, steps: int) -> int:
    """The position `steps` tokens before; steps < PAGE."""
    if position % PAGE >= steps:
        return position - steps
    return texts.links[position // PAGE, BEFORE] * PAGE + position % PAGE + PAGE - steps


@kernel
def num_after(texts: Texts, position: int, enough: int) -> int:
    """The number of tokens after a position in its text; counting may stop at `enough`."""
    page = position // PAGE
    count = texts.links[page, FILL] - position % PAGE - 1
    page = texts.links[page, AFTER]
    while page != NONE and count < enough:
        count += texts.links[page, FILL]
        page = texts.links[page, AFTER]
    return count


@kernel
def read(texts: Texts, position: int, out: np.ndarray) -> int:
    """Writes the tokens after a position to `out`; returns their number."""
    page, offset, count = position // PAGE, position % PAGE + 1, 0
    while page != NONE and count < len(out):
        stop = min(texts.links[page, FILL], offset + len(out) - count)
        for at in range(offset, stop):
            out[count] = texts.tokens[page, at]
            count += 1
        page, offset = texts.links[page, AFTER], 0
    return count


@compiled
def gather(texts: Texts, state: np.ndarray) -> np.ndarray:
    """A whole text, int32."""
    out = np.empty(state[LENGTH], np.int32)
    page, count = state[FIRST], 0
    while page != NONE:
        for at in range(texts.links[page, FILL]):
            out[count] = texts.tokens[page, at]
            count += 1
        page = texts.links[page, AFTER]
    return out


@kernel
def erase(texts: Texts, state: np.ndarray) -> None:
    """Empties a text and releases its pages."""
    page = state[FIRST]
    while page != NONE:
        after = texts.links[page, AFTER]
        release(texts.pool, texts.links, AFTER, page)
        page = after
    state[LENGTH], state[FIRST], state[LAST] = 0, NONE, NONE
