"""Runs a whole pass of forerun's decoder in one native call, for supported families."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence as Many
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forerun.runner.forward_batch import WorkRows, packed
from forerun.runner.native import kernels
from forerun.runner.native.layout import (
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
)
from forerun.runner.native.memory import cache_bytes, has_large_l1
from forerun.runner.native.packing import KINDS, row_stride
from forerun.runner.native.threads import ThreadCount

if TYPE_CHECKING:
    from forerun.models.layers import GatedMLP, LayerNorm, PlainMLP, RMSNorm
    from forerun.models.transformer import DecoderConfig, Transformer
    from forerun.runner.forward_batch import DetailedWork, PassRequest, Work
    from forerun.runner.kv_cache import Cache

log = logging.getLogger("forerun")
DEFAULT_CACHE_BYTES = 1 << 24  # bytes, if the system does not report it
BOTH = frozenset({"hidden", "logits"})
MAX_SPLIT_ROW_RUNS = 1024  # rows x runs up to which every run is a separate unit of work


def unsupported_config(config: DecoderConfig) -> str:
    """Why the kernels do not run a decoder; empty if they do."""
    if config.moe is not None:
        return "experts"
    if not config.has_even_heads:
        return "head counts that differ between layers"
    if config.head_dim > MOST_DIM:
        return f"a head size of {config.head_dim}, above {MOST_DIM}"
    if config.num_heads // config.num_kv_heads > MOST_FOLD:
        return f"more than {MOST_FOLD} query heads per key head"
    sizes = [("hidden", config.hidden_size), ("head", config.head_dim)]
    sizes += [("inner", size) for size in (config.mlp_size, *config.layer_mlp_sizes)]
    for what, size in sizes:  # heads and MLPs can be padded
        if size % LANES:
            return f"a {what} size of {size}, no multiple of {LANES}"
    return ""


def unsupported(model: Transformer) -> str:
    """Why the kernels do not run this model; empty if they do."""
    if model.head.packed is not None:
        return unsupported_config(model.config)
    if model.device.type != "cpu":
        return f"they are for CPUs, and the model is on {model.device}"
    return f"weights in {model.dtype}" if kernels() else kernels().why


@cache
def warn_once(reason: str) -> None:
    """Logs each reason once per process."""
    log.warning("passes run on torch, not on our own kernels: %s", reason)


class NativeDecoder:
    """Runs packed rows of all sequences through a model with packed weights."""

    # also ranges of layers with a tap after the last one: see `can_run`
    gives = frozenset({"hidden", "probes", "embeddings"})

    def __init__(self, model: Transformer) -> None:
        self.model, c = model, model.config
        self._kernels, self._threads = kernels(), ThreadCount()
        self._kept: list[Any] = []  # objects that the records point to
        self._buffers: dict[str, Tensor] = {}
        self._counters = np.zeros(c.num_layers + 2, dtype=np.int64)
        self._counters_at = self._counters.ctypes.data
        self._no_hidden = torch.empty(0, c.hidden_size, dtype=model.dtype)
        self._embed = None if model.embed is None else model.embed.data_ptr()
        self._ropes, self._ropes_at, self._rope_size = torch.empty(0), 0, 0
        self._rows = self._rows_runs = 0  # capacity of the buffers
        self._is_streamed = model.nbytes > (cache_bytes() or DEFAULT_CACHE_BYTES)
        self._record = self._describe(model)
        self._work = Pass(  # fields that are the same in all passes
            wide_stride=c.hidden_size,
            act_stride=row_stride(max(c.hidden_size, c.num_heads * c.head_dim, c.mlp_size)),
            logit_stride=-(-c.num_logits // LANES) * LANES,
        )

    def __call__(
        self,
        works: Many[Work],
        cache: Cache,
        needs: frozenset[str],
        table: Tensor | None = None,
        layers: range | None = None,
    ) -> tuple[Tensor, np.ndarray]:
        """Hidden rows [w, d] and logits fp32 [w, V] of all works, from the first wanted row of each
        on, each empty if not in `needs`; other rows only fill their cells.

        table [n, d], of the model's dtype: embeddings of the ids in place of the model's. layers:
        run only this range. Raises IndexError for ids without an embedding.
        """
        c, work = self.model.config, self._work
        slots, cells = cache.strides[1:3]
        num_ids = c.vocab_size if table is None else len(table)
        width = work.logit_stride if "logits" in needs else 0
        rows = packed(works, (slots, cells), num_ids, width)
        num = work.num_rows = sum(w.num_rows for w in works)
        if rows.wrong >= 0:
            token = rows.numbers[rows.wrong]
            raise IndexError(f"token {token} has no embedding: there are {num_ids}")
        runs = rows.top // RUN + 1
        work.is_split = num * runs <= MAX_SPLIT_ROW_RUNS
        work.max_runs = runs if work.is_split else 1
        self._reserve(num, work.max_runs)
        at, work.logits = rows.addresses
        work.ids, work.positions, work.wanted = at, at + 8 * num, at + 24 * num
        work.spans = at + 32 * num
        work.num_wanted, work.num_spans = len(rows.logits), len(works)
        work.rope, work.rope_stride = self._rope_tables(rows.top)
        work.cells, work.head_stride = cache.address, cache.strides[4]
        work.layer_stride, work.slot_stride = cache.strides[0], slots
        if layers is not None:
            work.cells += layers.start * cache.strides[0] * cache.dtype.itemsize
        wide, work.hidden = None, None
        if "hidden" in needs:
            wide = torch.empty(len(rows.logits), c.hidden_size)
            work.hidden = wide.data_ptr()
        embed = None if table is None else table.contiguous()
        self._counters[:] = 0
        work.num_threads = self._threads.size(torch.get_num_threads())
        record = self._record if layers is None else self._part(layers)
        record.embed = self._embed if embed is None else embed.data_ptr()
        self._kernels.library.forerun_pass(  # type: ignore[union-attr]
            self._kernels.level, record, work, at + 16 * num, self._counters_at
        )
        self._threads.took(num)
        hidden = self._no_hidden if wide is None else wide.to(self.model.dtype)
        return hidden, rows.logits[:, : c.num_logits]

    def can_run(self, works: Many[DetailedWork], request: PassRequest) -> bool:
        """Whether `rows_of` supports a detailed pass: a range of layers, a tap after the last."""
        layers = self._layers(request)
        is_plain = all(
            work.first_row == work.root
            and not (work.queries or work.resume is not None or work.slot.is_altered)
            for work in works
        )
        is_range = tuple(layers) == tuple(request.layers or layers)
        return is_plain and is_range and set(request.taps) <= {layers[-1]}

    def rows_of(
        self, works: Many[DetailedWork], cache: Cache, request: PassRequest
    ) -> list[WorkRows]:
        """The wanted rows of each work, for passes that `can_run` accepts."""
        layers = self._layers(request)
        hidden, logits = self(works, cache, BOTH, None, layers)
        num = sum(work.num_rows for work in works)
        stream = self._buffers["x"][: num * self.model.config.hidden_size].view(num, -1)
        found, at, first = [], 0, 0  # wanted rows, and rows, of the previous works
        for work in works:
            count = work.num_rows - work.root
            tap = stream[first + work.root : first + work.num_rows].to(self.model.dtype, copy=True)
            part = slice(at, at + count)
            taps = {layers[-1]: tap} if request.taps else {}
            found.append(WorkRows(hidden[part], torch.from_numpy(logits[part]), taps))
            at, first = at + count, first + work.num_rows
        return found

    def _layers(self, request: PassRequest) -> range:
        """From the first to the last layer of a pass."""
        if request.layers is None:
            return range(self.model.config.num_layers)
        return range(request.layers[0], request.layers[-1] + 1)

    def _part(self, layers: range) -> Any:
        """The record of a model with only a range of layers."""
        record = Model.from_buffer_copy(self._record)
        record.layers = (Layer * len(layers)).from_buffer(self._all_layers, self._offset(layers))
        record.num_layers = len(layers)
        return record

    @staticmethod
    def _offset(layers: range) -> int:
        """Byte offset of the first of these layers in the array of all layers."""
        return layers.start * ctypes.sizeof(Layer)

    def refresh(self) -> None:
        """Rebuilds the records of the kernels after a weight update."""
        self._kept = []
        self._record = self._describe(self.model)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return self._ropes.nbytes + sum(buffer.nbytes for buffer in self._buffers.values())

    def _reserve(self, rows: int, runs: int) -> None:
        """Scratch memory for a pass; it only grows."""
        if rows <= self._rows and rows * runs <= self._rows_runs:
            return
        runs_of_rows = rows * runs + rows * runs // 4
        rows += rows // 4  # spare, so that it grows rarely
        self._rows, self._rows_runs = max(rows, self._rows), max(runs_of_rows, self._rows_runs)
        c, rows = self.model.config, self._rows
        half = torch.bfloat16 if self._record.act_kind == BF16 else torch.float32
        sizes = {
            "x": rows * c.hidden_size,
            "wide": rows * c.hidden_size,
            "qkv": rows * c.num_lanes * c.head_dim,
            "partial": self._rows_runs * c.num_heads * (c.head_dim + STATE),
            "act": rows * self._work.act_stride,
            "inner_act": rows * self._work.act_stride,
        }
        for name, size in sizes.items():
            dtype = half if name.endswith("act") else torch.float32
            self._buffers[name] = held = torch.empty(size + LANES, dtype=dtype)
            setattr(self._work, name, held.data_ptr())

    def _rope_tables(self, top: int) -> tuple[int | None, int]:
        """Address of all rotary tables for positions up to `top`, and elements of each."""
        if not self.model.ropes:
            return None, 0
        if top >= self._rope_size:
            self._rope_size = max(256, 2 * top)
            self._ropes = torch.stack([r.table(self._rope_size) for r in self.model.ropes])
            self._ropes_at = self._ropes.data_ptr()
        return self._ropes_at, self._rope_size * self.model.config.head_dim

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
                rope=-1 if (rope := c.rope(i)) is None else rope,
            )
        self._kept.append(layers)
        self._all_layers = layers
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
            embed_scale=1.0 if model.embed_scale is None else model.embed_scale,
            logit_scale=1.0 / c.logit_divisor,
            residual_scale=c.residual_scale,
            embed=None if model.embed is None else model.embed.data_ptr(),
            places=None if model.positions is None else model.positions.data_ptr(),
            layers=layers,
            norm=self._norm(model.norm),
            head=head,
        )

    def _linear(self, linear: Any) -> Any:
        self._kept.append(linear.packed)
        linear.packed.record.is_streamed = self._is_streamed
        linear.packed.record.fetched = 2 if self._is_streamed and not has_large_l1() else 1
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
