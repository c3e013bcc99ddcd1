"""A draft model for any target: pre-training, continued training, alignment on its own answers.

Zafrir et al., "FastDraft: How to Train Your Draft", 2024; Goel et al., "Direct Alignment of Draft
Model for Speculative Decoding with Chat-Fine-Tuned LLMs", 2024; Zhou et al., "DistillSpec", 2023.
The draft has the target's tokenizer. Its shape is the one with the highest modelled speed-up
tau / (c gamma + 1) among depths of about equal size, with c measured on this machine and the
acceptance of a short probe. The weights with the best held-out acceptance are kept.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from transformers import PreTrainedModel

import forerun
from forerun.controllers.fixed import Fixed
from forerun.core.sampling import Sampling
from forerun.drafters.draft_model import DraftModel
from forerun.engine.cost.forward import one_row_seconds
from forerun.engine.stats import Stats
from forerun.errors import ConfigError
from forerun.models.paths import located
from forerun.registry import ModelName
from forerun.training import plans
from forerun.training.acceptance import best_gamma, held_out_acceptance
from forerun.training.data import Batches
from forerun.training.distillation import TEXT, Best, Distilled, divergence
from forerun.training.draft_card import draft_card
from forerun.training.draft_data import DraftData, read_prompts
from forerun.training.draft_shapes import DEPTHS, Candidate, candidates, rated, step_seconds
from forerun.training.export import save
from forerun.training.language_model import Size, build_model
from forerun.training.loop import Loop, LoopOptions, Progress
from forerun.training.mixture import Mixture
from forerun.training.progress import Watch, counted, silent, step_note
from forerun.training.recipes.base import Recipe
from forerun.utils.files import write_atomically

METHODS = {  # loss and data of the alignment phase, share of running text in it
    "fastdraft": ("ce", "target", 0.0),
    "direct_alignment": ("tvd++", "target", 0.1),
    "distillspec": ("jsd", "mixed", 0.0),
}
DATA = ("target", "fixed", "on_policy", "mixed")
CODE_SHARE = 2 / 3  # of tokens in continued training
WIDTH = 512  # tokens per row of a batch
MEASURED = 20  # held-out prompts for tau
MAX_GAMMA = 16
EVALUATIONS = 8  # of held-out acceptance per phase
RATES = {"probe": 1.0, "pretrain": 1.0, "continue": 0.3, "align": 0.3}  # factors of learning rates


class Phase(NamedTuple):
    """A phase of training."""

    name: str
    share: float  # of the budget
    data: Any  # batches
    loss: str


@dataclass(kw_only=True, eq=False)
class Draft(Recipe):
    """Trains a draft model for a target from nothing.

    model: target, a folder or name.
    recipe: fastdraft, direct_alignment or distillspec.
    prompts: JSON-lines file with "prompt", and optionally "answer" and "domain"; not needed for the
    embedded model.
    corpus: file or folder of running text for pre-training; without it, the target's answers.
    code: file or folder of code for continued training; without it, that phase is left out.
    num_prompts: maximum number of prompts; a tenth is held out.
    max_tokens: maximum length of an answer.
    share: parameters of the draft relative to the target.
    layers: depth of the draft; 0 chooses it.
    loss: ce, soft_ce, fkl, rkl, jsd, tvd, tvd++ or tvd++position; auto is that of the recipe.
    data: target, fixed, on_policy or mixed; auto is that of the recipe.
    top_k: number of target probabilities to store per token; 0 computes the target in every step.
    gamma: length of a draft in the final measurement; 0 uses the best by the model.
    minutes: training time of all phases; answers, probes and measurements come on top.
    max_steps: maximum number of steps of all phases.
    probe_steps: steps of training before a shape is judged.
    micro_tokens: padded tokens per micro-batch; a step has two.
    batch: number of answers generated at once.
    """

    may_change: ClassVar[frozenset[str]] = frozenset({"batch", "gamma"})
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
    data: str = "auto"
    top_k: int = 0
    gamma: int = 0
    minutes: float | None = 60.0
    max_steps: int | None = None
    probe_steps: int = 60
    micro_tokens: int = 4096
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
        if self.data not in DATA:
            raise ConfigError(f"data must be one of {', '.join(DATA)}, got {self.data!r}")
        if not 0 < self.share < 1:
            raise ConfigError(f"share must be above 0 and below 1, got {self.share}; e.g. 0.1")

    def train(self, out: Path, *, resume: bool = False, watch: Watch = silent) -> list[str]:
        self.state = out / "state"
        is_trained = any(self.state.glob("*.pt")) or (out / "config.json").exists()
        plans.begin(out, self, is_trained=is_trained, resume=resume)
        self.target = forerun.load(self.model, max_seqs=max(self.batch, 1))
        self.teacher = frozen(self.model)
        self.vocab = self.teacher.config.vocab_size
        self.material = DraftData(
            target=self.target,
            prompts=read_prompts(self.prompts, self.num_prompts, self.target),
            folder=out / "data",
            width=min(WIDTH, self.teacher.config.max_position_embeddings),
            max_tokens=self.max_tokens,
            micro_tokens=self.micro_tokens,
            seed=self.seed,
        )
        self.material.generate(self.top_k, self.batch, watch)
        chosen = self.choose(watch)
        model = self.build(chosen.size)
        best, stages = Best(self.state), dict[str, dict[str, float]]()
        for phase in self.phases(model):
            self.run(phase, model, best, watch)
            stages[phase.name] = self.acceptance(model)
        best.restore(model)
        save(model, out, tokenizer=self.target.tokenizer.inner)
        measured = self.measure(out, best.found["all"])
        facts = {"shape": asdict(chosen), "stages": stages, "best": best.found, **measured}
        card = draft_card(self, facts, self.material.records, out)
        write_atomically(out / "README.md", lambda part: Path.write_text(part, card))
        write(out / "draft.json", facts)
        return [
            f"draft: {chosen.parameters:,} parameters, {chosen.size.layers} layers; acceptance "
            f"{best.found['all']:.3f} after {best.found['phase']}, tau {measured['tau']:.2f} with "
            f"drafts of {measured['gamma']}, c {measured['c']:.3f} -> {out}"
        ]

    def choose(self, watch: Watch) -> Candidate:
        """The shape with the highest modelled speed-up; measured once and kept in the folder."""
        path = self.state / "shapes.json"
        if path.exists():
            rows = json.loads(path.read_text())
            found = [Candidate(**row | {"size": Size(**row["size"])}) for row in rows]
            return max(found, key=lambda one: one.speedup)
        most = int(self.share * sum(p.numel() for p in self.teacher.parameters()))
        sizes = candidates(self.vocab, most, (self.layers,) if self.layers else DEPTHS)
        seconds = one_row_seconds(self.target.target)
        show, found = counted(watch, "shapes", "shapes"), []
        for num, size in enumerate(sizes, 1):
            model = self.build(size)
            c = step_seconds(model, self.target.tokenizer.inner) / seconds
            Loop(self.first(model), self.options("probe", 1.0), torch.device("cpu")).run()
            found.append(rated(size, self.vocab, c, self.acceptance(model)["all"]))
            show(num, len(sizes))
        write(path, [asdict(one) for one in found])
        return max(found, key=lambda one: one.speedup)

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

    def phases(self, model: PreTrainedModel) -> list[Phase]:
        """The phases of the budget, with their data."""
        text_share = METHODS[self.recipe][2]
        first = Phase("pretrain", 0.5, self.first(model).data, "ce")
        aligned: Any = self.material.alignment(self.data, model)
        if text_share and isinstance(aligned, Batches):
            sources = {"answers": aligned, TEXT: self.material.text(self.corpus)}
            aligned = Mixture(sources, {"answers": 1 - text_share, TEXT: text_share})
        last = Phase("align", 0.5, aligned, self.loss)
        if self.code is None:
            return [first, last]
        sources = {"code": self.material.text(self.code), TEXT: self.material.text(self.corpus)}
        mixed = Mixture(sources, {"code": CODE_SHARE, TEXT: 1 - CODE_SHARE})
        shares = (0.45, 0.2, 0.35)
        found = [first, Phase("continue", 0, mixed, "ce"), last]
        return [phase._replace(share=share) for phase, share in zip(found, shares, strict=True)]

    def first(self, model: PreTrainedModel) -> Distilled:
        """Pre-training of a draft."""
        return Distilled(model, self.material.text(self.corpus), None)

    def options(self, name: str, share: float) -> LoopOptions:
        """Budget and learning rates of a phase."""
        if name == "probe":
            return LoopOptions(max_steps=self.probe_steps, warmup_steps=5, seed=self.seed)
        base, factor = LoopOptions(max_steps=1), RATES[name]
        return replace(
            base,
            max_steps=None if self.max_steps is None else max(1, round(share * self.max_steps)),
            minutes=None if self.minutes is None else share * self.minutes,
            matrix_rate=factor * base.matrix_rate,
            other_rate=factor * base.other_rate,
            seed=self.seed,
        )

    def run(self, phase: Phase, model: PreTrainedModel, best: Best, watch: Watch) -> None:
        """Trains a phase to the end of its budget, from its checkpoint if it has one."""
        trainer = Distilled(model, phase.data, divergence(phase.loss), self.teacher)
        options = self.options(phase.name, phase.share)
        path = self.state / f"{phase.name}.pt"
        loop = Loop(trainer, options, torch.device("cpu"), path)
        loop.resume()
        marks = int(loop.spent() * EVALUATIONS)

        def look(progress: Progress) -> None:
            nonlocal marks
            spent = min(1.0, loop.spent())
            if int(spent * EVALUATIONS) > marks:
                marks = int(spent * EVALUATIONS)
                best.offer(model, phase.name, progress.step, self.acceptance(model))
            watch(phase.name, *step_note(progress, spent))

        loop.on_step = look
        loop.run()

    def acceptance(self, model: PreTrainedModel) -> dict[str, float]:
        """Held-out acceptance, all and by domain."""
        data = self.material
        model.eval()
        try:
            return held_out_acceptance(
                model, self.teacher, data.records, data.held, data.domains, self.micro_tokens
            )
        finally:
            model.train()

    def measure(self, out: Path, alpha: float) -> dict[str, Any]:
        """tau on held-out prompts at temperatures 1 and 0, and the measured cost of a step."""
        draft = DraftModel(
            model=str(out), tokenizer=self.target.tokenizer, target=self.target.target
        )
        seconds = one_row_seconds(self.target.target)
        c = one_row_seconds(draft.runner) / seconds
        gamma = self.gamma or min(best_gamma(alpha, c)[0], MAX_GAMMA)
        prompts = self.material.held_prompts[:MEASURED]
        how: dict[str, Any] = {"drafter": draft, "controller": Fixed(nodes=gamma, depth=gamma)}
        found: dict[str, Any] = {"gamma": gamma, "c": c}
        for name, temperature in (("tau", 1.0), ("tau_greedy", 0.0)):
            sampling = Sampling(
                temperature=temperature, max_new_tokens=self.max_tokens, seed=self.seed
            )
            total = Stats()
            for result in self.target.generate(prompts, sampling, batch=1, **how):
                total.add(result.stats)
            found[name] = total.tau
        return found


def frozen(name: str) -> Any:
    """A target as a transformers module in float32."""
    from transformers import AutoModelForCausalLM

    from forerun.models.hf_load import load_whole

    model = load_whole(AutoModelForCausalLM, located(name), dtype=torch.float32)
    return model.eval().requires_grad_(False)


def write(path: Path, value: Any) -> None:
    """Writes JSON atomically."""
    text = json.dumps(value, indent=2) + "\n"
    write_atomically(path, lambda part: Path.write_text(part, text))
