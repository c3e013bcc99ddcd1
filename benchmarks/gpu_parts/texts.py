"""(a) Whole greedy texts: ours on graphs against transformers, and with drafts against without.

In fp32 on the same weights all texts must be the same. In bf16 passes of one row and of many round
differently, so the share of equal texts is only reported.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from forerun.api import Model
from forerun.assets import embedded
from forerun.tasks.reasoning import ReasoningTask

from .decoding import on_graphs
from .prepare import copy_tokenizer, tiny_model
from .report import Report
from .setting import Setting

DRAFTERS = "stand", "auto"
FIRST, PROMPTS, TOKENS = 600, 6, 96  # the first problem; of each model


def run(report: Report, setting: Setting) -> None:
    """Every model in fp32 against transformers, and with drafts; then with drafts in bf16."""
    most = 4 if setting.is_smoke else TOKENS
    task = ReasoningTask("heldout")
    prompts = [task.example(FIRST + i).prompt for i in range(2 if setting.is_smoke else PROMPTS)]
    for name, folder in models(setting).items():
        for dtype in ("fp32",) if setting.is_smoke else ("fp32", "bf16"):
            report.check()
            model = on_graphs(folder, setting, dtype)
            ids = [model.tokenizer.encode(prompt) for prompt in prompts]
            plain = ours(model, ids, "none", most)
            if dtype == "fp32":
                theirs = reference(folder, ids, most, setting)
                differing(report, f"{name}, fp32: texts unlike transformers'", plain, theirs)
            for drafter in DRAFTERS:
                report.check()
                drafted = ours(model, ids, drafter, most)
                what = f"{name}, {dtype}: texts with {drafter} unlike plain"
                differing(report, what, drafted, plain, is_goal=dtype == "fp32")
            trusted = model.target.decode.is_trusted  # type: ignore[attr-defined]
            report.add(f"{name}, {dtype}: texts come from graphs", int(trusted), least=1)
            del model
            gc.collect()


def models(setting: Setting) -> dict[str, Path]:
    """The reasoner with logits that go to the host, and one with logits that stay on the device."""
    if setting.is_smoke:
        tiny_model(folder := setting.work / "texts")
        return {"tiny": folder}
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 64_000}
    torch.manual_seed(1)
    folder = setting.work / "texts"
    config = LlamaConfig(**sizes, max_position_embeddings=1024, eos_token_id=1, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)
    copy_tokenizer(folder)
    return {"reasoner": Path(embedded("reasoner")), "random, 64000 tokens": folder}


def ours(model: Model, ids: Many[list[int]], drafter: str, most: int) -> list[list[int]]:
    """Greedy tokens of each prompt, one at a time: later ones are drafted from earlier ones."""
    options = {"drafter": drafter, "temperature": 0.0, "ignore_eos": True, "batch": 1}
    found = model.generate(list(ids), max_new_tokens=most, **options)
    return [one.samples[0].tokens for one in found]


def reference(folder: Path, ids: Many[list[int]], most: int, setting: Setting) -> list[list[int]]:
    """Greedy tokens of transformers in fp32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to(setting.device).eval()
    model.generation_config.eos_token_id = None
    found = []
    for prompt in ids:
        given = torch.tensor([prompt], device=setting.device)
        mask = torch.ones_like(given)
        with torch.inference_mode():
            out = model.generate(
                given, attention_mask=mask, do_sample=False, max_new_tokens=most, pad_token_id=0
            )
        found.append(out[0, len(prompt) :].tolist())
    return found


def differing(
    report: Report,
    name: str,
    texts: list[list[int]],
    others: list[list[int]],
    *,
    is_goal: bool = True,
) -> None:
    """A row with the number of texts that differ, and the first token of each that does."""
    firsts = [first_difference(*pair) for pair in zip(texts, others, strict=True)]
    note = f"of {len(texts)} texts of {max(map(len, texts))} tokens"
    if places := [str(place) for place in firsts if place is not None]:
        note += f"; first differing tokens: {', '.join(places)}"
    report.add(name, len(places), "texts", most=0 if is_goal else None, note=note)


def first_difference(one: list[int], other: list[int]) -> int | None:
    """The first position at which two texts differ; None if they are the same."""
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
