"""A draft model for any target: pre-training, continued training, alignment on its own answers.

Zafrir et al., "FastDraft: How to Train Your Draft", 2024; Goel et al., "Direct Alignment of Draft
Model for Speculative Decoding with Chat-Fine-Tuned LLMs", 2024; Zhou et al., "DistillSpec", 2023.
The draft has the target's tokenizer. Smaller shapes are tried as long as the acceptance after a
short probe does not fall, then several depths of about that size; the one with the highest modelled
speed-up tau / (c gamma + 1) is trained, with c measured on this machine. The weights with the best
held-out acceptance are kept.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

import forerun
from forerun.core.modelled_speedup import speedup
from forerun.engine.cost.forward import one_row_seconds
from forerun.errors import ConfigError
from forerun.models.load import choose_device
from forerun.models.paths import spelled
from forerun.registry import ModelName
from forerun.training import plans
from forerun.training.drafts.card import COSTS, draft_card
from forerun.training.drafts.data import DraftData, content_hash, read_prompts, text_hash
from forerun.training.drafts.distillation import Distilled, divergence
from forerun.training.drafts.measure import frozen, measured, write_json, write_text
from forerun.training.drafts.phases import Budget, Phase, Texts, Trainer
from forerun.training.drafts.shapes import (
    DEPTHS,
    Candidate,
    candidates,
    choose,
    rated,
    step_seconds,
)
from forerun.training.export import save
from forerun.training.language_model import Size, build_model
from forerun.training.loop import Loop
from forerun.training.processes import check_shares, my_device, num_processes, process_group
from forerun.training.progress import Watch, silent, step_note
from forerun.training.recipes.base import Recipe
from forerun.utils.text import counted

METHODS = {  # loss and data of the alignment phase, share of running text in it
    "fastdraft": ("ce", "target", 0.0),
    "direct_alignment": ("tvd++", "target", 0.1),
    "distillspec": ("jsd", "mixed", 0.0),
}
DATA = ("target", "fixed", "on_policy", "mixed")
MEANS = ("token", "text")
WIDTH = 512  # tokens per row of a batch
MEASURED = 20  # held-out prompts for tau


@dataclass(kw_only=True, eq=False)
class Draft(Recipe):
    """Trains a draft model for a target from nothing.

    model: target, a folder or name.
    recipe: loss and data of the last phase: fastdraft, direct_alignment or distillspec.
    prompts: JSON-lines file with "prompt", and optionally "answer" and "domain"; not needed for the
    embedded model.
    corpus: file or folder of running text for pre-training; without it, the target's answers.
    code: file or folder of code for continued training; without it, that phase is left out.
    num_prompts: maximum number of prompts; a tenth is held out.
    max_tokens: maximum length of an answer.
    share: parameters of the draft relative to the target, at most.
    layers: depth of the draft; 0 chooses it.
    loss: one of ce, soft_ce, fkl, rkl, jsd, tvd, tvd++ and tvd++position, for the last phase; auto
    is that of the recipe.
    mean: average the loss over tokens (token), or give every answer the same weight (text).
    data: answers that the last phase learns: target, fixed (those in prompts), on_policy (of the
    draft) or mixed; auto is that of the recipe.
    top_k: number of target probabilities to store per token of its answers, for data target and a
    loss other than ce; 0 computes the target in every step.
    gamma: length of a draft in the final measurement; 0 uses the best by the model.
    minutes: training time of all phases, with answers that the draft generates; answers of the
    target, probes (up to a twentieth for each shape) and measurements come on top. A resumed run
    keeps its own unless another is given; added minutes go to the current phase and those after it.
    max_steps: maximum number of steps of all phases.
    probe_steps: maximum number of steps before a shape is judged.
    micro_tokens: padded tokens per micro-batch.
    micro_batches: micro-batches per step; the processes share them.
    threads: number of processes: CPU cores, or GPUs with device cuda; each loads the target.
    device: where to train: cpu, cuda or cuda:N.
    rate: factor of all learning rates.
    batch: number of answers generated at once.
    """

    may_change: ClassVar[frozenset[str]] = frozenset(
        {"batch", "device", "gamma", "max_steps", "minutes", "rate", "threads"}
    )
    minimums = Recipe.minimums | {
        "num_prompts": 10,
        "max_tokens": 1,
        "layers": 0,
        "top_k": 0,
        "gamma": 0,
        "minutes": 0.01,
        "max_steps": 3,
        "probe_steps": 1,
        "micro_tokens": 1,
        "micro_batches": 1,
        "threads": 1,
        "batch": 1,
    }

    model: ModelName = "reasoner"
    recipe: str = "fastdraft"
    prompts: Path | None = None
    corpus: Path | None = None
    code: Path | None = None
    num_prompts: int = 500
    max_tokens: int = 256
    share: float = 0.1
    layers: int = 0
    loss: str = "auto"
    mean: str = "token"
    data: str = "auto"
    top_k: int = 0
    gamma: int = 0
    minutes: float | None = 60.0
    max_steps: int | None = None
    probe_steps: int = 60
    micro_tokens: int = 4096
    micro_batches: int = 2
    threads: int = 2
    device: str = "cpu"
    rate: float = 1.0
    batch: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recipe not in METHODS:
            raise ConfigError(
                f"recipe must be one of {', '.join(METHODS)}, got {self.recipe!r}; fastdraft is "
                "the simplest"
            )
        loss, data, _ = METHODS[self.recipe]
        self.loss = loss if self.loss == "auto" else self.loss
        self.data = data if self.data == "auto" else self.data
        divergence(self.loss)
        if self.mean not in MEANS:
            raise ConfigError(f"mean must be one of {', '.join(MEANS)}, got {self.mean!r}")
        if self.data not in DATA:
            raise ConfigError(f"data must be one of {', '.join(DATA)}, got {self.data!r}")
        if self.top_k and (self.loss == "ce" or self.data != "target"):
            raise ConfigError(
                f"top_k {self.top_k} stores probabilities of the target's answers, and loss "
                f"{self.loss} on data {self.data} does not read them; leave it out"
            )
        if not self.rate > 0:
            raise ConfigError(f"rate must be above 0, got {self.rate}; 1 is the default")
        if not 0 < self.share < 1:
            raise ConfigError(f"share must be above 0 and below 1, got {self.share}; e.g. 0.1")

    def train(self, out: Path, *, resume: bool = False, watch: Watch = silent) -> list[str]:
        choose_device(self.device)  # raises ConfigError if torch finds no GPU
        check_shares(self.micro_batches, self.processes)
        state = out / "state"
        is_trained = any(state.glob("*.pt")) or (out / "config.json").exists()
        plans.check(out, self, is_trained=is_trained, resume=resume)
        self.open(out)
        self.check()
        plans.write(out, self)
        self.material.generate(self.top_k, self.batch, watch)
        chosen = self.choose(watch)
        with process_group(self.processes, _train_along, (replace(self), out, chosen.size)):
            trainer, stages = self.trainer(chosen.size), dict[str, dict[str, float]]()
            costs = dict[str, dict[str, float]]()
            for phase, done in trainer.run_all(self.phases(trainer.model), watch):
                costs[phase.name] = {name: getattr(done, name) for name in COSTS}
                stages[phase.name] = trainer.rates.get(phase.name) or trainer.acceptance()
        trainer.best.restore(trainer.model)
        save(trainer.model, out, tokenizer=self.target.tokenizer.inner)
        facts = {"shape": asdict(chosen), "training": costs, "stages": stages}
        return self.report(out, facts | {"best": trainer.best.found})

    @property
    def processes(self) -> int:
        """Number of training processes."""
        return num_processes(self.device, self.threads)

    def open(self, out: Path) -> None:
        """Loads the target and reads the prompts."""
        self.state, device = out / "state", my_device(self.device)
        place = "auto" if device.type == "cpu" else str(device)  # answers may use a GPU anyway
        self.target = forerun.load(self.model, max_seqs=max(self.batch, 1), device=place)
        self.teacher = frozen(self.model).to(device)
        self.vocab = self.teacher.config.vocab_size
        self.budget = Budget(self.max_steps, self.minutes, self.rate, self.seed)
        self.material = DraftData(
            target=self.target,
            prompts=read_prompts(self.prompts, self.num_prompts, self.target),
            folder=out / "data",
            width=min(WIDTH, self.teacher.config.max_position_embeddings),
            max_tokens=self.max_tokens,
            micro_tokens=self.micro_tokens,
            micro_batches=self.micro_batches,
            by_text=self.mean == "text",
            seed=self.seed,
        )

    def check(self) -> None:
        """Checks shapes, texts and reference answers before the long work."""
        candidates(self.vocab, self.max_parameters, self.depths)  # raises ConfigError
        for path in filter(None, (self.corpus, self.code)):
            self.material.running(path)
        if self.data == "fixed":
            self.material.references()

    def fixed(self) -> dict[str, Any]:
        found = {} if self.prompts is None else {"prompts_hash": content_hash(self.prompts)}
        texts = {"corpus_hash": self.corpus, "code_hash": self.code}
        return found | {name: text_hash(path) for name, path in texts.items() if path is not None}

    @property
    def max_parameters(self) -> int:
        """Of the draft, by its share."""
        return int(self.share * sum(p.numel() for p in self.teacher.parameters()))

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths to choose from."""
        return (self.layers,) if self.layers else DEPTHS

    def trainer(self, size: Size) -> Trainer:
        """The training of a new draft of this shape, with a checkpoint per phase."""
        device = my_device(self.device)
        model = self.build(size)
        return Trainer(model, self.teacher, self.material, self.budget, self.state, device)

    def phases(self, model: PreTrainedModel) -> list[Phase]:
        """The phases of the training of a draft."""
        share = METHODS[self.recipe][2]
        texts = Texts(self.corpus, self.code, self.data, self.loss, share)
        return texts.phases(self.material, model)

    def choose(self, watch: Watch) -> Candidate:
        """The shape of the draft; what is measured of each is kept in the folder."""
        path, rate = self.state / "shapes.json", partial(self.rated, watch=watch)
        return choose(path, self.vocab, self.max_parameters, self.depths, rate, watch)

    def rated(self, size: Size, watch: Watch = silent) -> Candidate:
        """A shape with its measured cost, and its acceptance after a short training."""
        model, device = self.build(size), my_device(self.device)
        seconds = one_row_seconds(self.target.target)
        c = step_seconds(model, self.target.tokenizer.inner) / seconds
        torch.nn.Module.to(model, device)
        trained = Distilled(model, self.material.text(self.corpus), None)
        loop = Loop(trained, self.budget.probe(self.probe_steps), device)
        title = f"probe, {counted(size.layers, 'layer')} of width {size.hidden}"
        loop.on_step = lambda progress: watch(title, *step_note(progress, loop.spent()))
        loop.run()
        return rated(size, self.vocab, c, self.material.acceptance(model, self.teacher)["all"])

    def build(self, size: Size) -> PreTrainedModel:
        """A random draft with the target's vocabulary, padding included."""
        config, tokenizer = self.teacher.config, self.target.tokenizer
        end: list[int | None] = [*sorted(tokenizer.eos_ids)] or [None]
        return build_model(
            size,
            tokenizer.inner,
            self.seed,
            vocab_size=self.vocab,
            max_position_embeddings=config.max_position_embeddings,
            eos_token_id=end[0] if len(end) == 1 else end,
            pad_token_id=config.pad_token_id,
        )

    def report(self, out: Path, facts: dict[str, Any]) -> list[str]:
        """Measures the finished draft and writes its card."""
        best, shape = facts["best"], facts["shape"]
        found = measured(
            out,
            self.target,
            self.material.held_prompts[:MEASURED],
            alpha=best["all"],
            gamma=self.gamma,
            max_tokens=self.max_tokens,
            seed=self.seed,
        )
        facts |= found
        write_text(out / "README.md", draft_card(self, facts, self.material.records, out))
        write_json(out / "draft.json", facts)
        gain = speedup(found["tau"], found["gamma"], found["c"])
        lines = [
            f"draft: {shape['parameters']:,} parameters, depth {shape['size']['layers']}; "
            f"acceptance {best['all']:.3f} after {best['phase']}, tau {found['tau']:.2f} with "
            f"drafts of {found['gamma']}, c {found['c']:.3f}, modelled speed-up {gain:.2f} -> {out}"
        ]
        if gain > 1:
            lines.append(f"use it with --drafter draft_model:model={spelled(out)}")
        else:
            limit = "--max-steps N" if self.max_steps else "--minutes N"
            longer = f"forerun train draft --out {spelled(out)} --resume {limit}"
            lines.append(f"this draft does not speed up decoding yet; train it longer: {longer}")
        return lines


def _train_along(recipe: Draft, out: Path, size: Size) -> None:
    """The work of the other processes: their share of every step."""
    recipe.open(out)
    recipe.material.read()
    trainer = recipe.trainer(size)
    for _ in trainer.run_all(recipe.phases(trainer.model), silent):
        pass
