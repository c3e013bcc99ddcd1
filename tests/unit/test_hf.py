"""Models that our decoder does not know run on transformers, in the fastest way that is right."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import (
    VOCAB,
    branching,
    error,
    expected,
    forward,
    prompt,
    saved,
    sequence,
    tiny,
    worst,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from forerun.core.forward_batch import ForwardBatch
from forerun.core.tree import EMPTY
from forerun.errors import CapacityError, ModelError
from forerun.models.hf import WAYS, HFTarget
from forerun.models.load import load_target

TOLERANCE = 1e-4


def other(kind: str) -> Any:
    """A tiny random model of a type that has no family of ours."""
    fields: dict[str, dict[str, Any]] = {
        "gpt_neox": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        "gemma": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
        "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
        "gemma3_text": {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "head_dim": 8,
            "sliding_window": 6,
        },
        "falcon_h1": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
        },
    }
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    more = {"intermediate_size": 64, "max_position_embeddings": 128, "vocab_size": VOCAB}
    config = AutoConfig.for_model(kind, **{**more, **special, **fields[kind]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def check_generation(model: Any, target: HFTarget) -> None:
    """Prefill, a step, a tree, an accepted branch that is not the first, and a batch."""
    seq, tree = sequence(prompt(11)), branching()
    assert worst(model, seq, EMPTY, forward(target, [seq], [EMPTY])[0]) < TOLERANCE
    seq.tokens += [5]
    assert worst(model, seq, tree, forward(target, [seq], [tree])[0]) < TOLERANCE
    seq.tokens += [*tree.path(6), 7]
    other_seq = sequence(seq.tokens[:9] + [4, 4])
    outputs = forward(target, [other_seq, seq], [EMPTY, tree])
    assert worst(model, other_seq, EMPTY, outputs[0]) < TOLERANCE
    assert worst(model, seq, tree, outputs[1]) < TOLERANCE
    seq.tokens = seq.tokens[:10]  # tokens may also be taken back
    assert worst(model, seq, tree, forward(target, [seq], [tree])[0]) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("gpt_neox", "tree"),
        ("gemma", "tree"),
        ("gemma3_text", "paths"),
        ("mamba", "full"),
        ("bloom", "paths"),
        ("falcon_h1", "paths"),
    ],
)
def test_other_models_agree_with_plain_passes(kind: str, way: str) -> None:
    model = other(kind)
    target = HFTarget(model)
    assert target.way == way
    check_generation(model, target)


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_agree(way: str) -> None:
    model = tiny("llama")
    check_generation(model, HFTarget(model, way=way))


@pytest.mark.parametrize("way", WAYS)
def test_paths_of_a_draft_grow_level_by_level(way: str) -> None:
    model = tiny("llama")
    target, seq = HFTarget(model, way=way), sequence(prompt(6))
    for paths in ([()], [(7,), (8,)], [(7, 9), (8, 9), (7, 4)], [(7, 9, 3)]):
        rows = target.rows_at([(seq, path) for path in paths])
        for path, row in zip(paths, rows, strict=True):
            assert error(row, expected(model, [*seq.tokens, *path])[-1]) < TOLERANCE
    seq.tokens += [7, 9, 5]
    row = target.rows_at([(seq, ())])[0]
    assert error(row, expected(model, seq.tokens)[-1]) < TOLERANCE


def test_hidden_rows_and_memory() -> None:
    model = tiny("llama")
    target, seq = HFTarget(model), sequence(prompt(6))
    rows = target.forward(ForwardBatch([seq], [branching()], frozenset({"hidden"})))[0]
    assert rows.hidden is not None
    with torch.inference_mode():
        logits = model.lm_head(rows.hidden)
    assert error(logits, rows.logits.float()) < TOLERANCE
    report = target.memory_report()
    assert report["weights"] > 0
    assert report["kv cache"] > 0


def test_unknown_folders_fall_back(tmp_path: Path) -> None:
    model = other("gpt_neox")
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path)
    assert isinstance(target, HFTarget)
    assert "gpt_neox" in target.reason
    seq = sequence(prompt(9))
    assert worst(model, seq, branching(), forward(target, [seq], [branching()])[0]) < TOLERANCE


def test_an_unhandled_feature_falls_back(tmp_path: Path) -> None:
    model = saved("llama", tmp_path, hidden_act="mish")
    target = load_target(tmp_path)
    assert isinstance(target, HFTarget)
    seq = sequence(prompt(9))
    assert worst(model, seq, branching(), forward(target, [seq], [branching()])[0]) < TOLERANCE


def test_a_loaded_model_is_taken_as_it_is() -> None:
    model = tiny("llama")
    target = load_target(model)
    assert isinstance(target, HFTarget)
    assert target.model is model


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_damaged_weights_are_refused_by_name(tmp_path: Path, value: float) -> None:
    """From a folder and as a loaded model: else the first text would tell, or none."""
    model = other("gpt_neox")
    name, weight = next((n, w) for n, w in model.named_parameters() if w.dim() == 2)
    weight.data[3, 2] = value
    model.save_pretrained(tmp_path)
    for source in (tmp_path, model):
        with pytest.raises(ModelError, match=f"parameter {name} holds 1 values of .* damaged"):
            load_target(source)


def test_weights_that_overflow_in_half_precision_are_refused(tmp_path: Path) -> None:
    model = other("gpt_neox")
    next(w for w in model.parameters() if w.dim() == 2).data[0, 0] = 1e5
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="too large for fp16; load the model with dtype bf16"):
        load_target(tmp_path, dtype="fp16")


def stored(kind: str, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """The folder of a model whose tensors were changed after it was saved."""
    other(kind).save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def test_tensors_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    name = "gpt_neox.layers.0.mlp.dense_4h_to_h.weight"
    stored("gpt_neox", tmp_path / "one", lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"the checkpoint lacks {name}; is it complete"):
        load_target(tmp_path / "one")
    tiny("llama").save_pretrained(tmp_path / "llama")
    weights = load_file(tmp_path / "llama" / "model.safetensors")
    stored("gpt_neox", tmp_path / "all", lambda tensors: (tensors.clear(), tensors.update(weights)))
    with pytest.raises(ModelError, match=r"the checkpoint lacks gpt_neox.* and \d+ more; .* own\?"):
        load_target(tmp_path / "all")


def test_tensors_of_another_shape_are_named(tmp_path: Path) -> None:
    name = "gpt_neox.layers.1.mlp.dense_4h_to_h.bias"
    stored("gpt_neox", tmp_path, lambda tensors: tensors.update({name: torch.ones(7)}))
    with pytest.raises(
        ModelError, match=rf"{name} has shape \[7\], but config.json requires \[32\]"
    ):
        load_target(tmp_path)


def test_what_old_or_tied_checkpoints_have_otherwise_is_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Masks and tables of positions too many, a head that is the embedding too few."""
    names = ("bias", "masked_bias", "causal_mask", "rotary_emb.inv_freq")
    buffers = {f"gpt_neox.layers.0.attention.{name}": torch.ones(4) for name in names}
    old = stored("gpt_neox", tmp_path / "old", lambda tensors: tensors.update(buffers))
    tied = stored("bloom", tmp_path / "tied", lambda tensors: tensors.pop("lm_head.weight", None))
    for folder in (old, tied):
        assert isinstance(load_target(folder), HFTarget)
    assert not [record for record in caplog.records if record.name == "forerun"]


