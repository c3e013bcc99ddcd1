"""A shard index is followed, and messages about sizes name the checkpoint's own tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_tiny

import forerun
from forerun.errors import ModelError
from forerun.models.load import load_target
from forerun.models.shards import INDEX, tensors

HEAD = "lm_head.weight"
Q, GATE = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "model")


@pytest.fixture
def halves(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The checkpoint in two shards, a.safetensors and b.safetensors."""
    held = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    split(folder, held, {name: "ab"[i % 2] for i, name in enumerate(sorted(held))})
    return folder, held


def split(folder: Path, held: dict[str, Any], places: dict[str, str], **extra: Any) -> None:
    """Writes shards; extra: further tensors of a shard, which the index does not name there."""
    for shard in "ab":
        own = {name: held[name] for name, place in places.items() if place == shard}
        save_file(own | extra.get(shard, {}), folder / f"{shard}.safetensors", {"format": "pt"})
    index = {name: f"{place}.safetensors" for name, place in places.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))


def text(folder: Path) -> list[int]:
    (found,) = forerun.load(folder).generate("the cat", temperature=0, max_new_tokens=12)
    return found.samples[0].tokens


def places_of(folder: Path) -> dict[str, str]:
    found = json.loads((folder / INDEX).read_text())["weight_map"]
    return {name: file.removesuffix(".safetensors") for name, file in found.items()}


@pytest.mark.parametrize("shard", ["a", "b"])
def test_copies_in_other_shards_are_ignored(halves: Any, shard: str) -> None:
    folder, held = halves
    before, places = text(folder), places_of(folder)
    stale = {name: torch.zeros(3) for name, place in places.items() if place != shard}
    split(folder, held, places, **{shard: stale | {"left.behind": torch.ones(2)}})
    files = [folder / "a.safetensors", folder / "b.safetensors"]
    assert {name: tensor.tolist() for name, tensor in tensors(files)} == {
        name: tensor.tolist() for name, tensor in held.items()
    }
    assert text(folder) == before


def test_an_index_that_names_the_wrong_shard(halves: Any) -> None:
    folder, held = halves
    places = places_of(folder)
    split(folder, held, places)
    wrong = {n: f"{'ab'[p == 'a'] if n == HEAD else p}.safetensors" for n, p in places.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": wrong}))
    with pytest.raises(ModelError, match=rf"places {HEAD} in [ab]\.safetensors, which does not"):
        load_target(folder)


def test_a_tensor_that_no_shard_holds(halves: Any) -> None:
    folder, held = halves
    places = places_of(folder)
    split(folder, held, {n: p for n, p in places.items() if n != Q})
    index = {name: f"{place}.safetensors" for name, place in places.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ModelError, match=r"lacks layers\.0\.self_attn\.q_proj\.weight"):
        load_target(folder)


def test_an_index_left_behind(folder: Path) -> None:
    """Its shards are gone, and the whole checkpoint is there."""
    before = text(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {HEAD: "old-1.safetensors"}}))
    assert text(folder) == before


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": {HEAD: 3}}, []])
def test_an_index_that_is_none(halves: Any, content: Any) -> None:
    folder, _ = halves
    (folder / INDEX).write_text(json.dumps(content))
    with pytest.raises(ModelError, match="is not a safetensors index"):
        load_target(folder)


@pytest.mark.parametrize("name", [Q, GATE, HEAD, "model.embed_tokens.weight", "model.norm.weight"])
@pytest.mark.parametrize("more", [-1, 1])
def test_a_wrong_size_names_the_tensor(folder: Path, name: str, more: int) -> None:
    """Also where other tensors of a fused part would take the rows, or leave room for them."""
    path = folder / "model.safetensors"
    held = load_file(path)
    rows, *rest = held[name].shape
    held[name] = torch.zeros(rows + more, *rest)
    save_file(held, path, {"format": "pt"})
    said = rf"tensor {name} has shape \[{rows + more}.*makes it \[{rows}"
    with pytest.raises(ModelError, match=said):
        load_target(folder)
