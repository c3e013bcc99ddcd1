"""Layers of trained drafters: identity at the start, equality with transformers, gradients."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from forerun.errors import ConfigError
from forerun.models.families import plan_for
from forerun.training.heads import DecoderLayer, Fusion, ResBlock

SIZES = {
    "vocab_size": 17,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def reference(kind: str):
    torch.manual_seed(0)
    if kind == "qwen2":  # with biases
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, attn_implementation="eager"))
        torch.nn.init.normal_(model.model.layers[0].self_attn.q_proj.bias)
        return model.eval()
    rope = {"rope_parameters": LLAMA3} if kind == "llama3" else {}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **rope, attn_implementation="eager")).eval()


def test_a_residual_block_starts_as_the_identity_and_learns():
    block, x = ResBlock(8), torch.randn(3, 8)
    torch.testing.assert_close(block(x), x, rtol=0, atol=0)
    block(x).square().sum().backward()
    assert block.linear.weight.grad.abs().sum() > 0


def test_fusion_is_a_product_with_the_joined_rows():
    fusion, parts = Fusion(3, 4, out=5), [torch.randn(2, 6, 4) for _ in range(3)]
    weights = fusion.fc.weight.split(4, dim=1)
    expected = sum(part @ w.T for part, w in zip(parts, weights, strict=True))
    found = fusion(parts)
    assert found.shape == (2, 6, 5)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen2"])
def test_a_layer_is_that_of_transformers(kind):
    """The same weights, by the same names, give the same rows; so does one row after another."""
    model = reference(kind)
    layer = DecoderLayer(plan_for(model.config).config)
    layer.load_state_dict(model.model.layers[0].state_dict())
    ids = torch.randint(0, 17, (2, 20))
    with torch.no_grad():
        x = model.model.embed_tokens(ids)
        expected = model.model(ids, output_hidden_states=True)
        found, _ = layer(x, torch.arange(20))
        torch.testing.assert_close(
            model.model.norm(found), expected.last_hidden_state, atol=1e-5, rtol=1e-4
        )
        past, rows = None, []
        for start, stop in ((0, 7), (7, 8), (8, 20)):
            row, past = layer(x[:, start:stop], torch.arange(start, stop), past)
            rows.append(row)
    torch.testing.assert_close(torch.cat(rows, 1), found, atol=1e-5, rtol=1e-4)
    assert past[0].shape == (2, 2, 20, 8)


def test_a_mask_hides_siblings():
    """Rows of a tree: each sees its ancestors only."""
    layer = DecoderLayer(plan_for(reference("llama").config).config).eval()
    x = torch.randn(1, 4, 32)
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    positions = torch.tensor([[0, 1, 1, 2]])
    with torch.no_grad():
        tree, _ = layer(x, positions, mask=mask)
        path, _ = layer(x[:, [0, 2, 3]], torch.arange(3))
    torch.testing.assert_close(tree[:, [0, 2, 3]], path, atol=1e-6, rtol=1e-5)


def test_a_wider_input_is_narrowed_and_added_to_the_residual():
    layer = DecoderLayer(plan_for(reference("llama").config).config, input_size=64)
    assert layer.self_attn.q_proj.weight.shape == (32, 64)
    x, residual = torch.randn(2, 5, 64), torch.randn(2, 5, 32, requires_grad=True)
    for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
        torch.nn.init.zeros_(linear.weight)
    rows, _ = layer(x, torch.arange(5), residual=residual)
    torch.testing.assert_close(rows, residual)
    rows.sum().backward()
    assert residual.grad.abs().sum() > 0 and layer.self_attn.o_proj.weight.grad.abs().sum() > 0


def test_every_weight_gets_a_gradient():
    layer = DecoderLayer(plan_for(reference("qwen2").config).config)
    layer(torch.randn(1, 6, 32), torch.arange(6))[0].square().sum().backward()
    names = {name for name, p in layer.named_parameters() if p.grad is None or not p.grad.any()}
    assert names <= {"self_attn.k_proj.bias"}  # softmax does not see it


def test_families_with_other_layers_are_refused():
    config = Gemma2Config(**SIZES, head_dim=8)
    with pytest.raises(ConfigError, match="use a llama config of the target's width"):
        DecoderLayer(plan_for(config).config)
