"""Texts beyond the declared length, and position tables that depend on the length."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from hf_small import VOCAB, made, ours, rope, same

from forerun.errors import CapacityError
from forerun.models.hf import HFTarget


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "phi3", "bloom"])
def test_texts_go_beyond_the_declared_length_as_in_generate(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {} if kind == "bloom" else {"max_position_embeddings": 24}
    model = made(kind, **fields)
    with caplog.at_level(logging.WARNING, "forerun"):
        assert same(model, max_new_tokens=60)
    assert ("24 positions" in caplog.text) == (kind != "bloom")


@pytest.mark.parametrize(("kind", "long"), [("linear", 128), ("yarn", 128), ("dynamic", 128)])
def test_scaling_factors_extend_the_length(
    kind: str, long: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = made("llama", **rope(kind))
    assert HFTarget(model).context == long
    with caplog.at_level(logging.WARNING, "forerun"):
        assert same(model, max_new_tokens=80)
    assert "trained for" not in caplog.text


@pytest.mark.parametrize("kind", ["gpt2", "mpt"])
def test_stored_positions_end_with_a_clear_refusal(kind: str) -> None:
    model = made(kind)
    assert same(model, max_new_tokens=64 - 9 + 1) or kind == "mpt"
    with pytest.raises(CapacityError, match="stores 64 positions"):
        ours(model, max_new_tokens=100)
    with pytest.raises(CapacityError, match="prompt has 70 tokens"):
        ours(model, torch.randint(3, VOCAB, (1, 70)), max_new_tokens=4)


@pytest.mark.parametrize("length", [20, 31, 32, 33, 40])
@pytest.mark.parametrize("kind", ["llama longrope", "llama dynamic", "phi3 longrope"])
@pytest.mark.parametrize("drafter", ["stand", "prompt_lookup", "none"])
def test_drafts_near_the_switch_of_tables_change_nothing(
    kind: str, length: int, drafter: str
) -> None:
    family, _, name = kind.partition(" ")
    fields = rope(name)
    if family == "phi3":
        fields["original_max_position_embeddings"] = 32
    model = made(family, **fields)
    ids = torch.tensor([[5 + i % 4 for i in range(length)]])
    want = copy.deepcopy(model).generate(ids, max_new_tokens=40, do_sample=False)
    assert torch.equal(ours(model, ids, max_new_tokens=40, drafter=drafter), want)
    texts = model.generate(ids, max_new_tokens=40, do_sample=False)
    assert torch.equal(texts, want), "plain generate finds its tables as before"


class OwnRope(torch.nn.Module):
    """Rotary embeddings of foreign code, scaled by the last position of the pass."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        scale = 1 + max(int(position_ids.max()) - 20, 0) / 16
        return self.inner(x, position_ids.float() / scale)


def test_unknown_tables_are_found_by_a_probe(caplog: pytest.LogCaptureFixture) -> None:
    model = made("llama")
    model.model.rotary_emb = OwnRope(model.model.rotary_emb)
    with caplog.at_level(logging.WARNING, "forerun"):
        assert same(model, max_new_tokens=40)
    assert caplog.text.count("position tables that change") == 1


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_state_of_the_module_is_restored(kind: str) -> None:
    model = made("llama", **rope(kind))
    rotary = model.model.rotary_emb
    before = {name: x.clone() for name, x in rotary.named_buffers()}
    names, cached = set(vars(rotary)), rotary.max_seq_len_cached
    ours(model, max_new_tokens=60)
    assert rotary.max_seq_len_cached == cached and set(vars(rotary)) == names
    assert all(torch.equal(x, before[name]) for name, x in rotary.named_buffers())
