"""Checkpoints as they come: shards, ties, dtypes; and what is wrong with them is said."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from parity import branching, forward, prompt, saved, sequence, worst
from safetensors.torch import load_file, save_file
from tiny import make_tiny

import forerun
from forerun.cli.demo import chosen_model
from forerun.core.records import Step
from forerun.core.tree import EMPTY
from forerun.errors import CapacityError, ConfigError, ModelError, UnknownName
from forerun.models.load import load_target
from forerun.models.paths import is_hub_id, model_folder
from forerun.runner.free_memory import check_weights
from forerun.runner.model_runner import ModelRunner

TOLERANCE = 1e-4


def test_sharded_checkpoints(tmp_path: Path) -> None:
    model = saved("qwen3", tmp_path / "whole")
    model.save_pretrained(tmp_path / "parts", max_shard_size="40KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    seq = sequence(prompt(9))
    rows = forward(load_target(tmp_path / "parts"), [seq], [branching()])[0]
    assert worst(model, seq, branching(), rows) < TOLERANCE
    next((tmp_path / "parts").glob("*-00002-of-*.safetensors")).unlink()
    with pytest.raises(ModelError, match="model-00002-of-"):
        load_target(tmp_path / "parts")


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_dtypes(name: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    target = load_target(tmp_path, dtype=name)
    assert isinstance(target, ModelRunner)
    rows = forward(target, [sequence(prompt(9))], [branching()])[0]
    assert target.model.dtype == target.cache.data.dtype == kinds[name]
    assert rows.logits.isfinite().all()


def test_auto_is_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    from parity import tiny

    tiny("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    target = load_target(tmp_path)
    assert isinstance(target, ModelRunner)
    assert target.model.dtype == torch.bfloat16
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = load_target(tmp_path)
    assert isinstance(target, ModelRunner)
    assert target.model.dtype == torch.bfloat16, "from the tensors where the config is silent"


def edit(folder: Path, change: object) -> None:
    """Rewrites the tensors of a checkpoint."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_base_model_without_prefix_loads(tmp_path: Path) -> None:
    model = saved("gpt2", tmp_path)

    def strip(tensors: dict) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)  # the mask buffer of old files

    edit(tmp_path, strip)
    target = load_target(tmp_path)
    assert isinstance(target, ModelRunner)
    seq = sequence(prompt(9))
    assert worst(model, seq, EMPTY, forward(target, [seq], [EMPTY])[0]) < TOLERANCE


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks layers\.1\.mlp\.up_proj\.weight"):
        load_target(tmp_path)


def test_wrong_shapes_are_named(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["intermediate_size"] = 72
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"mlp\.\w+_proj\.weight has shape"):
        load_target(tmp_path)


@pytest.mark.parametrize(
    "name", ["self_attn.sinks", "self_attn.c_attn.bias", "cross_attention.bias"]
)
def test_unknown_tensors_are_not_dropped_silently(name: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    name = f"model.layers.0.{name}"
    edit(tmp_path, lambda tensors: tensors.update({name: torch.ones(4)}))
    with pytest.raises(ModelError, match=f"holds {name}, .* no place"):
        load_target(tmp_path)


def test_layers_are_not_dropped_silently(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 1}))
    with pytest.raises(ModelError, match=r"holds model\.layers\.1\..* more, .*number of layers"):
        load_target(tmp_path)


