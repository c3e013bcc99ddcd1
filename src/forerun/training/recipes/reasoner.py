"""The embedded reasoner: task data, tokenizer, a small Llama and its draft, evaluation, export.

Data are generated problems, short ones more often, tokenised once. Loss is on solutions, with a
tenth of its weight on prompts. Both models see the same data; the draft is a tenth of the size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from forerun.bench.tasks.reasoning import ReasoningTask
from forerun.errors import ConfigError
from forerun.training.data import (
    Batches,
    Documents,
    load_documents,
    save_documents,
    write_atomically,
)
from forerun.training.evaluate import Report, evaluate
from forerun.training.export import export
from forerun.training.language_model import LanguageModelRecipe, Size, build_model
from forerun.training.loop import Loop, LoopOptions, Progress
from forerun.training.model_card import write_card
from forerun.training.processes import in_processes, process_group
from forerun.training.tokenizer import train_tokenizer

CONTEXT, VOCAB, ACCUMULATE = 1024, 768, 2
MIX = (1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 5, 6)  # levels in turn: short problems teach most per token
SIZES = {
    "reasoner": Size(hidden=256, layers=6, heads=4, kv_heads=2, inner=640),
    "draft": Size(hidden=128, layers=2, heads=2, kv_heads=1, inner=352),
}


@dataclass(frozen=True)
class Plan:
    """One run of the recipe, resolved."""

    out: Path
    minutes: float = 60.0
    draft_minutes: float = 10.0
    threads: int = 2  # on a CPU: processes of one thread each
    device: str = "cpu"
    seed: int = 0
    num_problems: int = 160_000
    num_tokenizer_problems: int = 6000
    num_held_out: int = 200
    micro_tokens: int = 3072  # per micro-batch
    max_steps: int | None = None  # of each model, where minutes are not the limit
    num_samples: int = 16  # per held-out problem
    sample_limit: int = 800  # tokens

    def __post_init__(self) -> None:
        if self.threads < 1 or self.num_problems < 1 or self.num_held_out < 1:
            raise ConfigError(
                "threads, problems and held-out problems must be at least 1; e.g. --threads 2"
            )

    @property
    def processes(self) -> int:
        """Training processes."""
        return self.threads if self.device == "cpu" else 1

    def minutes_of(self, name: str) -> float:
        """Training time of one of the two models."""
        return self.minutes if name == "reasoner" else self.draft_minutes


@dataclass(frozen=True)
class Events:
    """What a caller may watch; a step comes with its model and the share of budget spent."""

    on_data: Callable[[int, int], None] | None = None
    on_step: Callable[[str, Progress, float], None] | None = None
    on_evaluation: Callable[[int, int], None] | None = None


def run(plan: Plan, resume: bool = False, events: Events | None = None) -> dict[str, Report]:
    """Does whatever is not yet done in the folder, in order; reports by model name."""
    events = events or Events()
    if not resume and any(plan.out.glob("*.pt")):
        raise ConfigError(
            f"{plan.out} holds an earlier run; continue it with --resume, or choose another --out"
        )
    tokenizer = prepare_tokenizer(plan)
    make_data(plan, events.on_data)
    progress, reports = {}, {}
    for name in SIZES:
        progress[name] = train(plan, name, events.on_step)
    for name in SIZES:
        folder = plan.out / name
        export(load_trained(plan, name), tokenizer, folder, card="")
        reports[name] = evaluate(
            folder,
            plan.num_held_out,
            plan.num_samples if name == "reasoner" else min(4, plan.num_samples),
            limit=plan.sample_limit,
            seed=plan.seed,
            workers=plan.processes,
            device=plan.device,
            on_batch=events.on_evaluation,
        )
        export(
            load_trained(plan, name),
            tokenizer,
            folder,
            card=_card(plan, name, progress[name], reports[name]),
        )
    _write_json(plan.out / "evaluation.json", {name: r.as_dict() for name, r in reports.items()})
    return reports


def prepare_tokenizer(plan: Plan) -> PreTrainedTokenizerFast:
    """The run's tokenizer, learned from its first training problems."""
    folder = plan.out / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        task = ReasoningTask("train", MIX, plan.seed)
        examples = (task.example(i) for i in range(plan.num_tokenizer_problems))
        made = train_tokenizer((e.prompt + e.reference for e in examples), VOCAB, CONTEXT)
        folder.mkdir(parents=True, exist_ok=True)
        made.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def make_data(
    plan: Plan, on_shard: Callable[[int, int], None] | None = None, shard_size: int = 8000
) -> None:
    """Writes the training shards that do not lie in the folder yet."""
    firsts = [
        first
        for first in range(0, plan.num_problems, shard_size)
        if not _shard(plan, first).exists()
    ]
    jobs = [(plan, first, min(shard_size, plan.num_problems - first)) for first in firsts]
    for done, _ in enumerate(in_processes(_write_shard, jobs, plan.threads), 1):
        if on_shard:
            on_shard(done, len(jobs))


