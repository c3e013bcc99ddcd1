"""Monte-Carlo tree search over a source: likely paths are those that the search visits often.

"Adaptive Draft-Verification for Efficient Large Language Model Decoding", 2024 (ADED). Every
iteration descends by the published score

    W / N_c + (c1 + ln((N + c2 + 1) / c2)) * p_c * sqrt(N) / (1 + N_c)

(N visits of the parent, N_c and W visits and summed rewards of the child, p_c its prior), expands
the leaf it reaches, steps into its best child, completes the path by draws in proportion to the
source's scores and adds the path's reward to all nodes passed. The most visited paths, each with
its likeliest continuation, become the tree. The source is asked for one path at a time, some
hundred times a tree: right for a table. The draws decide which nodes stand in the tree and say
nothing of the target's next token, so the nodes are POINT.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np

from forerun.core.dice import Dice
from forerun.core.records import Plan
from forerun.core.roles import Grower, Growth, Path
from forerun.core.tree import Proposal, Tree, TreeBuilder
from forerun.core.tree_search import CONSTANT, PATH, REWARDS, Search
from forerun.errors import ConfigError

DROPS = ("longest", "rarest")
MOST_PATHS = 10_000  # iterations, and paths


class MonteCarlo(Grower):
    """The `top` paths most visited in `iterations`, each continued by its likeliest next token.

    length: states of a searched path, the root's counted, so paths have length - 1 tokens.
    c1, c2: exploration; larger is wider. reward: of a path, "path" is 1 + the sum of its scores,
    as meant; "constant" is 1, which is what the authors' code comes to; "expected" is the accepted
    length if shares of the scores were the target's law. visit_all: an unvisited child comes before
    any visited one, as published; without, it counts the mean reward of its parent. drop: what does
    not fit the plan; the "rarest" nodes, those visited least, continuations before all others, or
    the "longest" paths, as published.
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
        if length < 2 or not (1 <= iterations <= MOST_PATHS and 1 <= top <= MOST_PATHS):
            raise ConfigError(
                "a search needs a length of 2 or more, and iterations and top of 1 to "
                f"{MOST_PATHS}; got {length}, {iterations} and {top}"
            )
        if not (math.isfinite(c1) and c1 >= 0 and math.isfinite(c2) and c2 > 0):
            raise ConfigError(f"c1 must be at least 0 and c2 more than 0, got {c1} and {c2}")
        for name, value, known in (("reward", reward, REWARDS), ("drop", drop, DROPS)):
            if value not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}; got {value!r}")
        self.search = Search(
            length - 1,
            iterations,
            top,
            float(c1),
            float(c2),
            REWARDS.index(reward),
            visit_all,
            drop == "longest",
        )

    def within(self, depth: int) -> Search:
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
        found = list(dict.fromkeys([*paths, *ends]))  # a path's prefixes come before it
        if search.drops_longest:
            kept = shortest(ends, plan.nodes)
            found = [path for path in found if path in kept]
        return trie(found[: plan.nodes])


@dataclass(eq=False)
class Node:
    """A path of the search with its visits N and summed rewards W."""

    path: Path
    prior: float = 0.0
    share: float = 0.0  # prior over the sum of its siblings' and its own
    parent: Node | None = None
    children: list[Node] | None = None  # None until expanded; best first
    visits: int = 0
    total: float = 0.0


@dataclass
class _Known:
    """What the source said, so that it is asked once per path."""

    answers: dict[Path, Proposal | None] = field(default_factory=dict)

    def ask(self, path: Path) -> Generator[list[Path], list[Proposal | None], Proposal | None]:
        if path not in self.answers:
            (self.answers[path],) = yield [path]
        return self.answers[path]


def _iterate(
    search: Search, root: Node, nodes: list[Node], known: _Known, dice: Dice
) -> Generator[list[Path], list[Proposal | None], None]:
    """Selection, expansion, rollout and backup, once."""
    node = root
    while node.children and len(node.path) < search.steps:
        node = selected(node, search)
    if node.children is None and len(node.path) < search.steps:
        node.children = children(node, (yield from known.ask(node.path)))
        nodes += node.children
        node = node.children[0] if node.children else node
    reward = Reward(search.reward)
    for step in trail(node):
        reward.add(step.prior, step.share)
    path = node.path
    while search.reward != CONSTANT and len(path) < search.steps:
        q = yield from known.ask(path)
        if q is None:
            break
        at = dice.choice(q.probs)
        reward.add(float(q.probs[at]), float(q.probs[at]) / sum(q.probs.tolist()))
        path = (*path, int(q.ids[at]))
    for step in (root, *trail(node)):
        step.visits += 1
        step.total += reward.value


class Reward:
    """What one path is worth."""

    def __init__(self, kind: int) -> None:
        self.kind, self.value, self._reached = kind, 1.0, 1.0

    def add(self, score: float, share: float) -> None:
        """One more edge."""
        self._reached *= share
        if self.kind != CONSTANT:
            self.value += score if self.kind == PATH else self._reached


def selected(node: Node, search: Search) -> Node:
    """The child with the largest published score; ties: the first."""
    assert node.children
    if search.visits_all:
        for child in node.children:
            if not child.visits:
                return child
    scale = search.c1 + math.log((node.visits + search.c2 + 1.0) / search.c2)
    scale *= math.sqrt(node.visits)
    best, highest = node.children[0], -math.inf
    for child in node.children:
        of = child if child.visits else node
        score = of.total / of.visits + scale * child.prior / (1.0 + child.visits)
        if score > highest:
            best, highest = child, score
    return best


def children(node: Node, q: Proposal | None) -> list[Node]:
    """Nodes for all successors, best first, ties by id; none where the source knows nothing."""
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


def trail(node: Node) -> list[Node]:
    """The nodes from below the root down to `node`."""
    found = []
    while node.parent is not None:
        found.append(node)
        node = node.parent
    return found[::-1]


def ranked(nodes: list[Node]) -> list[Node]:
    """Visited nodes but the root, most visits first, ties: the first that was made.

    A node's ancestors are visited at least as often and made earlier, so they come before it.
    """
    return sorted((n for n in nodes[1:] if n.visits), key=lambda n: -n.visits)


def shortest(ends: list[Path], limit: int) -> set[Path]:
    """Drops paths until the rest has `limit` prefixes, which it returns; longer and later first."""
    uses = Counter(end[:n] for end in ends for n in range(1, len(end) + 1))
    order = sorted(range(len(ends)), key=lambda i: (len(ends[i]), i))
    while len(uses) > limit:
        dropped = ends[order.pop()]
        uses -= Counter(dropped[:n] for n in range(1, len(dropped) + 1))  # keeps what is above 0
    return set(uses)


def trie(paths: list[Path]) -> Tree:
    """A node for every path, below that of the path without its last token."""
    tree = TreeBuilder()
    where: dict[Path, int] = {(): -1}
    for path in paths:
        where[path] = tree.add(path[-1], where[path[:-1]])
    return tree.build()
