"""(e) Tokens a second that the training loop learns from, and the share of a product's speed."""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.bench.hardware_limits import product_rate
from forerun.training.data.documents import Batches, Documents
from forerun.training.language_model import LanguageModel, Size
from forerun.training.loop import Loop, LoopOptions, Progress

from .report import OutOfTime, Report
from .setting import Setting

SIZES = {
    "reasoner (4M)": (Size(hidden=256, layers=6, heads=4, kv_heads=2, inner=640), 3072),
    "30M": (Size(hidden=512, layers=8, heads=8, kv_heads=4, inner=2048), 16384),
    "0.3B": (Size(hidden=1024, layers=24, heads=16, kv_heads=4, inner=3072), 16384),
}
TINY = {"tiny": (Size(hidden=32, layers=1, heads=2, kv_heads=1, inner=48), 256)}
VOCAB, CONTEXT, WARM = 768, 1024, 5
STEPS, SECONDS = 40, 8.0  # of a size, at most


def run(report: Report, setting: Setting) -> None:
    """Every size of a language model through the loop, with the recipe's own optimizers."""
    peak = None
    if not setting.is_smoke:
        peak = product_rate(torch.bfloat16, device="cuda") * 1e9
        report.add("a product in bf16", peak / 1e12, "TFLOP/s")
    for name, (size, tokens) in (TINY if setting.is_smoke else SIZES).items():
        report.check(2.0 if not setting.is_smoke else 0.0)
        throughput(report, name, size, tokens, peak, setting)


def throughput(
    report: Report, name: str, size: Size, tokens: int, peak: float | None, setting: Setting
) -> None:
    """Tokens a second of one size after WARM steps."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=size.hidden,
            intermediate_size=size.inner,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
        )
    )
    torch.nn.Module.to(model, setting.device)
    batches = Batches(some_documents(64 if setting.is_smoke else 4000), budget=tokens)
    clock = Clock(report, 2 if setting.is_smoke else STEPS, setting)
    options = LoopOptions(max_steps=10**6)
    loop = Loop(LanguageModel(model, batches), options, setting.device, on_step=clock)
    with suppress(StopIteration):
        loop.run()
    num = sum(p.numel() for p in model.parameters())
    note = f"{num / 1e6:.1f}M weights, {clock.steps} steps of {tokens} tokens x 2"
    if peak:
        note += f", {6 * num * clock.rate / peak:.1%} of a product's speed"
    report.add(f"{name}: trained", clock.rate, "tokens/s", note=note)


class Clock:
    """Listener of the loop: tokens and seconds after the first steps; ends the run."""

    def __init__(self, report: Report, most: int, setting: Setting) -> None:
        self.report, self.most, self.setting = report, most, setting
        self.steps, self._start, self._tokens, self.rate = 0, 0.0, 0, 0.0

    def __call__(self, progress: Progress) -> None:
        warm = 0 if self.setting.is_smoke else WARM
        if progress.step == warm or (warm == 0 and progress.step == 1):
            self._start, self._tokens = time.perf_counter(), progress.tokens
        if progress.step <= max(warm, 1):
            return
        self.steps = progress.step - max(warm, 1)
        spent = time.perf_counter() - self._start
        self.rate = (progress.tokens - self._tokens) / spent
        if self.report.left <= 0:
            raise OutOfTime
        if self.steps >= self.most or spent > SECONDS:
            raise StopIteration


def some_documents(num: int) -> Documents:
    """Random documents of 60 to 600 tokens, the first third of each its prompt."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(60, 600, num)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = rng.integers(3, VOCAB, starts[-1]).astype(np.uint16)
    return Documents(tokens, starts, lengths // 3)
