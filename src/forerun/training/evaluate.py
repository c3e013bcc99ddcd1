"""How well a model solves a task: accuracy of a sample and of the majority, and entropy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from forerun.bench.tasks.base import Example
from forerun.bench.tasks.reasoning import ReasoningTask, read_answer

from .processes import in_processes

FORK = 0.5  # nats; tokens above are choices
EDGES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 20.0)


@dataclass(frozen=True)
class Solved:
    """The samples of one problem, judged."""

    level: int
    right: list[bool]  # per sample
    majority: bool
    num_distinct: int  # different texts
    num_tokens: int  # over all samples


@dataclass(frozen=True)
class Sampling:
    """How an evaluation draws its samples; `limit` is the longest, in tokens."""

    folder: Path
    num_problems: int
    num_samples: int
    temperature: float
    limit: int
    seed: int
    device: str


@dataclass(frozen=True)
class Report:
    """Accuracies in percent, entropies in nats per token."""

    num_problems: int
    num_samples: int
    temperature: float
    one_sample: float
    majority: float
    any_right: float
    one_sample_by_level: dict[int, float]
    majority_by_level: dict[int, float]
    distinct_texts: float  # mean share of different texts among a problem's samples
    mean_tokens: float
    mean_entropy: float
    fork_share: float
    entropy_histogram: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a results file."""
        return asdict(self)


def evaluate(
    folder: Path,
    num_problems: int = 200,
    num_samples: int = 16,
    temperature: float = 0.6,
    limit: int = 800,
    seed: int = 0,
    workers: int = 1,
    device: str = "cpu",
    on_batch: Callable[[int, int], None] | None = None,
) -> Report:
    """Samples held-out problems, levels in turn; entropy is of other samples, at temperature 1."""
    task = ReasoningTask("heldout", seed=seed, size=num_problems)
    order = sorted(range(num_problems), key=lambda i: -task.example(i).level)  # long batches first
    batches = [order[at : at + 16] for at in range(0, num_problems, 16)]
    how = Sampling(folder, num_problems, num_samples, temperature, limit, seed, device)
    job = partial(_judge_batch, how)
    solved: list[Solved] = []
    entropies: list[np.ndarray] = []
    for done, (part, entropy) in enumerate(in_processes(job, batches, workers), 1):
        solved.extend(part)
        entropies.append(entropy)
        if on_batch:
            on_batch(done, len(batches))
    return summarise(solved, np.concatenate(entropies), num_samples, temperature)


def _judge_batch(how: Sampling, batch: list[int]) -> tuple[list[Solved], np.ndarray]:
    model, tokenizer = load(how.folder, how.device)
    task = ReasoningTask("heldout", seed=how.seed, size=how.num_problems)
    examples = [task.example(i) for i in batch]
    torch.manual_seed(how.seed + 1000 * batch[0])
    texts = sample(model, tokenizer, examples, how.num_samples, how.temperature, how.limit)
    solved = [judge(task, example, group) for example, group in zip(examples, texts, strict=True)]
    return solved, entropies(model, tokenizer, examples, how.limit)


