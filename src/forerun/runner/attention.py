"""Attention of one forward pass: writes new KV cells; each row attends to prefix and ancestors.

The rows of all sequences are packed [R, heads, head_dim]. Query heads that share a key head are
folded into rows, so keys are never repeated. One sequence runs on plain views; several run in
groups of neighbouring slots, padded only inside a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.forward_batch import EVERYTHING
from forerun.runner.full_attention import FullAttention
from forerun.runner.span import Span
from forerun.utils.device_copy import to_device

if TYPE_CHECKING:
    from forerun.models.transformer import DecoderConfig, Transformer
    from forerun.runner.forward_batch import Work
    from forerun.runner.kv_cache import Cache

MAX_PADDING_RATIO = 1.5  # limit of padded work / real work in a group
MAX_KEPT_MASK_ELEMENTS = 1 << 24  # elements of a mask that is kept


class Masks:
    """Additive masks in buffers of zeros: writes only columns that are hidden from some row."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._zeros: list[Tensor] = []  # flat, one per mask of a pass
        self._written: list[Tensor] = []
        self._num = 0  # masks of this pass

    @property
    def nbytes(self) -> int:
        return sum(zeros.nbytes for zeros in self._zeros)

    def clear(self) -> None:
        """Starts a pass: sets all masks to zero."""
        for part in self._written:
            part.zero_()
        self._written, self._num = [], 0

    def make(self, spans: Many[Span], fold: int, low: int, stop: int, window: int | None) -> Tensor:
        """Mask [B, 1, fold N, stop - low]; padding rows see everything."""
        width = max(span.num_rows for span in spans)
        mask = self._take((len(spans), fold, width, stop - low))
        for first, last in mixed(spans, low, stop, window):
            sees = seen(spans, width, first, last, window)
            part = mask[..., first - low : last - low]
            if mask.numel() <= MAX_KEPT_MASK_ELEMENTS:
                self._written.append(part)  # before it is written: a pass may be interrupted
            part.masked_fill_(to_device(~sees, self.device)[:, None], -torch.inf)
        return mask.view(len(spans), 1, fold * width, stop - low)

    def _take(self, shape: tuple[int, ...]) -> Tensor:
        """Zeros; kept for later passes up to MAX_KEPT_MASK_ELEMENTS elements."""
        size, kind = math.prod(shape), {"dtype": self.dtype, "device": self.device}
        if size > MAX_KEPT_MASK_ELEMENTS:
            return torch.zeros(shape, **kind)  # type: ignore[call-overload]
        if self._num == len(self._zeros):
            self._zeros.append(torch.zeros(0, **kind))  # type: ignore[call-overload]
        if len(self._zeros[self._num]) < size:
            self._zeros[self._num] = torch.zeros(size + size // 4, **kind)  # type: ignore[call-overload]
        self._num += 1
        return self._zeros[self._num - 1].narrow(0, 0, size).view(shape)


class Group:
    """Neighbouring slots in one attention call: rows [at, at + num), padded to [B, N]."""

    def __init__(
        self, spans: Many[Span], at: int, cache: Cache, config: DecoderConfig, masks: Masks
    ) -> None:
        self.at, self.num = at, sum(span.num_rows for span in spans)
        self.batch, self.width = len(spans), max(span.num_rows for span in spans)
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.fold = config.num_heads // config.num_kv_heads
        self.scale, self.softcap = config.attn_scale, config.attn_softcap
        stop = max(span.stop for span in spans)
        # no mask is needed for one row per sequence that sees all cells
        is_plain = all(s.num_rows == 1 and s.sees is None and s.stop == stop for s in spans)
        views = {}
        for window in dict.fromkeys(config.windows) or (None,):
            low = lowest(spans, window)
            cells = cache.data.narrow(1, spans[0].slot, len(spans)).narrow(2, low, stop - low)
            keys, values = cells.permute(3, 0, 1, 4, 2, 5).unbind(0)  # each [L, B, KV, n, D]
            mask = None if is_plain else masks.make(spans, self.fold, low, stop, window)
            views[window] = keys.unbind(0), values.unbind(0), mask
        self.views = [views[config.window(layer)] for layer in range(config.num_layers)]
        self.pad, self.unpad = self._padding(spans, cache.device)

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """[num, H, D] to [num, H D]."""
        keys, values, mask = self.views[layer]
        b, n = self.batch, self.width
        if self.pad is not None:
            q = q.index_select(0, self.pad)
        if n == 1:
            q = q.reshape(b, self.kv_heads, self.fold, self.dim)
        else:
            q = q.reshape(b, n, self.kv_heads, self.fold, self.dim).permute(0, 2, 3, 1, 4)
            q = q.reshape(b, self.kv_heads, self.fold * n, self.dim)
        out = attention(q, keys[layer], values[layer], mask, self.scale, self.softcap)
        if n > 1:
            out = out.view(b, self.kv_heads, self.fold, n, self.dim).permute(0, 3, 1, 2, 4)
        out = out.reshape(b * n, self.heads * self.dim)
        return out if self.unpad is None else out.index_select(0, self.unpad)

    def _padding(
        self, spans: Many[Span], device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """Packed row of each padded place, and padded place of each packed row."""
        if self.num == self.batch * self.width:
            return None, None
        pad = np.zeros((self.batch, self.width), dtype=np.int64)
        unpad, at = [], 0
        for row, span in enumerate(spans):
            pad[row, : span.num_rows] = np.arange(at, at + span.num_rows)
            unpad.append(row * self.width + np.arange(span.num_rows))
            at += span.num_rows
        return to_device(pad.reshape(-1), device), to_device(np.concatenate(unpad), device)


class Pass:
    """Called by the decoder per layer: writes keys and values, returns the attention output."""

    def __init__(
        self, spans: Many[Span], cache: Cache, config: DecoderConfig, masks: Masks
    ) -> None:
        masks.clear()
        self.num_heads, self.num_kv = config.num_heads, 2 * config.num_kv_heads
        self.groups = []
        at = 0
        for group in grouped(spans):
            self.groups.append(Group(group, at, cache, config, masks))
            at += self.groups[-1].num
        cells = cache.data.flatten(3, 4)  # [L, slots, n, 2 KV, D]
        self.index: tuple[Tensor, ...] | None = None
        if len(spans) == 1:
            span = spans[0]
            cells = cells[:, span.slot, span.start : span.stop]
        else:
            slots = np.repeat([s.slot for s in spans], [s.num_rows for s in spans])
            places = np.concatenate([np.arange(s.start, s.stop) for s in spans])
            where = slots, places
            self.index = tuple(to_device(at, cache.device) for at in where)
        self.cells = cells.unbind(0)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """[R, H + 2 KV, D], rotated, to [R, H D]."""
        kv = qkv.narrow(1, self.num_heads, self.num_kv)
        if self.index is None:
            self.cells[layer].copy_(kv)
        else:
            self.cells[layer].index_put_(self.index, kv)
        q = qkv.narrow(1, 0, self.num_heads)
        if len(self.groups) == 1:
            return self.groups[0](layer, q)
        return torch.cat([g(layer, q.narrow(0, g.at, g.num)) for g in self.groups])


class TorchDecoder:
    """Runs packed rows through a model in torch, on every device, dtype and family.

    The native kernels are tested against it.
    """

    gives = EVERYTHING

    def __init__(self, model: Transformer) -> None:
        self.model, self.masks = model, Masks(model.dtype, model.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the masks."""
        return self.masks.nbytes

    @torch.inference_mode()
    def __call__(
        self, works: Many[Work], cache: Cache, needs: frozenset[str], table: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden rows [w, d] and logits [w, V] of all works, from the first wanted row of each on.

        Logits are empty unless `needs` has them; other rows only fill their cells. table [n, d]:
        embeddings of the ids in place of the model's.
        """
        m = self.model
        order = sorted(range(len(works)), key=lambda i: works[i].slot.index)
        spans = [works[i].span for i in order]
        ids = [t for i in order for t in (*works[i].pending, *works[i].nodes)]
        positions = np.concatenate([span.positions for span in spans])
        wanted = _wanted(works, order) if "logits" in needs else np.zeros(0, np.int64)
        given = (np.array(ids), positions, wanted)
        rows, places, kept = (to_device(array, m.device) for array in given)
        attend = self.attention(spans, cache)
        hidden = m(rows, places, int(positions.max()), attend, table)
        hidden = hidden.index_select(0, kept)
        return hidden, m.logits(hidden)

    def attention(self, spans: Many[Span], cache: Cache) -> Pass | FullAttention:
        """The attention of these rows: in few calls; span by span for altered cells."""
        config = self.model.config
        if config.has_even_heads and not any(span.is_altered for span in spans):
            return Pass(spans, cache, config, self.masks)
        return FullAttention(spans, cache, config)


def _wanted(works: Many[Work], order: list[int]) -> np.ndarray:
    """Numbers of the wanted rows of the pass, in the order of `works`; int64."""
    at, rows = 0, {}
    for i in order:
        rows[i] = np.arange(at + works[i].first, at + works[i].num_rows)
        at += works[i].num_rows
    return np.concatenate([rows[i] for i in range(len(works))])


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """softmax(scale q k + mask) v; q [B, KV, M, D], k and v [B, KV, n, D], mask [B, 1, M, n]."""
    if softcap is not None:
        scores = torch.matmul(q, k.transpose(2, 3)).float().mul_(scale / softcap)
        scores = scores.tanh_().mul_(softcap)
        if mask is not None:
            scores += mask
        return torch.matmul(scores.softmax(-1).to(q.dtype), v)
    if q.shape[2] == 1 and q.device.type == "cpu":
        # the CPU kernel is much slower for one row than for two
        out = F.scaled_dot_product_attention(
            q.expand(-1, -1, 2, -1), k, v, attn_mask=mask, scale=scale
        )
        return out.narrow(2, 0, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def seen(spans: Many[Span], width: int, low: int, high: int, window: int | None) -> np.ndarray:
    """Which cells of [low, high) each row sees, bool [B, width, high - low]; padding sees all."""
    if window is None and all(s.num_rows == 1 and s.sees is None for s in spans):
        stops = np.array([span.stop for span in spans])  # plain decoding, different lengths
        return np.arange(low, high) < stops[:, None, None]
    found = np.ones((len(spans), width, high - low), dtype=bool)
    for row, span in enumerate(spans):
        found[row, : span.num_rows] = span.mask(low, high, window)
    return found


def grouped(spans: Many[Span]) -> list[list[Span]]:
    """Groups of neighbouring slots with little padding. Spans are in the order of slots."""
    groups: list[list[Span]] = []
    for span in spans:
        if groups and span.slot == groups[-1][-1].slot + 1:
            joined = [*groups[-1], span]
            true = sum(s.num_rows * s.stop for s in joined)
            width, stop = max(s.num_rows for s in joined), max(s.stop for s in joined)
            if len(joined) * width * stop <= MAX_PADDING_RATIO * true:
                groups[-1] = joined
                continue
        groups.append([span])
    return groups


def lowest(spans: Many[Span], window: int | None) -> int:
    """The first cell that any row of a windowed layer sees; at most the smallest base."""
    if window is None:
        return 0
    first = min(int(span.positions.min()) for span in spans) - window + 1
    return max(0, min(first, *(span.base for span in spans)))


def mixed(spans: Many[Span], low: int, stop: int, window: int | None) -> list[tuple[int, int]]:
    """Ranges of cells that only some rows see: window starts, and the rows' own cells."""
    base = min(span.base for span in spans)
    if window is None:
        return [(base, stop)]
    edge = max(int(span.positions.max()) for span in spans) - window + 1
    if edge >= base:
        return [(low, stop)]
    return [(low, edge), (base, stop)] if edge > low else [(base, stop)]
