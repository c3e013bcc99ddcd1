"""Runs passes over few rows as CUDA graphs: one launch instead of some hundred.

A pass is described by one array (`layout.py`), so a graph serves every pass of its shape. Long
passes, as those over prompts, and those that feed mixes of tokens go to torch.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from forerun.engine.attention import TorchDecoder
from forerun.engine.work import packed
from forerun.gpu.bodies import Body, body
from forerun.gpu.layout import HEAD, PER_ROW, Shape, describe, fits, shape_of
from forerun.native.decoder import say_once

if TYPE_CHECKING:
    from forerun.engine.cache import Cache
    from forerun.engine.work import Work
    from forerun.models.transformer import Transformer

HOST = 1 << 20  # bytes of fp32 logits up to which they come to the host, where a step is fastest
ROUNDING = 0.1  # of the norm of all numbers; half precisions differ by .02, mistakes by 1
BOTH = frozenset({"hidden", "logits"})
Found = tuple[Tensor, Tensor]  # hidden rows [R, d] and logits [R, V]


@dataclass
class Recorded:
    """Passes of one shape."""

    described: Tensor  # what the next one is told
    body: Body  # whose buffers the graph knows by their addresses
    graph: torch.cuda.CUDAGraph | None = None  # None where it is run as it is
    found: Found | None = None  # what the graph leaves

    def run(self) -> Found:
        """Computes what is described."""
        if self.graph is None or self.found is None:
            return self.body()
        self.graph.replay()
        return self.found


@dataclass
class Graphs:
    """What is recorded of passes on the cells at some address, with memory that all share."""

    place: tuple[Any, ...]  # address and size of the cells
    shapes: dict[Shape, Recorded] = field(default_factory=dict)
    pool: Any = None


class GraphDecoder:
    """Runs packed rows of all sequences through a decoder on a GPU."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.torch = model, TorchDecoder(model)
        self.is_trusted = True  # as long as every shape says what torch says
        self._graphs: WeakKeyDictionary[Cache, Graphs] = WeakKeyDictionary()
        if model.rope is not None:
            model.rope.reach(model.config.context)  # no graph sees it move

    @property
    def nbytes(self) -> int:
        """Bytes of masks, and of what passes of recorded shapes work in."""
        found = (one for graphs in self._graphs.values() for one in graphs.shapes.values())
        return self.torch.nbytes + sum(one.body.nbytes for one in found)

    @torch.inference_mode()
    def __call__(
        self, works: Many[Work], cache: Cache, needs: frozenset[str], table: Tensor | None = None
    ) -> tuple[Tensor, Tensor | np.ndarray]:
        """As `TorchDecoder`; small logits come as fp32 on the host."""
        if table is not None or "logits" not in needs or not fits(works) or not self.is_trusted:
            return self.torch(works, cache, needs, table)
        shape, vocab = shape_of(works), self.model.config.vocab_size
        slots, cells = cache.strides[1:3]
        rows = packed(works, (slots, cells), vocab, 1)
        if rows.wrong >= 0:
            token = rows.numbers[rows.wrong]
            raise IndexError(f"token {token} has no embedding: there are {vocab}")
        num_rows = sum(work.num_rows for work in works)
        given, shapes = describe(shape, rows, num_rows, slots), self._shapes(cache)
        is_new = shape not in shapes
        if is_new:
            shapes[shape] = self._recorded(cache, shape, given)
        else:
            shapes[shape].described.copy_(torch.from_numpy(given))
        hidden, logits = shapes[shape].run()
        first, num = HEAD + (PER_ROW - 1) * shape.rows, len(rows.logits)
        wanted = shapes[shape].described[first : first + num]
        if is_new and not self._agrees(works, cache, hidden[wanted], logits[wanted]):
            return self.torch(works, cache, needs)
        hidden = hidden.index_select(0, wanted) if "hidden" in needs else hidden[:0]
        if num * vocab * 4 > HOST:
            return hidden, logits.index_select(0, wanted)
        logits = logits[:num] if num == num_rows else logits.index_select(0, wanted)
        return hidden, logits.float().cpu().numpy()

    def _shapes(self, cache: Cache) -> dict[Shape, Recorded]:
        """What is recorded for a cache; nothing once its cells have moved."""
        place = cache.address, *cache.size
        graphs = self._graphs.get(cache)
        if graphs is None or graphs.place != place:
            graphs = self._graphs[cache] = Graphs(place)
        return graphs.shapes

    def _recorded(self, cache: Cache, shape: Shape, given: np.ndarray) -> Recorded:
        """Passes of a shape, the next of which is described; on a GPU as a graph."""
        described = torch.from_numpy(given).to(self.model.device)
        one = Recorded(described, body(self.model, cache, shape, described))
        if described.is_cuda:
            one.run()  # compiles kernels, and reserves memory, which no graph can
            torch.cuda.synchronize(self.model.device)
            graph, graphs = torch.cuda.CUDAGraph(), self._graphs[cache]
            with torch.cuda.graph(graph, pool=graphs.pool, capture_error_mode="thread_local"):
                one.found = one.body()
            one.graph, graphs.pool = graph, graph.pool()
        return one

    def _agrees(self, works: Many[Work], cache: Cache, hidden: Tensor, logits: Tensor) -> bool:
        """Whether torch says the same, but for rounding; else all passes are torch's from then on.

        Asked when a shape is new, since kernels that a compiler or a GPU gets wrong say nothing.
        """
        told = self.torch(works, cache, BOTH)
        for ours, theirs in zip((hidden, logits), told, strict=True):
            if not (ours.float() - theirs.float()).norm() <= ROUNDING * theirs.float().norm():
                self.is_trusted = False
                say_once("on this GPU they do not say what torch says")
        return self.is_trusted
