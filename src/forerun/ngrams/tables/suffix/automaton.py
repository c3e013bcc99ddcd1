"""Suffix automaton over many growing texts: the longest match, in constant time per token.

The structure of "SAM Decoding", 2024 (arXiv 2411.10666). Every text has a cursor: the longest
suffix of its tokens that occurs in the texts. States and edges are flat arrays that grow by
doubling. An automaton cannot remove texts, so `Generations` bounds memory with two: the younger
grows to half of the budget, then it replaces the older one.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from forerun.errors import ConfigError
from forerun.ngrams.tables.logits.kernels import Arrays
from forerun.ngrams.tables.suffix import automaton_kernels as kernels
from forerun.ngrams.tables.suffix.automaton_kernels import (
    EDGE_BYTES,
    EDGES,
    FIRST,
    HEAD,
    LATEST,
    LENGTH,
    LINK,
    MATCHED,
    PAGE_BYTES,
    ROOT,
    STATE_BYTES,
    STATES,
    TOTAL,
    new_automaton,
    with_capacity,
)
from forerun.ngrams.tables.suffix.hash_maps import LIVE, NONE, PAGE, TOKEN, gather, new_text

FIRST_STATES = 256
NO_LIMIT = 1 << 62


@dataclass(eq=False)
class Text:
    """A text and its cursor: the state of its end, the state of the match, the match's length."""

    state: np.ndarray = field(default_factory=new_text)
    cursor: np.ndarray = field(default_factory=lambda: np.zeros(3, np.int64))


class SuffixAutomaton:
    """All substrings of the texts. latest: a match continues at its latest occurrence."""

    def __init__(self, *, latest: bool = False, budget: int = NO_LIMIT) -> None:
        self.latest, self.budget = latest, budget
        self.auto = new_automaton(FIRST_STATES, 2 * FIRST_STATES, 4)
        self.texts: list[Text] = []

    def __len__(self) -> int:
        """Number of tokens."""
        return int(self.auto.used[TOTAL])

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        auto = self.auto
        return _bytes(len(auto.states), len(auto.edges), len(auto.texts.links))

    def begin(self, context: Many[int] = ()) -> Text:
        """Adds an empty text; its cursor reads `context`."""
        text = Text()
        self.texts.append(text)
        self.move_cursor(text, context)
        return text

    def end(self, text: Text) -> None:
        """The text is complete."""

    def move_cursor(self, text: Text, tokens: Many[int]) -> None:
        """Moves the text's cursor over tokens without adding them."""
        kernels.move_cursor(*self._plain, text.cursor, np.array(tokens, dtype=np.int32))

    def extend(self, text: Text, tokens: Many[int]) -> int:
        """Appends tokens within the budget; returns their number."""
        new, at = np.array(tokens, dtype=np.int32), 0
        while at < len(new):
            at += kernels.extend(*self._plain, text.state, text.cursor, new[at:], self.latest)
            if at < len(new) and not self._grow():
                break
        return at

    def match(self, text: Text) -> int:
        """Length of the longest suffix of the read tokens that has a continuation in the texts."""
        kernels.refresh(self.auto.states, text.cursor)
        return int(text.cursor[MATCHED])

    def largest(self) -> int:
        """The largest token of the texts; -1 if there is none."""
        return int(self.auto.edges[: self.auto.used[EDGES], TOKEN].max(initial=-1))

    def growth(self, num: int) -> int:
        """Bytes it must grow by for `num` more tokens."""
        auto, states = self.auto, self.auto.used[STATES] + 2 * num
        pages = auto.texts.pool[LIVE] + num // PAGE + 1
        is_short = (
            states > len(auto.states)
            or states + auto.used[TOTAL] + num >= len(auto.edges)
            or pages > len(auto.texts.links)
        )
        return self.nbytes if is_short else 0

    def following(self, text: Text, most: int, enough: int = 1) -> np.ndarray:
        """Up to `most` tokens after the match; of a shorter match if fewer than `enough` follow."""
        out = np.empty(most, np.int32)
        column = LATEST if self.latest else FIRST
        return out[: kernels.read_match(*self._plain, text.cursor, column, enough, out)]

    def all_texts(self) -> list[np.ndarray]:
        """The texts, oldest first; sufficient to rebuild the automaton."""
        return [gather(self.auto.texts, text.state) for text in self.texts if text.state[0]]

    def num_states(self) -> int:
        """Number of states, with the root."""
        return int(self.auto.used[STATES])

    def num_substrings(self) -> int:
        """Number of distinct non-empty substrings of the texts."""
        states = self.auto.states[1 : self.num_states()].astype(np.int64)
        return int((states[:, LENGTH] - self.auto.states[states[:, LINK], LENGTH]).sum())

    def check_integrity(self) -> None:
        """Asserts the invariants: lengths rise along edges and fall along links."""
        states, edges, used = self.auto.states, self.auto.edges, self.auto.used
        count = 0
        for state in range(used[STATES]):
            assert state == ROOT or states[states[state, LINK], LENGTH] < states[state, LENGTH]
            edge = states[state, HEAD]
            while edge != NONE:
                owner, token, target, following = edges[edge]
                found = kernels.edge_of(states, edges, self.auto.slots, state, token)
                assert owner == state and found == edge
                assert states[target, LENGTH] > states[state, LENGTH]
                assert states[states[target, LINK], LENGTH] <= states[state, LENGTH]
                count, edge = count + 1, following
        assert count == used[EDGES] <= used[STATES] + used[TOTAL]

    @property
    def _plain(self) -> tuple[Arrays, Arrays]:
        """The automaton as plain tuples, for kernels: see `Arrays`."""
        return self.auto[:-1], self.auto.texts[:]

    def _grow(self) -> bool:
        """Doubles the full arrays; False if the budget does not allow it."""
        auto = self.auto
        states, edges, pages = len(auto.states), len(auto.edges), len(auto.texts.links)
        if auto.used[STATES] + 2 > states:
            states *= 2
        if auto.used[STATES] + auto.used[TOTAL] + 3 > edges:
            edges *= 2
        if auto.texts.pool[LIVE] == pages:
            pages *= 2
        if _bytes(states, edges, pages) > self.budget:
            return False
        self.auto = with_capacity(auto, states, edges, pages)
        return True


