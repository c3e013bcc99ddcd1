"""The embedded reasoner: task data, tokenizer, a small Llama and its draft, evaluation, export.

Data are generated problems, short ones more often, tokenised once; held-out ones have the same mix
of levels. Loss is on solutions, with a tenth of its weight on prompts. Both models see the same
data; the draft is a tenth of the size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from forerun.controllers.fixed import Fixed
from forerun.core.sampling import Sampling
from forerun.drafters.draft_model import DraftModel
from forerun.errors import ConfigError
from forerun.models.draft_link import name_companion
from forerun.tasks._reasoning_world import MIX
from forerun.training.data import Batches
from forerun.training.evaluate import Report, evaluate, measure_tau
from forerun.training.export import export
from forerun.training.language_model import LanguageModelRecipe, Size, build_model
from forerun.training.loop import Loop, LoopOptions, Progress
from forerun.training.model_card import write_card
from forerun.training.plans import check_plan, read_plan, write_plan
from forerun.training.problems import Problems
from forerun.training.processes import process_group
from forerun.utils.files import write_atomically

CONTEXT, VOCAB = 1024, 768
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
    micro_batches: int = 0  # per step; 0: two, or the next multiple of the processes
    max_steps: int | None = None  # of each model, where minutes are not the limit
    num_samples: int = 16  # per held-out problem
    sample_limit: int = 800  # tokens
    num_tau_problems: int = 12  # first of the held-out ones

    def __post_init__(self) -> None:
        if self.threads < 1 or self.num_problems < 1 or self.num_held_out < 1:
            raise ConfigError(
                "threads, problems and held-out problems must be at least 1; e.g. --threads 2"
            )

    @property
    def processes(self) -> int:
        """Training processes."""
        return self.threads if self.device == "cpu" else 1

    @property
    def problems(self) -> Problems:
        """The training data."""
        return Problems(
            self.out, self.seed, self.num_problems, MIX, self.num_tokenizer_problems, VOCAB, CONTEXT
        )

    def settings(self) -> dict[str, Any]:
        """What a run keeps to its end."""
        kept = ("seed", "micro_batches", "micro_tokens", "num_tokenizer_problems")
        shapes = {name: asdict(size) for name, size in SIZES.items()}
        fixed = {"levels": MIX, "vocabulary": VOCAB, "context": CONTEXT, "shapes": shapes}
        return {name: getattr(self, name) for name in kept} | fixed

    def budgets(self) -> dict[str, Any]:
        """What may change from sitting to sitting."""
        others = vars(self).keys() - self.settings().keys() - {"out"}
        return {name: getattr(self, name) for name in sorted(others)}

    def minutes_of(self, name: str) -> float:
        """Training time of one of the two models."""
        return self.minutes if name == "reasoner" else self.draft_minutes


@dataclass(frozen=True)
class Events:
    """What a caller may watch; a step comes with its model and the share of budget spent."""

    on_data: Callable[[int, int], None] | None = None
    on_step: Callable[[str, Progress, float], None] | None = None
    on_evaluation: Callable[[str, int, int], None] | None = None  # what, done, of how many


def run(plan: Plan, resume: bool = False, events: Events | None = None) -> dict[str, Report]:
    """Does whatever is not yet done in the folder, in order; reports by model name."""
    events = events or Events()
    plan = settle(plan, resume)
    tokenizer = plan.problems.tokenizer()
    plan.problems.make(plan.threads, events.on_data)
    progress, reports = {}, {}
    for name in SIZES:
        progress[name] = train(plan, name, events.on_step)
        export(load_trained(plan, name), tokenizer, plan.out / name)
    name_companion(plan.out / "reasoner", "../draft")
    for name in SIZES:
        reports[name] = examine(plan, name, progress[name].step, events)
        card = _card(plan, name, progress[name], reports[name])
        _write(plan.out / name / "README.md", card)
    found = {name: report.as_dict() for name, report in reports.items()}
    _write(plan.out / "evaluation.json", json.dumps(found, indent=2) + "\n")
    return reports


def settle(plan: Plan, resume: bool) -> Plan:
    """The plan with its micro-batches per step, once it is sure that it suits the folder.

    Raises ConfigError where the folder holds a run that this one does not continue.
    """
    is_trained = any(plan.out.glob("*.pt"))
    if is_trained and not resume:
        raise ConfigError(
            f"{plan.out} holds an earlier run; continue it with --resume, or choose another --out"
        )
    usual = 2 if is_trained else -(-2 // plan.processes) * plan.processes  # folders of old: 2
    kept = read_plan(plan.out).get("micro_batches", usual)
    plan = replace(plan, micro_batches=plan.micro_batches or kept)
    check_plan(plan.out, plan.settings())
    plan.problems.check()
    if plan.micro_batches % plan.processes:
        raise ConfigError(
            f"a step of {plan.micro_batches} micro-batches cannot be shared evenly by "
            f"{plan.processes} processes; use --threads {_divisor(plan)}"
        )
    write_plan(plan.out, plan.settings(), plan.budgets())
    return plan


def _divisor(plan: Plan) -> int:
    """The most processes, up to those asked for, that share a step evenly."""
    return next(n for n in range(plan.processes, 0, -1) if plan.micro_batches % n == 0)


def examine(plan: Plan, name: str, step: int, events: Events) -> Report:
    """Accuracy and entropy of an exported model, and what it does for drafting."""
    is_target, folder = name == "reasoner", plan.out / name
    sampling = Sampling(
        temperature=0.6,
        n=plan.num_samples if is_target else min(4, plan.num_samples),
        max_new_tokens=plan.sample_limit,
    )
    report = evaluate(
        folder,
        plan.out / "evaluation" / f"{name}-step{step}-{sampling.n}x{plan.sample_limit}.jsonl",
        plan.num_held_out,
        sampling,
        plan.seed,
        plan.processes,
        plan.device,
        _named(name, events),
    )
    target = plan.out / "reasoner"
    parts: dict[str, Any] = {"drafter": "stand", "controller": "fixed"}
    if not is_target:
        draft = DraftModel(model=str(folder), dtype="fp32", device=plan.device)
        parts = {"drafter": draft, "controller": Fixed(nodes=4, depth=4)}
    tau = measure_tau(
        target,
        _num_tau(plan),
        sampling,
        plan.seed,
        plan.device,
        _named(f"tau of {name}", events),
        **parts,
    )
    return replace(report, tau=tau)


def _num_tau(plan: Plan) -> int:
    return min(plan.num_tau_problems, plan.num_held_out)


def _named(what: str, events: Events) -> Callable[[int, int], None] | None:
    on = events.on_evaluation
    return (lambda done, total: on(what, done, total)) if on else None


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
    tokenizer, device = plan.problems.tokenizer(), torch.device(plan.device)
    model: PreTrainedModel = build_model(SIZES[name], tokenizer, plan.seed)
    torch.nn.Module.to(model, device)
    batches = Batches(
        plan.problems.documents(),
        budget=plan.micro_tokens,
        accumulate=plan.micro_batches,
        pad=tokenizer.pad_token_id,
        seed=plan.seed,
    )
    options = LoopOptions(
        minutes=plan.minutes_of(name), max_steps=plan.max_steps, decay_share=0.4, seed=plan.seed
    )
    loop = Loop(LanguageModelRecipe(model, batches), options, device, plan.out / f"{name}.pt")
    loop.resume()
    return model, loop


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
        f" --problems {plan.num_problems} --held-out {plan.num_held_out}"
    )
    shape = f"{size.layers} layers, width {size.hidden}, {size.heads} heads ({size.kv_heads} KV)"
    machine = (
        f"{plan.threads} CPU core(s)" if plan.device == "cpu" else torch.cuda.get_device_name()
    )
    facts = {
        "title": "forerun reasoner" if name == "reasoner" else "forerun reasoner draft",
        "role": _ROLES[name],
        "shape": f"{shape}; byte-level BPE of {VOCAB} tokens, single digits; context {CONTEXT}",
        "made": f"{plan.num_problems} generated problems, on {machine}",
        "command": command,
        "tau_of": _TAU[name].format(n=report.num_samples, problems=_num_tau(plan)),
    }
    return write_card(facts, progress, report)


_ROLES = {
    "reasoner": "A small language model that solves word problems with written-out steps.",
    "draft": "A tenth-size companion of the forerun reasoner that drafts tokens for it.",
}

_TAU = {
    "reasoner": "tau with STAND, best-of-{n}, {problems} problems",
    "draft": "tau of the reasoner with chains of 4 of this draft, {n} samples, {problems} problems",
}


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda part: Path.write_text(part, text))
