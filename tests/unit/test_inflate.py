"""Inflation: the same law at a larger size, ordinary files, nothing half-written, refusals."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import forerun
from forerun.assets import embedded
from forerun.bench import inflate as module
from forerun.bench import padding
from forerun.bench.inflate import inflate, inflated_from
from forerun.bench.padding import SIZES, Padding, Shape, Size, grown
from forerun.cli.main import main
from forerun.errors import CapacityError, ConfigError, DataError, ModelError, UnknownName
from forerun.tasks import get_task

TINY = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CASES = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True, "head_dim": 16},
    "llama-biased": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "llama-one-kv": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
}


def make_checkpoint(name: str, folder: Path) -> Path:
    """A random checkpoint whose norms, biases and embeddings all matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name.partition("-")[0], **TINY | CASES[name])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.copy_(torch.rand_like(weight) + 0.5 if "norm" in key else weight * 8)
            if key.endswith("bias"):
                weight.normal_(0.0, 0.5)
    model.save_pretrained(folder)
    return folder


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """transformers' logits in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(ids).logits


def difference(one: torch.Tensor, two: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return ((one - two).abs().max() / one.abs().max()).item()


@pytest.fixture
def small_sizes(monkeypatch):
    """Sizes with 1, 2, 4 and 8 times the width of the tiny checkpoints."""
    for times, number in ((1, 0.1e6), (2, 0.3e6), (4, 1.2e6), (8, 4.8e6)):
        monkeypatch.setitem(padding.SIZES, f"X{times}", Size(number, 32 * times, 4, 24))


@pytest.mark.parametrize(
    ("name", "times"),
    [("llama", 1), ("llama", 2), ("llama", 4), ("llama-one-kv", 8), ("llama-biased", 2)]
    + [("llama-tied", 2), ("llama-tied", 4), ("mistral", 4), ("qwen2", 2), ("qwen3", 2)],
)
def test_every_family_keeps_its_law(name, times, tmp_path, small_sizes):
    source = make_checkpoint(name, tmp_path / "small")
    made = inflate(source, tmp_path / "big", f"X{times}", dtype="fp32")
    assert made.shape.hidden == 32 * times and made.shape.layers >= 4
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(1))
    assert difference(logits(source, ids), logits(tmp_path / "big", ids)) < 2e-5


@pytest.mark.slow
def test_the_reasoner_at_a_tenth_of_a_billion(tmp_path):
    """bf16 weights computed in fp32: logits as the small one's, in transformers and in ours."""
    source = Path(embedded("reasoner"))
    made = inflate("reasoner", tmp_path / "big", "0.1B")
    assert made.shape.parameters == pytest.approx(0.1e9, rel=0.03)
    assert made.num_bytes == pytest.approx(0.2e9, rel=0.03)
    tokenizer = forerun.load("reasoner").tokenizer
    task = get_task("reasoning:levels=1+4")
    for i in range(2):
        e = task.example(i)
        ids = torch.tensor([tokenizer.encode(e.prompt + e.reference)])
        assert difference(logits(source, ids), logits(tmp_path / "big", ids)) < 1e-4
    results = [
        forerun.load(str(path), dtype="fp32").generate(
            [task.example(i).prompt for i in range(2)],
            temperature=0.0,
            max_new_tokens=24,
            logprobs=5,
            drafter="prompt_lookup",
        )
        for path in (source, tmp_path / "big")
    ]
    for small, big in zip(*results, strict=True):
        assert small.samples[0].tokens == big.samples[0].tokens and len(big.text) > 30
        for one, two in zip(small.samples[0].logprobs, big.samples[0].logprobs, strict=True):
            assert two == pytest.approx(one, rel=1e-4, abs=1e-4)


