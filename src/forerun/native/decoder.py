"""A whole pass of our decoder in one native call, where the kernels cover its family."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence as Many
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forerun.native import kernels
from forerun.native.layout import (
    ACTIVATIONS,
    BF16,
    F32,
    LANES,
    MOST_DIM,
    MOST_FOLD,
    QK_NORMS,
    RUN,
    STATE,
    Layer,
    Model,
    Norm,
    Pass,
    Span,
)
from forerun.native.packing import KINDS, row_stride

if TYPE_CHECKING:
    from forerun.engine import attention
    from forerun.engine.cache import Cache
    from forerun.models.layers import GatedMLP, LayerNorm, PlainMLP, RMSNorm
    from forerun.models.transformer import DecoderConfig, Transformer

log = logging.getLogger("forerun")
SPLIT = 1024  # most rows x runs for which every run is a piece of work of its own


def missing(config: DecoderConfig) -> str:
    """What the kernels lack for a decoder; empty if they run it."""
    sizes = config.hidden_size, config.mlp_size, config.head_dim
    if config.moe is not None:
        return "experts"
    if any(size % LANES for size in sizes) or config.head_dim > MOST_DIM:
        return f"sizes {sizes}: hidden, inner and head size must be multiples of {LANES}"
    if config.num_heads // config.num_kv_heads > MOST_FOLD:
        return f"more than {MOST_FOLD} query heads per key head"
    return ""


def lacking(model: Transformer) -> str:
    """Why the kernels do not run this model; empty if they do."""
    if model.head.packed is not None:
        return missing(model.config)
    if model.device.type != "cpu":
        return f"they are for CPUs, and the model is on {model.device}"
    return f"weights in {model.dtype}" if kernels() else kernels().why


@cache
def say_once(lack: str) -> None:
    """One line per reason and process."""
    log.warning("passes run on torch, not on our own kernels: %s", lack)


class NativeDecoder:
    """Runs packed rows of all sequences through a model whose linears are packed."""

    def __init__(self, model: Transformer) -> None:
        self.model, c = model, model.config
        self._kernels = kernels()
        self._kept: list[Any] = []  # what the records point to
        self._buffers: dict[str, Tensor] = {}
        self._counters = np.zeros(c.num_layers + 1, dtype=np.int64)
        self._counters_at = self._counters.ctypes.data
        self._ints, self._numbers_at = np.zeros(0, dtype=np.int64), 0
        self._rope = torch.empty(0)
        self._record = self._describe(model)
        self._work = Pass(  # the fields that no pass changes
            wide_stride=c.hidden_size,
            act_stride=row_stride(max(c.hidden_size, c.num_heads * c.head_dim, c.mlp_size)),
            logit_stride=-(-c.vocab_size // LANES) * LANES,
        )

    def __call__(
        self,
        ids: Many[int],
        positions: np.ndarray,
        spans: Many[attention.Span],
        cache: Cache,
        wanted: np.ndarray,
        *,
        needs_hidden: bool,
        table: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Hidden rows [w, d] (empty if not needed) and logits fp32 [w, V] of the wanted rows,
        int64 [w]; the other rows only fill their cells. table [n, d], of the model's dtype: the
        embeddings that ids stand for, instead of tokens'. Raises IndexError for ids without."""
        c, num, work = self.model.config, len(ids), self._work
        top = int(positions.max())
        runs = top // RUN + 1
        work.is_split = num * runs <= SPLIT
        work.max_runs = runs = runs if work.is_split else 1
        self._reserve(num, runs)
        numbers = self._numbers(3 * num + len(wanted))
        numbers[:num] = ids
        numbers[num : 2 * num] = positions
        numbers[2 * num : 3 * num] = cells_of(spans, cache)
        numbers[3 * num :] = wanted
        work.ids = at = self._numbers_at
        work.positions, work.wanted = at + 8 * num, at + 24 * num
        work.num_rows, work.num_wanted, work.num_spans = num, len(wanted), len(spans)
        work.num_threads = torch.get_num_threads()
        work.spans, kept = records(spans)
        work.rope = self._rope_table(top)
        work.cells = cache.data.data_ptr()
        work.layer_stride, work.slot_stride = cache.data.stride(0), cache.data.stride(1)
        work.head_stride = cache.data.stride(4)
        logits = torch.empty(len(wanted), work.logit_stride)
        work.logits = logits.data_ptr()
        hidden = torch.empty(len(wanted) if needs_hidden else 0, c.hidden_size)
        work.hidden = hidden.data_ptr() if needs_hidden else None
        self._counters[:] = 0
        embed = self.model.embed if table is None else table.contiguous()
        _check_ids(numbers[:num], c.vocab_size if table is None else len(table))
        self._record.embed = None if embed is None else embed.data_ptr()
        self._kernels.library.forerun_pass(  # type: ignore[union-attr]
            self._kernels.level, self._record, work, at + 16 * num, self._counters_at
        )
        del kept
        if needs_hidden:
            hidden = hidden.to(self.model.dtype)
        return hidden, logits.narrow(1, 0, c.vocab_size)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return self._rope.nbytes + sum(buffer.nbytes for buffer in self._buffers.values())

    def _reserve(self, rows: int, runs: int) -> None:
        """Scratch memory for a pass; it grows and persists."""
        c = self.model.config
        half = torch.bfloat16 if self._record.act_kind == BF16 else torch.float32
        sizes = {
            "x": rows * c.hidden_size,
            "wide": rows * c.hidden_size,
            "qkv": rows * c.num_lanes * c.head_dim,
            "partial": rows * c.num_heads * runs * (c.head_dim + STATE),
            "act": rows * self._work.act_stride,
            "inner_act": rows * self._work.act_stride,
        }
        for name, size in sizes.items():
            held = self._buffers.get(name)
            if held is None or held.numel() < size:
                dtype = half if name.endswith("act") else torch.float32
                held = torch.empty(size + size // 4 + LANES, dtype=dtype)
                self._buffers[name] = held
                setattr(self._work, name, held.data_ptr())

    def _numbers(self, size: int) -> np.ndarray:
        """Room for the ids, positions, cells and wanted rows of a pass."""
        if len(self._ints) < size:
            self._ints = np.zeros(2 * size, dtype=np.int64)
            self._numbers_at = self._ints.ctypes.data
        return self._ints[:size]

    def _rope_table(self, top: int) -> int | None:
        rope = self.model.rope
        if rope is None:
            return None
        if top >= len(self._rope):
            self._rope = rope.table(max(256, 2 * top))
        return self._rope.data_ptr()

    def _describe(self, model: Transformer) -> Any:
        c = model.config
        head = self._linear(model.head)
        layers = (Layer * c.num_layers)()
        for i, layer in enumerate(model.layers):
            mlp: GatedMLP | PlainMLP = layer.mlp  # type: ignore[assignment]
            layers[i] = Layer(
                qkv=self._linear(layer.qkv),
                out=self._linear(layer.out),
                up=self._linear(mlp.gate_up if c.is_gated else mlp.up),  # type: ignore[union-attr]
                down=self._linear(mlp.down),
                attn=self._norm(layer.attn_norm),
                post_attn=self._norm(layer.post_attn_norm),
                mlp=self._norm(layer.mlp_norm),
                post_mlp=self._norm(layer.post_mlp_norm),
                q=self._norm(layer.q_norm),
                k=self._norm(layer.k_norm),
                window=c.window(i) or 0,
            )
        self._kept.append(layers)
        return Model(
            hidden=c.hidden_size,
            num_layers=c.num_layers,
            num_heads=c.num_heads,
            num_kv=c.num_kv_heads,
            head_dim=c.head_dim,
            inner=c.mlp_size,
            activation=ACTIVATIONS.index(c.act),
            qk_norm=QK_NORMS.index(c.qk_norm),
            cell_kind=KINDS[model.dtype],
            act_kind=BF16 if model.head.packed.takes_bf16 else F32,  # type: ignore[union-attr]
            attn_scale=c.attn_scale,
            attn_cap=c.attn_softcap or 0.0,
            logit_cap=c.logit_softcap or 0.0,
            embed_scale=1.0 if c.embed_scale is None else c.embed_scale,
            embed=None if model.embed is None else model.embed.data_ptr(),
            places=None if model.positions is None else model.positions.data_ptr(),
            layers=layers,
            norm=self._norm(model.norm),
            head=head,
        )

    def _linear(self, linear: Any) -> Any:
        self._kept.append(linear.packed)
        return linear.packed.record

    def _norm(self, norm: RMSNorm | LayerNorm | None) -> Any:
        if norm is None:
            return Norm()
        weight = norm.weight.float().contiguous()
        given = getattr(norm, "bias", None)
        bias = None if given is None else given.float().contiguous()
        self._kept += [weight, bias]
        is_layer = type(norm).__name__ == "LayerNorm"
        address = None if bias is None else bias.data_ptr()
        return Norm(weight=weight.data_ptr(), bias=address, is_layer=is_layer, eps=norm.eps)


def _check_ids(ids: np.ndarray, num: int) -> None:
    """No row is read that is not there."""
    if ids.view(np.uint64).max() >= num:  # negative ones are large then
        wrong = ids[(ids < 0) | (ids >= num)][0]
        raise IndexError(f"token {wrong} has no embedding: there are {num}")


def records(spans: Many[attention.Span]) -> tuple[ctypes.Array[Any], list[np.ndarray]]:
    """The spans for the kernels, and what must live as long as they do."""
    made, kept, row = (Span * len(spans))(), [], 0
    for record, s in zip(made, spans, strict=True):
        record.slot, record.base, record.stop = s.slot, s.base, s.stop
        record.num_rows, record.first_row = s.num_rows, row
        if s.sees is not None:
            sees = np.ascontiguousarray(s.sees)
            kept.append(sees)
            record.sees = sees.ctypes.data
        row += s.num_rows
    return made, kept


def cells_of(spans: Many[attention.Span], cache: Cache) -> np.ndarray:
    """Where the cell of each row begins within a layer, in numbers; int64 [R]."""
    slot, cell = cache.data.stride(1), cache.data.stride(2)
    parts = [s.slot * slot + np.arange(s.start, s.stop) * cell for s in spans]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
