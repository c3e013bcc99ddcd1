"""OpenVINO GenAI on a CPU: plain and prompt lookup, after an export by optimum-intel.

Weights and KV cache keep the requested dtype, as the defaults of 8 bits would change the
distribution. If the processor does not support the dtype, the plugin computes and caches in
float32, with a note in its versions.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

PRECISION = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
CAPABILITY = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}
BLOCK = 32  # KV cells; as in the catalog


class Worker:
    """One pipeline with paged attention and continuous batching."""

    packages = ("openvino-genai", "openvino", "openvino-tokenizers", "optimum-intel")

    def __init__(self) -> None:
        self.pipeline: Any = None
        self.notes: list[str] = []

    def load(
        self,
        mode: str,
        model: str,
        dtype: str,
        threads: int,
        cache: str,
        num_cells: int,
        num_seqs: int,
        **_: Any,
    ) -> None:
        """Exports the checkpoint if necessary, and compiles the pipeline."""
        import openvino
        import openvino_genai as genai

        folder = exported(Path(model), dtype, Path(cache))
        able = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        precision = PRECISION[dtype]
        if CAPABILITY[dtype] not in able:
            precision = "f32"
            self.notes.append(f"computes in float32, as this processor does not support {dtype}")
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = num_cells // BLOCK
        scheduler.max_num_seqs = num_seqs
        scheduler.enable_prefix_caching = (
            False  # across calls only; samples of one call share the prompt
        )
        properties = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
            "PERFORMANCE_HINT": "LATENCY",
        }
        if mode == "lookup":
            properties["prompt_lookup"] = True
        self.pipeline = genai.LLMPipeline(
            str(folder), "CPU", scheduler_config=scheduler, **properties
        )

    def run(
        self,
        mode: str,
        prompt: list[int],
        sampling: dict[str, Any],
        batch: bool,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """Samples by generate(); batched as num_return_sequences."""
        import numpy as np
        import openvino

        greedy = sampling["temperature"] == 0
        if sampling["min_p"]:
            raise NotImplementedError("OpenVINO GenAI has no min_p")
        if greedy and batch and len(sampling["seeds"]) > 1:
            raise NotImplementedError("OpenVINO GenAI has one greedy sample per prompt")
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        seeds = sampling["seeds"]
        calls = [(seeds[0], len(seeds))] if batch else [(seed, 1) for seed in seeds]
        samples: list[dict[str, Any]] = []
        prefill = 0.0
        for seed, n in calls:
            config = self._config(mode, sampling, options)
            config.rng_seed = seed
            config.num_return_sequences = n
            result = self.pipeline.generate(ids, config)
            found = [self._sample(list(tokens), sampling) for tokens in result.tokens]
            if n == 1 and mode == "lookup":
                found[0] |= counts(result, len(found[0]["tokens"]))
            samples += found
            prefill += result.perf_metrics.get_ttft().mean / 1000
        return {"samples": samples, "prefill_seconds": prefill}

    def _config(self, mode: str, sampling: dict[str, Any], options: dict[str, Any]) -> Any:
        """All sampling parameters, to override the checkpoint's defaults."""
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens = sampling["max_new_tokens"]
        config.apply_chat_template = False
        config.stop_token_ids = set(sampling["ends"])
        config.ignore_eos = not sampling["ends"]
        config.do_sample = sampling["temperature"] > 0
        if config.do_sample:
            config.temperature = sampling["temperature"]
            config.top_p = sampling["top_p"]
            config.top_k = sampling["top_k"] or 2**31 - 1
        if mode == "lookup":
            config.num_assistant_tokens = options["tokens"]
            config.max_ngram_size = options["ngram"]
        return config

    def _sample(self, tokens: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        ended = len(tokens) < sampling["max_new_tokens"] or tokens[-1] in sampling["ends"]
        return {"tokens": tokens, "finish": "stop" if ended else "length"}


def counts(result: Any, num_tokens: int) -> dict[str, int]:
    """Passes, drafted and accepted tokens, if reported."""
    metrics = result.extended_perf_metrics
    if metrics is None or not hasattr(metrics, "get_num_accepted_tokens"):
        return {}
    accepted = int(metrics.get_num_accepted_tokens())
    drafted = int(metrics.get_num_draft_tokens())  # accepted ones may be cut at the end
    return {"passes": max(1, num_tokens - accepted), "drafted": drafted, "accepted": accepted}


def exported(model: Path, dtype: str, cache: Path) -> Path:
    """The folder of the exported model, renamed when complete."""
    folder = cache / PRECISION[dtype]
    if not folder.exists():
        from optimum.exporters.openvino import main_export
        from optimum.intel import OVConfig

        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        main_export(
            str(model),
            part,
            task="text-generation-with-past",
            convert_tokenizer=True,
            ov_config=OVConfig(dtype="fp16" if dtype == "float16" else "fp32"),  # or 8 bits
            model_loading_kwargs={"torch_dtype": dtype},
        )
        os.replace(part, folder)
    return folder
