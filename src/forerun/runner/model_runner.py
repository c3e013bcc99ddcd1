"""The `Target` that runs forerun's decoder: updates the slots, then runs one packed pass."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from forerun.core.forward_batch import EVERYTHING, ForwardBatch
from forerun.core.records import Rows, Sequence
from forerun.errors import ConfigError, in_a_line
from forerun.runner import gpu
from forerun.runner.attention import TorchDecoder
from forerun.runner.base import CHUNK, HIDDEN, LOGITS, NOTHING, Runner
from forerun.runner.detailed_pass import detailed_pass
from forerun.runner.forward_batch import DetailedWork, PassRequest, Work, WorkRows
from forerun.runner.kv_cache import Cache
from forerun.runner.native.decoder import NativeDecoder, unsupported, warn_once

if TYPE_CHECKING:
    from forerun.models.sub_models import Exits
    from forerun.models.transformer import Transformer
    from forerun.runner.gpu.graphs import GraphDecoder

__all__ = ["CHUNK", "HIDDEN", "LOGITS", "NOTHING", "ModelRunner", "Runner", "decoder"]

log = logging.getLogger("forerun")
TREE_CELLS = 1024  # cells beyond the context, for tree nodes
ALTERED = frozenset({"positions", "dropped_cells"})


class ModelRunner(Runner):
    """forerun's decoder with its KV cache: one packed pass for all sequences.

    graphs: run passes over few rows as CUDA graphs on GPUs that support them.
    """

    gives = EVERYTHING
    exits: Exits | None = None  # sub-models of a sorted draft

    def __init__(
        self,
        model: Transformer,
        *,
        max_seqs: int = 16,
        context: int | None = None,
        graphs: bool = True,
    ) -> None:
        c = model.config
        self.model, self.graphs = model, graphs
        self.vocab_size, self.num_layers = c.vocab_size, c.num_layers
        self.head_map = model.head_map  # of a reduced head: its logits are those of some tokens
        self.context = min(context or c.context, c.context)
        self.cache: Cache = Cache(
            c.num_layers,
            c.num_kv_heads,
            c.head_dim,
            max_slots=max_seqs,
            max_cells=self.context + TREE_CELLS,
            dtype=model.dtype,
            device=model.device,
        )
        self.decode = decoder(model, graphs=graphs)
        self._torch: TorchDecoder | None = None  # for needs that `decode` lacks
        self._said: set[str] = set()  # needs for which the fallback was logged
        how = type(self.decode).__name__
        self.is_async = model.device.type == "cuda"
        self._is_launched = False
        self.shape = repr((c, model.dtype, model.device, model.nbytes, how))
        self.is_slow_at_first = model.device.type == "cuda"

    def memory_report(self) -> dict[str, int]:
        """Bytes of weights, KV cells, and scratch (kept draft logits, buffers, masks)."""
        return {
            "weights": self.model.nbytes,
            "kv cache": self.cache.nbytes,
            "scratch": self.kept_bytes() + self.decode.nbytes,
        }

    def run(self, works: list[Work], needs: frozenset[str]) -> tuple[Tensor, Tensor | np.ndarray]:
        for work in works:
            self.cache.reserve(work.slot, work.stop)
        self.cache.prepare(max(work.stop for work in works))
        decode = self.decode
        if any(work.slot.is_altered for work in works):
            decode = self.torch_decoder(ALTERED)
        found = decode(works, self.cache, needs)
        if not self._is_launched:
            self.collect()
        for work in works:
            self.num_rows += work.num_rows
            work.keep()
        return found

    def run_detailed(self, works: list[DetailedWork], request: PassRequest) -> list[WorkRows]:
        for work in works:
            self.cache.reserve(work.slot, work.stop)
        self.cache.prepare(max(work.stop for work in works))
        kinds = {
            "layers": request.layers is not None,
            "taps": bool(request.taps),
            "attention": any(work.queries for work in works),
            "resume": any(work.resume is not None for work in works),
            "prompt_rows": any(work.first_row < work.root for work in works),
        }
        used = frozenset(kind for kind, is_used in kinds.items() if is_used)
        if isinstance(self.decode, NativeDecoder) and self.decode.can_run(works, request):
            found = self.decode.rows_of(works, self.cache, request)
        else:
            found = detailed_pass(self.torch_decoder(used), works, self.cache, request)
        self.num_rows += sum(work.num_rows - work.num_resumed for work in works)
        return found

    def torch_decoder(self, needs: frozenset[str]) -> TorchDecoder:
        """The decoder for needs that `decode` lacks, on the same weights and cells."""
        if isinstance(self.decode, TorchDecoder):
            return self.decode
        if self._torch is None:
            own = getattr(self.decode, "torch", None)  # a graph decoder has one
            self._torch = own or TorchDecoder(self.model)
        new = needs - self.decode.gives - self._said
        if new:
            self._said |= new
            name = type(self.decode).__name__
            log.warning("%s has no %s: such passes run on torch", name, ", ".join(sorted(new)))
        return self._torch

    def embed(self, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.model.rows(ids.to(self.model.device))

    def drop_cells(self, seq: Sequence, layer: int, head: int, keep: np.ndarray) -> None:
        """Hides cells of one layer and KV head from all later rows of a sequence.

        keep: bool [n], n <= `num_cells`; later cells stay visible.
        """
        config, slot = self.model.config, self.cache.sync(seq)
        if not (0 <= layer < config.num_layers and 0 <= head < config.kv_heads(layer)):
            raise ConfigError(
                f"layer {layer}, KV head {head}: the model has {config.num_layers} layers and "
                f"{config.num_kv_heads} KV heads"
            )
        if len(keep) > len(slot.tokens):
            raise ConfigError(f"keep has {len(keep)} cells, the cache {len(slot.tokens)}")
        self.cache.drop(slot, layer, head, np.asarray(keep, np.bool_))

    def num_cells(self, seq: Sequence) -> int:
        """Number of a sequence's tokens in the cache."""
        return self.cache.known(seq)

    @property
    def weights_version(self) -> int:
        return self.model.version

    def update_weights(self, state: Mapping[str, Tensor]) -> None:
        with self.lock:
            if self.model.update_weights is None:  # built by hand
                super().update_weights(state)
            else:
                self.model.update_weights(state)
                self.forget_cells()

    def forget_cells(self) -> None:
        super().forget_cells()
        refresh = getattr(self.decode, "refresh", None)  # if it stores addresses of weights
        if refresh is not None:
            refresh()

    def launch(self, batch: ForwardBatch) -> list[Rows]:
        self._is_launched = True
        try:
            return self.forward(batch)
        finally:
            self._is_launched = False

    def collect(self) -> None:
        wait = getattr(self.decode, "wait", None)  # if logits are being copied to the host
        if wait is not None:
            wait()


def decoder(
    model: Transformer, *, graphs: bool = True
) -> NativeDecoder | TorchDecoder | GraphDecoder:
    """The decoder of a model: native or GPU kernels if they support it, otherwise torch."""
    if model.device.type == "cuda":
        reason = "" if graphs else gpu.TURNED_OFF
        reason = reason or gpu.unavailable(model.device) or gpu.unsupported_config(model.config)
        if not reason:
            try:
                from forerun.runner.gpu.graphs import GraphDecoder  # needs Triton
            except (ImportError, AttributeError) as fault:  # a broken or old Triton
                reason = f"Triton cannot be imported: {in_a_line(fault)}"
            else:
                return GraphDecoder(model)
    else:
        reason = unsupported(model)
        if not reason:
            return NativeDecoder(model)
    if model.device.type in ("cpu", "cuda"):
        warn_once(reason)
    return TorchDecoder(model)
