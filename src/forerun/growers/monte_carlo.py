"""Monte-Carlo tree search over a source: the most visited paths become the draft tree.

"Adaptive Draft-Verification for Efficient Large Language Model Decoding", 2024 (ADED). Every
iteration selects children by the published score

    W / N_c + (c1 + ln((N + c2 + 1) / c2)) * p_c * sqrt(N) / (1 + N_c)

(N: visits of the parent; N_c, W: visits and summed rewards of the child; p_c: its prior). It
expands the leaf, moves to the best child, and completes the path by draws in proportion to the
source's scores. The reward of the path is added to all nodes on it. The tree holds the most visited
paths, each with its most likely continuation. The source is queried for one path at a time, some
hundred times per tree, so it should be a table. The draws only decide which nodes are in the tree;
they are independent of the target's next token, so the nodes are POINT.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np

from forerun.core.dice import Dice
from forerun.core.growing import Grower, Growth, Path
from forerun.core.records import Plan
from forerun.core.tree import Proposal, Tree, TreeBuilder
from forerun.core.tree_search import CONSTANT, PATH, REWARDS, SearchSettings
from forerun.errors import ConfigError

DROPS = ("longest", "rarest")
MAX_PATHS = 10_000  # largest `iterations` and `top`


class MonteCarlo(Grower):
    """The `top` most visited paths of `iterations`, each with its most likely next token.

    length: states of a searched path with the root, so paths have length - 1 tokens.
    c1, c2: exploration constants; larger values search more widely.
    reward: "path": 1 + the sum of the path's scores (paper); "constant": 1 (the authors' code);
    "expected": the expected accepted length if normalised scores were the target distribution.
    visit_all: unvisited children are selected before visited ones, as published; if False, an
    unvisited child has the mean reward of its parent.
    drop: what is removed if the plan is too small. "rarest": the least visited nodes, continuations
    first. "longest": the longest paths, as published.
    """

    labels = frozenset({"point"})

    def __init__(
        self,
        *,
        length: int = 4,
        iterations: int = 150,
        top: int = 24,
        c1: float = 32.0,
        c2: float = 8.0,
        reward: str = "path",
        visit_all: bool = True,
        drop: str = "rarest",
    ) -> None:
        if length < 2 or not (1 <= iterations <= MAX_PATHS and 1 <= top <= MAX_PATHS):
            raise ConfigError(
                f"length={length}, iterations={iterations}, top={top} are out of range; use a "
                f"length of at least 2, and iterations and top from 1 to {MAX_PATHS}"
            )
        if not (math.isfinite(c1) and c1 >= 0 and math.isfinite(c2) and c2 > 0):
            raise ConfigError(f"c1={c1}, c2={c2} are out of range; use c1 >= 0 and c2 > 0")
        for name, value, known in (("reward", reward, REWARDS), ("drop", drop, DROPS)):
            if value not in known:
                raise ConfigError(f"unknown {name} {value!r}; use one of {', '.join(known)}")
        self.search = SearchSettings(
            length - 1,
            iterations,
            top,
            float(c1),
            float(c2),
            REWARDS.index(reward),
            visit_all,
            drop == "longest",
        )

    def within(self, depth: int) -> SearchSettings:
        """The settings with paths of at most `depth` tokens."""
        return self.search._replace(steps=min(self.search.steps, depth))

    def grow(self, plan: Plan, dice: Dice) -> Growth:
        search, known = self.within(plan.depth), _Known()
        root = Node(())
        nodes = [root]
        for _ in range(search.iterations):
            yield from _iterate(search, root, nodes, known, dice)
        paths = [node.path for node in ranked(nodes)[: search.top]]
        ends: list[Path] = []
        for path in paths:
            q = (yield from known.ask(path)) if len(path) < plan.depth else None
            ends.append((*path, int(q.ids[best_first(q)[0]])) if q else path)
        found = list(dict.fromkeys([*paths, *ends]))  # prefixes come before longer paths
        if search.drops_longest:
            kept = shortest(ends, plan.nodes)
            found = [path for path in found if path in kept]
        return trie(found[: plan.nodes])


@dataclass(eq=False)
class Node:
    """A search node: a path with its visits N and summed rewards W."""

    path: Path
    prior: float = 0.0
    share: float = 0.0  # prior, normalised over the siblings
    parent: Node | None = None
    children: list[Node] | None = None  # None until expanded; best first
    visits: int = 0
    total: float = 0.0


@dataclass
class _Known:
    """Cache of the source's answers by path."""

    answers: dict[Path, Proposal | None] = field(default_factory=dict)

    def ask(self, path: Path) -> Generator[list[Path], list[Proposal | None], Proposal | None]:
        if path not in self.answers:
            (self.answers[path],) = yield [path]
        return self.answers[path]