@pytest.mark.parametrize(
    "name",
    [
        "gpt_neox.layers.2.mlp.dense_4h_to_h.bias",  # of a layer too many
        "layers.1.attention.sinks",
        "gpt_neox.layers.0.attention.c_attn.bias",  # whose end is like that of an old mask
        "gpt_neox.final_layer_norm.offset",
        "lm_head.bias",
    ],
)
def test_surplus_tensors_of_the_model_s_own_parts_are_refused(tmp_path: Path, name: str) -> None:
    stored("gpt_neox", tmp_path, lambda tensors: tensors.update({name: torch.ones(3)}))
    with pytest.raises(ModelError, match=f"holds {name}, .* no place; check that config.json"):
        load_target(tmp_path)


def test_surplus_tensors_of_other_parts_are_named_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["mtp.layers.0.up.weight", "v_head.weight", "vision.a", "vision.b"]
    surplus = {name: torch.ones(3) for name in names}
    stored("gpt_neox", tmp_path, lambda tensors: tensors.update(surplus))
    theirs = logging.getLogger("transformers")  # what it says of a load as well
    level = theirs.level
    theirs.addHandler(caplog.handler)
    try:
        assert isinstance(load_target(tmp_path), HFTarget)
    finally:
        theirs.removeHandler(caplog.handler)
    (said,) = {record.getMessage() for record in caplog.records}
    assert f"holds {', '.join(names[:3])} and 1 more, which are not part of GPTNeoX" in said
    assert theirs.level == level


