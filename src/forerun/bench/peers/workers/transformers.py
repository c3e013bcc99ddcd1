"""Hugging Face transformers, eager PyTorch: plain, prompt lookup, assisted by a draft model.

All modes share one loaded model. Samples are sequential; only plain mode can be batched, as the
candidate generators need a batch size of 1.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any


class PassCounter:
    """Rows of every target pass, and seconds of the prefill."""

    def __init__(self, model: Any) -> None:
        import torch

        self.rows: list[int] = []
        is_away, wait = model.device.type == "cuda", partial(torch.cuda.synchronize, model.device)
        self._wait = wait if is_away else lambda: None
        self.prefill_seconds = self._start = 0.0
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)

    def _before(self, _: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self.rows.append(ids.shape[1])
        if len(self.rows) == 1:
            self._wait()
        self._start = time.perf_counter()

    def _after(self, *_: Any) -> None:
        if len(self.rows) == 1:
            self._wait()
            self.prefill_seconds += time.perf_counter() - self._start

    def drafted(self, num_prompt: int) -> int:
        """Rows beyond the prompt in the first pass and beyond one token in the others."""
        return max(0, sum(self.rows) - num_prompt - (len(self.rows) - 1))


class Worker:
    """One model, and a draft if requested."""

    packages = ("transformers", "torch", "tokenizers", "safetensors")

    def __init__(self) -> None:
        self.model: Any = None
        self.draft: Any = None

    def load(
        self, mode: str, model: str, dtype: str, threads: int, device: str, draft: str, **_: Any
    ) -> None:
        """Loads the model once, and the draft for mode "assisted" (None for the others)."""
        import torch

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        if self.model is None:
            self.model = self._loaded(model, dtype, device)
            self.counter = PassCounter(self.model)
        if mode == "assisted" and self.draft is None:
            self.draft = self._loaded(draft, dtype, device)

    def run(
        self,
        mode: str,
        prompt: list[int],
        sampling: dict[str, Any],
        batch: bool,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """Samples by generate(); the prompt is computed for every sample."""
        seeds = sampling["seeds"]
        config = self._config(sampling)
        draft = None
        if mode == "lookup":
            config.prompt_lookup_num_tokens = options["tokens"]
            config.max_matching_ngram_size = options["ngram"]
        if mode == "assisted":
            draft = self.draft
            draft.generation_config.num_assistant_tokens = options["tokens"]
        if batch:
            return self._generate(prompt, sampling, config, seeds[0], num_rows=len(seeds))
        found = [self._generate(prompt, sampling, config, seed, draft) for seed in seeds]
        return {
            "samples": [one["samples"][0] for one in found],
            "prefill_seconds": sum(one["prefill_seconds"] for one in found),
        }

    def _generate(
        self,
        prompt: list[int],
        sampling: dict[str, Any],
        config: Any,
        seed: int,
        draft: Any = None,
        num_rows: int = 1,
    ) -> dict[str, Any]:
        import torch

        self.counter.rows, self.counter.prefill_seconds = [], 0.0
        torch.manual_seed(seed)
        ids = torch.tensor([prompt] * num_rows, device=self.model.device)
        rows = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            assistant_model=draft,
        )
        samples = [self._sample(row, sampling) for row in rows[:, len(prompt) :].tolist()]
        if num_rows == 1:
            samples[0] |= self._counts(len(prompt), len(samples[0]["tokens"]))
        return {"samples": samples, "prefill_seconds": self.counter.prefill_seconds}

    def _counts(self, num_prompt: int, num_tokens: int) -> dict[str, int]:
        """Passes, drafted tokens, and tokens beyond one per pass as accepted."""
        drafted, passes = self.counter.drafted(num_prompt), len(self.counter.rows)
        accepted = min(drafted, max(0, num_tokens - passes))
        return {"passes": passes, "drafted": drafted, "accepted": accepted}

    def _sample(self, row: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """Tokens up to and including the first end token."""
        ends = set(sampling["ends"])
        last = next((i for i, token in enumerate(row) if token in ends), None)
        tokens = row if last is None else row[: last + 1]
        return {"tokens": tokens, "finish": "length" if last is None else "stop"}

    def _config(self, sampling: dict[str, Any]) -> Any:
        """All sampling parameters, to override the checkpoint's defaults."""
        from transformers import GenerationConfig

        law: dict[str, Any] = {"do_sample": False}
        if sampling["temperature"] > 0:
            law = {
                "do_sample": True,
                "temperature": sampling["temperature"],
                "top_k": sampling["top_k"],  # None means 50
                "top_p": sampling["top_p"],
                "min_p": sampling["min_p"] or None,
            }
        return GenerationConfig(
            **law,
            max_new_tokens=sampling["max_new_tokens"],
            eos_token_id=sampling["ends"] or None,
            pad_token_id=sampling["ends"][0] if sampling["ends"] else 0,
        )

    def _loaded(self, folder: str, dtype: str, device: str) -> Any:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        kind = getattr(torch, dtype)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=kind, trust_remote_code=False
        )
        model = model.to(device).eval()
        model.generation_config = GenerationConfig()  # else generate() uses its defaults
        return model
