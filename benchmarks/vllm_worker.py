"""One vLLM engine with its own drafter or one of forerun's, for benchmarks/vllm_plugin.py.

Runs in vLLM's environment under forerun.bench.peers.workers.serve, with forerun on PYTHONPATH.
"""

from __future__ import annotations

import time
from typing import Any

from forerun.bench.peers.workers import vllm as peer
from forerun.integrations import vllm_taps

OURS = {"stand": "StandProposer", "recycling": "TokenRecyclingProposer", "suffix": "SuffixProposer"}
FORMS = ("", "plain", "installed")
CLASSES = "forerun.integrations.vllm."


class Worker(peer.Worker):
    """The peer's worker with more modes: plain, ngram, arctic, and NAME[:FORM] of OURS.

    "arctic" is vLLM's own suffix method. NAME:plain is without the entry point of the plugin, and
    for NAME:installed vLLM has to find it by itself.
    """

    def load(
        self, mode: str, model: str, dtype: str, context: int, options: dict[str, int], **_: Any
    ) -> None:
        """Builds an engine; options: tokens drafted at most, eager (0 or 1), planted (0 or 1)."""
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
            self.notes += peer.mended()
        self.engine = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=context,
            max_num_seqs=peer.ROOM,
            kv_cache_memory_bytes=peer.cell_bytes(model, dtype) * context * peer.ROOM,
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
        self, mode: str, prompt: list[int], sampling: dict[str, Any], batch: bool, **_: Any
    ) -> dict[str, Any]:
        """One sample per seed, one after the other or (batch) all at once; counts of all."""
        before, start = self._counters(), time.process_time()
        asked = [self._law(sampling, seed, 1) for seed in sampling["seeds"]]
        tokens: list[list[int]] = []
        for some in [asked] if batch else [[one] for one in asked]:
            prompts = [{"prompt_token_ids": prompt} for _ in some]
            results = self.engine.generate(prompts, some, use_tqdm=False)
            tokens += [list(result.outputs[0].token_ids) for result in results]
        cpu = time.process_time() - start
        counts = peer.grown(before, self._counters(), sum(map(len, tokens))) | {"cpu_seconds": cpu}
        return {"samples": [{"tokens": one} for one in tokens], "counts": counts}

    def _drafter(self) -> Any:
        core = self.engine.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner.drafter


def sharper(probs: Any) -> Any:
    """A planted mistake: another q [n, V] than the drafts were drawn from."""
    return None if probs is None else probs**3 / (probs**3).sum(-1, keepdim=True)
