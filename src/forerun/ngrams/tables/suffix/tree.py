"""Counted suffix tree over many growing texts.

The structure of "SuffixDecoding", 2024 (arXiv 2411.04975): path-compressed, with strings of at most
`depth` tokens and children sorted by count. A token costs at most `depth` pointer moves. Flat
arrays double up to a byte budget; then the oldest texts are removed exactly, so the tree equals one
of the remaining texts.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from forerun.errors import ConfigError
from forerun.ngrams.tables.suffix import kernels as kernels
from forerun.ngrams.tables.suffix.draft import DraftLimits, speculate
from forerun.ngrams.tables.suffix.hash_maps import (
    LIVE,
    NONE,
    PAGE,
    enlarged,
    gather,
    new_text,
    num_free,
)
from forerun.ngrams.tables.suffix.nodes import (
    COUNT,
    HEAD,
    LENGTH,
    NEXT,
    NODE_BYTES,
    PREV,
    ROOT,
    RUN,
    TOKEN,
    child_of,
    new_nodes,
    with_nodes,
)

FIRST_PAGES = 16
NO_LIMIT = 1 << 62
MAX_NODE_SHARE, MAX_PAGE_SHARE = 0.85, 0.5  # of the budget


@dataclass(eq=False)
class Text:
    """A text of the tree. A growing text has a pointer for each of its last suffixes."""

    birth: int
    state: np.ndarray = field(default_factory=new_text)
    pointers: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # [depth]

    def __len__(self) -> int:
        return int(self.state[0])


@dataclass(frozen=True)
class Draft:
    """Continuations of a match, parents first, with their score."""

    tokens: np.ndarray  # int32 [n]
    parents: np.ndarray  # int32 [n]
    score: float  # expected number of accepted tokens, by the counts
    match: int  # length of the match


class SuffixTree:
    """Counts of all strings of at most `depth` tokens in the texts.

    budget: bytes; a change takes effect at the next growth. most: largest number of texts.
    """

    def __init__(self, *, depth: int = 64, budget: int = 64 << 20, most: int = 100_000) -> None:
        if not 2 <= depth <= PAGE:
            raise ConfigError(f"depth must be in 2..{PAGE}, got {depth}")
        if most < 1:
            raise ConfigError(f"most={most} is too small; use at least 1 text")
        self.depth, self.budget, self.most = depth, budget, most
        least = 2 * self._bytes(16 * depth, FIRST_PAGES)
        if budget < least:
            raise ConfigError(
                f"a suffix tree of depth {depth} needs at least {least} bytes, got {budget}; raise "
                "the budget"
            )
        self.tree = new_nodes(16 * depth, FIRST_PAGES)
        self.texts: dict[int, Text] = {}  # by birth, oldest first
        self.evicted = 0  # texts removed so far
        self._births = 0

    def __len__(self) -> int:
        """Number of tokens."""
        return int(self.tree.nodes[ROOT, COUNT])

    @property
    def num_nodes(self) -> int:
        """Number of nodes, with the root."""
        return int(self.tree.node_pool[LIVE])

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self._bytes(len(self.tree.nodes), len(self.tree.texts.links))

    def growth(self, num: int) -> int:
        """Bytes the tree must grow by for `num` more tokens."""
        tree = self.tree
        nodes = len(tree.nodes) - tree.node_pool.item(LIVE) < self.depth + 2 * num
        pages = len(tree.texts.links) - tree.texts.pool.item(LIVE) < 1 + num // PAGE
        if not nodes and not pages:
            return 0
        return self._bytes(nodes * len(tree.nodes), pages * len(tree.texts.links))

    def begin(self, context: Many[int] = ()) -> Text:
        """Adds an empty text; `context` is not used."""
        while len(self.texts) >= self.most:
            self.evict()
        text = Text(NONE, pointers=np.zeros(self.depth, np.int32))
        self._enter(text)
        return text

    def end(self, text: Text) -> None:
        """The text is complete; it stays until it is evicted."""
        text.pointers = np.empty(0, np.int32)

    def extend(self, text: Text, tokens: Many[int]) -> None:
        """Appends tokens; evicts older texts at the budget, and finally the text's beginning."""
        assert len(text.pointers), "a text that has ended cannot grow"
        new, scratch = np.array(tokens, dtype=np.int32), np.empty(self.depth, np.int32)
        while len(new):
            if text.birth not in self.texts:  # evicted while it grew: restart it empty
                self._enter(text)
            arrays = *self.tree[:-1], *self.tree.texts
            done = kernels.append(*arrays, text.state, text.pointers, text.birth, new, scratch)
            new = new[done:]
            if len(new):
                self._make_room()

    def draft(self, text: Text, limits: DraftLimits, at_least: float = 0.0) -> Draft | None:
        """The best continuation of a growing text with a score above `at_least`, or None."""
        frontier, out = np.empty((limits.nodes, 4), np.int32), np.empty((5, limits.nodes), np.int32)
        size, score, match = speculate(
            self.tree.nodes, *self.tree.texts, text.state, text.pointers, limits[:], at_least,
            frontier, out,
        )  # fmt: skip
        return Draft(out[3, :size], out[4, :size], score, match) if size else None

    def count(self, tokens: Many[int]) -> int:
        """The number of occurrences of a string of at most `depth` tokens."""
        node, at = ROOT, 0
        while at < len(tokens):
            node = child_of(self.tree, node, tokens[at])
            if node == NONE:
                return 0
            label = self._label(node)[: len(tokens) - at]
            if label != list(tokens[at : at + len(label)]):
                return 0
            at += len(label)
        return int(self.tree.nodes[node, COUNT])

    def all_texts(self) -> list[np.ndarray]:
        """The texts, oldest first; sufficient to rebuild the tree."""
        return [gather(self.tree.texts, text.state) for text in self.texts.values()]

    def evict(self) -> None:
        """Removes the oldest text."""
        text = self.texts.pop(next(iter(self.texts)))
        kernels.remove(self.tree, text.state, self.depth)
        self.evicted += 1

    def check_integrity(self) -> None:
        """Asserts the invariants of every node: counts, order, runs, map, lengths."""
        nodes, runs = self.tree.nodes, self.tree.runs
        seen, stack = 0, [(ROOT, 0)]
        while stack:
            node, above = stack.pop()
            seen += 1
            assert above <= self.depth
            children, before = [], NONE
            child = nodes[node, HEAD]
            while child != NONE:
                assert nodes[child, 0] == node and nodes[child, LENGTH] >= 1
                assert child_of(self.tree, node, nodes[child, TOKEN]) == child
                assert self._label(child)[0] == nodes[child, TOKEN]
                run, count = runs[nodes[child, RUN]], nodes[child, COUNT]
                is_new = before == NONE or nodes[before, COUNT] != count
                assert is_new or nodes[before, RUN] == nodes[child, RUN]
                assert before == NONE or nodes[before, COUNT] >= count >= 1
                assert (run[0] == child) == is_new
                assert before == NONE or nodes[child, PREV] == before
                following = nodes[child, NEXT]
                ends = following == NONE or nodes[following, COUNT] != count
                assert (run[1] == child) == ends
                children.append(int(count))
                stack.append((int(child), above + int(nodes[child, LENGTH])))
                before, child = child, following
            assert not children or nodes[nodes[node, HEAD], PREV] == before
            assert sum(children) <= nodes[node, COUNT]
            assert node == ROOT or len(children) != 1 or children[0] < nodes[node, COUNT]
        assert seen == self.num_nodes
        assert sum(len(text) for text in self.texts.values()) == len(self)

    def _label(self, node: int) -> list[int]:
        tokens = []
        for steps in reversed(range(self.tree.nodes[node, LENGTH])):
            at = kernels.back(self.tree.texts, self.tree.nodes[node, kernels.END], steps)
            tokens.append(int(kernels.token_at(self.tree.texts, at)))
        return tokens

    def _enter(self, text: Text) -> None:
        """Adds an empty text as the youngest."""
        self._births += 1
        text.birth = self._births
        self.texts[text.birth] = text

    def _make_room(self) -> None:
        """Makes space for at least one token: grows the arrays within the budget, or evicts."""
        tree = self.tree
        while num_free(tree.node_pool, len(tree.nodes)) < self.depth:
            if not self._grow_nodes():
                self.evict()
            tree = self.tree
        while num_free(tree.texts.pool, len(tree.texts.links)) < 1:
            if not self._grow_pages():
                self.evict()
            tree = self.tree

    def _grow_nodes(self) -> bool:
        size = len(self.tree.nodes)
        share = MAX_NODE_SHARE * self.budget - size * NODE_BYTES
        more = min(size, int(min(self.budget - self.nbytes, share) // NODE_BYTES))
        if more < self.depth:
            return False
        self.tree = with_nodes(self.tree, size + more)
        return True

    def _grow_pages(self) -> bool:
        texts = self.tree.texts
        size = len(texts.links)
        share = MAX_PAGE_SHARE * self.budget - self._bytes(0, size)
        more = min(size, int(min(self.budget - self.nbytes, share) // self._bytes(0, 1)))
        if more < 1:
            return False
        larger = texts._replace(
            tokens=enlarged(texts.tokens, size + more), links=enlarged(texts.links, size + more)
        )
        self.tree = self.tree._replace(texts=larger)
        return True

    def _bytes(self, nodes: int, pages: int) -> int:
        return nodes * NODE_BYTES + pages * (4 * PAGE + 16)


@cache
def warm_up() -> None:
    """Compiles the kernels of the tree, or loads them from the cache."""
    tree = SuffixTree(depth=2)
    text = tree.begin()
    tree.extend(text, [1, 2, 1])
    tree.draft(text, DraftLimits(2, 2, 1.0, 0.0, 0.1, 2))
    tree.all_texts()
    tree.tree = with_nodes(tree.tree, 2 * len(tree.tree.nodes))
    tree.evict()
