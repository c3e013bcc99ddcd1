"""Replaces weights of a loaded model; tensors are named as in its Hugging Face checkpoint.

All names, shapes and values are checked before the first weight changes. A fused part (queries,
keys and values; gate and up) is replaced as a whole, so all of its tensors are required.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.models.checkpoint import Parts, flaw, tensor_shapes
from forerun.models.families import Plan
from forerun.models.layers import GatedMLP, LayerNorm, Linear, PlainMLP, RMSNorm
from forerun.models.transformer import Transformer
from forerun.models.weight_map import IGNORED, canonical, listed
from forerun.runner.native.weight_format import UNQUANTIZED, WeightFormat

HEAD = "lm_head.weight"
TABLE = {"embed": ("embed_tokens.weight", "wte.weight")}


@torch.inference_mode()
def update_decoder(
    model: Transformer,
    plan: Plan,
    state: Mapping[str, Tensor],
    rounding: WeightFormat = UNQUANTIZED,
) -> None:
    """Replaces weights of our decoder. Raises ModelError before any weight has changed."""
    given = {canonical(name): tensor for name, tensor in state.items()}
    groups = checked(plan, given, model.dtype)
    parts = Parts(plan, model.dtype, model.device, rounding)
    for dest, names in groups.items():
        for name in names:
            parts.add(name, given[name])
        assign(model, dest, parts.take(dest), parts.rounding_of("head"))
    model.version += 1


def checked(
    plan: Plan, given: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, list[str]]:  # fmt: skip
    """The tensor names of every part that changes. Raises ModelError for a wrong tensor."""
    used = [name for name in given if name in plan.pieces]
    strange = [name for name in given if name not in plan.pieces and not name.endswith(IGNORED)]
    if plan.config.is_tied and HEAD in strange:
        _check_tie(given)
        strange.remove(HEAD)
    if strange:
        raise ModelError(
            f"the model has no {listed(strange)}; name tensors as in its checkpoint, for example "
            f"{next(iter(plan.pieces))}"
        )
    groups: dict[str, list[str]] = {}
    for name, piece in plan.pieces.items():
        groups.setdefault(piece.dest, []).append(name)
    groups = {dest: names for dest, names in groups.items() if not set(names).isdisjoint(used)}
    for names in groups.values():
        if absent := [name for name in names if name not in given]:
            raise ModelError(
                f"{names[0]} and {listed(names[1:])} are fused here, and {listed(absent)} is "
                "missing; send them together"
            )
    for names in groups.values():
        _check_shapes(plan, names, given)
    for name in used:
        if found := flaw(given[name], dtype):
            raise ModelError(f"tensor {name} {found}")
    return groups


def _check_tie(given: Mapping[str, Tensor]) -> None:
    """Raises ModelError unless a tied head equals the given embedding."""
    embed = next((given[name] for name in TABLE["embed"] if name in given), None)
    if embed is None or not torch.equal(embed, given[HEAD]):
        raise ModelError(
            f"{HEAD} is tied to the embedding in this model; send the embedding, alone or with an "
            "equal head"
        )


def _check_shapes(plan: Plan, names: list[str], given: Mapping[str, Tensor]) -> None:
    """Raises ModelError for a tensor that does not fill its rows of a part."""
    shapes = tensor_shapes(plan)
    for name in names:
        wanted, fix = shapes[name], plan.pieces[name].fix
        tensor = given[name]
        found = tuple(tensor.shape) if fix is None else tuple(fix(tensor).shape)
        if found != wanted:
            wanted = wanted if fix is None or found == tuple(tensor.shape) else wanted[::-1]
            raise ModelError(
                f"tensor {name} has shape {list(tensor.shape)}, the model needs {list(wanted)}"
            )


def assign(
    model: Transformer, dest: str, part: Tensor | Linear, head_rounding: WeightFormat
) -> None:
    """Puts a finished part into the model."""
    c, words = model.config, dest.split(".")
    if dest == "embed":
        assert isinstance(part, Tensor)
        if model.embed is not None:
            model.embed.copy_(part)
        if c.is_tied:
            model.head.replace(Linear(part.clone(), rounding=head_rounding))
    elif dest == "positions":
        assert model.positions is not None
        model.positions.copy_(part)  # type: ignore[arg-type]
    else:
        owner, name = _owner(model, words)
        _assign_to(owner, name, words[-1], part, c.norm_offset)


def _owner(model: Transformer, words: list[str]) -> tuple[Any, str]:
    """The owner and attribute name of a part: of layers.1.gate_up.weight, the MLP of layer 1."""
    if words[0] != "layers":
        return model, words[0]
    layer, name = model.layers[int(words[1])], words[-2]
    if name == "router":
        return layer.mlp, "gate"
    mlp: Any = layer.mlp.experts[int(words[3])] if words[2] == "experts" else layer.mlp  # type: ignore[union-attr]
    if name in ("gate_up", "up", "down"):
        assert isinstance(mlp, GatedMLP | PlainMLP)
        return mlp, name
    return layer, name


def _assign_to(owner: Any, name: str, kind: str, part: Tensor | Linear, offset: float) -> None:
    held = getattr(owner, name)
    if isinstance(held, RMSNorm):
        setattr(owner, name, RMSNorm(part, held.eps, offset))  # type: ignore[arg-type]
    elif isinstance(held, LayerNorm):
        both = {"weight": held.weight, "bias": held.bias, kind: part}
        setattr(owner, name, LayerNorm(both["weight"], both["bias"], held.eps))  # type: ignore[arg-type]
    elif isinstance(part, Linear):
        held.replace(part)
    else:
        held.set_bias(part)


def update_module(module: Any, state: Mapping[str, Tensor]) -> None:
    """Replaces weights of a transformers model. Raises ModelError before any has changed."""
    own = module.state_dict()
    if strange := sorted(set(state) - set(own)):
        raise ModelError(
            f"the model has no {listed(strange)}; name tensors as its checkpoint does, for example "
            f"{next(iter(own))}"
        )
    by_memory: dict[int, Tensor] = {}
    for name, tensor in state.items():
        if tensor.shape != own[name].shape:
            raise ModelError(
                f"tensor {name} has shape {list(tensor.shape)}, the model needs "
                f"{list(own[name].shape)}"
            )
        if found := flaw(tensor, own[name].dtype):
            raise ModelError(f"tensor {name} {found}")
        tied = by_memory.setdefault(own[name].data_ptr(), tensor)
        if tied is not tensor and not torch.equal(tied, tensor):
            raise ModelError(f"{name} is tied to another tensor, and the two differ; send one")
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)
