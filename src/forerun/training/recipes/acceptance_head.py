"""Head that predicts which tokens of a draft model its target accepts (SpecDec++).

Huang et al., "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths", 2024. The
target generates texts X. At each position a token Y ~ q is drawn and labelled with its acceptance
probability a = min(1, p(Y) / q(Y)), both distributions after X. The draft then reads the prompt and
Z, which is Y or, with probability `mix`, X; the head learns a from the hidden row at Z = Y. Only
the head is trained. With a draft of another tokenizer the examples are the target tokens that
`cross_vocab` drafts, with their own hidden rows (OmniDraft).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import forerun
from forerun.controllers.acceptance_head import NAME
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError
from forerun.models.draft_link import has_vocabulary_of
from forerun.models.paths import located
from forerun.models.tokenizer import Tokenizer
from forerun.registry import ModelName
from forerun.tasks.reasoning import MIX, ReasoningTask
from forerun.training import plans
from forerun.training.data.documents import Batches, Documents, Micro, load_documents
from forerun.training.drafts.data import content_hash
from forerun.training.export import save
from forerun.training.generate import generate_records
from forerun.training.loop import LoopOptions, Progress
from forerun.training.losses import binary_cross_entropy
from forerun.training.online.replay import read_traffic
from forerun.training.progress import Watch
from forerun.training.recipes._drafted_tokens import Examples, drafted_examples
from forerun.training.recipes.base import LoopRecipe
from forerun.training.records import read_records
from forerun.training.renamed import refuse
from forerun.utils.stats import auc

LAST_PROBLEM = 999_999  # the training problems up to this number are used
EVALUATION_STEPS = 8


@dataclass(kw_only=True, eq=False)
class AcceptanceHead(LoopRecipe):
    """Trains the head of controller `acceptance_head` on a frozen draft and its target.

    problems: number of training problems, with one text of the target each; a tenth is held out.
    prompts: JSON-lines file with "prompt", to take the first `problems` of instead.
    target: model that generates the texts and verifies drafts.
    draft: model that gives the hidden rows.
    temperature: sampling temperature of texts and labels; use that of deployment.
    max_tokens: maximum length of a text.
    layers: residual blocks of the head.
    shared: one block repeated instead of separate blocks, as in the authors' code.
    weight: cost of a missed rejection, relative to a missed acceptance.
    mix: probability that the draft reads the target's own token; unused with another tokenizer.
    rate: learning rate of AdamW.
    micro_tokens: padded tokens per step.
    batch: number of texts generated at once.
    """

    may_change: ClassVar[frozenset[str]] = LoopRecipe.may_change | {"batch"}
    checkpoint: ClassVar[str] = "head.pt"

    minimums = LoopRecipe.minimums | {
        "problems": 2,
        "temperature": 0,
        "max_tokens": 1,
        "layers": 0,
        "micro_tokens": 1,
        "batch": 1,
    }

    max_steps: int | None = 600
    problems: int = 2000
    prompts: Path | None = None
    target: ModelName = "reasoner"
    draft: ModelName = "draft"
    temperature: float = 0.6
    max_tokens: int = 300
    layers: int = 3
    shared: bool = False
    weight: float = 6.0
    mix: float = 0.15
    rate: float = 1e-3
    micro_tokens: int = 4096
    batch: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scored: Examples | None = None  # of a draft with another tokenizer
        if not 0 <= self.mix < 1 or not self.weight > 0 or not self.rate > 0:
            raise ConfigError(
                "acceptance_head needs 0 <= mix < 1, weight > 0 and rate > 0, got "
                f"{self.mix}, {self.weight}, {self.rate}"
            )

    def fixed(self) -> dict[str, Any]:
        found = plans.model_hashes(target=self.target, draft=self.draft)
        if self.prompts is not None:
            found["prompts_hash"] = content_hash(self.prompts)
        return found

    def loop_options(self) -> LoopOptions:
        return LoopOptions(
            max_steps=self.max_steps,
            minutes=self.minutes,
            other_rate=self.rate,
            warmup_steps=20,
            decay_share=0.9,
            seed=self.seed,
        )

    def prepare(self, out: Path, watch: Watch) -> None:
        tokenizer = Tokenizer.load(located(self.target))
        self.held: Batches | Examples
        self.data: Batches | Examples
        if has_vocabulary_of(tokenizer, self.draft):
            held, trained = self.texts(out, watch)
            self.held, self.data = self._batches(held), self._batches(trained)
            self.models = [_frozen(name) for name in (self.target, self.draft)]
            width = self.models[1].config.hidden_size
        else:
            self.scored = self.drafted(out, watch)
            self.held, self.data = self.scored.split()
            width = self.scored.hidden.shape[1]
        torch.manual_seed(self.seed)
        self.head = HeadModule(width, self.layers, self.shared)

    def texts(self, out: Path, watch: Watch) -> tuple[Documents, Documents]:
        """Texts of the target on training problems: a held-out tenth, and the rest."""
        files = [out / "data" / f"{name}.npz" for name in ("held", "train")]
        if all(file.exists() for file in files):  # of a run that an earlier version started
            held, trained = (load_documents([file]) for file in files)
            return held, trained
        model = forerun.load(self.target, max_seqs=self.batch)
        folder = out / "data"
        how: dict[str, Any] = {"seed": self.seed, "batch": self.batch, "watch": watch}
        generate_records(model, self.prompt_texts(), folder, self.sampling, **how)
        documents = read_records(folder, model)
        num_held = max(1, len(documents) // 10)
        return documents.part(0, num_held), documents.part(num_held, len(documents))

    def drafted(self, out: Path, watch: Watch) -> Examples:
        """Examples of a draft with another tokenizer."""
        model = forerun.load(self.target, max_seqs=self.batch)
        how: dict[str, Any] = {"seed": self.seed, "batch": self.batch, "watch": watch}
        path, per_step = out / "data" / "drafted.npz", self.micro_tokens
        prompts = self.prompt_texts()
        return drafted_examples(
            model, self.draft, prompts, path, self.sampling, per_step=per_step, **how
        )

    @property
    def sampling(self) -> Sampling:
        """How texts are sampled."""
        return Sampling(temperature=self.temperature, max_new_tokens=self.max_tokens)

    def prompt_texts(self) -> list[str]:
        """The prompts of the texts."""
        if self.prompts is not None:
            return [request.prompt for request in read_traffic(self.prompts, self.problems)]
        task = ReasoningTask("train", MIX)
        return [task.example(LAST_PROBLEM - i).prompt for i in range(self.problems)]

    def batches(self, start: int) -> Iterator[list[Micro]]:
        return self.data.steps(start)

    def loss(self, micro: Micro) -> Tensor:
        hidden, labels, keep = self.examples(micro)
        weights = keep * (micro.weights.sum() / keep.sum().clamp_min(1))
        logits = self.head(hidden)
        return binary_cross_entropy(logits[..., 1] - logits[..., 0], labels, weights, self.weight)

    @torch.no_grad()
    def examples(self, micro: Micro) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden rows [b, n, d] at Z, labels [b, n], and a mask of trained positions [b, n]."""
        if self.scored is not None:
            return self.scored(micro)
        x, is_text = micro.tokens, micro.weights > 0
        target, draft = self.models
        with torch.autocast(x.device.type, enabled=False):
            p, q = (self._probs(model, x) for model in (target, draft))  # [b, n - 1, V]
            drawn = torch.multinomial(q.flatten(0, 1), 1).view(q.shape[:2])
            ratio = p.gather(2, drawn[..., None]) / q.gather(2, drawn[..., None])
            labels = torch.zeros(x.shape)
            labels[:, 1:] = ratio[..., 0].clamp(max=1.0)
            y = torch.cat([x[:, :1], drawn], dim=1)
            is_mixed = torch.rand(x.shape) < self.mix
            z = torch.where(is_text & ~is_mixed, y, x)
            hidden = draft(z, output_hidden_states=True, use_cache=False).hidden_states[-1]
        return hidden, labels, is_text & (z == y)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return {f"head.{name}": p for name, p in self.head.named_parameters()}

    def save(self, out: Path) -> None:
        save(self.head.tensors(), out, file=NAME)

    def report(self, out: Path, progress: Progress) -> list[str]:
        self.auc = self.evaluate()
        return [
            f"head: {progress.step} steps, area under the curve {self.auc:.3f} on a tenth of the "
            f"texts -> {out}"
        ]

    def evaluate(self) -> float:
        """AUC of the head's scores on held-out texts."""
        torch.manual_seed(self.seed)
        scores, labels = [], []
        for _, micros in zip(range(EVALUATION_STEPS), self.held.steps(), strict=False):
            for micro in micros:
                hidden, a, keep = self.examples(micro)
                with torch.no_grad():
                    scores.append(self.head(hidden)[..., 1][keep].numpy())
                labels.append(a[keep].numpy())
        return auc(np.concatenate(scores), np.concatenate(labels))

    def _probs(self, model: Any, tokens: Tensor) -> Tensor:
        """Distributions [b, n - 1, V] after all tokens but the last; one-hot at temperature 0."""
        logits = model(tokens[:, :-1], use_cache=False).logits.float()
        if not self.temperature:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        return torch.softmax(logits / self.temperature, dim=-1)

    def _batches(self, documents: Documents) -> Batches:
        return Batches(
            documents, self.micro_tokens, accumulate=1, prompt_weight=0.0, seed=self.seed
        )


class HeadModule(torch.nn.Module):
    """Trainable form of `controllers.acceptance_head.Head`; initially it predicts 0.5."""

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
            block = i % len(self.weights)
            e = e + torch.nn.functional.silu(e @ self.weights[block].T + self.biases[block])
        return torch.log_softmax(e @ self.out.T + self.bias, dim=-1)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors by the names that the controller reads."""
        found: dict[str, Tensor] = dict(self.named_parameters())
        return found | {"layers": torch.tensor(self.layers)}


def _frozen(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    from forerun.models.hf_load import load_whole

    model = load_whole(AutoModelForCausalLM, located(name), dtype=torch.float32)
    return model.eval().requires_grad_(False)


__getattr__ = refuse(
    __name__, {"Plan": "AcceptanceHead(...)", "run": "AcceptanceHead(...).train(out)"}
)
