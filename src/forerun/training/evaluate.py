"""Evaluation on the reasoning task: accuracy of one sample and of the majority, entropy, tau.

Each problem has its own seed and its own line in the results file, so an interrupted evaluation
continues with the missing problems.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import forerun
from forerun.core.records import Step
from forerun.core.sampling import Sampling
from forerun.engine.stats import Stats
from forerun.tasks.reasoning import ReasoningTask, read_answer
from forerun.utils.stats import majority

from .processes import in_processes

FORK = 0.5  # nats; a token with a higher entropy is a fork
EDGES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 20.0)
SEEDS = 1_000_000  # distance between the seeds of two runs


@dataclass(frozen=True)
class Solved:
    """Scores of the samples of one problem, and the entropy of one more at temperature 1."""

    problem: int
    level: int
    right: list[bool]  # per sample
    majority: bool
    num_distinct: int  # number of distinct texts
    num_tokens: int  # over all samples
    entropy: float  # mean, nats per token
    entropy_counts: list[int]  # histogram of token entropies with EDGES


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
    distinct_texts: float  # mean share of distinct texts among the samples of a problem
    mean_tokens: float
    mean_entropy: float
    fork_share: float
    entropy_histogram: dict[str, float]
    tau: float | None = None  # tokens per pass, with the drafts that the model is used with

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def evaluate(
    folder: Path,
    kept: Path,
    num_problems: int = 200,
    sampling: Sampling | None = None,
    seed: int = 0,
    workers: int = 1,
    device: str = "cpu",
    on_problem: Callable[[int, int], None] | None = None,
) -> Report:
    """Samples and scores held-out problems; results in the file `kept` are reused."""
    sampling = sampling or Sampling(temperature=0.6, n=16, max_new_tokens=800)
    solved = {s.problem: s for s in read_solved(kept) if s.problem < num_problems}
    left = [i for i in range(num_problems) if i not in solved]
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.open("a") as file:
        for s in in_processes(partial(solve, folder, sampling, seed, device), left, workers):
            file.write(
                "\n" + json.dumps(asdict(s))
            )  # starts with a line break, which ends an incomplete line
            file.flush()
            solved[s.problem] = s
            if on_problem:
                on_problem(len(solved), num_problems)
    return summarise([solved[i] for i in range(num_problems)], sampling)


def read_solved(path: Path) -> list[Solved]:
    """The complete lines of a results file; empty if there is no file."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(Solved(**json.loads(line)))
        except (ValueError, TypeError):  # an empty or incomplete line
            continue
    return found


def solve(folder: Path, sampling: Sampling, seed: int, device: str, problem: int) -> Solved:
    """Samples one held-out problem n times and scores the texts."""
    model = load(folder, device, sampling.n)
    task = ReasoningTask("heldout", seed=seed)
    example = task.example(problem)
    own = replace(sampling, seed=seed * SEEDS + problem)
    result = model.generate([example.prompt], own, drafter="none", batch=own.n)[0]
    texts = [sample.text for sample in result.samples]
    values = entropies(model, example.prompt, replace(own, temperature=1.0, n=1))
    return Solved(
        problem,
        example.level,
        right=[task.score(example, text) == 1.0 for text in texts],
        majority=majority([read_answer(text) for text in texts]) == example.answer,
        num_distinct=len(set(texts)),
        num_tokens=result.stats.generated,
        entropy=float(np.mean(values)),
        entropy_counts=np.histogram(np.clip(values, 0, EDGES[-1]), EDGES)[0].tolist(),
    )


def load(folder: Path, device: str, max_seqs: int) -> forerun.Model:
    """The model in float32."""
    return forerun.load(str(folder), dtype="fp32", device=device, max_seqs=max_seqs)


def entropies(model: forerun.Model, prompt: str, sampling: Sampling) -> list[float]:
    """Entropy in nats of the model's distribution at each sampled token, with the end token."""
    found: list[float] = []

    def look(step: Step) -> None:
        for i, law in enumerate(step.laws):
            for node in step.visited(i):
                logp = law.logprobs(node)
                found.append(-float(np.exp(logp) @ logp))

    model.generate([prompt], sampling, drafter="none", on_step=look)
    return found


def measure_tau(
    folder: Path,
    num_problems: int,
    sampling: Sampling,
    seed: int = 0,
    device: str = "cpu",
    on_problem: Callable[[int, int], None] | None = None,
    **parts: Any,
) -> float:
    """Tokens per pass on the first held-out problems; samples run one after another.

    parts: drafter and controller of `Model.run`.
    """
    model, task, total = load(folder, device, 1), ReasoningTask("heldout", seed=seed), Stats()
    for i in range(num_problems):
        own = replace(sampling, seed=seed * SEEDS + i)
        total.add(model.generate([task.example(i).prompt], own, **parts)[0].stats)
        if on_problem:
            on_problem(i + 1, num_problems)
    return round(total.tau, 2)


def summarise(solved: list[Solved], sampling: Sampling) -> Report:
    """Means over problems, and over tokens for the entropy."""
    levels = sorted({s.level for s in solved})
    counts = np.sum([s.entropy_counts for s in solved], axis=0)
    nats = sum(s.entropy * sum(s.entropy_counts) for s in solved)
    shares = 100 * counts / counts.sum()
    names = [f"{a:g}-{b:g}" for a, b in zip(EDGES[:-2], EDGES[1:-1], strict=True)]
    names.append(f">{EDGES[-2]:g}")
    return Report(
        num_problems=len(solved),
        num_samples=sampling.n,
        temperature=sampling.temperature,
        one_sample=_percent(x for s in solved for x in s.right),
        majority=_percent(s.majority for s in solved),
        any_right=_percent(any(s.right) for s in solved),
        one_sample_by_level={
            n: _percent(x for s in solved if s.level == n for x in s.right) for n in levels
        },
        majority_by_level={n: _percent(s.majority for s in solved if s.level == n) for n in levels},
        distinct_texts=_percent(s.num_distinct / sampling.n for s in solved),
        mean_tokens=sum(s.num_tokens for s in solved) / (len(solved) * sampling.n),
        mean_entropy=float(nats / counts.sum()),
        fork_share=round(float(shares[EDGES.index(FORK) :].sum()), 2),
        entropy_histogram={n: round(float(x), 2) for n, x in zip(names, shares, strict=True)},
    )


def _percent(values: Any) -> float:
    values = list(values)
    return round(100 * sum(map(float, values)) / len(values), 2)
