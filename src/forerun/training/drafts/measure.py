"""What a finished draft brings: tau on held-out prompts, and the cost of a step."""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch

from forerun.api import Model
from forerun.controllers.fixed import Fixed
from forerun.core.modelled_speedup import best_gamma
from forerun.core.sampling import Sampling
from forerun.drafters.draft_model import DraftModel
from forerun.engine.cost.forward import one_row_seconds
from forerun.engine.stats import Stats
from forerun.errors import ModelError
from forerun.models.paths import is_gguf, located
from forerun.utils.files import reports_no_room, write_atomically

MAX_GAMMA = 16


def measured(
    folder: Path,
    target: Model,
    prompts: Many[list[int]],
    *,
    alpha: float,
    gamma: int = 0,
    max_tokens: int = 256,
    seed: int = 0,
) -> dict[str, Any]:
    """gamma, c, and tau at temperatures 1 and 0 of the draft in a folder.

    alpha: its acceptance, from which the draft length follows if gamma is 0.
    """
    draft = DraftModel(model=str(folder), tokenizer=target.tokenizer, target=target.target)
    c = one_row_seconds(draft.runner) / one_row_seconds(target.target)
    gamma = gamma or min(best_gamma(alpha, c)[0], MAX_GAMMA)
    how: dict[str, Any] = {"drafter": draft, "controller": Fixed(nodes=gamma, depth=gamma)}
    found: dict[str, Any] = {"gamma": gamma, "c": c}
    for name, temperature in (("tau", 1.0), ("tau_greedy", 0.0)):
        sampling = Sampling(temperature=temperature, max_new_tokens=max_tokens, seed=seed)
        total = Stats()
        for result in target.generate(prompts, sampling, batch=1, **how):
            total.add(result.stats)
        found[name] = total.tau
    return found


def frozen(name: str) -> Any:
    """A target as a transformers module in float32. Raises ModelError for a GGUF file."""
    from transformers import AutoModelForCausalLM

    from forerun.models.hf_load import load_whole

    if is_gguf(Path(name).expanduser()):
        raise ModelError(f"{name} is a GGUF file; training needs the checkpoint in safetensors")

    model = load_whole(AutoModelForCausalLM, located(name), dtype=torch.float32)
    return model.eval().requires_grad_(False)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically. Raises CapacityError if the disk has no room."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text atomically. Raises CapacityError if the disk has no room."""
    with reports_no_room(path):
        write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))
