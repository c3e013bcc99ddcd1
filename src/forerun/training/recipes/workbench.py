"""Small models of text and code, on which methods that train drafts are compared.

Three models learn the same texts: a target, a draft with its tokenizer, and a draft with another
tokenizer. The end of each text is held out. The checkpoints are small enough to be shared.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from forerun.models.draft_link import name_companion
from forerun.models.load import choose_device
from forerun.training import plans
from forerun.training.data.documents import Batches, Documents
from forerun.training.data.texts import Texts
from forerun.training.data.tokenizer import train_tokenizer
from forerun.training.export import save
from forerun.training.language_model import Size, build_model, loop_of, train_together
from forerun.training.loop import Loop, LoopOptions, Progress
from forerun.training.losses import cross_entropy, expected_acceptance
from forerun.training.progress import Watch, silent
from forerun.training.recipes.base import Recipe
from forerun.utils.files import write_atomically

CONTEXT = 512  # tokens of a model; pieces of text are half as long
MAX_PIECES = 64  # of a domain in an evaluation


class Model(NamedTuple):
    """What is trained: the number of tokens, the shape, and a sentence for the card."""

    vocabulary: int
    size: Size
    role: str


MODELS = {
    "target": Model(4096, Size(256, 6, 4, 2, 640), "A small target model of prose and code."),
    "draft": Model(4096, Size(96, 2, 3, 1, 192), "A draft model with the target's tokenizer."),
    "other": Model(1024, Size(128, 2, 4, 2, 320), "A draft model with a tokenizer of its own."),
}


@dataclass(kw_only=True, eq=False)
class Workbench(Recipe):
    """Trains a small target and two drafts from text files; one draft has another tokenizer.

    data: folder with texts (.txt, .txt.gz) and source code (.tar.gz).
    minutes: training time of the target.
    draft_minutes: training time of each draft.
    threads: number of CPU cores; one single-threaded process each.
    device: cpu, cuda or cuda:N.
    held_out: share of the texts that is held out for evaluation.
    micro_tokens: padded tokens per micro-batch.
    max_steps: maximum number of training steps of each model.
    """

    may_change: ClassVar[frozenset[str]] = frozenset(
        {"minutes", "draft_minutes", "threads", "device", "max_steps"}
    )
    minimums = Recipe.minimums | {
        "minutes": 0.01,
        "draft_minutes": 0.01,
        "threads": 1,
        "held_out": 0.001,
        "micro_tokens": 1,
        "max_steps": 1,
    }

    data: Path
    minutes: float = 30.0
    draft_minutes: float = 8.0
    threads: int = 2
    device: str = "cpu"
    held_out: float = 0.05
    micro_tokens: int = 4096
    max_steps: int | None = None

    def fixed(self) -> dict[str, Any]:
        shapes = {name: asdict(model.size) for name, model in MODELS.items()}
        return {"context": CONTEXT, "shapes": shapes, "domains": list(self.texts.domains())}

    @property
    def texts(self) -> Texts:
        """The texts that the models learn."""
        return Texts(Path(self.data), CONTEXT // 2, self.held_out)

    @property
    def processes(self) -> int:
        """Number of training processes."""
        return self.threads if self.device == "cpu" else 1

    def train(self, out: Path, *, resume: bool = False, watch: Watch = silent) -> list[str]:
        choose_device(self.device)  # raises ConfigError if torch finds no GPU
        plans.begin(out, self, is_trained=any(out.glob("*.pt")), resume=resume)
        progress, models = {}, {}
        for name in MODELS:
            self.tokenizer(out, name)  # made once, before other processes read it
            progress[name] = train_together(self, out, name, watch)
            models[name] = replace(self, device="cpu").prepare(out, name)[0].eval()
        scores = {name: self.scores(out, name, models) for name in MODELS}
        for name, model in models.items():
            card = write_card(name, scores[name], progress[name], self)
            save(model, out / name, tokenizer=self.tokenizer(out, name), card=card)
        name_companion(out / "target", "../draft")
        text = json.dumps(scores, indent=2) + "\n"
        write_atomically(out / "evaluation.json", lambda part: Path.write_text(part, text))
        return [line(name, score, out / name) for name, score in scores.items()]

    def prepare(self, out: Path, name: str) -> tuple[PreTrainedModel, Loop]:
        """A model and its training loop, in the state of the last checkpoint."""
        tokenizer = self.tokenizer(out, name)
        batches = Batches(
            self.texts.pieces(tokenizer)[0],
            budget=self.micro_tokens,
            accumulate=2 * self.threads,
            prompt_weight=1.0,
            pad=tokenizer.pad_token_id,
            seed=self.seed,
        )
        options = LoopOptions(
            minutes=self.minutes if name == "target" else self.draft_minutes,
            max_steps=self.max_steps,
            seed=self.seed,
        )
        model = build_model(MODELS[name].size, tokenizer, self.seed)
        return model, loop_of(model, batches, options, self.device, out / f"{name}.pt")

    def tokenizer(self, out: Path, name: str) -> PreTrainedTokenizerFast:
        """The tokenizer of a model; trained on the texts if it does not exist."""
        vocabulary = MODELS[name].vocabulary
        folder = out / f"tokenizer-{vocabulary}"
        if not (folder / "tokenizer.json").exists():
            made = train_tokenizer(self.texts.trained(), vocabulary, CONTEXT)
            folder.mkdir(parents=True, exist_ok=True)
            made.save_pretrained(folder)
        return PreTrainedTokenizerFast.from_pretrained(folder)

    def scores(
        self, out: Path, name: str, models: dict[str, PreTrainedModel]
    ) -> dict[str, dict[str, float]]:
        """Figures of a model on held-out pieces, by domain.

        bits_per_byte: cross-entropy. acceptance: of a draft with the target's tokenizer, the
        expected acceptance rate of its tokens at temperature 1.
        """
        tokenizer = self.tokenizer(out, name)
        held_out = self.texts.pieces(tokenizer)[1]
        is_draft = name != "target" and MODELS[name].vocabulary == MODELS["target"].vocabulary
        target = models["target"] if is_draft else None
        return {
            domain: score(models[name], target, documents, tokenizer)
            for domain, documents in held_out.items()
            if len(documents)
        }


@torch.inference_mode()
def score(
    model: PreTrainedModel,
    target: PreTrainedModel | None,
    documents: Documents,
    tokenizer: PreTrainedTokenizerFast,
) -> dict[str, float]:
    """Figures of a model on up to MAX_PIECES documents, spread over all."""
    bits, accepted, num_tokens, num_bytes = 0.0, 0.0, 0, 0
    for i in range(0, len(documents), -(-len(documents) // MAX_PIECES)):
        ids = torch.from_numpy(documents.document(i).astype("int64"))
        if len(ids) < 2:
            continue
        logits = model(input_ids=ids[None, :-1]).logits[0].float()
        bits += float(cross_entropy(logits, ids[1:])) * (len(ids) - 1) / math.log(2)
        num_bytes += len(str(tokenizer.decode(ids[1:])).encode())
        num_tokens += len(ids) - 1
        if target is not None:
            wanted = target(input_ids=ids[None, :-1]).logits[0].float()
            accepted += float(expected_acceptance(logits, wanted)) * (len(ids) - 1)
    found = {"bits_per_byte": bits / max(num_bytes, 1)}
    return found | ({} if target is None else {"acceptance": accepted / max(num_tokens, 1)})


def line(name: str, scores: dict[str, dict[str, float]], folder: Path) -> str:
    """A line of the report."""
    parts = (
        f"{domain} " + ", ".join(f"{key} {value:.3f}" for key, value in found.items())
        for domain, found in scores.items()
    )
    return f"{name}: {'; '.join(parts)} -> {folder}"


def write_card(
    name: str, scores: dict[str, dict[str, float]], progress: Progress, recipe: Workbench
) -> str:
    """The README of a model."""
    model, columns = MODELS[name], list(next(iter(scores.values()), {}))
    rows = [
        f"| {domain} | " + " | ".join(f"{found[key]:.3f}" for key in columns) + " |"
        for domain, found in scores.items()
    ]
    size = model.size
    return _CARD.format(
        name=name,
        role=model.role,
        shape=f"{size.layers} layers, width {size.hidden}, {size.heads} heads ({size.kv_heads} KV)",
        vocabulary=model.vocabulary,
        context=CONTEXT,
        domains=", ".join(scores),
        steps=progress.step,
        million=progress.tokens / 1e6,
        minutes=progress.seconds / 60,
        held_out=100 * recipe.held_out,
        seed=recipe.seed,
        head=" | ".join(["domain", *columns]),
        rule="|---" * (len(columns) + 1) + "|",
        rows="\n".join(rows),
    )


_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# forerun workbench: {name}

{role} For tests and comparisons of training methods, not for use.
Llama architecture: {shape}; byte-level BPE of {vocabulary} tokens; context {context}.

Made by `forerun train workbench --seed {seed}` from {domains}: {steps} steps, {million:.1f} million
tokens, {minutes:.0f} minutes. {held_out:g} % of the texts were held out; on them:

| {head} |
{rule}
{rows}
"""
