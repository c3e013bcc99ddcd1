"""Attention of one pass: writes the new cells, then lets every row see its prefix and ancestors.

The rows of all sequences come packed [R, heads, head_dim]. Query heads that share a key head are
folded into rows, so keys are never repeated. One sequence runs on plain views; several run in
groups of neighbouring slots, padded only inside a group.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from forerun.engine.cache import Cache
    from forerun.models.transformer import DecoderConfig

PADDING = 1.5  # most padded work per true work in a group


@dataclass(frozen=True)
class Span:
    """Rows of one sequence in a pass: cells [start, stop) are new, in slot `slot`."""

    slot: int
    start: int
    positions: np.ndarray  # int64 [n], of the new rows
    sees: np.ndarray | None  # bool [n, stop]; None: causal
    places: np.ndarray | None = None  # int64 [stop], position per cell; None: cell i is position i

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    @property
    def stop(self) -> int:
        return self.start + len(self.positions)

    def mask(self, window: int | None) -> np.ndarray | None:
        """bool [n, stop], or None where every row sees every cell."""
        cells = np.arange(self.stop)
        sees = self.sees
        if sees is None:
            if self.num_rows == 1 and (window is None or self.stop <= window):
                return None
            sees = cells <= np.arange(self.start, self.stop)[:, None]
        if window is not None:
            places = cells if self.places is None else self.places
            sees = sees & (self.positions[:, None] - places < window)
        return sees


class Group:
    """Neighbouring slots that attend in one call: rows [at, at + num), padded to [B, N]."""

    def __init__(self, spans: Many[Span], at: int, cache: Cache, config: DecoderConfig) -> None:
        self.at, self.num = at, sum(span.num_rows for span in spans)
        self.batch, self.width = len(spans), max(span.num_rows for span in spans)
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.fold = config.num_heads // config.num_kv_heads
        self.scale, self.softcap = config.attn_scale, config.attn_softcap
        stop = max(span.stop for span in spans)
        views = {}
        for window in dict.fromkeys(config.windows) or (None,):
            low = _lowest(spans, window)
            cells = cache.data.narrow(1, spans[0].slot, len(spans)).narrow(2, low, stop - low)
            keys, values = cells.permute(3, 0, 1, 4, 2, 5).unbind(0)  # each [L, B, KV, n, D]
            mask = self._mask(spans, window, low, stop, cache)
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

    def _mask(
        self, spans: Many[Span], window: int | None, low: int, stop: int, cache: Cache
    ) -> Tensor | None:
        """Additive [B, 1, G N, n], or None."""
        masks = [span.mask(window) for span in spans]
        same = all(span.stop == stop and span.num_rows == self.width for span in spans)
        if same and all(mask is None for mask in masks):
            return None
        sees = np.zeros((self.batch, self.width, stop), dtype=bool)
        sees[:, :, low] = True  # rows of padding see one cell: no division by zero
        for row, (span, mask) in enumerate(zip(spans, masks, strict=True)):
            sees[row, : span.num_rows, : span.stop] = True if mask is None else mask
        folded = np.tile(sees[:, None, :, low:], (1, self.fold, 1, 1))
        folded = folded.reshape(self.batch, 1, -1, stop - low)
        hidden = torch.from_numpy(~folded).to(cache.device)
        zeros = torch.zeros(folded.shape, dtype=cache.dtype, device=cache.device)
        return zeros.masked_fill_(hidden, -torch.inf)

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
        places = torch.from_numpy(pad.reshape(-1)), torch.from_numpy(np.concatenate(unpad))
        return places[0].to(device), places[1].to(device)


class Pass:
    """What the decoder calls per layer: writes keys and values, returns the attended rows."""

    def __init__(self, spans: Many[Span], cache: Cache, config: DecoderConfig) -> None:
        self.num_heads, self.num_kv = config.num_heads, 2 * config.num_kv_heads
        self.groups = []
        at = 0
        for group in grouped(spans):
            self.groups.append(Group(group, at, cache, config))
            at += self.groups[-1].num
        layers, slots, cells = cache.data.shape[:3]
        tail = (self.num_kv, config.head_dim)
        if len(spans) == 1:
            span = spans[0]
            new = cache.data[:, span.slot, span.start : span.stop]
            self.cells = new.view(layers, span.num_rows, *tail).unbind(0)
            self.index = None
        else:
            self.cells = cache.data.view(layers, slots * cells, *tail).unbind(0)
            index = np.concatenate([s.slot * cells + np.arange(s.start, s.stop) for s in spans])
            self.index = torch.from_numpy(index).to(cache.device)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """[R, H + 2 KV, D], rotated, to [R, H D]."""
        kv = qkv.narrow(1, self.num_heads, self.num_kv)
        if self.index is None:
            self.cells[layer].copy_(kv)
        else:
            self.cells[layer].index_copy_(0, self.index, kv)
        q = qkv.narrow(1, 0, self.num_heads)
        if len(self.groups) == 1:
            return self.groups[0](layer, q)
        return torch.cat([g(layer, q.narrow(0, g.at, g.num)) for g in self.groups])


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
        # the CPU kernel is several times slower at one row than at two
        out = F.scaled_dot_product_attention(
            q.expand(-1, -1, 2, -1), k, v, attn_mask=mask, scale=scale
        )
        return out.narrow(2, 0, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def grouped(spans: Many[Span]) -> list[list[Span]]:
    """Runs of neighbouring slots whose padding costs little. Spans come in the order of slots."""
    groups: list[list[Span]] = []
    for span in spans:
        if groups and span.slot == groups[-1][-1].slot + 1:
            joined = [*groups[-1], span]
            true = sum(s.num_rows * s.stop for s in joined)
            width, stop = max(s.num_rows for s in joined), max(s.stop for s in joined)
            if len(joined) * width * stop <= PADDING * true:
                groups[-1] = joined
                continue
        groups.append([span])
    return groups


def _lowest(spans: Many[Span], window: int | None) -> int:
    """The first cell that any row of a windowed layer sees."""
    if window is None:
        return 0
    return max(0, min(int(span.positions.min()) for span in spans) - window + 1)
