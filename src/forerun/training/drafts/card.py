"""The model card of a trained draft: target, data, shape, acceptance, cost."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from forerun.core.modelled_speedup import speedup
from forerun.training.data.documents import Documents
from forerun.training.drafts.data import COLUMNS
from forerun.training.plans import read_plan

COSTS = ("step", "tokens", "seconds")  # of the training of a phase


class Settings(Protocol):
    """The options of the recipe that the card lists."""

    model: str
    recipe: str
    loss: str
    data: str
    seed: int


def data_hash(documents: Documents) -> str:
    """SHA-256 of the texts that a draft was aligned on."""
    digest = hashlib.sha256(documents.starts.astype("<i8").tobytes())
    digest.update(documents.tokens.astype("<i4").tobytes())
    return digest.hexdigest()


def draft_card(
    settings: Settings, facts: Mapping[str, Any], documents: Documents, out: Path
) -> str:
    """The README of a draft. facts: shape, training, stages, best, tau, tau_greedy, gamma, c."""
    made, shape = read_plan(out / "data"), facts["shape"]
    size, best = shape["size"], facts["best"]
    domains = [k for k in best if k not in COLUMNS | {"all"}]
    columns = ["all", "greedy", *domains]
    rows = [*facts["stages"].items(), (f"kept ({best['phase']}, step {best['step']})", best)]
    lines = [f"| {name} | " + " | ".join(f"{r[c]:.3f}" for c in columns) + " |" for name, r in rows]
    return _CARD.format(
        target=made.get("target", settings.model),
        target_hash=made.get("target_hash", ""),
        tokenizer_hash=made.get("tokenizer_hash", ""),
        data_hash=data_hash(documents),
        num=len(documents),
        million=len(documents.tokens) / 1e6,
        s=settings,
        parameters=shape["parameters"],
        size=size,
        f=facts,
        head=" | ".join(columns),
        rule="---:|" * len(columns),
        table="\n".join(lines),
        **{name: sum(one[name] for one in facts["training"].values()) for name in COSTS},
        modelled=speedup(facts["tau"], facts["gamma"], facts["c"]),
    )


_CARD = """---
library_name: transformers
pipeline_tag: text-generation
---
# Draft model for {target}

Drafts tokens for {target} in speculative decoding; it has the same tokenizer.
Llama architecture with tied embeddings: {parameters:,} parameters, depth {size[layers]}, width
{size[hidden]}, MLP width {size[inner]}, {size[heads]} heads.

| what | value |
|---|---|
| recipe | {s.recipe}, loss {s.loss}, mean per {s.mean}, data {s.data}, seed {s.seed} |
| target | `{target_hash}` (SHA-256 of config and weights; of files above 64 MiB, of samples) |
| tokenizer | `{tokenizer_hash}` |
| data | {num} answers of the target, {million:.2f} M tokens, `{data_hash}` |
| training | {step} steps, {tokens:,} tokens, {seconds:.0f} s |
| cost of a step c | {f[c]:.3f} of a target step, measured |
| tau, drafts of {f[gamma]}, temperature 1 | {f[tau]:.2f} tokens per target pass |
| tau, drafts of {f[gamma]}, greedy | {f[tau_greedy]:.2f} |
| modelled speed-up tau / (c gamma + 1) | {modelled:.2f} |

## Held-out acceptance

sum min(p, q) per position at temperature 1; "greedy" is the share of equal argmax.

| after | {head} |
|---|{rule}
{table}
"""
