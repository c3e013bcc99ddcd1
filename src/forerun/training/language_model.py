"""Next-token prediction of causal language models, and small Llama models to train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from .data import Batches, Micro
from .losses import cross_entropy
from .renamed import refuse

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
        logits = self.logits(micro)
        return cross_entropy(logits.float(), micro.tokens[:, 1:], micro.weights[:, 1:])

    def logits(self, micro: Micro) -> Tensor:
        """Logits [rows, width - 1, V] at all tokens but the last."""
        if micro.tokens.device.type == "cpu":
            self.model.set_attn_implementation(
                "eager" if micro.tokens.shape[1] <= EAGER_WIDTH else "sdpa"
            )
        packed = {} if micro.positions is None else {"position_ids": micro.positions[:, :-1]}
        return self.model(input_ids=micro.tokens[:, :-1], use_cache=False, **packed).logits

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All parameters of the model by name; tied parameters once."""
        return dict(self.model.named_parameters())


__getattr__ = refuse(__name__, {"LanguageModelRecipe": "LanguageModel(model, batches)"})
