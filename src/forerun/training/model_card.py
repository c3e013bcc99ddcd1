"""Model cards of the reasoner and its draft: shape, training, measurements."""

from __future__ import annotations

from typing import Protocol

import torch

from .evaluate import Report
from .language_model import Size
from .loop import Progress

_ROLES = {
    "reasoner": "A small language model that solves word problems with written-out steps.",
    "draft": "A tenth-size companion of the forerun reasoner that drafts tokens for it.",
}
_TAU = {
    "reasoner": "tau with STAND, best-of-{n}, {problems} problems",
    "draft": "tau of the reasoner with chains of 4 of this draft, {n} samples, {problems} problems",
}


class Settings(Protocol):
    """The options of the reasoner's recipe that its card lists."""

    minutes: float
    draft_minutes: float
    threads: int
    device: str
    seed: int
    problems: int
    held_out: int
    tau_problems: int


def reasoner_facts(
    s: Settings, name: str, size: Size, num_samples: int, vocabulary: int, context: int
) -> dict[str, str]:
    """The part of a card without measurements."""
    command = (
        f"forerun train reasoner --minutes {s.minutes:g} --draft-minutes {s.draft_minutes:g}"
        f" --threads {s.threads} --device {s.device} --seed {s.seed}"
        f" --problems {s.problems} --held-out {s.held_out}"
    )
    shape = f"{size.layers} layers, width {size.hidden}, {size.heads} heads ({size.kv_heads} KV)"
    is_cpu = s.device == "cpu"
    machine = f"{s.threads} CPU core(s)" if is_cpu else torch.cuda.get_device_name()
    problems = min(s.tau_problems, s.held_out)
    return {
        "title": "forerun reasoner" if name == "reasoner" else "forerun reasoner draft",
        "role": _ROLES[name],
        "shape": f"{shape}; byte-level BPE of {vocabulary} tokens, single digits; "
        f"context {context}",
        "made": f"{s.problems} generated problems, on {machine}",
        "command": command,
        "tau_of": _TAU[name].format(n=num_samples, problems=problems),
    }


def write_card(facts: dict[str, str], progress: Progress, report: Report) -> str:
    """The README of a model; facts: title, role, shape, made, command, tau_of."""
    one, most = report.one_sample_by_level, report.majority_by_level
    return _CARD.format(
        **facts,
        p=progress,
        r=report,
        minutes=progress.seconds / 60,
        million=progress.tokens / 1e6,
        levels="\n".join(f"| {n} | {one[n]:.1f} | {most[n]:.1f} |" for n in one),
        histogram="\n".join(f"| {k} | {x:.1f} |" for k, x in report.entropy_histogram.items()),
    )


_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# {title}

{role}
Llama architecture: {shape}.
It knows nothing but the `reasoning` task of forerun: six levels of word problems about people,
boxes, farms, hours, money and distances, up to 13 operations and four-digit numbers.

Prompt form: `Problem: ...`, a line break, `Solution:`, a line break.
The text ends in a line `Answer: N`.

## How it was made

`{command}`

{p.step} steps, {million:.1f} million tokens, {minutes:.0f} minutes of training; {made}.
Muon and AdamW, bf16 autocast, warm-up, constant rate, linear decay; loss on solutions, with a
tenth of its weight on prompts.

## Measured

{r.num_problems} held-out problems with the training data's mix of levels,
{r.num_samples} samples each, temperature {r.temperature:g}, top-p 1, bf16 weights
computed in float32.

| what | value |
|---|---|
| one sample right | {r.one_sample:.1f} % |
| majority of {r.num_samples} right | {r.majority:.1f} % |
| any of {r.num_samples} right | {r.any_right:.1f} % |
| different texts among {r.num_samples} | {r.distinct_texts:.1f} % |
| tokens per solution | {r.mean_tokens:.0f} |
| mean entropy at temperature 1 | {r.mean_entropy:.3f} nats per token |
| forks (entropy above 0.5 nats) | {r.fork_share:.1f} % of tokens |
| {tau_of} | {r.tau:.2f} tokens per pass |

| level | one sample, % | majority, % |
|---|---|---|
{levels}

| entropy, nats | % of tokens |
|---|---|
{histogram}

## Limits

Not a general model: other prompts get nonsense. Its arithmetic and its choice of numbers fail now
and then, which is what makes best-of-n useful.
"""
