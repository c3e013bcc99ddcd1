"""Graph passes without Triton: attention in torch with all its inputs in the described array.

In place of `bodies.Attention` it lets `GraphDecoder` run where no kernel does, such as on the fake
device. No op waits for the device. Models with windows or soft caps are not covered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.models.transformer import Transformer
from forerun.runner.gpu.layout import BITS, HEAD, PER_ROW, TILE, WORDS, Shape
from forerun.runner.kv_cache import Cache


class TorchAttention:
    """`bodies.Attention` for one pass of a shape."""

    def __init__(self, model: Transformer, cache: Cache, shape: Shape, described: Tensor) -> None:
        self.config, self.cells, self.shape = model.config, cache.data, shape
        self.described = described
        self.slot_stride, self.cell_stride = cache.strides[1:3]

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """[R, H + 2 KV, D], rotated, to [R, H D]."""
        c, rows, given = self.config, self.shape.rows, self.described
        row = torch.arange(rows, device=given.device)
        is_row = row < given[0]
        # a row of padding writes what the first row writes
        source = torch.where(is_row, row, 0)
        address = given[HEAD + 2 * rows : HEAD + 3 * rows].index_select(0, source)
        slots, cells = address // self.slot_stride, address % self.slot_stride // self.cell_stride
        new = qkv[:, c.num_heads :].index_select(0, source)
        new = new.view(rows, 2, c.num_kv_heads, c.head_dim)
        self.cells[layer].index_put_((slots, cells), new)
        held = self.cells[layer].index_select(0, self._tiles(row)[0])  # [R, n, 2, KV, D]
        fold = c.num_heads // c.num_kv_heads
        q = qkv[:, : c.num_heads].view(rows, c.num_kv_heads, fold, c.head_dim)
        scores = torch.einsum("rkfd,rnkd->rkfn", q, held[:, :, 0]) * c.attn_scale
        hidden = ~self._visible(row, held.shape[1])
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        out = torch.einsum("rkfn,rnkd->rkfd", scores.softmax(-1), held[:, :, 1])
        return out.reshape(rows, c.num_heads * c.head_dim)

    def _tiles(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Slot, base and stop of each row, by its tile."""
        start = HEAD + (PER_ROW + WORDS) * self.shape.rows
        tiles = self.described[start:].view(self.shape.tiles, TILE)
        is_tile = torch.arange(self.shape.tiles, device=row.device) < self.described[1]
        own = ((row[:, None] >= tiles[:, 0]) & is_tile).sum(1) - 1
        _, _, slot, base, stop = tiles.index_select(0, own.clamp(min=0)).unbind(1)
        return slot // self.slot_stride, base, stop

    def _visible(self, row: Tensor, num_cells: int) -> Tensor:
        """Which cells each row sees, bool [R, n]."""
        _, base, stop = self._tiles(row)
        start = HEAD + PER_ROW * self.shape.rows
        words = self.described[start : start + WORDS * self.shape.rows].view(-1, WORDS)
        cell = torch.arange(num_cells, device=row.device)
        bit = (cell - base[:, None]).clamp(0, WORDS * BITS - 1)
        is_set = (words.gather(1, bit // BITS) >> (bit % BITS)) & 1
        is_before = cell < base[:, None]
        return is_before | (cell < stop[:, None]) & (is_set == 1)