def test_truncated_files_are_named(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    for broken in (raw[: len(raw) // 2], raw[:5], b""):
        path.write_bytes(broken)
        with pytest.raises(
            ModelError, match=r"model\.safetensors has [\d,]+ bytes, but its header"
        ):
            load_target(tmp_path)


def test_a_broken_index_is_named(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("{]")
    with pytest.raises(ModelError, match=r"index\.json is not a safetensors index"):
        load_target(tmp_path)


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model folder"):
        load_target(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be used"):
        load_target(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    with pytest.raises(ModelError, match="no_such_type"):
        load_target(tmp_path)
    with pytest.raises(ModelError, match="is a file"):
        load_target(tmp_path / "config.json")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"there are no weights in .*model\.safetensors"):
        load_target(tmp_path)


@pytest.mark.parametrize("dtype", ["fp32", "float32", "torch.float32", torch.float32])
def test_names_of_a_number_type(tmp_path: Path, dtype: str | torch.dtype) -> None:
    saved("llama", tmp_path)
    assert load_target(tmp_path, dtype=dtype).model.dtype == torch.float32


def test_bad_options(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with pytest.raises(UnknownName, match="bf16"):
        load_target(tmp_path, dtype="bf61")
    with pytest.raises(ConfigError, match="at least 1"):
        load_target(tmp_path, max_seqs=0)
    for device in ("abacus", None):
        with pytest.raises(ConfigError, match="expected device"):
            load_target(tmp_path, device=device)
    with pytest.raises(ConfigError, match="weights must be auto, int8 .*, got None"):
        load_target(tmp_path, weights=None)
    if not torch.backends.mps.is_available():
        with pytest.raises(ConfigError, match="device 'mps': .*; use cpu"):
            load_target(tmp_path, device="mps")
    for graphs in ("off", None, 1):
        with pytest.raises(ConfigError, match=f"graphs must be True or False, got {graphs!r}"):
            load_target(tmp_path, graphs=graphs)


@pytest.mark.parametrize(
    ("built", "why"), [("13.0", "torch sees no GPU"), (None, "this torch is built for CPUs")]
)
def test_without_a_gpu_the_reason_is_named_before_anything_is_fetched(
    built: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    fetched: list[object] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **_: fetched.append(a))
    monkeypatch.setattr("forerun.models.pull.pull", lambda *a, **_: fetched.append(a))
    said = f"device 'cuda' is not available: {why}; use cpu"
    for load in (lambda: forerun.load("owner/name", device="cuda"), lambda: chosen_model("cuda")):
        with pytest.raises(ConfigError, match=said):
            load()
    assert not fetched


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])  # by our decoder, by transformers
def test_weights_that_do_not_fit(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(family, tmp_path)
    monkeypatch.setattr("forerun.runner.free_memory.available_bytes", lambda device: 1000)
    with pytest.raises(CapacityError, match=r"the weights take .* GiB at 4 bytes .*; use dtype"):
        load_target(tmp_path)


@pytest.mark.parametrize(("size", "is_warned"), [(95 << 30, True), (50 << 30, False)])
def test_weights_that_leave_hardly_any_memory(
    size: int, is_warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forerun.runner.free_memory.available_bytes", lambda device: 100 << 30)
    check_weights(size, torch.device("cpu"), "at 2 bytes each")
    said = "the weights take 95.0 GiB at 2 bytes each, and 100.0 GiB are free: the machine may swap"
    assert (said in caplog.text) == is_warned


def test_a_context_whose_cells_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved("llama", tmp_path)
    layers, _, _, *cell = load_target(tmp_path).cache.data.shape
    cells = 256 * layers * math.prod(cell) * 4  # all of its context, in float32
    for free, is_warned in ((cells - 1, True), (cells, False)):
        monkeypatch.setattr(
            "forerun.runner.kv_cache.available_bytes", lambda device, free=free: free
        )
        caplog.clear()
        load_target(tmp_path)
        assert ("a text of 256 tokens does not fit into memory" in caplog.text) == is_warned


def test_hub_ids() -> None:
    assert is_hub_id("gpt2")
    assert is_hub_id("owner/name")
    assert not is_hub_id("./folder")
    assert not is_hub_id("/a/b")
    assert not is_hub_id("a/b/c")


def test_a_hub_that_cannot_deliver(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*args: object, **kwargs: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=r"neither a local folder .* \(no network\)"):
        load_target("owner/name")


@pytest.mark.parametrize("grower", ["chain", "iid", "gumbel"])
def test_a_draft_with_a_shorter_context_stops_drafting(grower: str, tmp_path: Path) -> None:
    import forerun
    from forerun.drafters.draft_model import DraftModel

    model = forerun.load(make_tiny(tmp_path / "target", context=96))
    draft = load_target(make_tiny(tmp_path / "draft", seed=1, context=40))
    prompts, limits = [list(range(5, 14)), list(range(50, 95))], {"max_new_tokens": 70, "seed": 3}
    sampling = forerun.Sampling(temperature=0.0, stop_token_ids=(), **limits)
    plain = model.generate(prompts, sampling, drafter="none")
    ends: list[int] = []

    def note(step: Step) -> None:
        for seq, tree, emitted in zip(step.seqs, step.trees, step.emitted, strict=True):
            if len(tree):
                ends.append(len(seq.tokens) - len(emitted) + int(tree.depths.max()))

    for batch in (1, 2):
        drafter = DraftModel(model=draft, grower=grower)
        options = {"drafter": drafter, "verifier": "recursive", "batch": batch}
        options["controller"] = "fixed"  # drafts that do not pay are what is looked at
        results = model.generate(prompts, sampling, on_step=note, **options)
        for one, other in zip(results, plain, strict=True):
            assert one.samples[0].tokens == other.samples[0].tokens
    assert 14 < max(ends) <= 40, "trees end with the draft's context"


@pytest.mark.parametrize("options", [{"max_seqs": 0}, {"context": 0}, {"context": 1.5}])
def test_limits_are_positive_integers(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="integer of at least [12]"):
        load_target("anywhere", **options)


@pytest.mark.parametrize("name", ["a" * 5000, "~nobody-of-this-name/x"])
def test_names_that_no_folder_can_have(name: str) -> None:
    with pytest.raises(ModelError, match="no model folder"):
        model_folder(name)


@pytest.mark.parametrize("target", [5, [], b"entropy_switch"])
def test_a_target_that_is_no_name_is_refused(target: Any) -> None:
    with pytest.raises(ConfigError, match="target must be a name, got .*forerun methods"):
        forerun.load("./nowhere", target=target)
