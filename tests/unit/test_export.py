"""Saved heads and models: whole or not at all, and in the format that vLLM reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig

from forerun.models.families import plan_for
from forerun.training.export import Speculator, save
from forerun.training.heads import DecoderLayer

LAYER = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)


def read_as_vllm(config: dict) -> tuple[dict, dict]:
    """The speculative settings and the model configuration, by the accesses of vLLM's loader."""
    speculators = config["speculators_config"]
    first = speculators["proposal_methods"][0]
    _ = speculators["verifier"]["name_or_path"]
    found = {
        "method": config["speculators_model_type"],
        "num_speculative_tokens": first["speculative_tokens"],
    }
    layer = dict(config["transformer_layer_config"])
    layer["draft_vocab_size"] = config.get("draft_vocab_size")
    layer["norm_before_residual"] = config.get("norm_before_residual", True)
    assert layer.get("model_type", "llama") in ("llama", "qwen3")
    return found, layer


def eagle(folder: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    head = DecoderLayer(plan_for(LAYER).config, input_size=32)
    config = Speculator(
        "eagle3",
        verifier="org/target",
        verifier_architectures=("LlamaForCausalLM",),
        layer_config=LAYER.to_dict(),
        tokens=4,
        architectures=("Eagle3DraftModel",),
        fields={"draft_vocab_size": 20, "norm_before_residual": False},
    )
    save(head, folder, config=config, card="# A head\n")
    return head


def test_a_head_in_speculators_format_is_read(tmp_path):
    head = eagle(tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    speculative, layer = read_as_vllm(config)
    assert speculative == {"method": "eagle3", "num_speculative_tokens": 4}
    assert layer["draft_vocab_size"] == 20 and layer["hidden_size"] == 16
    built = AutoConfig.for_model(**layer)
    assert built.num_key_value_heads == 1 and built.model_type == "llama"
    speculators = config["speculators_config"]
    assert speculators["default_proposal_method"] == "greedy"
    assert speculators["verifier"]["architectures"] == ["LlamaForCausalLM"]
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert tensors.keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensors[name], tensor)


def test_a_new_folder_appears_whole_and_an_old_one_keeps_other_files(tmp_path):
    eagle(tmp_path / "head")
    (tmp_path / "head" / "notes.txt").write_text("mine")
    save({"a": torch.zeros(2)}, tmp_path / "head", file="heads/a.safetensors")
    names = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert names == {
        "head/README.md",
        "head/config.json",
        "head/heads/a.safetensors",
        "head/model.safetensors",
        "head/notes.txt",
    }


def test_a_failed_save_leaves_the_folder_as_it_was(tmp_path):
    save({"a": torch.ones(2)}, tmp_path / "head", file="heads/a.safetensors", card="one")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(AttributeError):
        save({"a": "no tensor"}, tmp_path / "head", file="heads/a.safetensors", card="two")  # type: ignore[dict-item]
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["head"]
    with pytest.raises(AttributeError):
        save({"a": "no tensor"}, tmp_path / "new")  # type: ignore[dict-item]
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def test_tied_and_strided_tensors_are_saved(tmp_path):
    table = torch.arange(12.0).view(3, 4)
    save({"one": table, "same": table, "turned": table.T}, tmp_path / "head")
    found = load_file(tmp_path / "head" / "model.safetensors")
    assert torch.equal(found["one"], found["same"]) and torch.equal(found["turned"], table.T)