def _bytes(states: int, edges: int, pages: int) -> int:
    return states * STATE_BYTES + edges * EDGE_BYTES + pages * PAGE_BYTES


@dataclass(eq=False)
class Place:
    """A text's entries in both automata; `era`: the generation they belong to."""

    young: Text
    old: Text
    era: int


class Generations:
    """Two automata within a budget: they hold the latest texts, at least half of the budget."""

    def __init__(self, *, budget: int, latest: bool = False) -> None:
        self.latest, self.budget = latest, budget
        self.young = SuffixAutomaton(latest=latest)
        self.old: SuffixAutomaton | None = None
        self.era = 0  # number of replacements so far
        if budget < 2 * self.young.nbytes:
            raise ConfigError(
                f"a memory of texts needs at least {2 * self.young.nbytes} bytes, got {budget}; "
                "raise the budget"
            )

    def __len__(self) -> int:
        """Number of tokens."""
        return sum(map(len, self.parts))

    @property
    def parts(self) -> list[SuffixAutomaton]:
        """The automata, oldest first."""
        return [self.young] if self.old is None else [self.old, self.young]

    @property
    def nbytes(self) -> int:
        """Bytes of both automata."""
        return sum(part.nbytes for part in self.parts)

    def growth(self, num: int) -> int:
        """Bytes it must grow by for `num` more tokens."""
        growth = self.young.growth(num)
        return growth if growth + self.young.nbytes <= self.budget // 2 else 0

    def begin(self, context: Many[int] = ()) -> Place:
        """Adds an empty text; its cursors read `context`."""
        place = Place(self.young.begin(context), Text(), self.era)
        if self.old is not None:
            self.old.move_cursor(place.old, context)
        return place

    def end(self, place: Place) -> None:
        """The text is complete."""

    def extend(self, place: Place, tokens: Many[int]) -> None:
        """Appends tokens; drops the older automaton if the younger one is full."""
        self.young.budget = self.budget // 2
        while True:
            self.update_place(place)
            if self.old is not None:
                self.old.move_cursor(place.old, tokens)
            done = self.young.extend(place.young, tokens)
            if done == len(tokens):
                return
            tokens = tokens[done:]
            self.old, self.era = self.young, self.era + 1
            self.young = SuffixAutomaton(latest=self.latest, budget=self.budget // 2)

    def places(self, place: Place) -> list[tuple[SuffixAutomaton, Text]]:
        """The automata, the younger first, with the text's entry in each."""
        self.update_place(place)
        older = [] if self.old is None else [(self.old, place.old)]
        return [(self.young, place.young), *older]

    def update_place(self, place: Place) -> None:
        """Moves a text to the current automata."""
        if place.era < self.era:
            place.old = place.young if place.era == self.era - 1 else Text()
            place.young, place.era = self.young.begin(), self.era

    def all_texts(self) -> list[np.ndarray]:
        """The texts, oldest first."""
        return [text for part in self.parts for text in part.all_texts()]


@cache
def warm_up() -> None:
    """Compiles the kernels of the automaton, or loads them from the cache."""
    automaton = SuffixAutomaton()
    text = automaton.begin([1])
    automaton.extend(text, [1, 2, 1])
    automaton.match(text)
    automaton.following(text, 1)
    automaton.all_texts()
    with_capacity(automaton.auto, FIRST_STATES, 4 * FIRST_STATES, 4)
