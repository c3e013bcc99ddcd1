"""The draft tree: flat arrays, parents first, with a sampling label per node.

Node -1 is the root: the last committed token. The label of a node says how its token was drawn.
With q it gives the distribution of the token once its earlier siblings have been rejected
(`Tree.proposal`):

    POINT  chosen deterministically        a unit mass
    IID    drawn from q, with replacement  q
    SWOR   drawn without replacement       q without the earlier siblings' tokens, renormalised

Rejection verifiers need nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

POINT, IID, SWOR = 0, 1, 2
LAW_NAMES = {"point": POINT, "iid": IID, "swor": SWOR}


@dataclass(frozen=True)
class Proposal:
    """A sparse distribution q: probs [k] over token ids [k]; q is 0 elsewhere."""

    ids: np.ndarray  # int32
    probs: np.ndarray  # float64, sums to 1
    level: int = 0  # see forerun.core.acceptance_prior

    @classmethod
    def of(cls, dense: np.ndarray) -> Proposal:
        """The support of a dense distribution [V]."""
        ids = np.flatnonzero(dense).astype(np.int32)
        return cls(ids, np.ascontiguousarray(dense[ids], dtype=np.float64))


@dataclass(frozen=True, eq=False)
class Resume:
    """Rows that a self-drafter has computed up to a layer; the target continues from there.

    They are `Rows.taps[layer - 1]` of a pass with `layers=range(layer)` over the same nodes.
    """

    layer: int  # the first layer to compute
    rows: torch.Tensor  # [k, d], residual stream before it: the root and the first k - 1 nodes


@dataclass(eq=False)
class Tree:
    """Draft nodes as parallel arrays; masks, depths and paths are derived from `parents`.

    Immutable, except that `with_source` may set `sources`.
    """

    tokens: np.ndarray  # int32 [n]
    parents: np.ndarray  # int32 [n]; -1 is the root; parents[i] < i
    laws: np.ndarray  # int8 [n]: POINT, IID or SWOR
    rows: np.ndarray  # int32 [n]: index of the proposal that the node was drawn from, -1 if POINT
    starts: np.ndarray  # int64 [m + 1]: proposal r is [starts[r]:starts[r + 1]] of q_ids, q_probs
    q_ids: np.ndarray  # int32
    q_probs: np.ndarray  # float64
    # int8 [n], cell of the acceptance estimate (forerun.core.acceptance_prior); -1: none
    cells: np.ndarray | None = None
    sources: tuple[str, ...] = ()  # [n], the drafter of each node; empty: unknown
    resume: Resume | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def has_same_nodes(self, other: Tree) -> bool:
        """Whether tokens and parents are equal."""
        same = np.array_equal
        return same(self.tokens, other.tokens) and same(self.parents, other.parents)

    @cached_property
    def depths(self) -> np.ndarray:
        """Depth of every node, int64 [n]; children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents.tolist():
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return np.array(depths, dtype=np.int64)

    @cached_property
    def ancestors(self) -> np.ndarray:
        """ancestors[i, j]: node i sees node j (itself or above it). bool [n, n]."""
        sees: list[int] = []  # per node the bit mask of the nodes it sees
        for node, parent in enumerate(self.parents.tolist()):
            sees.append(1 << node | (sees[parent] if parent >= 0 else 0))
        width = len(self) // 8 + 1
        packed = np.frombuffer(b"".join(s.to_bytes(width, "little") for s in sees), np.uint8)
        bits = np.unpackbits(packed.reshape(-1, width), axis=1, bitorder="little")
        return bits[:, : len(self)].view(bool)

    def cells_of(self, name: str) -> np.ndarray:
        """`cells` of the nodes of drafter `name`, -1 elsewhere. int8 [n]."""
        if self.cells is None:
            return np.full(len(self), -1, np.int8)
        if self.sources.count(name) == len(self.sources):  # all nodes, or sources are unknown
            return self.cells
        return np.where([source == name for source in self.sources], self.cells, np.int8(-1))

    def children(self, node: int) -> list[int]:
        """Children of `node` in the order in which they were drawn."""
        return np.flatnonzero(self.parents == node).tolist()

    def path(self, node: int) -> list[int]:
        """Tokens from below the root down to `node`."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(int(self.tokens[node]))
            node = int(self.parents[node])
        return tokens[::-1]

    def q(self, node: int) -> Proposal | None:
        """The distribution that `node` was drawn from; None for a POINT node."""
        row = self.rows[node]
        if row < 0:
            return None
        piece = slice(self.starts[row], self.starts[row + 1])
        return Proposal(self.q_ids[piece], self.q_probs[piece])

    def without_nodes_below(self, tokens: frozenset[int]) -> Tree:
        """The tree without the descendants of nodes with one of these tokens."""
        own, parents = self.tokens.tolist(), self.parents.tolist()
        if tokens.isdisjoint(own):
            return self
        kept: list[bool] = []
        for parent in parents:
            kept.append(parent < 0 or (kept[parent] and own[parent] not in tokens))
        return self if all(kept) else self.part(np.array(kept))

    def part(self, kept: np.ndarray) -> Tree:
        """The tree of some nodes, bool [n]; with a node, all nodes above it are kept."""
        index = np.append(np.cumsum(kept) - 1, -1).astype(np.int32)  # the last is the root's
        resume = self.resume
        if resume is not None:
            rows = [0, *np.flatnonzero(kept[: len(resume.rows) - 1]) + 1]
            resume = Resume(resume.layer, resume.rows[rows])
        return Tree(
            self.tokens[kept],
            index[self.parents[kept]],
            self.laws[kept],
            self.rows[kept],
            self.starts,
            self.q_ids,
            self.q_probs,
            None if self.cells is None else self.cells[kept],
            tuple(compress(self.sources, kept)),
            resume,
        )

    def proposal(self, node: int, vocab: int) -> np.ndarray:
        """Distribution of `node` given that its earlier siblings were rejected, float64 [vocab]."""
        dense = np.zeros(vocab)
        drawn = self.q(node)
        if drawn is None:
            dense[self.tokens[node]] = 1.0
            return dense
        dense[drawn.ids] = drawn.probs
        if self.laws[node] == SWOR:
            siblings = self.children(int(self.parents[node]))
            dense[[self.tokens[s] for s in siblings if s < node]] = 0.0
        return dense / dense.sum()


class TreeBuilder:
    """Builds a tree node by node, for growers that are not kernels."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._laws: list[int] = []
        self._rows: list[int] = []
        self._proposals: list[Proposal] = []
        self._row_of: dict[int, int] = {}  # id of a proposal -> row

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int = -1, law: int = POINT, q: Proposal | None = None) -> int:
        """Appends a node and returns its index. `q` is required unless the label is POINT."""
        assert parent < len(self.tokens), "add parents first"
        assert (law == POINT) == (q is None), "IID and SWOR nodes need q, POINT nodes have none"
        self.tokens.append(int(token))
        self.parents.append(int(parent))
        self._laws.append(law)
        if q is None:
            self._rows.append(-1)
        else:  # siblings share one proposal object
            row = self._row_of.setdefault(id(q), len(self._proposals))
            if row == len(self._proposals):
                self._proposals.append(q)
            self._rows.append(row)
        return len(self.tokens) - 1

    def children(self, node: int) -> list[int]:
        """Children of `node` in the order added."""
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """Tokens from below the root down to `node`."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def build(self) -> Tree:
        """The finished tree."""
        sizes = [len(q.ids) for q in self._proposals]
        return Tree(
            tokens=np.array(self.tokens, dtype=np.int32),
            parents=np.array(self.parents, dtype=np.int32),
            laws=np.array(self._laws, dtype=np.int8),
            rows=np.array(self._rows, dtype=np.int32),
            starts=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            q_ids=_joined([q.ids for q in self._proposals], np.int32),
            q_probs=_joined([q.probs for q in self._proposals], np.float64),
        )


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)


def chain(tokens: Iterable[int]) -> Tree:
    """A chain of POINT nodes."""
    tokens = np.fromiter(tokens, dtype=np.int32)
    return points(tokens, np.arange(-1, len(tokens) - 1, dtype=np.int32))


NO_Q = np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0)  # starts, q_ids, q_probs


def points(tokens: np.ndarray, parents: np.ndarray) -> Tree:
    """A tree of POINT nodes; tokens, parents int32 [n]."""
    rows = np.empty(len(tokens), np.int32)
    rows.fill(-1)
    return Tree(tokens, parents, np.zeros(len(tokens), np.int8), rows, *NO_Q)  # POINT is 0


def with_source(tree: Tree, name: str) -> Tree:
    """The tree with `name` as the drafter of every node, unless its sources are set."""
    if not tree.sources:
        tree.sources = (name,) * len(tree.tokens)
    return tree


EMPTY = chain(())


def appended(tree: Tree, tokens: Iterable[int], parents: Iterable[int]) -> Tree:
    """The tree with POINT nodes appended, without cells and sources."""
    more = chain(tokens)
    return Tree(
        tokens=np.concatenate([tree.tokens, more.tokens]),
        parents=np.concatenate([tree.parents, np.fromiter(parents, dtype=np.int32)]),
        laws=np.concatenate([tree.laws, more.laws]),
        rows=np.concatenate([tree.rows, more.rows]),
        starts=tree.starts,
        q_ids=tree.q_ids,
        q_probs=tree.q_probs,
        resume=tree.resume,
    )
