"""Kernels of a suffix automaton: append tokens, move cursors, read continuations.

A state is the set of strings with the same end positions. Its longest string has LENGTH tokens;
LINK is the state of the next shorter suffixes. Blumer et al. 1985, with a cursor as in "SAM
Decoding", 2024 (arXiv 2411.10666): the longest suffix of the read tokens that occurs in the texts.
Several texts may grow at once in one automaton.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.ngrams.tables.logits.kernels import Arrays
from forerun.ngrams.tables.suffix.hash_maps import LENGTH as SIZE
from forerun.ngrams.tables.suffix.hash_maps import (
    NONE,
    OWNER,
    PAGE,
    TOKEN,
    Texts,
    back,
    enlarged,
    find,
    new_texts,
    num_after,
    put,
    read,
    write,
)
from forerun.utils.jit import kernel

# Columns of `states`. FIRST, LATEST: end positions; HEAD: first edge.
LINK, LENGTH, FIRST, LATEST, HEAD = range(5)
TARGET, NEXT = 2, 3  # columns of `edges` after OWNER and TOKEN; NEXT: next edge of the owner
STATES, EDGES, TOTAL = 0, 1, 2  # of `used`
END, AT, MATCHED = 0, 1, 2  # of a cursor: state of the whole text, state and length of the match
ROOT = 0
STATE_BYTES, EDGE_BYTES, PAGE_BYTES = 20, 21, 4 * PAGE + 16
MAX_LATEST_STATES = 64  # states per token with an updated latest position


class Automaton(NamedTuple):
    """S states and E edges. `slots` maps edges; a state's only edge is its HEAD and not mapped."""

    states: np.ndarray  # int32 [S, 5]
    edges: np.ndarray  # int32 [E, 4]
    slots: np.ndarray  # int32 [1.25 E]
    used: np.ndarray  # int64 [3]: states, edges, tokens of all texts
    texts: Texts


