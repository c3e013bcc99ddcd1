"""A whole pass of our decoder in one native call, where the kernels cover its family."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forerun.native import kernels
from forerun.native.layout import (
    ACTIVATIONS,
    BF16,
    BF16_PAIRS,
    CHUNK,
    F32,
    LANES,
    MOST_DIM,
    MOST_FOLD,
    QK_NORMS,
    STATE,
    Layer,
    Model,
    Norm,
    Pass,
    Span,
)
from forerun.native.packing import KINDS

if TYPE_CHECKING:
    from forerun.engine import attention
    from forerun.engine.cache import Cache
    from forerun.models.layers import GatedMLP, LayerNorm, PlainMLP, RMSNorm
    from forerun.models.transformer import DecoderConfig, Transformer

SPLIT = 2048  # most rows x chunks for which every chunk is a piece of work of its own


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


class NativeDecoder:
    """Runs packed rows of all sequences through a model whose linears are packed."""

    def __init__(self, model: Transformer) -> None:
        self.model, c = model, model.config
        self._kernels = kernels()
        self._kept: list[Any] = []  # what the records point to
        self._buffers: dict[str, Tensor] = {}
        self._counters = np.zeros(c.num_layers + 1, dtype=np.int64)
        self._rope = torch.empty(0)
        self._record = self._describe(model)

    def __call__(
        self,
        ids: Many[int],
        positions: np.ndarray,
        spans: Many[attention.Span],
        cache: Cache,
        wanted: np.ndarray,
        *,
        needs_hidden: bool,
    ) -> tuple[Tensor, Tensor]:
        """Hidden rows [w, d] (empty if not needed) and logits fp32 [w, V] of the wanted rows,
        int64 [w]; the other rows only fill their cells."""
        c, num = self.model.config, len(ids)
        token_ids = np.array(ids, dtype=np.int64)
        positions = np.ascontiguousarray(positions)
        top = int(positions.max())
        records, cells, kept = self._spans(spans, cache)
        chunks = top // CHUNK + 1
        is_split = num * chunks <= SPLIT
        chunks = chunks if is_split else 1
        width = max(c.hidden_size, c.num_heads * c.head_dim, c.mlp_size)
        act_kind = self._record.act_kind
        stride = -(-c.vocab_size // LANES) * LANES
        logits = torch.empty(len(wanted), stride)
        hidden = torch.empty(len(wanted) if needs_hidden else 0, c.hidden_size)
        wanted = np.ascontiguousarray(wanted)
        work = Pass(
            num_rows=num,
            num_spans=len(spans),
            num_threads=torch.get_num_threads(),
            is_split=is_split,
            ids=_at(token_ids),
            positions=_at(positions),
            spans=records,
            rope=self._rope_table(top),
            cells=cache.data.data_ptr(),
            layer_stride=cache.data.stride(0),
            slot_stride=cache.data.stride(1),
            x=self._buffer("x", num * c.hidden_size),
            wide=self._buffer("wide", num * c.hidden_size),
            qkv=self._buffer("qkv", num * c.num_lanes * c.head_dim),
            partial=self._buffer("partial", num * c.num_heads * chunks * (c.head_dim + STATE)),
            act=self._buffer("act", num * width, act_kind),
            inner_act=self._buffer("inner", num * width, act_kind),
            wide_stride=c.hidden_size,
            act_stride=width,
            max_chunks=chunks,
            wanted=_at(wanted),
            num_wanted=len(wanted),
            hidden=hidden.data_ptr() if needs_hidden else None,
            logits=logits.data_ptr(),
            logit_stride=stride,
        )
        self._counters[:] = 0
        self._kernels.library.forerun_pass(  # type: ignore[union-attr]
            self._kernels.level, self._record, work, _at(cells), _at(self._counters)
        )
        del kept
        return hidden.to(self.model.dtype), logits.narrow(1, 0, c.vocab_size)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return self._rope.nbytes + sum(buffer.nbytes for buffer in self._buffers.values())

    def _spans(
        self, spans: Many[attention.Span], cache: Cache
    ) -> tuple[ctypes.Array[Any], np.ndarray, list[np.ndarray]]:
        """Records of the spans, where each row's cell is within a layer, and what to keep alive."""
        records = (Span * len(spans))()
        cell, slot_stride = cache.data.stride(2), cache.data.stride(1)
        cells, kept, row = [], [], 0
        for record, s in zip(records, spans, strict=True):
            record.slot, record.base, record.stop = s.slot, s.base, s.stop
            record.num_rows, record.first_row = s.num_rows, row
            if s.sees is not None:
                sees = np.ascontiguousarray(s.sees)
                kept.append(sees)
                record.sees = _at(sees)
            row += s.num_rows
            first = s.slot * slot_stride + s.start * cell
            cells.append(np.arange(first, first + s.num_rows * cell, cell, dtype=np.int64))
        return records, np.concatenate(cells), kept

    def _buffer(self, name: str, size: int, kind: int = F32) -> int:
        """Address of scratch memory that grows and persists."""
        held = self._buffers.get(name)
        if held is None or held.numel() < size:
            dtype = torch.bfloat16 if kind == BF16 else torch.float32
            held = self._buffers[name] = torch.empty(size + size // 4 + LANES, dtype=dtype)
        return held.data_ptr()

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
            act_kind=BF16 if head.kind == BF16_PAIRS else F32,
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


def _at(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
