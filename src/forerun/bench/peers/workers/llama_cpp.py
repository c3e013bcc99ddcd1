"""llama.cpp through llama-cpp-python: plain, prompt lookup, and batched samples of a prompt.

Weights keep the requested dtype; mode "f16" is plain decoding with fp16 weights, llama.cpp's own
format. Plain and lookup use `Llama.generate`, with the sampler chain reordered to temperature first
(its default truncates first, which is a different distribution). Batched samples use the C
interface of the package: one batch, with shared cells of the prompt.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


class Worker:
    """One model and its contexts."""

    packages = ("llama-cpp-python", "gguf", "numpy")

    def __init__(self) -> None:
        self.model: Any = None
        self.room: BatchContext | None = None

    def load(
        self,
        mode: str,
        model: str,
        dtype: str,
        threads: int,
        context: int,
        cache: str,
        options: dict[str, int],
        **_: Any,
    ) -> None:
        """Writes the GGUF file if necessary, and loads it.

        context: KV cells of the sequence of plain and lookup.
        """
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        path = converted(Path(model), "float16" if mode == "f16" else dtype, Path(cache))
        draft = None
        if mode == "lookup":
            draft = LlamaPromptLookupDecoding(options["ngram"], options["tokens"])
        self.model = counting_llama()(
            str(path),
            n_ctx=context,
            n_batch=min(context, 512),
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=draft,
            verbose=False,
        )
        self.model.scores = IgnoredLogits()
        print("llama.cpp:", llama_cpp.llama_print_system_info().decode(), file=sys.stderr)

    def reset(self, prompt: list[int], sampling: dict[str, Any], batch: bool, **_: Any) -> None:
        """Clears the cached prompt; allocates the context of a batch."""
        self.model.clear_cache()
        if batch:
            cells = len(prompt) + len(sampling["seeds"]) * sampling["max_new_tokens"]
            self.room = room_for(self.room, self.model, len(sampling["seeds"]), cells)

    def run(
        self,
        mode: str,
        prompt: list[int],
        sampling: dict[str, Any],
        batch: bool,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """Samples one after the other (the prompt's cells are reused), or at once."""
        if batch:
            assert self.room
            return run_batched(self.room, prompt, sampling)
        found = [self._one(prompt, sampling, seed) for seed in sampling["seeds"]]
        return {
            "samples": [sample for sample, _ in found],
            "prefill_seconds": sum(seconds for _, seconds in found),
        }

    def _one(
        self, prompt: list[int], sampling: dict[str, Any], seed: int
    ) -> tuple[dict[str, Any], float]:
        model, ends, tokens = self.model, set(sampling["ends"]), []
        model.law = sampling
        model.set_seed(seed % (1 << 32))
        model.passes, model.prefill_seconds = [], 0.0
        for token in model.generate(prompt, repeat_penalty=1.0):
            tokens.append(int(token))
            if token in ends or len(tokens) >= sampling["max_new_tokens"]:
                break
        passes = len(model.passes)
        drafted = max(0, sum(model.passes[1:]) - (passes - 1))  # the first reads the prompt
        sample = {
            "tokens": tokens,
            "finish": "stop" if tokens[-1] in ends else "length",
            "passes": passes,
            "drafted": drafted,
            "accepted": min(drafted, max(0, len(tokens) - passes)),
        }
        return sample, model.prefill_seconds


class IgnoredLogits:
    """Replaces the array into which the library copies all logits when drafting.

    That array has one row per token of a batch, so the copy fails for longer texts; sampling does
    not read it.
    """

    def __getitem__(self, _: Any) -> IgnoredLogits:
        return self

    def __setitem__(self, *_: Any) -> None:
        """Does nothing."""

    def reshape(self, _: int) -> IgnoredLogits:
        return self


def counting_llama() -> type:
    """The library's class with our sampler order and a count of passes."""
    import llama_cpp

    class CountingLlama(llama_cpp.Llama):
        law: dict[str, Any]
        passes: list[int]
        prefill_seconds = 0.0

        def _init_sampler(self, **_: Any) -> Any:
            return chain(self.law, self._seed)

        def eval(self, tokens: Any) -> None:
            start = time.perf_counter()
            super().eval(tokens)
            if not self.passes:
                self.prefill_seconds += time.perf_counter() - start
            self.passes.append(len(tokens))

        def clear_cache(self) -> None:
            self._ctx.kv_cache_clear()
            self.n_tokens = 0

    return CountingLlama


def chain(law: dict[str, Any], seed: int) -> Any:
    """Temperature, top-k, top-p, min-p, draw; or the argmax."""
    from llama_cpp._internals import LlamaSampler

    sampler = LlamaSampler()
    if law["temperature"] == 0:
        sampler.add_greedy()
        return sampler
    sampler.add_temp(law["temperature"])
    if law["top_k"]:
        sampler.add_top_k(law["top_k"])
    if law["top_p"] < 1:
        sampler.add_top_p(law["top_p"], 1)
    if law["min_p"]:
        sampler.add_min_p(law["min_p"], 1)
    sampler.add_dist(seed)
    return sampler


@dataclass
class BatchContext:
    """A context with KV cells shared by several sequences."""

    context: Any
    batch: Any
    num_seqs: int
    num_cells: int
    width: int  # tokens of a pass, at most

    def close(self) -> None:
        """Frees the memory."""
        self.batch.close()
        self.context.close()


def room_for(room: BatchContext | None, model: Any, num_seqs: int, num_cells: int) -> BatchContext:
    """The existing context, emptied, or a larger one."""
    from llama_cpp._internals import LlamaBatch, LlamaContext

    if room and room.num_seqs >= num_seqs and room.num_cells >= num_cells:
        room.context.kv_cache_clear()
        return room
    if room:
        room.close()
    params = model.context_params
    before = params.n_ctx, params.n_seq_max, params.kv_unified
    params.n_ctx, params.n_seq_max, params.kv_unified = num_cells, num_seqs, True
    context = LlamaContext(model=model._model, params=params, verbose=False)
    params.n_ctx, params.n_seq_max, params.kv_unified = before
    width = max(params.n_batch, num_seqs)
    batch = LlamaBatch(n_tokens=width, embd=0, n_seq_max=1, verbose=False)
    return BatchContext(context, batch, num_seqs, num_cells, params.n_batch)


def run_batched(room: BatchContext, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
    """n samples of one prompt in one batch, with a shared prompt."""
    seeds, ends, most = sampling["seeds"], set(sampling["ends"]), sampling["max_new_tokens"]
    context, batch = room.context, room.batch
    start = time.perf_counter()
    for first in range(0, len(prompt), room.width):
        piece = prompt[first : first + room.width]
        batch.set_batch(piece, n_past=first, logits_all=False)
        context.decode(batch)
    samplers = [chain(sampling, seed % (1 << 32)) for seed in seeds]
    texts = [[int(sampler.sample(context, -1))] for sampler in samplers]
    prefill = time.perf_counter() - start
    for i in range(1, len(seeds)):
        context.kv_cache_seq_cp(0, i, 0, -1)
    running = list(range(len(seeds)))
    while running := [i for i in running if texts[i][-1] not in ends and len(texts[i]) < most]:
        fill(batch.batch, [(texts[i][-1], len(prompt) + len(texts[i]) - 1, i) for i in running])
        context.decode(batch)
        for row, i in enumerate(running):
            texts[i].append(int(samplers[i].sample(context, row)))
    samples = [
        {"tokens": text, "finish": "stop" if text[-1] in ends else "length"} for text in texts
    ]
    return {"samples": samples, "prefill_seconds": prefill}


def fill(batch: Any, rows: list[tuple[int, int, int]]) -> None:
    """One (token, position, sequence) per row, all with logits."""
    batch.n_tokens = len(rows)
    for row, (token, position, sequence) in enumerate(rows):
        batch.token[row], batch.pos[row] = token, position
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        batch.logits[row] = True


def converted(model: Path, dtype: str, cache: Path) -> Path:
    """The GGUF file of a checkpoint, written on first use."""
    path = cache / f"{dtype}.gguf"
    if not path.exists():
        sibling_module("llama_gguf").write(model, path, dtype)
    return path


def sibling_module(name: str) -> ModuleType:
    """A module of this folder, which is not on the path."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module
