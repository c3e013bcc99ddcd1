"""A shard index is followed, and messages about sizes name the checkpoint's own tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_tiny
from transformers import AutoModelForCausalLM

import forerun
import forerun.api
from forerun.errors import ModelError
from forerun.models.hf_load import load_hf
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


@pytest.mark.parametrize("way", ["ours", "transformers"])
def test_a_single_file_comes_before_an_index(
    halves: Any, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers chooses; both forms hold whole models here."""
    folder, held = halves
    other = {name: torch.roll(tensor, 1, 0) for name, tensor in held.items()}
    before = text(folder)
    save_file(other, folder / "model.safetensors", {"format": "pt"})
    (want,) = AutoModelForCausalLM.from_pretrained(folder).generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    made = load_target(folder) if way == "ours" else load_hf(folder, None, torch.device("cpu"), "")
    model = forerun.api.Model(made, forerun.load(folder).tokenizer)
    caplog.clear()
    with caplog.at_level("WARNING", "forerun"):
        load_target(folder)
    assert caplog.text.count("has both model.safetensors and model.safetensors.index.json") == 1
    (found,) = model.generate([[5, 6, 7]], temperature=0, max_new_tokens=8, ignore_eos=True)
    assert found.samples[0].tokens == want[3:].tolist()
    assert text(folder) != before


@pytest.mark.parametrize("place", ["../out/a.safetensors", "/{}", "b/../../x", "..\\x", "C:\\x"])
def test_an_index_that_leaves_its_folder(halves: Any, place: str) -> None:
    folder, _ = halves
    out = folder.parent / "out" / "a.safetensors"
    out.parent.mkdir()
    (folder / "a.safetensors").rename(out)
    index = {
        n: "b.safetensors" if p == "b" else place.format(out) for n, p in places_of(folder).items()
    }
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ModelError, match="is outside of the folder"):
        load_target(folder)


def test_shards_may_be_links(halves: Any) -> None:
    """As in the cache of huggingface_hub."""
    folder, _ = halves
    before, blobs = text(folder), folder.parent / "blobs"
    blobs.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        (folder / name).rename(blobs / name)
        (folder / name).symlink_to(blobs / name)
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