def load(folder: Path, device: str) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return torch.nn.Module.to(model, device).eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def sample(
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    num_samples: int,
    temperature: float,
    limit: int,
) -> list[list[tuple[str, int]]]:
    """For each example its samples as (text, number of tokens)."""
    prompts = [e.prompt for e in examples for _ in range(num_samples)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    ids, mask = inputs["input_ids"].to(model.device), inputs["attention_mask"].to(model.device)
    rows = draw(model, ids, mask, temperature, limit, tokenizer.eos_token_id)
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    made = [(text, len(row)) for text, row in zip(texts, rows, strict=True)]
    return [made[at : at + num_samples] for at in range(0, len(made), num_samples)]


def draw(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, temperature: float, limit: int, end: int
) -> list[list[int]]:
    """Plain sampling of left-padded rows (rows, width); rows that have ended leave the batch."""
    rows: list[list[int]] = [[] for _ in ids]
    running = torch.arange(len(ids), device=ids.device)
    positions, cache = (mask.cumsum(1) - 1).clamp(min=0), DynamicCache(config=model.config)
    for _ in range(limit):
        out = model(
            ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            logits_to_keep=1,
        )
        probs = torch.softmax(out.logits[:, -1].float() / temperature, dim=-1)
        tokens = torch.multinomial(probs, 1)  # (rows still running, 1)
        for row, token in zip(running.tolist(), tokens[:, 0].tolist(), strict=True):
            rows[row].append(token)
        keep = (tokens[:, 0] != end).nonzero()[:, 0]
        if not len(keep):
            break
        if len(keep) < len(running):
            cache.batch_select_indices(keep)
        running, ids, positions = running[keep], tokens[keep], positions[keep, -1:] + 1
        mask = torch.cat([mask[keep], torch.ones_like(ids)], dim=1)
    return rows


def judge(task: ReasoningTask, example: Example, samples: list[tuple[str, int]]) -> Solved:
    """Samples scored one by one, and by their most frequent answer (first seen wins a tie)."""
    texts = [text for text, _ in samples]
    votes = Counter(answer for text in texts if (answer := read_answer(text)) is not None)
    majority = bool(votes) and votes.most_common(1)[0][0] == example.answer
    right = [task.score(example, text) == 1.0 for text in texts]
    return Solved(example.level, right, majority, len(set(texts)), sum(n for _, n in samples))


@torch.no_grad()
def entropies(model: Any, tokenizer: Any, examples: Sequence[Example], limit: int) -> np.ndarray:
    """Entropy in nats at each token of one sample per example, drawn at temperature 1."""
    found = []
    for example, group in zip(
        examples, sample(model, tokenizer, examples, 1, 1.0, limit), strict=True
    ):
        prompt = tokenizer(example.prompt)["input_ids"]
        solution = tokenizer(group[0][0])["input_ids"]
        ids = torch.tensor([prompt + solution], device=model.device)
        logp = torch.log_softmax(
            model(ids).logits[0, len(prompt) - 1 :].float(), dim=-1
        )  # (solution + 1, V)
        found.append(-(logp.exp() * logp).sum(-1).cpu().numpy())
    return np.concatenate(found)


def summarise(
    solved: list[Solved], entropy: np.ndarray, num_samples: int, temperature: float
) -> Report:
    """Means over problems, and over tokens for the entropy."""
    levels = sorted({s.level for s in solved})
    shares = np.histogram(np.clip(entropy, 0, EDGES[-1]), EDGES)[0] / len(entropy)
    names = [f"{a:g}-{b:g}" for a, b in zip(EDGES[:-2], EDGES[1:-1], strict=True)] + [
        f">{EDGES[-2]:g}"
    ]
    return Report(
        num_problems=len(solved),
        num_samples=num_samples,
        temperature=temperature,
        one_sample=_percent(x for s in solved for x in s.right),
        majority=_percent(s.majority for s in solved),
        any_right=_percent(any(s.right) for s in solved),
        one_sample_by_level={
            n: _percent(x for s in solved if s.level == n for x in s.right) for n in levels
        },
        majority_by_level={n: _percent(s.majority for s in solved if s.level == n) for n in levels},
        distinct_texts=_percent(s.num_distinct / num_samples for s in solved),
        mean_tokens=sum(s.num_tokens for s in solved) / (len(solved) * num_samples),
        mean_entropy=float(entropy.mean()),
        fork_share=_percent(entropy > FORK),
        entropy_histogram={
            name: round(100 * float(x), 2) for name, x in zip(names, shares, strict=True)
        },
    )


def _percent(values: Any) -> float:
    values = list(values)
    return round(100 * sum(map(float, values)) / len(values), 2)