def test_what_is_written_is_an_ordinary_checkpoint(tmp_path):
    source = Path(embedded("reasoner"))
    before = {f.name: f.read_bytes() for f in source.iterdir() if f.is_file()}
    folder = inflate("reasoner", tmp_path / "deep" / "big", "0.1b", seed=1).folder
    assert {f.name: f.read_bytes() for f in source.iterdir() if f.is_file()} == before
    config = json.loads((folder / "config.json").read_text())
    assert config["hidden_size"] == 1024 and config["head_dim"] == 64
    assert config["rms_norm_eps"] == json.loads(before["config.json"])["rms_norm_eps"] / 4
    assert (folder / "tokenizer.json").read_bytes() == before["tokenizer.json"]
    assert inflated_from(folder)["name"] == "reasoner" and inflated_from(source) is None
    assert [p.name for p in folder.parent.iterdir()] == ["big"]
    assert all(f.stat().st_mode & 0o777 == 0o644 for f in folder.iterdir())
    weights = load_file(folder / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    for key, weight in weights.items():
        share = (weight == 0).float().mean().item()
        is_new = int(key.split(".")[2]) >= 6 if ".layers." in key else False
        if "o_proj" in key or "down_proj" in key:
            assert share == 1.0 if is_new else 0.5 < share < 1.0
        elif "embed" not in key:
            assert share < 1e-3, key


def test_large_checkpoints_are_written_in_shards(tmp_path, monkeypatch, small_sizes):
    monkeypatch.setattr(module, "SHARD_BYTES", 300_000)
    source = make_checkpoint("llama", tmp_path / "small")
    folder = inflate(source, tmp_path / "big", "X4").folder
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files == sorted(f.name for f in folder.glob("*.safetensors"))
    assert all((folder / f).stat().st_size < 400_000 for f in files)
    assert index["metadata"]["total_size"] == sum(
        w.nbytes for f in files for w in load_file(folder / f).values()
    )
    again = inflate(folder, tmp_path / "bigger", "X8").folder  # sharded sources are read too
    ids = torch.randint(3, 90, (1, 30), generator=torch.Generator().manual_seed(2))
    assert difference(logits(folder, ids), logits(again, ids)) < 1e-5
    assert inflated_from(again) == inflated_from(folder)  # and the first model is not forgotten
    assert inflated_from(again)["name"] == "small" and inflated_from(again)["hidden"] == 32


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "small",
    [
        Shape(256, 6, 4, 2, 64, 640, 768, True),
        Shape(320, 8, 5, 5, 64, 960, 1024, True),
        Shape(384, 8, 6, 2, 64, 1024, 1024, False),
        Shape(64, 5, 8, 4, 8, 172, 512, True),
        Shape(288, 6, 6, 6, 48, 768, 32000, False),
    ],
)
def test_sizes_are_what_they_are_called(size, small):
    big = grown(small, size)
    pad = Padding(small, big, torch.bfloat16)
    assert big.parameters == pytest.approx(SIZES[size].parameters, rel=0.03)
    assert (
        big.heads % big.kv_heads == 0 == big.hidden % big.heads
        and math.log2(big.hidden / small.hidden) % 1 == 0
    )
    assert math.log2(pad.norm_factor) % 1 == 0 == math.log2(pad.eps_factor) % 1
    (queries,) = pad.places("q")
    assert len(set(queries.tolist())) == len(queries) and queries.max() < big.heads * big.head_dim
    heads = queries[:: small.head_dim] // small.head_dim
    groups = torch.arange(small.heads) // (small.heads // small.kv_heads)
    assert (heads // (big.heads // big.kv_heads)).tolist() == groups.tolist()


def test_names_of_sizes_and_dtypes(tmp_path):
    said = "unknown size '0.2B'; known: 30M, 0.1B, 0.3B, 1B, 8B"
    with pytest.raises(UnknownName, match=f"^{re.escape(said)}$"):
        inflate("reasoner", tmp_path / "x", "0.2B")
    with pytest.raises(UnknownName, match="unknown dtype 'bf61'"):
        inflate("reasoner", tmp_path / "x", "1B", dtype="bf61")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2e10, 1e10, 1e10))
    with pytest.raises(CapacityError, match=r"takes 16\.3 GB, but .* has 10\.0 GB free"):
        inflate("reasoner", tmp_path / "a" / "b", "8B")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path, monkeypatch, small_sizes):
    source = make_checkpoint("llama", tmp_path / "small")

    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(CapacityError, match="No space left"):
        inflate(source, tmp_path / "big", "X2")
    assert [p.name for p in tmp_path.iterdir()] == ["small"]


