"""Recursive rejection with tensors: a batch of trees at once, on the device of the logits.

For the same uniforms the outcome is that of `verifiers.recursive`. No trial depends on the outcome
of another. The residual after the first j children of a node were rejected follows from their
distributions. The number of uniforms used before a trial follows from the shape of the tree, since
a walk reaches it by one path only. So all trials of all nodes are decided at once, one round per
rank among siblings. A node is kept if it and all its ancestors are the first accepted among their
siblings. `walk` needs no synchronisation with the host: no step per node, no shape that depends on
a value. One small tensor is copied back. A batch with too large tensors is split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.core.dice import SeededDice
from forerun.core.records import Verdict
from forerun.core.tree import POINT, SWOR, Proposal, Tree, TreeBuilder
from forerun.utils.device_copy import to_device
from forerun.utils.jit import compiled
from forerun.verifiers.base import NO_MASS, arrays, check_mass, reject_recursively

MAX_WALK_BYTES = 1 << 30  # approximate size of the tensors of one walk; one tree may exceed it


@dataclass(frozen=True)
class Forest:
    """Trees for `walk`. Row: a node or a root. Family: the children of one row, by rank.

    [R]: ranks, [F]: families plus an empty one, [S]: maximum number of tokens in a family's q,
    [N]: rows of all trees, [B]: trees. Entries without a child hold row N; without a token, id V.
    """

    parents: Tensor  # [F], parent row of the family
    ids: Tensor  # [F, S], tokens in the q of any child
    q: Tensor  # [R, F, S] float64, q of a child given that its earlier siblings were rejected
    place: Tensor  # [R, F], position of a child's token in ids
    child: Tensor  # [R, F], its row
    trial: Tensor  # [R, F], index of the uniform for its trial
    tree: Tensor  # [N], tree of a row
    up: Tensor  # [N], parent row; a root's is itself
    family: Tensor  # [N], family of its children; the empty one if there are none
    draw: Tensor  # [N], index of the uniform that draws the last token if the walk ends there
    uniforms: Tensor  # [B, M] float64
    depth: int  # of the deepest tree

    def to(self, device: torch.device | str) -> Forest:
        """A copy on another device."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for dtype in (torch.int64, torch.float64):
            some = {
                name: value
                for name, value in values.items()
                if isinstance(value, Tensor) and value.dtype == dtype
            }
            values |= _together(some, torch.device(device))
        return Forest(**values)


