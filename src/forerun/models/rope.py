"""Rotary position tables: cos and sin per position, stored so that one roll rotates a head."""

from __future__ import annotations

import torch
from torch import Tensor


class Rope:
    """Rows cos and +-sin [head_dim] per position; rotated x = x cos + roll(x, head_dim / 2) sin.

    inv_freq [rotary / 2]. With partial rotary the head is stored as (first rotary half, first plain
    half, second rotary half, second plain half), where the plain dimensions have angle 0.
    """

    def __init__(
        self,
        inv_freq: Tensor,
        head_dim: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        half = head_dim // 2
        self._freq = torch.zeros(half, dtype=torch.float32)
        self._freq[: len(inv_freq)] = inv_freq.float()
        self._scale = torch.ones(half)
        self._scale[: len(inv_freq)] = scale
        self.dtype, self.device = dtype, device
        self._table = torch.empty(0, 2, head_dim, dtype=dtype, device=device)

    def rows(self, positions: Tensor, top: int) -> tuple[Tensor, Tensor]:
        """cos and sin, each [R, 1, head_dim]; top: max position."""
        if top >= len(self._table):
            self.reach(max(256, 2 * top))
        rows = self._table.index_select(0, positions)
        return rows.narrow(1, 0, 1), rows.narrow(1, 1, 1)

    def table(self, length: int) -> Tensor:
        """cos and sin of every position, fp32 [length, 2, head_dim / 2]."""
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._freq
        return torch.stack((angles.cos() * self._scale, angles.sin() * self._scale), 1)

    def reach(self, length: int) -> Tensor:
        """The table of `rows`, [n, 2, head_dim] with n >= length, grown if needed."""
        if length > len(self._table):
            self._grow(length)
        return self._table

    def _grow(self, length: int) -> None:
        cos, sin = self.table(length).unbind(1)
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        self._table = table.to(self.device, self.dtype)


def roll_order(head_dim: int, rotary: int) -> list[int]:
    """Order of a head's dimensions in which `Rope` pairs them; the identity if all rotate."""
    half, rest = rotary // 2, list(range(rotary, head_dim))
    cut = len(rest) // 2
    first, second = list(range(half)), list(range(half, rotary))
    return [*first, *rest[:cut], *second, *rest[cut:]]
