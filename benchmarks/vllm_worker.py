"""One vLLM engine with its own drafter or one of forerun's, for benchmarks/vllm_plugin.py.

Runs in vLLM's environment under forerun.bench.peers.workers.serve, with forerun on PYTHONPATH.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from forerun.bench.peers.workers import vllm as peer
from forerun.integrations import vllm_taps

OURS = {"stand": "StandProposer", "recycling": "TokenRecyclingProposer", "suffix": "SuffixProposer"}
FORMS = ("", "plain", "installed")
CLASSES = "forerun.integrations.vllm."
NUM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Worker(peer.Worker):
    """The peer's worker with more modes: plain, ngram, arctic, and NAME[:FORM] of OURS.

    "arctic" is vLLM's own suffix method. NAME:plain is without the entry point of the plugin, and
    for NAME:installed vLLM has to find it by itself.
    """

    def load(
        self, mode: str, model: str, dtype: str, context: int, options: dict[str, int], **_: Any
    ) -> None:
        """Builds an engine.

        options: tokens drafted at most, and 0 or 1 for eager, planted, and grammars: whether it
        serves structured outputs, which need vLLM's tokenizer.
        """
        name, _colon, form = mode.partition(":")
        if form not in FORMS:
            raise ValueError(f"expected {name}, {name}:plain or {name}:installed, got {mode}")
        from vllm import LLM

        if not form:
            vllm_taps.register()  # what vLLM does itself where forerun is installed
        speculation: dict[str, Any] = {"num_speculative_tokens": options["tokens"]}
        if name in OURS:
            speculation |= {"method": "custom_class", "model": CLASSES + OURS[name]}
        elif name == "ngram":
            speculation |= {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 2}
        elif name == "arctic":
            speculation |= {"method": "suffix"}
        if name not in OURS and name != "plain":
            self.notes += peer.apply_fix()
        self.engine = LLM(
            model=model,
            skip_tokenizer_init=not options.get("grammars"),
            dtype=dtype,
            max_model_len=context,
            max_num_seqs=peer.MIN_SEQS,
            kv_cache_memory_bytes=cell_bytes(model, dtype) * context * peer.MIN_SEQS,
            speculative_config=None if name == "plain" else speculation,
            enable_prefix_caching=True,
            enforce_eager=bool(options.get("eager")),
            disable_log_stats=False,
            seed=0,
        )
        if name in OURS and self._drafter().has_logits != (form != "plain"):
            raise ValueError(f"{mode} runs in the other form; set VLLM_PLUGINS")
        if options.get("planted"):
            drafter = self._drafter()
            probs = drafter.draft_probs
            drafter.draft_probs = lambda: sharper(probs())

    def reset(self, mode: str, **fields: Any) -> None:
        """Empties what earlier prompts left."""
        if mode.partition(":")[0] in OURS:
            self._drafter().restart()
        super().reset("suffix" if mode == "arctic" else "", **fields)

    def run(
        self,
        mode: str,
        prompt: list[int],
        sampling: dict[str, Any],
        batch: bool,
        structured: dict[str, Any] | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """One sample per seed, one after the other or (batch) all at once; counts of all.

        structured: fields of vLLM's StructuredOutputsParams, for every second sample.
        """
        before, start = self._counters(), time.process_time()
        asked = [self._law(sampling, seed, 1) for seed in sampling["seeds"]]
        if structured:
            asked[::2] = [constrained(one, structured) for one in asked[::2]]
        tokens: list[list[int]] = []
        for some in [asked] if batch else [[one] for one in asked]:
            prompts = [{"prompt_token_ids": prompt} for _ in some]
            results = self.engine.generate(prompts, some, use_tqdm=False)
            tokens += [list(result.outputs[0].token_ids) for result in results]
        cpu = time.process_time() - start
        counts = peer.count_difference(before, self._counters(), sum(map(len, tokens)))
        counts["cpu_seconds"] = cpu
        return {"samples": [{"tokens": one} for one in tokens], "counts": counts}

    def _drafter(self) -> Any:
        core = self.engine.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner.drafter


def constrained(sampling: Any, structured: dict[str, Any]) -> Any:
    """Sampling parameters with one of vLLM's structured outputs."""
    from vllm.sampling_params import StructuredOutputsParams

    sampling.structured_outputs = StructuredOutputsParams(**structured)
    return sampling


def cell_bytes(folder: str, dtype: str) -> int:
    """Bytes of one token in the KV cache of a model."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return config["num_hidden_layers"] * 2 * kv_heads * width * NUM_BYTES[dtype]


def sharper(probs: Any) -> Any:
    """A planted mistake: another q [n, V] than the drafts were drawn from."""
    return None if probs is None else probs**3 / (probs**3).sum(-1, keepdim=True)
