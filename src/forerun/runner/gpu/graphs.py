"""Runs passes over few rows as CUDA graphs: one launch instead of hundreds.

One array (`layout.py`) describes a pass, so a graph serves every pass of its shape. Long passes,
e.g. over prompts, and passes with soft inputs run on torch.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from forerun.errors import in_a_line
from forerun.runner.attention import TorchDecoder
from forerun.runner.forward_batch import Packed, packed
from forerun.runner.gpu.bodies import Body, body
from forerun.runner.gpu.layout import HEAD, PER_ROW, Shape, describe, fits, shape_of
from forerun.runner.native.decoder import warn_once
from forerun.utils.device_copy import staged, to_device

if TYPE_CHECKING:
    from forerun.models.transformer import Transformer
    from forerun.runner.forward_batch import Work
    from forerun.runner.kv_cache import Cache

MAX_HOST_BYTES = 1 << 20  # of fp32 logits that are copied to the host for verification
MAX_RELATIVE_ERROR = 0.1  # of a row's norm; half precisions differ by 0.02, errors by 1
RECORDING_LOCK = Lock()  # for recording graphs
BOTH = frozenset({"hidden", "logits"})
Found = tuple[Tensor, Tensor]  # hidden rows [R, d] and logits [R, V]


@dataclass
class Recorded:
    """Passes of one shape."""

    described: Tensor  # the array of the next pass
    body: Body  # the graph holds addresses of its buffers
    graph: torch.cuda.CUDAGraph | None = None  # None: run without a graph
    found: Found | None = None  # output of the graph

    def run(self) -> Found:
        """Runs the described pass."""
        if self.graph is None or self.found is None:
            return self.body()
        self.graph.replay()
        return self.found

    @property
    def nbytes(self) -> int:
        """Bytes of buffers and outputs."""
        return self.body.nbytes + sum(part.nbytes for part in self.found or ())


@dataclass
class Graphs:
    """Recorded passes for cells at one address, with shared memory."""

    place: tuple[int, ...]  # address and size of the cells
    shapes: dict[Shape, Recorded] = field(default_factory=dict)
    pool: Any = None


class GraphDecoder:
    """Runs packed rows of all sequences through a decoder on a GPU.

    For a new shape torch computes the same pass, and its result is used. If the results differ by
    more than rounding, or anything fails, all later passes run on torch, with one log message.
    """

    gives = frozenset({"hidden", "probes", "embeddings"})

    def __init__(self, model: Transformer) -> None:
        self.model, self.torch = model, TorchDecoder(model)
        self.is_trusted = True
        self._graphs: WeakKeyDictionary[Cache, Graphs] = WeakKeyDictionary()
        self._copied: torch.cuda.Event | None = None  # when the last logits are on the host

    @property
    def nbytes(self) -> int:
        """Bytes of masks and of the buffers of recorded passes."""
        found = (one for graphs in self._graphs.values() for one in graphs.shapes.values())
        return self.torch.nbytes + sum(one.nbytes for one in found)

    def __call__(
        self, works: Many[Work], cache: Cache, needs: frozenset[str], table: Tensor | None = None
    ) -> tuple[Tensor, Tensor | np.ndarray]:
        """Like `TorchDecoder`; small logits are fp32 on the host, valid after `wait`."""
        place = self.model.device
        with torch.inference_mode(), torch.cuda.device(place if place.type == "cuda" else -1):
            shapes = self._shapes(cache)  # drops graphs of cells that have moved
            if table is not None or "logits" not in needs or not fits(works) or not self.is_trusted:
                return self.torch(works, cache, needs, table)
            shape = shape_of(works)
            if shape not in shapes:
                return self._first(works, cache, shape, needs)
            rows, given = self._described(works, cache, shape)
            shapes[shape].described.copy_(staged(given, place), non_blocking=True)
            return self._wanted(shapes[shape], shape, given, len(rows.logits), needs)

    def _shapes(self, cache: Cache) -> dict[Shape, Recorded]:
        """Recorded passes for a cache; none after its cells have moved."""
        place = cache.address, *cache.size
        graphs = self._graphs.get(cache)
        if graphs is None or graphs.place != place:
            graphs = self._graphs[cache] = Graphs(place)
        return graphs.shapes

    def _described(
        self, works: Many[Work], cache: Cache, shape: Shape
    ) -> tuple[Packed, np.ndarray]:
        """The rows of a pass and its array. Raises IndexError for ids without an embedding."""
        (slots, cells), vocab = cache.strides[1:3], self.model.config.vocab_size
        rows = packed(works, (slots, cells), vocab, 1)
        if rows.wrong >= 0:
            token = rows.numbers[rows.wrong]
            raise IndexError(f"token {token} has no embedding: there are {vocab}")
        return rows, describe(shape, rows, sum(work.num_rows for work in works), slots)

    def _wanted(
        self, one: Recorded, shape: Shape, given: np.ndarray, num: int, needs: frozenset[str]
    ) -> tuple[Tensor, Tensor | np.ndarray]:
        """Copies of hidden rows, if needed, and of logits of the `num` wanted rows."""
        hidden, logits = one.run()
        first = HEAD + (PER_ROW - 1) * shape.rows
        wanted = one.described[first : first + num]
        hidden = hidden.index_select(0, wanted) if "hidden" in needs else hidden[:0]
        if num * logits.shape[1] * 4 > MAX_HOST_BYTES:
            return hidden, logits.index_select(0, wanted)
        logits = logits[:num] if num == given[0] else logits.index_select(0, wanted)
        return hidden, self._to_host(logits.float())

    def refresh(self) -> None:
        """Drops recorded passes after a weight update, which may change addresses."""
        self.wait()
        self._graphs.clear()

    def wait(self) -> None:
        """Waits until the logits of the last pass are on the host."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def _to_host(self, logits: Tensor) -> np.ndarray:
        """Starts a copy to new memory, which the next pass does not overwrite."""
        if not logits.is_cuda:
            return logits.clone().numpy()
        host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
        host.copy_(logits, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()
        return host.numpy()

    def _first(
        self, works: Many[Work], cache: Cache, shape: Shape, needs: frozenset[str]
    ) -> tuple[Tensor, Tensor]:
        """Runs a pass of a new shape on torch and as a graph; keeps the graph if they agree."""
        rows, given = self._described(works, cache, shape)
        found, why = None, "on this GPU their results differ from those of torch"
        try:
            one = self._recorded(cache, shape, given)
            found = self._wanted(one, shape, given, len(rows.logits), BOTH)
            self.wait()
        except Exception as fault:  # e.g. no compiler or no memory: continue on torch
            why = f"{type(fault).__name__}: {in_a_line(fault)}"
        expected = self.torch(works, cache, BOTH)  # runs last, so the cells are torch's
        if found and all(
            _alike(torch.as_tensor(a), b) for a, b in zip(found, expected, strict=True)
        ):
            self._shapes(cache)[shape] = one
        else:
            self.is_trusted = False
            self._graphs.clear()
            warn_once(why)
        return (expected[0] if "hidden" in needs else expected[0][:0]), expected[1]

    def _recorded(self, cache: Cache, shape: Shape, given: np.ndarray) -> Recorded:
        """Records a pass of a shape; on a GPU as a graph."""
        described = to_device(given, self.model.device)
        one = Recorded(described, body(self.model, cache, shape, described))
        if described.is_cuda:
            one.run()  # compiles kernels and allocates memory, which is impossible in a graph
            torch.cuda.synchronize()
            graph, graphs, stream = torch.cuda.CUDAGraph(), self._graphs[cache], torch.cuda.Stream()
            how = {"pool": graphs.pool, "capture_error_mode": "thread_local"}
            with (
                RECORDING_LOCK,
                torch.cuda.stream(torch.cuda.current_stream()),  # restored after a failure
                torch.cuda.graph(graph, stream=stream, **how),
            ):
                one.found = one.body()
            one.graph, graphs.pool = graph, graph.pool()
        return one


def _alike(ours: Tensor, theirs: Tensor) -> bool:
    """Whether all rows [V] agree up to rounding."""
    wide = theirs.float()
    far = (ours.to(wide.device).float() - wide).norm(dim=-1)
    return bool((far <= MAX_RELATIVE_ERROR * wide.norm(dim=-1)).all())