def new_automaton(states: int, edges: int, pages: int) -> Automaton:
    """An automaton with only the root."""
    slots = np.full(edges + edges // 4, NONE, np.int32)
    auto = Automaton(
        np.zeros((states, 5), np.int32),
        np.zeros((edges, 4), np.int32),
        slots,
        np.array([1, 0, 0]),
        new_texts(pages),
    )
    auto.states[ROOT] = NONE, 0, NONE, NONE, NONE
    return auto


def with_capacity(old: Automaton, states: int, edges: int, pages: int) -> Automaton:
    """The automaton in larger arrays."""
    texts = old.texts._replace(
        tokens=enlarged(old.texts.tokens, pages), links=enlarged(old.texts.links, pages)
    )
    auto = old._replace(states=enlarged(old.states, states), texts=texts)
    if edges > len(old.edges):
        slots = np.full(edges + edges // 4, NONE, np.int32)
        auto = auto._replace(edges=enlarged(old.edges, edges), slots=slots)
        rehash(old.slots, auto.slots, auto.edges)
    return auto


@kernel
def rehash(old: np.ndarray, new: np.ndarray, edges: np.ndarray) -> None:
    """Maps all edges of the old slots in the new slots."""
    for edge in old:
        if edge != NONE:
            put(new, edges, edge)


@kernel
def extend(
    parts: Arrays,
    pages: Arrays,
    text: np.ndarray,
    cursor: np.ndarray,
    new: np.ndarray,
    keeps_latest: bool,
) -> int:
    """Appends tokens to a text until the arrays are full; returns their number.

    The cursor moves before a token is added, so a text never matches its own end. parts: fields of
    Automaton without texts; pages: fields of Texts.
    """
    auto = Automaton(*parts, Texts(*pages))  # type: ignore[call-arg]
    for done in range(len(new)):
        live, states = auto.texts.pool[2], auto.used[STATES] + 2
        is_full = live == len(auto.texts.links) and text[SIZE] % PAGE == 0
        # edges <= states + tokens: each edge outside a spanning tree belongs to one suffix
        if states > len(auto.states) or states + auto.used[TOTAL] + 1 > len(auto.edges) or is_full:
            return done
        if keeps_latest and text[SIZE] > 0:
            update_latest(auto, cursor[END], end_position(text))
        step_cursor(auto, cursor, new[done])
        position = write(auto.texts, text, 0, new[done])
        cursor[END] = grow(auto, cursor[END], new[done], position)
        auto.used[TOTAL] += 1
    return len(new)


@kernel
def move_cursor(parts: Arrays, pages: Arrays, cursor: np.ndarray, new: np.ndarray) -> None:
    """Moves a cursor over tokens without adding them. parts, pages: see `extend`."""
    auto = Automaton(*parts, Texts(*pages))  # type: ignore[call-arg]
    for token in new:
        step_cursor(auto, cursor, token)


@kernel
def end_position(text: np.ndarray) -> int:
    """The position of the last token of a text."""
    return text[2] * PAGE + (text[SIZE] - 1) % PAGE


@kernel
def edge_of(
    states: np.ndarray, edges: np.ndarray, slots: np.ndarray, state: int, token: int
) -> int:
    """The edge of a state by `token`, or -1."""
    head = states[state, HEAD]
    if head == NONE or edges[head, TOKEN] == token:
        return head
    if edges[head, NEXT] == NONE:
        return NONE
    return find(slots, edges, state, token)


@kernel
def add_edge(auto: Automaton, state: int, token: int, target: int) -> None:
    """Adds an edge as the first of its owner."""
    edges, head = auto.edges, auto.states[state, HEAD]
    edge = auto.used[EDGES]
    auto.used[EDGES] += 1
    row = edges[edge]
    row[OWNER], row[TOKEN], row[TARGET], row[NEXT] = state, token, target, head
    auto.states[state, HEAD] = edge
    if head != NONE:
        if edges[head, NEXT] == NONE:
            put(auto.slots, edges, head)
        put(auto.slots, edges, edge)


@kernel
def new_state(auto: Automaton, link: int, length: int, first: int, latest: int) -> int:
    """Adds a state without edges."""
    state = auto.used[STATES]
    auto.used[STATES] += 1
    row = auto.states[state]
    row[LINK], row[LENGTH], row[FIRST], row[LATEST], row[HEAD] = link, length, first, latest, NONE
    return state


@kernel
def grow(auto: Automaton, end: int, token: int, position: int) -> int:
    """Appends a token to a text with state `end`; returns its new state."""
    states, edges = auto.states, auto.edges
    edge = edge_of(states, edges, auto.slots, end, token)
    if edge != NONE:  # the string occurs in another text
        target = edges[edge, TARGET]
        is_longest = states[target, LENGTH] == states[end, LENGTH] + 1
        return target if is_longest else clone(auto, end, token, target)
    new = new_state(auto, ROOT, states[end, LENGTH] + 1, position, position)
    while end != NONE:
        edge = edge_of(states, edges, auto.slots, end, token)
        if edge != NONE:
            break
        add_edge(auto, end, token, new)
        end = states[end, LINK]
    if end != NONE:
        target = edges[edge, TARGET]
        is_longest = states[target, LENGTH] == states[end, LENGTH] + 1
        states[new, LINK] = target if is_longest else clone(auto, end, token, target)
    return new


@kernel
def clone(auto: Automaton, state: int, token: int, target: int) -> int:
    """Moves the strings of `target` with at most LENGTH[state] + 1 tokens to a new state."""
    states, edges = auto.states, auto.edges
    old = states[target]
    new = new_state(auto, old[LINK], states[state, LENGTH] + 1, old[FIRST], old[LATEST])
    edge = old[HEAD]
    while edge != NONE:
        add_edge(auto, new, edges[edge, TOKEN], edges[edge, TARGET])
        edge = edges[edge, NEXT]
    old[LINK] = new
    while state != NONE:
        edge = edge_of(states, edges, auto.slots, state, token)
        if edges[edge, TARGET] != target:
            break
        edges[edge, TARGET] = new
        state = states[state, LINK]
    return new


@kernel
def step_cursor(auto: Automaton, cursor: np.ndarray, token: int) -> None:
    """Extends the match by a token: of its suffixes, the longest that continues with it."""
    states, edges = auto.states, auto.edges
    fix_state(states, cursor)
    at, matched = cursor[AT], cursor[MATCHED]
    edge = edge_of(states, edges, auto.slots, at, token)
    while edge == NONE and at != ROOT:
        at = states[at, LINK]
        matched = states[at, LENGTH]
        edge = edge_of(states, edges, auto.slots, at, token)
    if edge == NONE:
        cursor[AT], cursor[MATCHED] = ROOT, 0
    else:
        cursor[AT], cursor[MATCHED] = edges[edge, TARGET], matched + 1


@kernel
def fix_state(states: np.ndarray, cursor: np.ndarray) -> None:
    """Corrects the state of the match if `clone` has moved its string to another state."""
    at = cursor[AT]
    while at != ROOT and cursor[MATCHED] <= states[states[at, LINK], LENGTH]:
        at = states[at, LINK]
    cursor[AT] = at


@kernel
def refresh(states: np.ndarray, cursor: np.ndarray) -> None:
    """Updates the match to the longest suffix with a continuation, after other texts have grown.

    A state has a continuation if it has an edge. The suffixes of the text that occur elsewhere are
    the states on END's links.
    """
    fix_state(states, cursor)
    while states[cursor[AT], HEAD] == NONE and cursor[AT] != ROOT:
        cursor[AT] = states[cursor[AT], LINK]
        cursor[MATCHED] = states[cursor[AT], LENGTH]
    end = cursor[END]
    while states[end, HEAD] == NONE and end != ROOT:
        end = states[end, LINK]
    if states[end, LENGTH] > cursor[MATCHED]:
        cursor[AT], cursor[MATCHED] = end, states[end, LENGTH]


@kernel
def update_latest(auto: Automaton, state: int, position: int) -> None:
    """Sets the latest position of a text's suffixes, the longest first, up to a limit."""
    for _ in range(MAX_LATEST_STATES):
        if state == ROOT:
            return
        auto.states[state, LATEST] = position
        state = auto.states[state, LINK]


@kernel
def read_match(
    parts: Arrays, pages: Arrays, cursor: np.ndarray, column: int, enough: int, out: np.ndarray
) -> int:
    """Copies the tokens after the match; returns their number. column: FIRST or LATEST.

    If fewer than `enough` tokens follow, a shorter match is used, if there is one. parts, pages:
    see `extend`.
    """
    auto = Automaton(*parts, Texts(*pages))  # type: ignore[call-arg]
    refresh(auto.states, cursor)
    at = cursor[AT]
    if at == ROOT:
        return 0
    place = position_of(auto, at, column)
    while auto.states[at, LINK] != ROOT and num_after(auto.texts, place, enough) < enough:
        at = auto.states[at, LINK]
        place = position_of(auto, at, column)
    return read(auto.texts, place, out)


@kernel
def position_of(auto: Automaton, state: int, column: int) -> int:
    """An end position of a state with an edge, such that a token follows."""
    place = auto.states[state, column]
    if num_after(auto.texts, place, 1) > 0:
        return place
    beyond = auto.edges[auto.states[state, HEAD], TARGET]  # `place` is the end of a text
    return back(auto.texts, auto.states[beyond, column], 1)