def test_what_a_killed_process_left_goes_first(tmp_path, monkeypatch, small_sizes):
    source, big = make_checkpoint("llama", tmp_path / "small"), tmp_path / "big"
    left = tmp_path / ".big.forerun-inflate"
    left.mkdir()
    (left / "model-00001-of-00032.safetensors").write_bytes(bytes(30_000_000))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2e10, 2e10, 0))
    done = []
    inflate(source, big, "X2", report=lambda *told: done.append(told))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big", "small"]
    assert not (big / "model-00001-of-00032.safetensors").exists()
    total = sum(tensor.nbytes for tensor in load_file(big / "model.safetensors").values())
    assert done == [(0, total), (total, total)]


def test_two_at_once_do_not_meet(tmp_path, monkeypatch, small_sizes):
    source, save = make_checkpoint("llama", tmp_path / "small"), module.save_file

    def beside(*given, **named):
        with pytest.raises(
            DataError, match=r"another process writes .*\.big\.forerun-inflate; wait"
        ):
            inflate(source, tmp_path / "big", "X2")
        save(*given, **named)

    monkeypatch.setattr(module, "save_file", beside)
    assert (inflate(source, tmp_path / "big", "X2").folder / "config.json").exists()


def test_ctrl_c_leaves_nothing_and_says_so(tmp_path, monkeypatch, capsys):
    def interrupted(*given, **named):
        assert (tmp_path / ".big.forerun-inflate").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "save_file", interrupted)
    assert main(["bench", "inflate", "reasoner", str(tmp_path / "big"), "--size", "30M"]) == 130
    said = "interrupted: nothing was kept; the same command starts again\n"
    assert capsys.readouterr() == ("", said) and not list(tmp_path.iterdir())


def test_an_existing_target_is_kept(tmp_path, small_sizes):
    source = make_checkpoint("llama", tmp_path / "small")
    with pytest.raises(ConfigError, match="exists"):
        inflate(source, source, "X2")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="exists"):
        inflate(source, tmp_path / "file", "X2")
    with pytest.raises(DataError, match=r"cannot create .*\.big\.forerun-inflate: .*another place"):
        inflate(source, tmp_path / "file" / "big", "X2")
    (tmp_path / "empty").mkdir()
    assert (inflate(source, tmp_path / "empty", "X2").folder / "config.json").exists()


def spoil(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_sources_that_cannot_be_padded(tmp_path, small_sizes):
    source = make_checkpoint("llama", tmp_path / "small")
    with pytest.raises(ModelError, match="no model folder"):
        inflate(tmp_path / "none", tmp_path / "x", "X2")
    whole = (source / "model.safetensors").read_bytes()
    for changes, hint in (
        ({"model_type": "gpt2"}, "of type 'gpt2'; only llama"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantised"),
        ({"quantization_config": None, "num_hidden_layers": 400}, "does not fit into X2"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2"),
        ({"num_hidden_layers": 2, "intermediate_size": 40}, r"shape \[48, 32\], but config.json"),
    ):
        spoil(source, **changes)
        with pytest.raises(ModelError, match=hint):
            inflate(source, tmp_path / "x", "X2")
    spoil(source, intermediate_size=48)
    (source / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="cannot be read"):
        inflate(source, tmp_path / "x", "X2")
    (source / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no model.safetensors"):
        inflate(source, tmp_path / "x", "X2")
    (source / "model.safetensors").write_bytes(whole)
    (source / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        inflate(source, tmp_path / "x", "X2")
    assert [p.name for p in tmp_path.iterdir()] == ["small"]
