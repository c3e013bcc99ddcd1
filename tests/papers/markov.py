"""Targets with a known law: Markov chains as teachers, and small drafts that learn them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.training.data.documents import Batches, Documents
from forerun.training.drafts.acceptance import held_out_acceptance
from forerun.training.drafts.distillation import Distilled, divergence
from forerun.training.loop import Loop, LoopOptions

VOCAB, LENGTH = 48, 64
NARROW = 16  # width of a draft that cannot hold its target
CPU = torch.device("cpu")


class Markov(torch.nn.Module):
    """A target of which the next token depends on the last one only: logits [V, V]."""

    device = CPU

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.table = logits

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        found = type("Output", (), {})()
        found.logits = self.table[input_ids]
        return found

    def texts(self, num: int, seed: int, *, prompt: int = 1, temperature: float = 1.0) -> Documents:
        """Texts of this law; the first `prompt` tokens of each are not learned."""
        generator = torch.Generator().manual_seed(seed)
        probs = torch.softmax(self.table / temperature, -1)
        last = torch.randint(len(probs), (num,), generator=generator)
        columns = [last]
        for _ in range(LENGTH - 1):
            last = torch.multinomial(probs[last], 1, generator=generator)[:, 0]
            columns.append(last)
        return Documents.of((row, prompt) for row in torch.stack(columns, 1).tolist())


def markov(seed: int, sharpness: float = 2.5, tokens: range = range(VOCAB)) -> Markov:
    """A random chain that stays within `tokens` once it is there."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(VOCAB, VOCAB, generator=generator)
    outside = torch.tensor([token not in tokens for token in range(VOCAB)])
    return Markov(logits.masked_fill(outside, -30.0))


def small_draft(seed: int = 0, *, layers: int = 1, hidden: int = 32) -> LlamaForCausalLM:
    """A random llama over the chains' vocabulary."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=2 * LENGTH,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def train(
    model: Any, data: Any, steps: int, *, loss: str = "ce", target: Any = None, rate: float = 1.0
) -> None:
    """Trains a draft on batches with a loss."""
    run(Distilled(model, data, divergence(loss), target), steps, rate)


def run(trained: Any, steps: int, rate: float = 1.0) -> None:
    """Trains anything for a number of steps."""
    base = LoopOptions(max_steps=steps, warmup_steps=5)
    rates = {"matrix_rate": rate * base.matrix_rate, "other_rate": rate * base.other_rate}
    Loop(trained, LoopOptions(**vars(base) | rates), CPU).run()


def batches(documents: Documents, seed: int = 0) -> Batches:
    """Micro-batches of 16 texts."""
    return Batches(documents, 16 * LENGTH, accumulate=1, prompt_weight=0.0, seed=seed)


def alpha(model: Any, target: Any, documents: Documents) -> float:
    """Mean of sum min(p, q) on texts."""
    return held_out_acceptance(model, target, documents, np.arange(len(documents)))["all"]


@dataclass(frozen=True)
class Pretrained:
    """A target, texts of a chain near it, and the weights of a draft that was trained on them."""

    target: Markov
    texts: Documents
    state: dict[str, Tensor]
    seed: int

    def draft(self) -> LlamaForCausalLM:
        """A new copy of the draft."""
        model = small_draft(self.seed, hidden=NARROW)
        model.load_state_dict(self.state)
        return model


@cache
def pretrained(seed: int, num_texts: int) -> Pretrained:
    """A narrow draft after 60 steps on texts that differ from those of its target."""
    target = markov(seed)
    noise = 2.0 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed + 100))
    texts = Markov(target.table + noise).texts(num_texts, seed=seed)
    model = small_draft(seed, hidden=NARROW)
    train(model, batches(texts), 60)
    state = {name: p.clone() for name, p in model.state_dict().items()}
    return Pretrained(target, texts, state, seed)
