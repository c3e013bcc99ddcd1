"""Small models that solve word problems: the embedded reasoner and its draft.

The data are generated problems, tokenised once; held-out problems have the same mix of levels.
Tokens of solutions have loss weight 1, those of prompts 0.1. Both models see the same data; the
draft is a tenth of the size. Both are evaluated on held-out problems and exported with a model
card.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel

from forerun.controllers.fixed import Fixed
from forerun.core.sampling import Sampling
from forerun.drafters.draft_model import DraftModel
from forerun.models.draft_link import name_companion
from forerun.models.load import choose_device
from forerun.tasks.reasoning import MIX
from forerun.training import plans
from forerun.training.data.documents import Batches
from forerun.training.data.problems import Problems
from forerun.training.evaluate import Report, evaluate, measure_tau
from forerun.training.export import save
from forerun.training.language_model import Size, build_model, loop_of, train_together
from forerun.training.loop import Loop, LoopOptions
from forerun.training.model_card import reasoner_facts, write_card
from forerun.training.processes import check_shares
from forerun.training.progress import Watch, counted, silent
from forerun.training.recipes.base import Recipe
from forerun.training.renamed import refuse
from forerun.utils.files import write_atomically

CONTEXT, VOCAB = 1024, 768
SIZES = {
    "reasoner": Size(hidden=256, layers=6, heads=4, kv_heads=2, inner=640),
    "draft": Size(hidden=128, layers=2, heads=2, kv_heads=1, inner=352),
}


@dataclass(kw_only=True, eq=False)
class Reasoner(Recipe):
    """Trains the embedded reasoner and its draft from generated word problems.

    minutes: training time of the reasoner.
    draft_minutes: training time of its draft.
    threads: number of CPU cores; one single-threaded process each.
    device: cpu, cuda or cuda:N.
    problems: number of training problems.
    tokenizer_problems: number of problems that the tokenizer is trained on.
    held_out: number of held-out problems for evaluation.
    micro_tokens: padded tokens per micro-batch.
    micro_batches: micro-batches per step; 0 is two, or the next multiple of the threads.
    max_steps: maximum number of training steps of each model.
    samples: samples per held-out problem.
    sample_limit: maximum length of a sample, in tokens.
    tau_problems: number of held-out problems for measuring tokens per forward pass.
    """

    may_change: ClassVar[frozenset[str]] = frozenset(
        {"minutes", "draft_minutes", "threads", "device", "problems", "held_out", "max_steps"}
    ) | {"samples", "sample_limit", "tau_problems"}

    minimums = Recipe.minimums | {
        "minutes": 0.01,
        "draft_minutes": 0.01,
        "threads": 1,
        "problems": 2,
        "tokenizer_problems": 1,
        "held_out": 1,
        "micro_tokens": 1,
        "micro_batches": 0,
        "max_steps": 1,
        "samples": 1,
        "sample_limit": 1,
        "tau_problems": 1,
    }

    minutes: float = 60.0
    draft_minutes: float = 10.0
    threads: int = 2
    device: str = "cpu"
    problems: int = 160_000
    tokenizer_problems: int = 6000
    held_out: int = 200
    micro_tokens: int = 3072
    micro_batches: int = 0
    max_steps: int | None = None
    samples: int = 16
    sample_limit: int = 800
    tau_problems: int = 12

    def fixed(self) -> dict[str, Any]:
        shapes = {name: asdict(size) for name, size in SIZES.items()}
        return {"levels": MIX, "vocabulary": VOCAB, "context": CONTEXT, "shapes": shapes}

    def train(self, out: Path, *, resume: bool = False, watch: Watch = silent) -> list[str]:
        choose_device(self.device)  # raises ConfigError if torch finds no GPU
        recipe = self.settled(out, resume)
        data, progress = recipe.data(out), {}
        data.make(self.threads, counted(watch, "data", "shards"))
        for name in SIZES:
            progress[name] = train_together(recipe, out, name, watch)
            model = replace(recipe, device="cpu").prepare(out, name)[0]
            save(model, out / name, tokenizer=data.tokenizer())
        name_companion(out / "reasoner", "../draft")
        self.reports = {}
        for name in SIZES:
            report = examine(recipe, out, name, progress[name].step, watch)
            facts = reasoner_facts(recipe, name, SIZES[name], report.num_samples, VOCAB, CONTEXT)
            _write(out / name / "README.md", write_card(facts, progress[name], report))
            self.reports[name] = report
        found = {name: report.as_dict() for name, report in self.reports.items()}
        _write(out / "evaluation.json", json.dumps(found, indent=2) + "\n")
        return [_line(name, report, out) for name, report in self.reports.items()]

    def settled(self, out: Path, resume: bool) -> Reasoner:
        """The recipe with its number of micro-batches per step, checked against the folder.

        Raises ConfigError if the folder has a run that this one does not continue.
        """
        is_trained = any(out.glob("*.pt"))
        plans.check_resume(out, is_trained, resume)
        processes = self.processes
        usual = 2 if is_trained else -(-2 // processes) * processes  # without a plan it was 2
        kept = plans.read_plan(out).get("micro_batches", usual)
        recipe = replace(self, micro_batches=self.micro_batches or kept)
        plans.check_plan(out, plans.settings(recipe))
        recipe.data(out).check()
        check_shares(recipe.micro_batches, processes)
        plans.write_plan(out, plans.settings(recipe), plans.budgets(recipe))
        return recipe

    @property
    def processes(self) -> int:
        """Number of training processes."""
        return self.threads if self.device == "cpu" else 1

    def data(self, out: Path) -> Problems:
        """The training data."""
        return Problems(out, self.seed, self.problems, MIX, self.tokenizer_problems, VOCAB, CONTEXT)

    def prepare(self, out: Path, name: str) -> tuple[PreTrainedModel, Loop]:
        """One of the two models and its training loop, in the state of the last checkpoint."""
        data = self.data(out)
        tokenizer = data.tokenizer()
        batches = Batches(
            data.documents(),
            budget=self.micro_tokens,
            accumulate=self.micro_batches,
            pad=tokenizer.pad_token_id,
            seed=self.seed,
        )
        options = LoopOptions(
            minutes=self.minutes if name == "reasoner" else self.draft_minutes,
            max_steps=self.max_steps,
            decay_share=0.4,
            seed=self.seed,
        )
        model = build_model(SIZES[name], tokenizer, self.seed)
        return model, loop_of(model, batches, options, self.device, out / f"{name}.pt")


def examine(recipe: Reasoner, out: Path, name: str, step: int, watch: Watch) -> Report:
    """Accuracy and entropy of an exported model, and tokens per forward pass when drafting."""
    is_target, folder = name == "reasoner", out / name
    sampling = Sampling(
        temperature=0.6,
        n=recipe.samples if is_target else min(4, recipe.samples),
        max_new_tokens=recipe.sample_limit,
    )
    report = evaluate(
        folder,
        out / "evaluation" / f"{name}-step{step}-{sampling.n}x{recipe.sample_limit}.jsonl",
        recipe.held_out,
        sampling,
        recipe.seed,
        recipe.processes,
        recipe.device,
        counted(watch, f"evaluation: {name}", "problems"),
    )
    parts: dict[str, Any] = {"drafter": "stand", "controller": "fixed"}
    if not is_target:
        draft = DraftModel(model=str(folder), dtype="fp32", device=recipe.device)
        parts = {"drafter": draft, "controller": Fixed(nodes=4, depth=4)}
    tau = measure_tau(
        out / "reasoner",
        min(recipe.tau_problems, recipe.held_out),
        sampling,
        recipe.seed,
        recipe.device,
        counted(watch, f"evaluation: tau of {name}", "problems"),
        **parts,
    )
    return replace(report, tau=tau)


def _line(name: str, r: Report, out: Path) -> str:
    return (
        f"{name}: one sample {r.one_sample:.1f} %, majority@{r.num_samples} {r.majority:.1f} %, "
        f"entropy {r.mean_entropy:.2f} nats per token, {r.fork_share:.0f} % forks, "
        f"tau {r.tau:.2f} -> {out / name}"
    )


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda part: Path.write_text(part, text))


__getattr__ = refuse(__name__, {"Plan": "Reasoner(...)", "run": "Reasoner(...).train(out)"})
