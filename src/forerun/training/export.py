"""Writes trained models as Hugging Face checkpoints, and heads also in `speculators` format."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from forerun.models.hf_load import quiet
from forerun.utils.files import write_folder

from .renamed import refuse

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
SPECULATORS_VERSION = "0.9.0"  # release of the library that defines these fields


@dataclass(frozen=True)
class Speculator:
    """Configuration of a draft head in the format of vllm-project/speculators, which vLLM loads.

    kind: the format's model type, such as eagle3. verifier: name or path of the target.
    layer_config: transformers configuration of the head's layers, as a dict. tokens: draft length.
    fields: further fields of the kind, such as draft_vocab_size.
    """

    kind: str
    verifier: str
    verifier_architectures: tuple[str, ...]
    layer_config: Mapping[str, Any]
    tokens: int = 5
    architectures: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The contents of config.json."""
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": self.tokens,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        speculators = {
            "algorithm": self.kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": self.verifier,
                "architectures": list(self.verifier_architectures),
            },
        }
        return {
            "architectures": list(self.architectures),
            "speculators_model_type": self.kind,
            "speculators_version": SPECULATORS_VERSION,
            "speculators_config": speculators,
            "transformer_layer_config": dict(self.layer_config),
            **self.fields,
        }


def save(
    made: PreTrainedModel | nn.Module | Mapping[str, Tensor],
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    card: str = "",
    config: Speculator | None = None,
    file: str = WEIGHTS,
) -> None:
    """Writes a trained model or head into a folder.

    A transformers model becomes a checkpoint in bf16, with its tokenizer. A module or named tensors
    become one safetensors file; with `config` the folder is in speculators format. card: text of
    the model card. file: path of a head's weights within the folder.
    """

    def write(part: Path) -> None:
        if isinstance(made, PreTrainedModel):
            _write_checkpoint(made, part)
        else:
            _write_tensors(made, part / file)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
            _clean_tokenizer_config(part / "tokenizer_config.json")
        if config is not None:
            (part / CONFIG).write_text(json.dumps(config.as_dict(), indent=2) + "\n")
        if card:
            (part / CARD).write_text(card)

    write_folder(folder, write)


def _write_checkpoint(model: PreTrainedModel, part: Path) -> None:
    half = copy.deepcopy(model).bfloat16()
    half.generation_config = GenerationConfig(
        do_sample=True,
        top_k=0,  # transformers' default of 50 would change the distribution
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    with quiet():
        half.save_pretrained(part)


def _write_tensors(made: nn.Module | Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    tensors = made.state_dict() if isinstance(made, nn.Module) else made
    path.parent.mkdir(parents=True, exist_ok=True)
    copies = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    save_file(copies, path, metadata={"format": "pt"})


def _clean_tokenizer_config(path: Path) -> None:
    """Sets the tokenizer class that all versions of transformers know; drops loading flags."""
    config = json.loads(path.read_text())
    for trace in ("is_local", "local_files_only"):
        config.pop(trace, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")


__getattr__ = refuse(__name__, {"export": "save(model, folder, tokenizer=...)"})
