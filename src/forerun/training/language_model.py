"""Next-token prediction of causal language models: small Llama models, and their training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from .data.documents import Batches, Micro
from .head_loss import head_cross_entropy
from .loop import Loop, LoopOptions, Progress
from .losses import cross_entropy
from .processes import process_group
from .progress import Watch, silent, step_note
from .renamed import refuse

LINEAR_HEADS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
EAGER_WIDTH = 320  # tokens; up to here eager attention trains faster than SDPA on a CPU


@dataclass(frozen=True)
class Size:
    """Shape of a Llama model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int


def build_model(
    size: Size, tokenizer: PreTrainedTokenizerFast, seed: int = 0, **fields: Any
) -> LlamaForCausalLM:
    """A randomly initialised Llama with tied embeddings; fields: others of its configuration."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": tokenizer.model_max_length,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | fields))


def has_linear_head(model: PreTrainedModel) -> bool:
    """Whether logits are `hidden @ head.T`, without bias, scale or cap."""
    return isinstance(model, LINEAR_HEADS)


class LanguageModel:
    """`Trainable` for next-token prediction with a Hugging Face causal model.

    As a base class of a recipe it needs the attributes `model` and `data`, set by `prepare`.
    """

    def __init__(self, model: PreTrainedModel, data: Batches) -> None:
        self.model, self.data = model, data

    def batches(self, start: int) -> Iterator[list[Micro]]:
        """Steps of micro-batches from step `start` on."""
        return self.data.steps(start)

    def loss(self, micro: Micro) -> torch.Tensor:
        """Weighted cross-entropy in nats; position t predicts token t + 1."""
        if has_linear_head(self.model):
            hidden = self.outputs(micro, self.model.model).last_hidden_state
            return self.head_loss(hidden, micro)
        targets, weights = micro.tokens[:, 1:], micro.weights[:, 1:]
        return cross_entropy(self.logits(micro).float(), targets, weights)

    def head_loss(self, hidden: Tensor, micro: Micro) -> Tensor:
        """`loss` of a model with a linear head, from the hidden states [rows, width - 1, D]."""
        targets, weights = micro.tokens[:, 1:], micro.weights[:, 1:]
        return head_cross_entropy(hidden, self.model.lm_head.weight, targets, weights)

    def logits(self, micro: Micro) -> Tensor:
        """Logits [rows, width - 1, V] at all tokens but the last."""
        return self.outputs(micro, self.model).logits

    def outputs(self, micro: Micro, module: Any) -> Any:
        """What the model, or the part before its head, returns at all tokens but the last."""
        if micro.tokens.device.type == "cpu":
            self.model.set_attn_implementation(
                "eager" if micro.tokens.shape[1] <= EAGER_WIDTH else "sdpa"
            )
        packed = {} if micro.positions is None else {"position_ids": micro.positions[:, :-1]}
        return module(input_ids=micro.tokens[:, :-1], use_cache=False, **packed)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All parameters of the model by name; tied parameters once."""
        return dict(self.model.named_parameters())


def loop_of(
    model: PreTrainedModel, batches: Batches, options: LoopOptions, device: str, checkpoint: Path
) -> Loop:
    """The training loop of a model, in the state of its last checkpoint."""
    torch.nn.Module.to(model, device)
    loop = Loop(LanguageModel(model, batches), options, torch.device(device), checkpoint)
    loop.resume()
    return loop


class TrainsModels(Protocol):
    """A recipe that trains several models, each in `processes` processes."""

    @property
    def processes(self) -> int:
        """Number of training processes."""
        ...

    def prepare(self, out: Path, name: str) -> tuple[PreTrainedModel, Loop]:
        """A model and its training loop, in the state of the last checkpoint."""
        ...


def train_together(recipe: TrainsModels, out: Path, name: str, watch: Watch = silent) -> Progress:
    """Trains one model of a recipe to the end of its budget, from its checkpoint if it has one."""
    with process_group(recipe.processes, _train_along, (recipe, out, name)):
        _, loop = recipe.prepare(out, name)
        loop.on_step = lambda progress: watch(name, *step_note(progress, loop.spent()))
        return loop.run()


def _train_along(recipe: TrainsModels, out: Path, name: str) -> None:
    """The work of the other processes."""
    recipe.prepare(out, name)[1].run()


__getattr__ = refuse(__name__, {"LanguageModelRecipe": "LanguageModel(model, batches)"})
