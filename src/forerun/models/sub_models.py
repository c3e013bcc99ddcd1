"""Sorted drafts: the first k layers of a checkpoint, with its norm and head, are models.

`forerun-sorted.json` in the folder lists those depths and a held-out text:
`{"exits": [2, 4, 6], "text": [token ids]}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.errors import ConfigError, ModelError
from forerun.utils.files import reports_no_room, write_atomically

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.core.roles import Target
    from forerun.models.transformer import Transformer
    from forerun.runner.model_runner import ModelRunner

FILE = "forerun-sorted.json"
FORM = 'expected {"exits": [2, 4], "text": [token ids]}, depths in ascending order'
MIN_TEXT = 2  # tokens
BY_LAYER = ("layer_ropes", "windows", "layer_heads", "layer_kv_heads", "layer_mlp_sizes")


@dataclass(frozen=True)
class Exits:
    """The depths of a sorted draft's sub-models, and a text to compare them on."""

    depths: tuple[int, ...]  # ascending; the last is the whole model
    text: tuple[int, ...]  # token ids


def read_exits(folder: Path) -> Exits | None:
    """The sub-models of a checkpoint; None for an ordinary one. Raises ModelError."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        found = Exits(tuple(map(int, held["exits"])), tuple(map(int, held["text"])))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path} cannot be used ({error!r}); {FORM}") from None
    depths = list(found.depths)
    if not depths or depths[0] < 1 or depths != sorted(set(depths)):
        raise ModelError(f"{path} has the exits {depths}; {FORM}")
    if len(found.text) < MIN_TEXT or min(found.text) < 0:
        raise ModelError(f"{path} has no text of {MIN_TEXT} tokens or more; {FORM}")
    return found


def write_exits(folder: Path, exits: Exits) -> None:
    """Writes the file that makes a checkpoint a sorted draft.

    Raises CapacityError if the disk has no room.
    """
    text = json.dumps({"exits": list(exits.depths), "text": list(exits.text)}) + "\n"
    with reports_no_room(folder / FILE):
        write_atomically(folder / FILE, lambda part: part.write_text(text, encoding="utf-8"))


def first_layers(model: Transformer, num: int) -> Transformer:
    """The sub-model of the first `num` layers; it shares all weights with the model."""
    from forerun.models.transformer import Transformer  # options are checked without torch

    c = model.config
    if not 1 <= num <= c.num_layers:
        raise ConfigError(
            f"layers must be from 1 to {c.num_layers}, got {num}; leave it out for all layers"
        )
    if num == c.num_layers:
        return model
    moe = c.moe and replace(c.moe, layers=c.moe.layers[:num])
    cut = {name: getattr(c, name)[:num] for name in BY_LAYER}
    config = replace(c, num_layers=num, moe=moe, **cut)
    found = Transformer(
        config,
        model.embed,
        model.layers[:num],
        model.norm,
        model.head,
        model.positions,
        model.head_map,
    )

    def update(state: Mapping[str, Tensor]) -> None:
        assert model.update_weights is not None
        model.update_weights(state)
        for name in ("embed", "norm", "head", "positions", "version"):
            setattr(found, name, getattr(model, name))

    found.update_weights = update if model.update_weights else None
    return found


def sub_runner(runner: Target, num: int) -> ModelRunner:
    """A runner of the first `num` layers, with KV cells of its own. Raises ConfigError."""
    from forerun.runner.model_runner import ModelRunner

    if not isinstance(runner, ModelRunner):
        raise ConfigError(
            "layers of a draft can be chosen for models that forerun's decoder runs, and "
            f"{type(runner).__name__} runs this one; leave the option out"
        )
    if num == runner.num_layers:
        return runner
    found = ModelRunner(
        first_layers(runner.model, num),
        max_seqs=runner.cache.max_slots,
        context=runner.context,
        graphs=runner.graphs,
    )
    found.lock = runner.lock
    return found
