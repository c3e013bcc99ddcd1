"""A torch pass that returns more than logits, runs only some layers, or resumes at a layer.

The rows of all works are packed as in `TorchDecoder`. Rows that resume at a layer wait until the
others reach it. This divides the layers into stages; all rows of a stage run together.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from forerun.runner.forward_batch import DetailedWork, PassRequest, WorkRows
from forerun.runner.full_attention import FullAttention
from forerun.runner.span import Span
from forerun.utils.device_copy import to_device

if TYPE_CHECKING:
    from forerun.runner.attention import Pass, TorchDecoder
    from forerun.runner.kv_cache import Cache


@dataclass(frozen=True)
class Stage:
    """Layers that the same rows run through."""

    layers: list[int]
    rows: np.ndarray  # int64, of the packed rows
    spans: list[Span]
    queries: list[Many[int]]  # per span, row numbers in it


@torch.inference_mode()
def detailed_pass(
    decoder: TorchDecoder, works: Many[DetailedWork], cache: Cache, request: PassRequest
) -> list[WorkRows]:
    """The wanted rows of each work, in their order."""
    order = sorted(range(len(works)), key=lambda i: works[i].slot.index)
    sorted_works = [works[i] for i in order]
    found = _sorted_pass(decoder, sorted_works, cache, request)
    by_place = dict(zip(order, found, strict=True))
    return [by_place[i] for i in range(len(works))]


def _sorted_pass(
    decoder: TorchDecoder, works: Many[DetailedWork], cache: Cache, request: PassRequest
) -> list[WorkRows]:
    """Rows of works that are in the order of their slots."""
    m = decoder.model
    ids = [token for work in works for token in (*work.pending, *work.nodes)]
    spans = [work.span for work in works]
    positions = np.concatenate([span.positions for span in spans])
    firsts = np.cumsum([0, *(work.num_rows for work in works)])
    places = to_device(positions, m.device)
    x = m.embedded(to_device(np.array(ids, np.int64), m.device), places)
    for work, first in zip(works, firsts, strict=False):
        if work.resume is not None:
            x[first : first + work.num_resumed] = work.resume.rows.to(x)
    turns = m.turns(places, int(positions.max()))
    start, taps = x, dict[int, Tensor]()
    weights: list[dict[int, Tensor]] = [{} for _ in works]
    for stage in _stages(works, spans, firsts, request.layers or tuple(range(len(m.layers)))):
        rows = to_device(stage.rows, m.device)
        attend = _attention(decoder, stage, cache)
        part = x.index_select(0, rows)
        own = [tuple(t.index_select(0, rows) for t in pair) for pair in turns]
        for i in stage.layers:
            part = m.layer(i, part, own, attend)  # type: ignore[arg-type]
            if i in request.taps:
                taps[i] = x.index_copy(0, rows, part)
        x = x.index_copy(0, rows, part)
        if isinstance(attend, FullAttention) and len(stage.spans) == len(works):
            for kept, new in zip(weights, attend.weights, strict=True):
                kept |= new
    for layer in request.taps:  # no row ran this layer: all rows resume after it
        taps.setdefault(layer, start)
    return [
        _rows_of(decoder, work, int(first), x, taps, attention, request)
        for work, first, attention in zip(works, firsts, weights, strict=False)
    ]


def _rows_of(
    decoder: TorchDecoder,
    work: DetailedWork,
    first: int,
    x: Tensor,
    taps: dict[int, Tensor],
    attention: dict[int, Tensor],
    request: PassRequest,
) -> WorkRows:
    """The wanted rows of one work; `first` is its first row in the pass."""
    wanted = slice(first + work.first_row, first + work.num_rows)
    hidden = decoder.model.norm(x[wanted])
    start = 0 if request.has_prompt_logits else max(work.root - work.first_row, 0)
    scored = hidden[start:] if request.has_logits else hidden[:0]
    return WorkRows(
        hidden,
        decoder.model.logits(scored),
        {layer: rows[wanted] for layer, rows in taps.items()},
        attention,
    )


def _stages(
    works: Many[DetailedWork], spans: Many[Span], firsts: np.ndarray, layers: tuple[int, ...]
) -> Iterator[Stage]:
    """The stages of a pass, in the order of their layers."""
    starts = sorted({0, *(work.resume.layer for work in works if work.resume is not None)})
    for low, high in zip(starts, [*starts[1:], max(layers) + 1], strict=True):
        todo = [layer for layer in layers if low <= layer < high]
        rows: list[np.ndarray] = []
        active: list[Span] = []
        queries: list[Many[int]] = []
        for work, span, first in zip(works, spans, firsts, strict=False):
            waits = work.resume is not None and work.resume.layer > low
            skipped = work.num_resumed if waits else 0
            if skipped < work.num_rows:
                rows.append(np.arange(first + skipped, first + work.num_rows))
                active.append(span.last(work.num_rows - skipped) if skipped else span)
                queries.append(work.queries)
        if todo and rows:
            yield Stage(todo, np.concatenate(rows), active, queries)


def _attention(decoder: TorchDecoder, stage: Stage, cache: Cache) -> Pass | FullAttention:
    if any(map(len, stage.queries)):
        return FullAttention(stage.spans, cache, decoder.model.config, stage.queries)
    return decoder.attention(stage.spans, cache)
