"""New weights in a running model equal a fresh load, for every decoder and family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import branching, forward, prompt, saved, sequence, tiny, worst
from safetensors.torch import load_file

from forerun.core.records import Sequence
from forerun.core.roles import Target
from forerun.core.tree import EMPTY
from forerun.errors import ConfigError, ModelError
from forerun.models.hf import HFTarget
from forerun.models.load import load_target
from forerun.runner.attention import TorchDecoder
from forerun.runner.model_runner import ModelRunner
from forerun.runner.native import kernels

CASES = ("llama", "llama-biased-tied", "qwen2", "qwen3", "gemma2", "phi3-partial", "gpt2", "olmo2")
TOLERANCE = 1e-4


def pair(case: str, tmp_path: Path) -> tuple[Path, Path, Any]:
    """Folders of two models of one shape, and the second one."""
    folders = tmp_path / "old", tmp_path / "new"
    saved(case, folders[0], seed=0)
    return *folders, saved(case, folders[1], seed=1)


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors by name."""
    return load_file(folder / "model.safetensors")


def rows_of(target: Target, seq: Sequence) -> torch.Tensor:
    """Logits of a tree behind a sequence."""
    return forward(target, [seq], [branching()])[0].logits


@pytest.mark.parametrize("kind", ["own", "torch"])
@pytest.mark.parametrize("case", [*CASES, "qwen3_moe"])
def test_an_update_equals_a_fresh_load(case: str, kind: str, tmp_path: Path) -> None:
    old, new, _ = pair(case, tmp_path)
    runner, fresh = load_target(old), load_target(new)
    for target in (runner, fresh):
        assert isinstance(target, ModelRunner)
        if kind == "torch":
            target.decode = TorchDecoder(target.model)
    seq = sequence(prompt(20))
    before = rows_of(runner, seq)
    seq.tokens += [*branching().path(5), 4]
    runner.update_weights(state_of(new))
    want = rows_of(fresh, sequence(list(seq.tokens)))
    assert torch.equal(rows_of(runner, seq), want), "cells of the old weights are not used"
    assert not torch.allclose(before, want)


@pytest.mark.skipif(not kernels(), reason="our kernels are not built here")
@pytest.mark.parametrize("options", [{"weights": "int8"}, {"dtype": "bf16"}])
@pytest.mark.parametrize("case", ["llama-biased-tied", "gpt2"])
def test_rounded_and_half_weights_are_packed_again(
    case: str, options: dict[str, str], tmp_path: Path
) -> None:
    old, new, _ = pair(case, tmp_path)
    runner, fresh = (load_target(folder, **options) for folder in (old, new))  # type: ignore[arg-type]
    seq = sequence(prompt(9))
    rows_of(runner, seq)
    runner.update_weights(state_of(new))
    assert torch.equal(rows_of(runner, seq), rows_of(fresh, sequence(prompt(9))))


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_some_parts_may_change_alone(case: str, tmp_path: Path) -> None:
    old, new, later = pair(case, tmp_path)
    model, runner, seq = tiny(case, seed=0), load_target(old), sequence(prompt(15))
    rows_of(runner, seq)
    words = ("layers.1.mlp", "norm.weight") if case == "llama" else ("h.1.mlp", "ln_f")
    some = {n: t for n, t in state_of(new).items() if any(word in n for word in words)}
    assert 0 < len(some) < len(state_of(new))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in some:
                tensor.copy_(later.state_dict()[name])
    runner.update_weights(some)
    assert worst(model, seq, branching(), forward(runner, [seq], [branching()])[0]) < TOLERANCE


def test_draft_paths_and_twins_use_the_new_weights(tmp_path: Path) -> None:
    old, new, model = pair("llama", tmp_path)
    runner = load_target(old)
    assert isinstance(runner, ModelRunner)
    seqs = [sequence(prompt(12)) for _ in range(3)]
    twin, other = runner.twin(), ModelRunner(runner.model)
    runner.rows_at([(seqs[0], (4,))])
    forward(twin, seqs[1:2], [EMPTY])
    forward(other, seqs[2:], [EMPTY])
    runner.update_weights(state_of(new))
    with torch.inference_mode():
        want = model(torch.tensor([[*seqs[0].tokens, 4]])).logits[0]
    assert torch.allclose(runner.rows_at([(seqs[0], (4,))])[0], want[-1], atol=1e-4)
    for target, seq in ((twin, seqs[1]), (other, seqs[2])):
        assert worst(model, seq, EMPTY, forward(target, [seq], [EMPTY])[0]) < TOLERANCE


@pytest.mark.parametrize("way", ["tree", "paths"])
def test_a_transformers_target_takes_new_weights(way: str, tmp_path: Path) -> None:
    _, new, later = pair("llama-biased-tied", tmp_path)
    target, seq = HFTarget(tiny("llama-biased-tied", seed=0), way=way), sequence(prompt(12))
    rows_of(target, seq)
    target.update_weights(later.state_dict())
    assert worst(later, seq, branching(), forward(target, [seq], [branching()])[0]) < TOLERANCE
    with pytest.raises(ModelError, match="has no what"):
        target.update_weights({"what": torch.zeros(1)})
    other = {
        "model.embed_tokens.weight": torch.ones(100, 48),
        "lm_head.weight": torch.zeros(100, 48),
    }
    with pytest.raises(ModelError, match="tied"):
        target.update_weights(other)


def bad(kind: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state that is refused."""
    at = "model.layers.0."
    if kind == "name":
        return state | {f"{at}mlp.side_proj.weight": torch.zeros(2, 2)}
    if kind == "shape":
        return state | {f"{at}mlp.down_proj.weight": torch.zeros(48, 81)}
    if kind == "rows":
        return state | {f"{at}self_attn.k_proj.weight": torch.zeros(12, 48)}
    if kind == "value":
        return state | {f"{at}mlp.down_proj.weight": torch.full((48, 80), torch.nan)}
    if kind == "part":
        return {f"{at}self_attn.q_proj.weight": state[f"{at}self_attn.q_proj.weight"]}
    return state | {"lm_head.weight": torch.zeros(100, 48)}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("name", "the model has no layers.0.mlp.side_proj.weight"),
        ("shape", r"has shape \[48, 81\], the model needs \[48, 80\]"),
        ("rows", r"has shape \[12, 48\], the model needs \[32, 48\]"),
        ("value", "NaN"),
        ("part", "layers.0.self_attn.k_proj.weight, layers.0.self_attn.v_proj.weight is missing"),
        ("tie", "lm_head.weight is tied to the embedding"),
    ],
)
def test_a_bad_state_changes_nothing(kind: str, message: str, tmp_path: Path) -> None:
    case = "llama-biased-tied"
    old, new, _ = pair(case, tmp_path)
    runner, seq = load_target(old), sequence(prompt(9))
    before, state = rows_of(runner, seq), state_of(new)
    if kind == "part":
        state = {n: t for n, t in state.items() if "bias" not in n}
    with pytest.raises(ModelError, match=message):
        runner.update_weights(bad(kind, state))
    assert torch.equal(rows_of(runner, seq), before)


def test_a_target_without_a_checkpoint_says_so() -> None:
    from fakes import FakeTarget, table_law

    with pytest.raises(ConfigError, match="cannot take new weights"):
        FakeTarget(table_law(0)).update_weights({})
