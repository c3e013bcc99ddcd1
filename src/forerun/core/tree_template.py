"""Ranked tree templates: the places of a draft tree, fixed before any token is drawn.

A place is a path of ranks: (0, 0, 2) is the third child of the best child of the best child. Places
are ranked by value, parents before children, lower ranks before higher ones. The best tree of N
nodes is the first N places. STAND section 4 fits the ranking from counts.
"""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import ConfigError, DataError
from forerun.utils.files import write_atomically

# Prior acceptance of a child by rank, used until a ranking is fitted.
RANK_VALUES = (0.55, 0.14, 0.07, 0.045, 0.03, 0.02, 0.015, 0.01, 0.007, 0.005)
MAX_PLACES = 1 << 16  # of a full tree


@dataclass(frozen=True)
class Shape:
    """The first N places of a template, level by level."""

    parents: np.ndarray  # int32 [N], -1 is the root; the children of a node are adjacent, by rank
    depths: np.ndarray  # int32 [N], from 1
    widths: np.ndarray  # int32 [N + 1]: number of children; the last entry is the root's
    firsts: np.ndarray  # int32 [N + 1]: first child; undefined for a leaf


@dataclass(frozen=True)
class Template:
    """Places in descending order of value."""

    places: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        seen: set[tuple[int, ...]] = {()}
        for place in self.places:
            before = (*place[:-1], place[-1] - 1) if place and place[-1] else place[:-1]
            if not place or place in seen or place[:-1] not in seen or before not in seen:
                raise ConfigError(
                    f"template place {place} is a duplicate, or precedes its parent or its sibling "
                    "of lower rank; order the places by value, parents first"
                )
            seen.add(place)

    def __len__(self) -> int:
        return len(self.places)

    @cached_property
    def _shapes(self) -> dict[int, Shape]:
        return {}

    def first(self, nodes: int) -> Shape:
        """The best tree of at most `nodes` nodes."""
        nodes = max(0, min(nodes, len(self)))
        if nodes not in self._shapes:
            self._shapes[nodes] = _shape(self, nodes)
        return self._shapes[nodes]

    def save(self, path: Path, **facts: Any) -> None:
        """Writes the places as JSON, atomically, with `facts` as further fields."""
        text = json.dumps(facts | {"places": self.places})
        write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))

    @classmethod
    def load(cls, path: Path) -> Template:
        """Reads a file of `save`. Raises DataError."""
        try:
            places = json.loads(path.read_text())["places"]
            if not places or any(type(rank) is not int for place in places for rank in place):
                raise ValueError("places must be non-empty lists of integers")
            return cls(tuple(map(tuple, places)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not a template (JSON with 'places'): {error}") from None


def _shape(template: Template, nodes: int) -> Shape:
    order = sorted(template.places[:nodes], key=lambda place: (len(place), place))
    index = {place: i for i, place in enumerate(order)} | {(): -1}
    widths, firsts = np.zeros(nodes + 1, np.int32), np.zeros(nodes + 1, np.int32)
    for i, place in reversed(list(enumerate(order))):
        widths[index[place[:-1]]] += 1
        firsts[index[place[:-1]]] = i
    parents = np.array([index[place[:-1]] for place in order], dtype=np.int32)
    depths = np.array([len(place) for place in order], dtype=np.int32)
    return Shape(parents, depths, widths, firsts)


def levels(shape: Shape, depth: int) -> list[dict[int, list[int]]]:
    """For each level down to `depth`: parent -> its children by rank."""
    found: list[dict[int, list[int]]] = []
    for node, (parent, at) in enumerate(zip(shape.parents.tolist(), shape.depths, strict=True)):
        if at > depth:
            break
        if at > len(found):
            found.append({})
        found[-1].setdefault(parent, []).append(node)
    return found


def best_first(nodes: int, values: tuple[float, ...] = RANK_VALUES, depth: int = 20) -> Template:
    """The `nodes` best places; place (r1, ..., rd) has value values[r1] * ... * values[rd]."""
    heap: list[tuple[float, tuple[int, ...]]] = [(-values[0], (0,))]
    places: list[tuple[int, ...]] = []
    while heap and len(places) < nodes:
        worth, place = heapq.heappop(heap)
        places.append(place)
        *stem, rank = place
        if rank + 1 < len(values):
            heapq.heappush(heap, (worth / values[rank] * values[rank + 1], (*stem, rank + 1)))
        if len(place) < depth:
            heapq.heappush(heap, (worth * values[0], (*place, 0)))
    return Template(tuple(places))


def grid(*widths: int) -> Template:
    """The full tree with widths[i] children per node at level i, level by level.

    Raises ConfigError for widths below 1 and for more than MAX_PLACES places.
    """
    size = sum(accumulate(widths, mul))
    if min(widths, default=1) < 1 or size > MAX_PLACES:
        raise ConfigError(
            f"branching must be integers of at least 1 with at most {MAX_PLACES} places in all, "
            f"got {widths}"
        )
    places: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for width in widths:
        level = [(*place, rank) for place in level for rank in range(width)]
        places += level
    return Template(tuple(places))


DEFAULT = best_first(625)