@pytest.mark.parametrize("level", [logging.WARNING, logging.DEBUG])
def test_no_progress_bars_are_drawn_while_loading(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    level: int,
) -> None:
    """Unless our log tells everything; what the user has set stands again afterwards."""
    other("gpt_neox").save_pretrained(tmp_path)
    capsys.readouterr()
    before = transformers_logging.set_tqdm_hook(own := lambda make, args, options: make(*args))
    try:
        with caplog.at_level(level, "forerun"):
            load_target(tmp_path)
    finally:
        assert transformers_logging.set_tqdm_hook(before) is own
    assert bool(capsys.readouterr().err) == (level == logging.DEBUG)


def test_prompts_beyond_the_context_are_refused() -> None:
    target = HFTarget(tiny("llama"), context=8)
    with pytest.raises(CapacityError, match="context is 8"):
        forward(target, [sequence(prompt(9))], [EMPTY])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_a_pass_that_breaks_off_leaves_right_state(way: str, kind: type[BaseException]) -> None:
    model = tiny("llama")
    target, seq, tree = HFTarget(model, way=way), sequence(prompt(11)), branching()
    forward(target, [seq], [tree])
    seq.tokens += [*tree.path(6), 7]
    last = model.model.layers[-1]

    def fail(*args: Any) -> None:
        raise kind

    hook = last.register_forward_pre_hook(fail)
    with pytest.raises(CapacityError if kind is MemoryError else kind):
        forward(target, [seq], [tree])
    hook.remove()
    check_rows(model, target, seq)


def check_rows(model: Any, target: HFTarget, seq: Any) -> None:
    """Two right steps, the second after an accepted branch."""
    tree = branching()
    assert worst(model, seq, tree, forward(target, [seq], [tree])[0]) < TOLERANCE
    seq.tokens += [*tree.path(6), 7]
    assert worst(model, seq, tree, forward(target, [seq], [tree])[0]) < TOLERANCE


def test_an_interrupted_move_leaves_right_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    target, seq, tree = HFTarget(model, way="tree"), sequence(prompt(11)), branching()
    forward(target, [seq], [tree])
    seq.tokens += [*tree.path(6), 7]
    real = torch.Tensor.index_select
    calls = iter(range(100))

    def select(self: torch.Tensor, *args: Any) -> torch.Tensor:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return real(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "index_select", select)
        with pytest.raises(KeyboardInterrupt):
            forward(target, [seq], [tree])
    check_rows(model, target, seq)


def test_a_small_error_is_no_rounding_in_full_precision() -> None:
    model = tiny("llama")
    real = model.forward

    @functools.wraps(real)
    def slightly_wrong(*args: Any, **options: Any) -> Any:
        out = real(*args, **options)
        if options.get("attention_mask") is not None:
            out.logits[:, -1] *= 1.003  # only where a pass without a mask is far off
        return out

    model.forward = slightly_wrong
    assert HFTarget(model).way == "paths"


def test_cells_are_cut_without_a_copy() -> None:
    target, seq = HFTarget(tiny("llama"), way="tree"), sequence(prompt(11))
    forward(target, [seq], [branching()])
    held = target.cache.held(target.cache.slots[0])  # type: ignore[attr-defined]
    before = held.cache.layers[0].keys.data_ptr()
    held.cut(5)
    assert held.cache.layers[0].keys.data_ptr() == before
    assert held.length == held.cache.get_seq_length() == 5
