"""A sequence with soft inputs: weighted mixes of token embeddings.

It has a separate KV cache: its cells belong to no text, so no other sequence may reuse them.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch

from forerun.core.roles import Target
from forerun.errors import CapacityError, ConfigError
from forerun.runner.forward_batch import Work
from forerun.runner.kv_cache import Cache
from forerun.runner.model_runner import CHUNK, LOGITS, ModelRunner
from forerun.runner.slots import Slot


class MixedStream:
    """A prompt, then one mix of tokens per step; each call returns the next logits [V].

    A step with one token of weight 1 equals a plain step bit for bit. Raises ConfigError for a
    target that takes only tokens, CapacityError beyond its context.
    """

    def __init__(self, target: Target) -> None:
        if not isinstance(target, ModelRunner):
            raise ConfigError(
                "mixed embeddings need a model that runs on forerun's own decoder, got "
                f"{type(target).__name__}; `forerun doctor` lists the families that do"
            )
        self.target, self.model = target, target.model
        c = self.model.config
        self.cache = Cache(
            c.num_layers,
            c.num_kv_heads,
            c.head_dim,
            max_slots=1,
            max_cells=target.context,
            dtype=self.model.dtype,
            device=self.model.device,
        )
        self.slot, self.num_passes = Slot(0), 0

    @torch.inference_mode()
    def prompt(self, tokens: Many[int]) -> np.ndarray:
        """Runs the tokens in chunks; logits [V], float32 or wider."""
        assert tokens, "there is no answer to nothing"
        for at in range(0, len(tokens), CHUNK):
            logits = self._pass(list(tokens[at : at + CHUNK]), None)
        return logits

    @torch.inference_mode()
    def step(self, tokens: Many[int], weights: Many[float]) -> np.ndarray:
        """Runs the input sum_i weights[i] E[tokens[i]]; logits [V]."""
        return self._pass([0], self.mix(tokens, weights))

    def mix(self, tokens: Many[int], weights: Many[float]) -> torch.Tensor:
        """The mixed embedding [1, d], summed in fp32."""
        device = self.model.device
        rows = self.model.rows(torch.tensor(list(tokens), device=device)).float()
        mixed = torch.tensor(list(weights), dtype=torch.float32, device=device)[None] @ rows
        return mixed.to(self.model.dtype)

    def _pass(self, ids: list[int], table: torch.Tensor | None) -> np.ndarray:
        work = Work(self.slot, ids)
        if work.stop > self.target.context:
            raise CapacityError(
                f"the prompt and its drafts need {work.stop} tokens, but the context is "
                f"{self.target.context}; shorten the prompt, or draft fewer tokens"
            )
        self.cache.reserve(self.slot, work.stop)
        _, logits = self.target.decode([work], self.cache, LOGITS, table)
        self.target.collect()
        work.keep()
        self.num_passes += 1
        row = torch.as_tensor(logits)[-1]
        return (row.float() if row.element_size() < 4 else row).cpu().numpy()
