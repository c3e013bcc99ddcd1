"""The head of SpecDec++: which tokens of a draft model its target would accept.

Huang et al. 2024. Texts X are the target's own. At each place a token Y ~ q is drawn and labelled
with its acceptance a = min(1, p(Y) / q(Y)), both laws after X; the draft then reads the prompt and
Z, which is Y or, with probability `mix`, X, and the head learns a from the hidden row at Z = Y.
Only the head moves; what is wrong costs `weight` times as much where a rejection was missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import forerun
from forerun.controllers.acceptance_head import NAME
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError
from forerun.models.paths import located
from forerun.tasks._reasoning_world import MIX
from forerun.tasks.reasoning import ReasoningTask
from forerun.training.data import (
    Batches,
    Documents,
    Micro,
    load_documents,
    save_documents,
)
from forerun.training.loop import Loop, LoopOptions, Progress
from forerun.utils.files import write_atomically
from forerun.utils.stats import auc


@dataclass(frozen=True)
class Plan:
    """One run, resolved. temperature: that of deployment; the labels hold for it."""

    out: Path
    target: str = "reasoner"
    draft: str = "draft"
    num_texts: int = 2000
    temperature: float = 0.6
    max_tokens: int = 300
    layers: int = 3
    shared: bool = False  # one block repeated, as in the authors' code; else separate ones
    weight: float = 6.0
    mix: float = 0.15
    minutes: float | None = None
    max_steps: int | None = 600
    rate: float = 1e-3
    micro_tokens: int = 4096
    batch: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_texts < 2 or self.layers < 0 or not 0 <= self.mix < 1 or self.weight <= 0:
            raise ConfigError(
                "an acceptance head needs two texts, layers >= 0, 0 <= mix < 1 and weight > 0, got "
                f"{self.num_texts}, {self.layers}, {self.mix}, {self.weight}"
            )


class HeadModule(torch.nn.Module):
    """The trained form of `forerun.controllers.acceptance_head.Head`; starts from no opinion."""

    def __init__(self, width: int, layers: int, shared: bool) -> None:
        super().__init__()
        blocks = min(layers, 1) if shared else layers
        self.layers = layers
        self.weights = torch.nn.Parameter(torch.randn(blocks, width, width) * width**-0.5)
        self.biases = torch.nn.Parameter(torch.zeros(blocks, width))
        self.out = torch.nn.Parameter(torch.zeros(2, width))
        self.bias = torch.nn.Parameter(torch.zeros(2))

    def forward(self, hidden: Tensor) -> Tensor:
        """log s [.., 2] of hidden rows [.., d]; class 1 is acceptance."""
        e = hidden.float()
        for i in range(self.layers):
            at = i % len(self.weights)
            e = e + torch.nn.functional.silu(e @ self.weights[at].T + self.biases[at])
        return torch.log_softmax(e @ self.out.T + self.bias, dim=-1)


def weighted_loss(logs: Tensor, labels: Tensor, keep: Tensor, weight: float) -> Tensor:
    """-[a log s + w (1 - a) log(1 - s)] over kept places, by the sum of a + w (1 - a)."""
    a, kept = labels, keep.float()
    lost = -(a * logs[..., 1] + weight * (1 - a) * logs[..., 0])
    return (lost * kept).sum() / ((a + weight * (1 - a)) * kept).sum().clamp_min(1e-9)


class HeadRecipe:
    """What `Loop` trains: two frozen transformers models, and a head."""

    def __init__(self, target: Any, draft: Any, head: HeadModule, plan: Plan, data: Batches):
        self.target, self.draft, self.head, self.plan, self.data = target, draft, head, plan, data

    def batches(self, start: int) -> Iterator[list[Micro]]:
        """Steps of micro-batches from number `start` on."""
        return self.data.steps(start)

    def loss(self, micro: Micro) -> Tensor:
        """The micro-batch's share of the step's loss."""
        hidden, labels, keep = self.examples(micro)
        share = micro.weights.sum()
        return share * weighted_loss(self.head(hidden), labels, keep, self.plan.weight)

    @torch.no_grad()
    def examples(self, micro: Micro) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden rows [b, n, d] at Z, labels [b, n], and which places count [b, n]."""
        x, places = micro.tokens, micro.weights > 0
        with torch.autocast(x.device.type, enabled=False):
            p, q = (self._law(model, x) for model in (self.target, self.draft))
            drawn = torch.multinomial(q.flatten(0, 1), 1).view(q.shape[:2])
            ratio = p.gather(2, drawn[..., None]) / q.gather(2, drawn[..., None])
            labels = torch.zeros(x.shape)
            labels[:, 1:] = ratio[..., 0].clamp(max=1.0)
            y = torch.cat([x[:, :1], drawn], dim=1)
            mixed = torch.rand(x.shape) < self.plan.mix
            z = torch.where(places & ~mixed, y, x)
            hidden = self.draft(z, output_hidden_states=True, use_cache=False).hidden_states[-1]
        return hidden, labels, places & (z == y)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those of the head."""
        return {f"head.{name}": p for name, p in self.head.named_parameters()}

    def _law(self, model: Any, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1], use_cache=False).logits.float()
        return torch.softmax(logits / self.plan.temperature, dim=-1)


def run(
    plan: Plan, resume: bool = False, on_step: Callable[[Progress, float], None] | None = None
) -> tuple[Progress, float]:
    """Texts, training, export to plan.out; progress, and the AUC on a tenth of the texts.

    resume: goes on from the checkpoint in plan.out. on_step hears progress and the share spent.
    """
    held, trained = texts(plan)
    torch.manual_seed(plan.seed)
    target, draft = _model(plan.target), _model(plan.draft)
    head = HeadModule(draft.config.hidden_size, plan.layers, plan.shared)
    options = LoopOptions(
        max_steps=plan.max_steps,
        minutes=plan.minutes,
        other_rate=plan.rate,
        warmup_steps=20,
        decay_share=0.9,
        seed=plan.seed,
    )
    recipe = HeadRecipe(target, draft, head, plan, _batches(trained, plan))
    loop = Loop(recipe, options, torch.device("cpu"), plan.out / "head.pt")
    if on_step:
        loop.on_step = lambda progress: on_step(progress, loop.spent())
    if resume:
        loop.resume()
    progress = loop.run()
    save(head, plan.out / NAME)
    return progress, evaluate(recipe, _batches(held, plan))


def texts(plan: Plan) -> tuple[Documents, Documents]:
    """Texts of the target on training problems: a tenth held out, and the rest."""
    files = [plan.out / "data" / f"{name}.npz" for name in ("held", "train")]
    if not all(file.exists() for file in files):
        task, model = ReasoningTask("train", MIX), forerun.load(plan.target, max_seqs=plan.batch)
        sampling = Sampling(temperature=plan.temperature, max_new_tokens=plan.max_tokens)
        prompts = [task.example(1_000_000 - 1 - i).prompt for i in range(plan.num_texts)]
        results = model.generate(prompts, sampling, seed=plan.seed, batch=plan.batch)
        ids = [model.tokenizer.encode(prompt) for prompt in prompts]
        found = [(p + r.samples[0].tokens, len(p)) for p, r in zip(ids, results, strict=True)]
        cut = max(1, len(found) // 10)
        for file, part in zip(files, (found[:cut], found[cut:]), strict=True):
            save_documents(file, part)
    held, trained = (load_documents([file]) for file in files)
    return held, trained


def evaluate(recipe: HeadRecipe, data: Batches, steps: int = 8) -> float:
    """Area under the curve: is an accepted token scored above a rejected one? Labels weigh in."""
    scores, labels = [], []
    for micros, _ in zip(data.steps(0), range(steps), strict=False):
        for micro in micros:
            hidden, a, keep = recipe.examples(micro)
            with torch.no_grad():
                scores.append(recipe.head(hidden)[..., 1][keep].numpy())
            labels.append(a[keep].numpy())
    return auc(np.concatenate(scores), np.concatenate(labels))


def save(head: HeadModule, path: Path) -> None:
    """Writes the head as the controller reads it."""
    from safetensors.torch import save_file

    tensors = {name: p.detach().clone().contiguous() for name, p in head.named_parameters()}
    tensors["layers"] = torch.tensor(head.layers)
    write_atomically(path, lambda part: save_file(tensors, part))


def _batches(documents: Documents, plan: Plan) -> Batches:
    return Batches(
        documents, budget=plan.micro_tokens, accumulate=1, prompt_weight=0.0, seed=plan.seed
    )


def _model(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    from forerun.models.hf_load import load_whole

    model = load_whole(AutoModelForCausalLM, located(name), dtype=torch.float32)
    return model.eval().requires_grad_(False)