def _iterate(
    search: SearchSettings, root: Node, nodes: list[Node], known: _Known, dice: Dice
) -> Generator[list[Path], list[Proposal | None], None]:
    """One iteration: selection, expansion, rollout and backup."""
    node = root
    while node.children and len(node.path) < search.steps:
        node = selected(node, search)
    if node.children is None and len(node.path) < search.steps:
        node.children = children(node, (yield from known.ask(node.path)))
        nodes += node.children
        node = node.children[0] if node.children else node
    reward = Reward(search.reward)
    for step in nodes_to(node):
        reward.add(step.prior, step.share)
    path = node.path
    while search.reward != CONSTANT and len(path) < search.steps:
        q = yield from known.ask(path)
        if q is None:
            break
        at = dice.choice(q.probs)
        reward.add(float(q.probs[at]), float(q.probs[at]) / sum(q.probs.tolist()))
        path = (*path, int(q.ids[at]))
    for step in (root, *nodes_to(node)):
        step.visits += 1
        step.total += reward.value


class Reward:
    """The reward of one path."""

    def __init__(self, kind: int) -> None:
        self.kind, self.value, self._reached = kind, 1.0, 1.0

    def add(self, score: float, share: float) -> None:
        """Adds one edge of the path."""
        self._reached *= share
        if self.kind != CONSTANT:
            self.value += score if self.kind == PATH else self._reached


def selected(node: Node, search: SearchSettings) -> Node:
    """The child with the largest score of the module docstring; ties: the first."""
    assert node.children
    if search.visits_all:
        for child in node.children:
            if not child.visits:
                return child
    scale = search.c1 + math.log((node.visits + search.c2 + 1.0) / search.c2)
    scale *= math.sqrt(node.visits)
    best, highest = node.children[0], -math.inf
    for child in node.children:
        rewarded = child if child.visits else node
        mean = rewarded.total / rewarded.visits
        score = mean + scale * child.prior / (1.0 + child.visits)
        if score > highest:
            best, highest = child, score
    return best


def children(node: Node, q: Proposal | None) -> list[Node]:
    """One node per token of q, best first, ties by id; empty if q is None."""
    if q is None:
        return []
    total = sum(q.probs.tolist())
    return [
        Node((*node.path, int(q.ids[i])), float(q.probs[i]), float(q.probs[i]) / total, node)
        for i in best_first(q)
    ]


def best_first(q: Proposal) -> list[int]:
    """Indices into q by falling score, ties by id."""
    return np.lexsort((q.ids, -q.probs)).tolist()


def nodes_to(node: Node) -> list[Node]:
    """The nodes on the path to `node`, top down, without the root."""
    found = []
    while node.parent is not None:
        found.append(node)
        node = node.parent
    return found[::-1]


def ranked(nodes: list[Node]) -> list[Node]:
    """Visited nodes without the root, most visits first, ties by creation.

    Ancestors of a node have at least as many visits and are older, so they come before it.
    """
    return sorted((n for n in nodes[1:] if n.visits), key=lambda n: -n.visits)


def shortest(ends: list[Path], limit: int) -> set[Path]:
    """Prefixes of the paths that remain when the longest (last) are dropped down to `limit`."""
    uses = Counter(end[:n] for end in ends for n in range(1, len(end) + 1))
    order = sorted(range(len(ends)), key=lambda i: (len(ends[i]), i))
    while len(uses) > limit:
        dropped = ends[order.pop()]
        uses -= Counter(dropped[:n] for n in range(1, len(dropped) + 1))  # drops counts of 0
    return set(uses)


def trie(paths: list[Path]) -> Tree:
    """The tree with one node per path; prefixes must come before longer paths."""
    tree = TreeBuilder()
    where: dict[Path, int] = {(): -1}
    for path in paths:
        where[path] = tree.add(path[-1], where[path[:-1]])
    return tree.build()
