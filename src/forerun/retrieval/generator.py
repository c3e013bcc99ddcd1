"""A causal language model that generates n-grams of passages relevant to a query.

The prompt is the query's ids and a marker for the n-gram's kind: body or title. Beams copy the KV
cache of their prompt.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from forerun.errors import ModelError
from forerun.models.tokenizer import Tokenizer


class State(NamedTuple):
    """KV cache and attention mask, one row per continuation."""

    cache: Any
    mask: torch.Tensor  # int64 [rows, positions]: 0 at padding


class Generator:
    """A causal transformers model with its tokenizer; a `Scorer` of `search/beam`."""

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.context = int(getattr(model.config, "max_position_embeddings", 1 << 30))

    @classmethod
    def load(cls, folder: Path | str) -> Generator:
        """Loads a model trained by recipe `seal`, in fp32. Raises ModelError."""
        from transformers import AutoModelForCausalLM

        from forerun.models.hf_load import load_whole

        tokenizer = Tokenizer.load(str(folder))
        try:
            model = load_whole(AutoModelForCausalLM, folder, dtype=torch.float32)
        except (OSError, ValueError) as cause:
            raise ModelError(
                f"cannot load the model in {folder}: {cause}; train it with `forerun seal build`"
            ) from None
        return cls(model, tokenizer)

    @torch.inference_mode()
    def begin(self, prompts: Many[Many[int]]) -> tuple[State, np.ndarray]:
        """See `Scorer`; prompts are padded on the left."""
        from transformers import DynamicCache

        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, width - len(prompt) :] = 1
        return self._forward(DynamicCache(config=self.model.config), mask, ids)

    @torch.inference_mode()
    def go_on(self, state: State, rows: np.ndarray, tokens: np.ndarray) -> tuple[State, np.ndarray]:
        """See `Scorer`; the given state becomes invalid."""
        indices = torch.from_numpy(np.asarray(rows, np.int64))
        state.cache.reorder_cache(indices)
        new_columns = torch.ones(len(indices), 1, dtype=torch.int64)
        mask = torch.cat([state.mask[indices], new_columns], dim=1)
        return self._forward(state.cache, mask, torch.from_numpy(np.asarray(tokens))[:, None])

    @torch.inference_mode()
    def logps(self, prompt: Many[int], grams: Many[Many[int]]) -> np.ndarray:
        """log P(gram | prompt) per n-gram, teacher-forced, summed over tokens. float64 [m]."""
        if not grams:
            return np.zeros(0)
        longest, start = max(map(len, grams)), len(prompt)
        ids = torch.zeros(len(grams), start + longest, dtype=torch.int64)
        ids[:, :start] = torch.tensor(list(prompt))
        inside = torch.zeros(len(grams), longest, dtype=torch.bool)
        for row, gram in enumerate(grams):
            ids[row, start : start + len(gram)] = torch.tensor(list(gram))
            inside[row, : len(gram)] = True
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits[:, start - 1 :]
        each = torch.log_softmax(logits.float(), -1).gather(2, ids[:, start:, None])[..., 0]
        return (each.double() * inside).sum(1).numpy()

    def _forward(
        self, cache: Any, mask: torch.Tensor, ids: torch.Tensor
    ) -> tuple[State, np.ndarray]:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logps = torch.log_softmax(out.logits[:, -1].float(), -1).numpy()
        return State(cache, mask), logps