def _shard(plan: Plan, first: int) -> Path:
    return plan.out / "data" / f"shard-{first:07d}.npz"


def _write_shard(job: tuple[Plan, int, int]) -> None:
    plan, first, count = job
    tokenizer = prepare_tokenizer(plan)
    save_documents(
        _shard(plan, first),
        tokenise(ReasoningTask("train", MIX, plan.seed), tokenizer, first, count),
    )


def tokenise(
    task: ReasoningTask, tokenizer: PreTrainedTokenizerFast, first: int, count: int
) -> list[tuple[list[int], int]]:
    """(Ids of prompt, solution and end mark; prompt length) per problem from index `first` on."""
    examples = [task.example(i) for i in range(first, first + count)]
    prompts = tokenizer([e.prompt for e in examples])["input_ids"]
    solutions = tokenizer([e.reference for e in examples])["input_ids"]
    end = tokenizer.eos_token_id
    return [([*p, *s, end], len(p)) for p, s in zip(prompts, solutions, strict=True)]


def train(
    plan: Plan, name: str, on_step: Callable[[str, Progress, float], None] | None = None
) -> Progress:
    """Trains one of the two models to the end of its budget, from its checkpoint if any."""
    with process_group(plan.processes, _train_beside, (plan, name)):
        _, loop = prepare(plan, name)
        loop.on_step = (lambda p: on_step(name, p, loop.spent())) if on_step else None
        return loop.run()


def prepare(plan: Plan, name: str) -> tuple[PreTrainedModel, Loop]:
    """One of the two models and its training loop, both as the last checkpoint left them."""
    tokenizer, device = prepare_tokenizer(plan), torch.device(plan.device)
    model: PreTrainedModel = build_model(SIZES[name], tokenizer, plan.seed)
    torch.nn.Module.to(model, device)
    batches = Batches(
        documents(plan),
        budget=plan.micro_tokens,
        accumulate=ACCUMULATE,
        pad=tokenizer.pad_token_id,
        seed=plan.seed,
    )
    options = LoopOptions(
        minutes=plan.minutes_of(name), max_steps=plan.max_steps, decay_share=0.4, seed=plan.seed
    )
    loop = Loop(LanguageModelRecipe(model, batches), options, device, plan.out / f"{name}.pt")
    loop.resume()
    return model, loop


def documents(plan: Plan) -> Documents:
    """The run's training documents."""
    return load_documents(sorted((plan.out / "data").glob("shard-*.npz")))


def _train_beside(plan: Plan, name: str) -> None:
    prepare(plan, name)[1].run()


def load_trained(plan: Plan, name: str) -> PreTrainedModel:
    """The model at its last checkpoint, on the CPU."""
    model, _ = prepare(replace(plan, device="cpu"), name)
    return model


def _card(plan: Plan, name: str, progress: Progress, report: Report) -> str:
    size = SIZES[name]
    command = (
        f"forerun train reasoner --minutes {plan.minutes:g} --draft-minutes {plan.draft_minutes:g}"
        f" --threads {plan.threads} --device {plan.device} --seed {plan.seed}"
    )
    shape = f"{size.layers} layers, width {size.hidden}, {size.heads} heads ({size.kv_heads} KV)"
    machine = f"{plan.threads} CPU cores" if plan.device == "cpu" else torch.cuda.get_device_name()
    facts = {
        "title": "forerun reasoner" if name == "reasoner" else "forerun reasoner draft",
        "role": _ROLES[name],
        "shape": f"{shape}; byte-level BPE of {VOCAB} tokens, single digits; context {CONTEXT}",
        "made": f"{plan.num_problems} generated problems, on {machine}",
        "command": command,
    }
    return write_card(facts, progress, report)


_ROLES = {
    "reasoner": "A small language model that solves word problems with written-out steps.",
    "draft": "A tenth-size companion of the forerun reasoner that drafts tokens for it.",
}


def _write_json(path: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data, indent=2) + "\n"
    write_atomically(path, lambda part: Path.write_text(part, text))
