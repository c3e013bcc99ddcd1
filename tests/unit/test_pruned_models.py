"""Models with sizes per layer: removed heads and neurons equal zeroed ones in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import branching, prompt, saved, sequence, worst
from safetensors.torch import save_file

from forerun.core.forward_batch import ForwardBatch
from forerun.core.tree import EMPTY
from forerun.errors import ModelError
from forerun.models.load import load_target
from forerun.runner.model_runner import ModelRunner
from forerun.runner.native import kernels
from forerun.runner.native.decoder import NativeDecoder

TOLERANCE = 1e-4
HEADS = ([0, 1], [0, 1, 2, 3], [1, 2])  # query heads that each layer keeps; two share a KV head
KV_HEADS = ([0], [0, 1], [0, 1])
WIDTHS = (80, 48, 33)


def pruned(
    case: str, folder: Path, *, heads: bool = True, widths: bool = True
) -> Any:  # fmt: skip
    """Saves a checkpoint without some heads and neurons; returns the model with them zeroed."""
    model = saved(case, folder, rms_norm_eps=1e-6)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = json.loads((folder / "config.json").read_text())
    dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    for i, layer in enumerate(model.model.layers):
        at = f"model.layers.{i}"
        if heads:
            query, kv = _channels(HEADS[i], dim), _channels(KV_HEADS[i], dim)
            _keep(state, f"{at}.self_attn.q_proj.weight", 0, query)
            _keep(state, f"{at}.self_attn.k_proj.weight", 0, kv)
            _keep(state, f"{at}.self_attn.v_proj.weight", 0, kv)
            _keep(state, f"{at}.self_attn.o_proj.weight", 1, query)
            _zero(layer.self_attn.o_proj.weight, query)
        if widths:
            kept = torch.arange(WIDTHS[i]) * 80 // WIDTHS[i]
            for name, axis in (("gate", 0), ("up", 0), ("down", 1)):
                _keep(state, f"{at}.mlp.{name}_proj.weight", axis, kept)
            _zero(layer.mlp.down_proj.weight, kept)
    config["head_dim"] = dim
    if heads:
        config["num_attention_heads"] = [len(kept) for kept in HEADS]
        config["num_key_value_heads"] = [len(kept) for kept in KV_HEADS]
    if widths:
        config["intermediate_size"] = list(WIDTHS)
    (folder / "config.json").write_text(json.dumps(config))
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    tensors = {n: t.contiguous() for n, t in state.items() if n not in tied}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model


def _channels(heads: list[int], dim: int) -> torch.Tensor:
    return torch.cat([torch.arange(head * dim, (head + 1) * dim) for head in heads])


def _keep(state: dict[str, torch.Tensor], name: str, axis: int, kept: torch.Tensor) -> None:
    state[name] = state[name].index_select(axis, kept)


def _zero(weight: torch.Tensor, kept: torch.Tensor) -> None:
    """Zeroes the input channels that are not kept."""
    with torch.no_grad():
        mask = torch.zeros(weight.shape[1])
        mask[kept] = 1.0
        weight *= mask


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("parts", ["heads", "widths", "both"])
def test_removed_parts_equal_zeroed_ones(case: str, parts: str, tmp_path: Path) -> None:
    model = pruned(case, tmp_path, heads=parts != "widths", widths=parts != "heads")
    runner = load_target(tmp_path)
    assert isinstance(runner, ModelRunner)
    runs_native = bool(kernels()) and parts == "widths"
    assert isinstance(runner.decode, NativeDecoder) == runs_native
    seqs = [sequence(prompt(n)) for n in (20, 5)]
    for trees in ([branching(), EMPTY], [EMPTY, branching(3)]):
        for needs in (frozenset[str](), frozenset({"taps:1"})):
            found = runner.forward(ForwardBatch(seqs, trees, needs))
            for seq, tree, rows in zip(seqs, trees, found, strict=True):
                assert worst(model, seq, tree, rows) < TOLERANCE
        for seq, tree in zip(seqs, trees, strict=True):
            seq.tokens += [*(tree.path(5) if len(tree) else []), 9]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": [4, 4]}, "2 sizes for 3 layers"),
        ({"intermediate_size": [80, 0, 80]}, "integers of at least 1"),
        ({"num_attention_heads": [4, 3, 4]}, "3 heads do not share 2 key-value heads"),
        ({"num_attention_heads": [4, 2, 4], "head_dim": None}, "head_dim must be given"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        load_target(tmp_path)