def _together(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Moves tensors of one dtype to a device with one copy."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    parts = to_device(flat, device).split([x.numel() for x in tensors.values()])
    pairs = zip(tensors.items(), parts, strict=True)
    return {name: part.view(tensor.shape) for (name, tensor), part in pairs}


def verdicts(p: Many[Tensor], trees: Many[Tree], dice: Many[SeededDice]) -> list[Verdict]:
    """Verdicts of trees with target distributions p[i] [n + 1, V] on one device; advances the dice.

    Raises ConfigError for an invalid p; for an invalid q see `verifiers.base.reject_invalid`.
    """
    return collect_verdicts(walk_trees(p, trees, dice, None)[0], p, trees, dice)


Walked = dict[int, tuple[Verdict, int]]  # by tree: its verdict, number of uniforms used


def walk_trees(
    p: Many[Tensor], trees: Many[Tree], dice: Many[SeededDice], more: Tensor | None
) -> tuple[Walked, np.ndarray]:
    """Walks all valid trees on the device. The dice do not advance, so an error changes nothing.

    more: float64 [m], copied to the host in the same transfer. Raises ConfigError as `verdicts`.
    """
    if not p:
        return {}, _to_host([], more)[1]
    vocab, itemsize = p[0].shape[1], p[0].element_size()
    valid = [i for i, tree in enumerate(trees) if is_valid(tree, vocab)]
    parts = [[valid[i] for i in part] for part in split([trees[i] for i in valid], vocab, itemsize)]
    found: Walked = {}
    rest = np.empty(0)
    for part in parts:
        copied, others = _walk_on_device(part, p, trees, dice, more)
        rest, more = (rest, None) if more is None else (others, None)
        rows = sum(len(trees[i]) + 1 for i in part)
        at, last = 0, copied[rows:].reshape(3, -1).T
        for i, (token, used, mass) in zip(part, last, strict=True):
            size = len(trees[i]) + 1
            nodes = (np.flatnonzero(copied[at : at + size])[1:] - 1).tolist()
            at += size
            check_mass(mass, len(nodes))
            found[i] = Verdict(nodes, int(token)), int(used)
    return found, rest if more is None else _to_host([], more)[1]


def collect_verdicts(
    found: Walked, p: Many[Tensor], trees: Many[Tree], dice: Many[SeededDice]
) -> list[Verdict]:
    """The verdicts of all trees in order; advances the dice."""
    for i, (_, used) in found.items():
        dice[i].skip(used)
    verdicts = {i: verdict for i, (verdict, _) in found.items()}
    for i in set(range(len(trees))) - found.keys():  # an invalid tree: the host reports the error
        laws = dict(enumerate(p[i].cpu().numpy(), start=-1))
        verdicts[i] = reject_recursively(trees[i], laws, dice[i])  # type: ignore[arg-type]
    return [verdicts[i] for i in range(len(trees))]


def split(trees: Many[Tree], vocab: int, itemsize: int) -> list[list[int]]:
    """Indices of adjacent trees that are walked together, within MAX_WALK_BYTES.

    Counts the largest tensors of `walk`: p of all rows, three times p of the families, five times
    p of the last rows, q of every rank, and four more numbers for each token of a family.
    """
    parts: list[list[int]] = []
    rows, families, ranks, support = 0, 1, 1, 1
    for i, tree in enumerate(trees):
        own = [int(size) for size in tree_sizes(tree.parents, tree.rows, tree.starts)]
        if parts:
            rows, families = rows + len(tree) + 1, families + own[0]
            ranks, support = max(ranks, own[1]), max(support, own[2])
            size = vocab * (itemsize * (rows + 3 * families) + 40 * (len(parts[-1]) + 1))
            if size + 8 * families * support * (ranks + 4) <= MAX_WALK_BYTES:
                parts[-1].append(i)
                continue
        parts.append([i])
        rows, families, ranks, support = len(tree) + 1, own[0] + 1, max(1, own[1]), max(1, own[2])
    return parts


def _walk_on_device(
    part: list[int],
    p: Many[Tensor],
    trees: Many[Tree],
    dice: Many[SeededDice],
    more: Tensor | None,
) -> tuple[np.ndarray, np.ndarray]:
    """The results of `walk` for the trees of a part, flat [N + 3 B], and `more`, in one copy."""
    uniforms = [dice[i].peek(len(trees[i]) + 1) for i in part]
    grown = forest([trees[i] for i in part], uniforms, p[0].shape[1]).to(p[0].device)
    kept, ends = walk(torch.cat([p[i] for i in part]), grown)
    return _to_host([kept.double(), ends.flatten()], more)


def _to_host(parts: list[Tensor], more: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """The concatenated parts and `more`, copied to the host at once; empty if not given."""
    given = parts if more is None else [*parts, more]
    copied = torch.cat(given).cpu().numpy() if given else np.empty(0)
    size = sum(len(part) for part in parts)
    return copied[:size], copied[size:]


def walk(p: Tensor, trees: Forest) -> tuple[Tensor, Tensor]:
    """Walks all trees. p [N, V]: target distributions of all rows.

    Returns which rows are kept, bool [N], including roots; and [3, B]: the last token, number of
    uniforms used, mass that the token was drawn from.
    """
    wins, weights = trials(p, trees)
    kept = torch.zeros(len(p) + 1, dtype=torch.bool, device=p.device)
    kept = kept.scatter(0, trees.child.flatten(), wins.flatten())[: len(p)]
    row = torch.arange(len(p), device=p.device)
    kept, up = kept | (trees.up == row), trees.up
    for _ in range(math.ceil(math.log2(trees.depth + 1))):  # kept only if all ancestors are
        kept, up = kept & kept[up], up[up]
    ends = torch.zeros(len(trees.uniforms), dtype=row.dtype, device=p.device)
    ends = ends.scatter_reduce(0, trees.tree, torch.where(kept, row, 0), "amax")
    left = torch.nn.functional.pad(p[ends].double(), (0, 1))  # [B, V + 1]
    left = left.scatter(1, trees.ids[trees.family[ends]], weights[trees.family[ends]])[:, :-1]
    drawn = trees.draw[ends]
    uniform = trees.uniforms.gather(1, drawn[:, None])
    token, mass = choice(left, uniform)
    return kept, torch.stack([token.double(), drawn.double() + 1, mass])


def trials(p: Tensor, trees: Forest) -> tuple[Tensor, Tensor]:
    """Which children are the first accepted of their family, bool [R, F], if the walk gets there.

    And the residual on `ids` [F, S] after all children were rejected.
    """
    vocab, own = p.shape[1], p[trees.parents]
    weights = own.gather(1, trees.ids.clamp(max=vocab - 1)).double()
    weights = torch.where(trees.ids < vocab, weights, 0.0)
    others = torch.nn.functional.pad(own, (0, 1)).scatter(1, trees.ids, 0.0)
    outside = others.sum(1, dtype=torch.float64)  # a subtraction would cancel
    mass, wins = torch.ones_like(outside), []
    family_tree = trees.tree[trees.parents]
    for q, place, child, trial in zip(trees.q, trees.place, trees.child, trees.trial, strict=True):
        scaled_q = mass * q.gather(1, place[:, None])[:, 0]
        weight = weights.gather(1, place[:, None])[:, 0]
        is_child = child < len(p)
        uniform = trees.uniforms[family_tree, trial]
        wins.append(is_child & ((weight >= scaled_q) | (uniform * scaled_q < weight)))
        left = (weights - mass[:, None] * q).clamp(min=0.0)
        now = outside + left.sum(1)
        is_left = is_child & (now > NO_MASS * mass)  # else p = q: rejection has probability 0
        weights = torch.where(is_left[:, None], left, weights)
        mass = torch.where(is_left, now, mass)
    won = torch.stack(wins)
    return won & (won.cumsum(0) == 1), weights


def choice(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] drawn in proportion to weights [B, V] with uniforms [B, 1], and masses [B]."""
    sums = weights.cumsum(1)
    mass = sums[:, -1]
    token = torch.searchsorted(sums, uniform * mass[:, None], right=True)[:, 0]
    ids = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, ids, 0).amax(1)
    return torch.minimum(token, last), mass


def forest(trees: Many[Tree], uniforms: Many[np.ndarray], vocab: int) -> Forest:
    """The input of `walk` for trees and their uniforms [n + 1], on the CPU."""
    sizes = np.array([tree_sizes(tree.parents, tree.rows, tree.starts) for tree in trees])
    num_families, num_ranks, support = sizes[:, 0].sum() + 1, sizes[:, 1].max(), sizes[:, 2].max()
    num_rows = sum(map(len, trees)) + len(trees)
    shape = max(1, int(num_ranks)), int(num_families)
    made = {
        "parents": np.zeros(shape[1], np.int64),
        "ids": np.full((shape[1], max(1, int(support))), vocab, np.int64),
        "q": np.zeros((*shape, max(1, int(support)))),
        "place": np.zeros(shape, np.int64),
        "child": np.full(shape, num_rows, np.int64),
        "trial": np.zeros(shape, np.int64),
        "tree": np.zeros(num_rows, np.int64),
        "up": np.arange(num_rows),
        "family": np.full(num_rows, num_families - 1, np.int64),
        "draw": np.zeros(num_rows, np.int64),
        "uniforms": np.zeros((len(trees), max(map(len, uniforms)))),
    }
    slots, row, family = np.full(vocab, -1, np.int64), 0, 0
    names = ("parents", "ids", "q", "place", "child", "trial", "up", "family", "draw")
    for i, (tree, own) in enumerate(zip(trees, uniforms, strict=True)):
        flat: tuple[Any, ...] = arrays(tree)
        family = fill_forest(slots, row, family, *flat, *(made[name] for name in names))
        made["tree"][row : row + len(tree) + 1] = i
        made["uniforms"][i, : len(own)] = own
        row += len(tree) + 1
    depth = max((int(tree.depths.max()) for tree in trees if len(tree)), default=0)
    return Forest(**{name: torch.from_numpy(array) for name, array in made.items()}, depth=depth)


def is_valid(tree: Tree, vocab: int) -> bool:
    """Whether every node's q is valid and holds its token: see `verifiers.base.draft_error`."""
    flat: tuple[Any, ...] = arrays(tree)
    return bool(has_valid_nodes(vocab, *flat))


@cache
def warm_up() -> None:
    """Compiles the kernels or loads them from the cache."""
    builder = TreeBuilder()
    builder.add(0, -1, SWOR, Proposal(np.array([0], np.int32), np.ones(1)))
    tree = builder.build()
    is_valid(tree, 1)
    forest([tree], [np.zeros(2)], 1)


@compiled
def tree_sizes(parents: np.ndarray, rows: np.ndarray, starts: np.ndarray) -> tuple[int, int, int]:
    """Number of families, maximum of children in one, upper bound of tokens in one."""
    children, support = np.zeros(len(parents) + 1, np.int64), np.zeros(len(parents) + 1, np.int64)
    for node in range(len(parents)):
        row, last = rows[node], -1
        for other in range(node):
            if parents[other] == parents[node]:
                last = rows[other] if rows[other] == row else last
        children[parents[node] + 1] += 1
        own = 0 if row < 0 or last == row else starts[row + 1] - starts[row]
        support[parents[node] + 1] += own + 1
    return (children > 0).sum(), children.max(), support.max()


@compiled
def has_valid_nodes(
    vocab: int,
    tokens: np.ndarray,
    parents: np.ndarray,
    laws: np.ndarray,
    rows: np.ndarray,
    starts: np.ndarray,
    q_ids: np.ndarray,
    q_probs: np.ndarray,
) -> bool:
    """`is_valid` for the arrays of a tree."""
    for token in tokens:
        if not 0 <= token < vocab:
            return False
    for i in range(len(q_ids)):
        if not (0 <= q_ids[i] < vocab and 0.0 <= q_probs[i] < math.inf):
            return False
    for node in range(len(tokens)):
        is_in_q = laws[node] == POINT
        for i in range(starts[rows[node]], starts[rows[node] + 1]) if not is_in_q else range(0):
            is_in_q = is_in_q or (q_ids[i] == tokens[node] and q_probs[i] > 0.0)
        for other in range(node) if laws[node] == SWOR else range(0):
            is_sibling = parents[other] == parents[node]
            is_in_q = is_in_q and not (is_sibling and tokens[other] == tokens[node])
        if not is_in_q:
            return False
    return True


@compiled
def fill_forest(
    slots: np.ndarray,
    root: int,
    family: int,
    tokens: np.ndarray,
    parents: np.ndarray,
    laws: np.ndarray,
    rows: np.ndarray,
    starts: np.ndarray,
    q_ids: np.ndarray,
    q_probs: np.ndarray,
    of: np.ndarray,
    ids: np.ndarray,
    q: np.ndarray,
    place: np.ndarray,
    child: np.ndarray,
    trial: np.ndarray,
    up: np.ndarray,
    families: np.ndarray,
    draw: np.ndarray,
) -> int:
    """Writes one tree with its root at row `root`, starting at `family`; returns the next family.

    slots [V] is all -1 between calls. draw: number of uniforms used before a row's first child.
    """
    for parent in range(-1, len(tokens)):
        rank = size = 0
        for node in range(parent + 1, len(tokens)):
            if parents[node] != parent:
                continue
            part = slice(starts[rows[node]], starts[rows[node] + 1])
            own = q_ids[part] if laws[node] != POINT else tokens[node : node + 1]
            for x in own:
                if slots[x] < 0:
                    slots[x] = size
                    ids[family, size] = x
                    size += 1
            total = 1.0 if laws[node] == POINT else 0.0
            q[rank, family, slots[tokens[node]]] = total
            for i in range(part.start, part.stop) if laws[node] != POINT else range(0):
                is_tried = False
                for j in range(rank) if laws[node] == SWOR else range(0):
                    is_tried = is_tried or place[j, family] == slots[q_ids[i]]
                if not is_tried:
                    q[rank, family, slots[q_ids[i]]] = q_probs[i]
                    total += q_probs[i]
            q[rank, family] /= total
            place[rank, family] = slots[tokens[node]]
            child[rank, family] = root + 1 + node
            up[root + 1 + node] = root + 1 + parent
            trial[rank, family] = draw[root + 1 + parent] + rank
            draw[root + 1 + node] = draw[root + 1 + parent] + rank + 1
            rank += 1
        for i in range(size):
            slots[ids[family, i]] = -1
        if rank:
            of[family], families[root + 1 + parent] = root + 1 + parent, family
            draw[root + 1 + parent] += rank
            family += 1
    return family
