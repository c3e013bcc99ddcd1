"""Every family gives transformers' logits: prefill, cached steps, tree passes, batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import CASES, TINY, branching, expected, forward, prompt, saved, sequence, worst

from forerun.core.tree import EMPTY
from forerun.models.families import Unsupported, plan_for
from forerun.models.hf import HFTarget
from forerun.models.load import choose_dtype, load_target, planned
from forerun.models.paths import StoredConfig, read_config, read_json
from forerun.runner.model_runner import ModelRunner
from forerun.runner.native import kernels
from forerun.runner.native.decoder import NativeDecoder

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A transformers model and the folder that it was saved in."""
    folder = tmp_path_factory.mktemp(request.param)
    return saved(request.param, folder), folder


@pytest.fixture(params=["kernels", "torch"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test runs on our kernels, where they cover the family, and on torch."""
    if request.param == "torch":
        monkeypatch.setenv("FORERUN_NATIVE", "off")
    kernels.cache_clear()
    yield
    kernels.cache_clear()


def test_all_of_a_generation_agrees(pair: tuple, engine: None) -> None:
    model, folder = pair
    runner = load_target(folder, context=128)
    assert isinstance(runner, ModelRunner), "no family may fall back"
    seq, tree = sequence(prompt(21)), branching()
    rows = forward(runner, [seq], [EMPTY])[0]
    assert worst(model, seq, EMPTY, rows) < TOLERANCE  # prefill
    seq.tokens += [5]
    assert worst(model, seq, EMPTY, forward(runner, [seq], [EMPTY])[0]) < TOLERANCE  # a step
    seq.tokens += [6]
    assert worst(model, seq, tree, forward(runner, [seq], [tree])[0]) < TOLERANCE  # a tree
    seq.tokens += [*tree.path(6), 7]  # the second branch was accepted
    before = runner.num_rows
    assert worst(model, seq, tree, forward(runner, [seq], [tree])[0]) < TOLERANCE
    assert runner.num_rows - before == 1 + len(tree), "accepted nodes are not computed again"


def test_ragged_batches_agree(pair: tuple, engine: None) -> None:
    model, folder = pair
    runner = load_target(folder, context=128)
    seqs = [sequence(prompt(n)) for n in (17, 3, 30)]
    trees = [branching(1), EMPTY, branching(2)]
    for _ in range(2):
        outputs = forward(runner, seqs, trees)
        for seq, tree, rows in zip(seqs, trees, outputs, strict=True):
            assert worst(model, seq, tree, rows) < TOLERANCE
        seqs[0].tokens += [*trees[0].path(3), 9]
        seqs[1].tokens += [4]
        seqs[2].tokens += [*trees[2].path(7), 8]
        seqs, trees = seqs[::-1], trees[::-1]  # the order of a batch is free


def test_prefill_in_chunks(pair: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = pair
    monkeypatch.setattr("forerun.runner.model_runner.CHUNK", 8)
    runner = load_target(folder, context=128)
    seq = sequence(prompt(29))
    rows = forward(runner, [seq], [branching()])[0]
    assert worst(model, seq, branching(), rows) < TOLERANCE


@pytest.mark.parametrize(
    ("case", "options", "reason"),
    [
        ("llama", {"hidden_act": "mish"}, "activation"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn"),
        ("gemma2", {"use_bidirectional_attention": True}, "bidirectional"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_what_is_not_exact_is_refused(case: str, options: dict, reason: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(case, **{**TINY, **options})
    with pytest.raises(Unsupported, match=reason):
        plan_for(config)


def test_unknown_model_types_are_refused() -> None:
    from transformers import AutoConfig

    with pytest.raises(Unsupported, match="gptj"):
        plan_for(AutoConfig.for_model("gptj"))


@pytest.mark.parametrize("length", [100, 127, 128, 129, 140])
def test_longrope_changes_its_table_in_a_text(length: int, tmp_path: Path) -> None:
    """Our decoder serves the first table only; transformers runs longer contexts."""
    model = saved("phi3-longrope", tmp_path)
    assert isinstance(load_target(tmp_path, context=128), ModelRunner)
    target, seq = load_target(tmp_path), sequence(prompt(length))
    assert isinstance(target, HFTarget) and target.context == 256
    for _ in range(140 - length + 8):
        seq.tokens.append(int(forward(target, [seq], [EMPTY])[0].row(-1).argmax()))
    options = {"max_new_tokens": 140 - length + 8, "do_sample": False, "eos_token_id": None}
    want = model.generate(torch.tensor([prompt(length)]), **options)
    assert seq.tokens == want[0].tolist()


@pytest.mark.parametrize(("kind", "limit"), [("linear", 1024), ("yarn", 512), ("llama3", 256)])
def test_scaled_rotations_extend_the_context(kind: str, limit: int, tmp_path: Path) -> None:
    params = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind != "linear":
        params["original_max_position_embeddings"] = 128
    if kind == "llama3":
        params |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = saved("llama", tmp_path, rope_parameters=params)
    assert HFTarget(model).context == load_target(tmp_path).context == limit


SLOW = ("llama3", "yarn", "longrope")  # rotations that transformers computes
WRITTEN = {
    case
    for case, fields in CASES.items()
    if fields.get("rope_parameters", {}).get("rope_type") not in SLOW
    and not case.startswith("qwen3_moe")
}


@pytest.mark.parametrize("case", CASES)
def test_a_config_that_is_read_as_written_gives_the_plan_of_transformers(
    case: str, tmp_path: Path
) -> None:
    """Where it says enough; what it does not say is asked of transformers."""
    saved(case, tmp_path)
    plan = plan_for(read_config(tmp_path), 128)
    found, config = planned(tmp_path, 128)
    assert isinstance(config, StoredConfig) == (case in WRITTEN)
    assert (found.config, found.shapes, [*found.pieces]) == (
        plan.config,
        plan.shapes,
        [*plan.pieces],
    )
    assert choose_dtype("auto", config, []) == torch.float32


def test_a_config_that_is_read_as_written_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("llama", tmp_path)
    read: list[Path] = []

    def note(path: Path) -> dict[str, Any]:
        read.append(path)
        return read_json(path)

    monkeypatch.setattr("forerun.models.paths.read_json", note)
    planned(tmp_path)
    assert read == [tmp_path / "config.json"]


@pytest.mark.parametrize("name", ["rms_norm_eps", "head_dim", "dtype", "transformers_version"])
def test_what_a_config_does_not_say_is_asked_of_transformers(name: str, tmp_path: Path) -> None:
    import json

    saved("llama", tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields[name]
    path.write_text(json.dumps(fields))
    found, config = planned(tmp_path)
    assert not isinstance(config, StoredConfig) and found == plan_for(read_config(tmp_path))


def test_older_rope_fields_are_read(tmp_path: Path) -> None:
    import json

    model = saved("llama-llama3", tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    scaling = fields.pop("rope_parameters")
    fields["rope_theta"] = scaling.pop("rope_theta")
    fields["rope_scaling"] = scaling
    fields["torch_dtype"] = fields.pop("dtype")
    path.write_text(json.dumps(fields))
    seq = sequence(prompt(90))
    rows = forward(load_target(tmp_path), [seq], [EMPTY])[0]
    assert worst(model, seq, EMPTY, rows) < TOLERANCE


@pytest.mark.parametrize("case", ["gemma2", "gemma3_text"])
def test_the_embedding_scale_is_rounded_as_in_transformers(
    case: str, engine: None, tmp_path: Path
) -> None:
    """In bf16 sqrt(48) is 6.9375."""
    model = saved(case, tmp_path).to(torch.bfloat16)
    runner = load_target(tmp_path, dtype="bf16")
    assert isinstance(runner, ModelRunner)
    ids, scale = torch.tensor([5, 99]), runner.model.embed_scale
    assert scale == 6.9375
    assert torch.equal(runner.model.rows(ids) * scale, model.model.embed_tokens(ids))
    if isinstance(runner.decode, NativeDecoder):
        assert runner.decode._record.embed_scale == scale


def test_a_vocabulary_of_262144_ids(engine: None, tmp_path: Path) -> None:
    """As in gemma 3. The tied head is held once, and the last id counts."""
    vocab = 1 << 18
    model = saved("gemma3_text", tmp_path, vocab_size=vocab)
    runner, tree = load_target(tmp_path), branching()
    seq = sequence([*prompt(20), vocab - 1])
    assert worst(model, seq, tree, forward(runner, [seq], [tree])[0]) < TOLERANCE
    table = vocab * TINY["hidden_size"] * 4  # bytes
    assert runner.memory_report()["weights"] < 1.1 * table
    assert runner.memory_report()["scratch"] < 0.1 * table


@pytest.mark.parametrize(
    "case", ["llama", "gemma2", "gemma3_text", "granite", "smollm3", "qwen3_moe", "gpt2"]
)
def test_bf16_is_close(case: str, tmp_path: Path) -> None:
    model = saved(case, tmp_path)
    runner = load_target(tmp_path, dtype="bf16")
    seq, tree = sequence(prompt(21)), branching()
    rows = forward(runner, [seq], [tree])[0]
    assert rows.logits.dtype in (torch.bfloat16, torch.float32)  # native kernels do not round
    want = expected(model, seq.tokens)[-1]
    correlation = torch.corrcoef(torch.stack([rows.logits[0].float(), want]))[0, 1]
    assert correlation > 0.995
    seq.tokens += tree.path(6) + [3]
    again = forward(runner, [seq], [EMPTY])[0].logits[0].float()
    want = expected(model, seq.tokens)[-1]
    assert torch.corrcoef(torch.stack([again, want]))[0, 1] > 0.995
