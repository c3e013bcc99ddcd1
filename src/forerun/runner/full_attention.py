"""Attention with an explicit softmax, sequence by sequence: slower and more general.

It runs layers of any head count, cells with explicit positions and hidden cells, and returns the
weights of chosen queries. `attention.Pass` is the fast form.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from forerun.runner.span import Span
from forerun.utils.device_copy import to_device

if TYPE_CHECKING:
    from forerun.models.transformer import DecoderConfig
    from forerun.runner.kv_cache import Cache

MAX_SCORES = 1 << 24  # elements of a block of scores; long prompts run in blocks


class FullAttention:
    """Called by the decoder per layer, like `attention.Pass`.

    queries: ascending row numbers of each span; `weights[span][layer]` are their attention weights
    [heads, queries, cells].
    """

    def __init__(
        self,
        spans: Many[Span],
        cache: Cache,
        config: DecoderConfig,
        queries: Many[Many[int]] | None = None,
    ) -> None:
        self.spans, self.cache, self.config = spans, cache, config
        self.queries = queries
        self.weights: list[dict[int, Tensor]] = [{} for _ in spans]
        self._masks = [self._window_masks(span) for span in spans]

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """[R, H + 2 KV, D], rotated, to [R, H D]."""
        parts, at = [], 0
        for i, span in enumerate(self.spans):
            rows = qkv.narrow(0, at, span.num_rows)
            parts.append(self._attend(i, span, layer, rows))
            at += span.num_rows
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, i: int, span: Span, layer: int, qkv: Tensor) -> Tensor:
        """One span: writes its cells, then softmax(scale q k + mask) v in float32 weights."""
        c = self.config
        heads, kv_heads, rows = c.heads(layer), c.kv_heads(layer), span.num_rows
        cells = self.cache.data[layer, span.slot]  # [cells, 2, KV, D]
        new = qkv.narrow(1, heads, 2 * kv_heads).unflatten(1, (2, kv_heads))
        cells[span.start : span.stop, :, :kv_heads] = new
        keys, values = cells[: span.stop, :, :kv_heads].permute(1, 2, 0, 3).unbind(0)  # [KV, n, D]
        q = qkv.narrow(1, 0, heads).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
        hidden = self._hidden(i, span, layer, kv_heads)  # [KV or 1, 1, rows, n]
        parts, kept = [], []
        size = max(1, MAX_SCORES // (heads * span.stop))
        for at in range(0, rows, size):
            block = slice(at, at + size)
            scores = torch.matmul(q[:, :, block], keys.transpose(1, 2)[:, None]).float()
            scores = scores * c.attn_scale
            if c.attn_softcap is not None:
                scores = (scores / c.attn_softcap).tanh() * c.attn_softcap
            weights = scores.masked_fill(hidden[:, :, block], -torch.inf).softmax(-1)
            parts.append(torch.matmul(weights.to(q.dtype), values[:, None]))  # [KV, fold, rows, D]
            if chosen := [row - at for row in self._chosen(i) if at <= row < at + size]:
                kept.append(weights.flatten(0, 1)[:, chosen])
        if kept:
            self.weights[i][layer] = torch.cat(kept, 1)
        out = torch.cat(parts, 2)
        return out.permute(2, 0, 1, 3).reshape(rows, heads * c.head_dim)

    def _chosen(self, i: int) -> Many[int]:
        """Rows of a span that return their weights, ascending."""
        return () if self.queries is None else self.queries[i]

    def _hidden(self, i: int, span: Span, layer: int, kv_heads: int) -> Tensor:
        """Cells hidden from rows: by window, by ancestry, or dropped."""
        mask = self._masks[i][self.config.window(layer)]
        if span.dropped is None:
            return mask
        dropped = np.zeros((kv_heads, 1, 1, span.stop), np.bool_)
        dropped[..., : span.dropped.shape[2]] = span.dropped[layer, :kv_heads, None, None]
        return mask | to_device(dropped, mask.device)

    def _window_masks(self, span: Span) -> dict[int | None, Tensor]:
        """Per window of the model: cells hidden from each row, bool [1, 1, rows, n]."""
        return {
            window: torch.from_numpy(~span.mask(0, span.stop, window)[None, None]).to(
                self.cache.device
            )
            for window in dict.fromkeys(self.config.windows or (None,))
        }
