"""Peers before they run: their names and options, their environments, their model files."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from parity import saved

from forerun.bench.peers import catalog, install, methods, parse
from forerun.bench.peers.catalog import Mode, Peer
from forerun.errors import ConfigError, UnknownName


class TestNames:
    def test_all_methods_parse(self) -> None:
        assert {"vllm:suffix", "vllm:ngram:batch", "transformers:assisted"} <= {*methods()}
        for name in methods():
            parts = parse(name)
            assert parts.batch is name.endswith(":batch") and parts.peer in name
            assert (catalog.WORKERS / f"{parts.peer}.py").exists()

    def test_options(self) -> None:
        parts = parse("llama-cpp:lookup,tokens=7")
        assert (parts.peer, parts.mode) == ("llama_cpp", "lookup")
        assert parts.options == {"tokens": 7, "ngram": 2}
        assert parse("vllm:draft,draft=/a/b,tokens=3").draft == "/a/b"

    @pytest.mark.parametrize(
        ("name", "error", "said"),
        [
            ("vlm", UnknownName, "did you mean 'vllm'"),
            ("vllm:ngrams", UnknownName, "did you mean 'ngram'"),
            ("openvino:lookup,token=3", UnknownName, "did you mean 'tokens'"),
            ("openvino:lookup,tokens=none", ConfigError, "whole number"),
            ("transformers:lookup:batch", ConfigError, "drop :batch"),
            ("vllm:ngram:tokens=3:tokens=4", ConfigError, "'tokens' of .* is given twice"),
        ],
    )
    def test_mistakes(self, name: str, error: type[Exception], said: str) -> None:
        with pytest.raises(error, match=said):
            parse(name)


class TestInstall:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
        """Commands instead of their effects; those that name "broken" fail."""
        made: list[list[str]] = []

        def call(command: list[str], log: object, env: object) -> None:
            made.append(command)
            if "broken" in command:
                raise install.InstallError("ERROR: No matching distribution found for broken")
            if "venv" in command:
                python = Path(command[-1]) / "bin" / "python"
                python.parent.mkdir(parents=True)
                python.symlink_to(os.path.realpath(sys.executable))

        monkeypatch.setattr(install, "call", call)
        return made

    def test_once_and_again_when_the_recipe_changes(
        self, tmp_path: Path, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        peer = Peer(
            ("pip",), {"plain": Mode()}, "import pip", extras={"x": (("broken",),)}, removed=("y",)
        )
        monkeypatch.setitem(catalog.PEERS, "one", peer)
        entry = install.install(tmp_path, ["one"], sys.executable)["one"]
        assert "pip" in entry["versions"] and "No matching" in entry["missing"]["x"]
        assert any("uninstall" in command for command in calls)
        assert install.problem(tmp_path, "one") is None
        assert "x could not be installed" in (install.problem(tmp_path, "one", "x") or "")
        count = len(calls)
        install.install(tmp_path, ["one"], sys.executable)
        assert len(calls) == count  # nothing to do
        monkeypatch.setitem(catalog.PEERS, "one", Peer(("pip", "wheel"), peer.modes, "pass"))
        install.install(tmp_path, ["one"], sys.executable)
        assert len(calls) > count

    def test_what_fails_is_skipped_and_tried_again(
        self, tmp_path: Path, calls: list[list[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, packages in (("bad", ("broken",)), ("good", ("pip",))):
            monkeypatch.setitem(catalog.PEERS, name, Peer(packages, {"plain": Mode()}, "pass"))
        state = install.install(tmp_path, ["bad", "good"], sys.executable)
        assert "No matching distribution" in state["bad"]["skipped"] and state["good"]["versions"]
        assert "could not be installed" in install.installed(tmp_path)["bad"]
        count = len(calls)
        install.install(tmp_path, ["bad", "good"], sys.executable)
        assert any("broken" in command for command in calls[count:])

    def test_the_reason_is_found_in_a_log(self, tmp_path: Path) -> None:
        assert (
            install.reason_in("Collecting x\nERROR: no disk\nERROR: more\nhint") == "ERROR: no disk"
        )
        with (
            open(tmp_path / "log", "w") as log,
            pytest.raises(install.InstallError, match="ERROR: so it is"),
        ):
            code = "import sys; print('ERROR: so it is'); sys.exit(1)"
            install.call([sys.executable, "-c", code], log, os.environ)


class TestGguf:
    @pytest.fixture
    def gguf(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        """The writer's module, loaded as the worker loads it."""
        spec = importlib.util.spec_from_file_location("g", catalog.WORKERS / "llama_gguf.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "g", module)
        spec.loader.exec_module(module)
        return module

    def test_numbers_keep_their_value(self, gguf: ModuleType) -> None:
        import torch

        wide = torch.randn(64, 3)
        half = wide.bfloat16()
        bits = half.view(torch.uint16).numpy()
        assert np.array_equal(gguf.to_float32(bits, "BF16"), half.float().numpy())
        assert np.array_equal(gguf.to_dtype(wide.numpy(), "F32", "BF16"), bits)
        assert np.array_equal(gguf.to_dtype(bits, "BF16", "F16"), half.half().numpy())
        assert np.array_equal(gguf.to_dtype(bits, "BF16", "BF16"), bits)

    def test_neighbouring_pairs_turn_as_halves_did(self, gguf: ModuleType) -> None:
        dim, heads = 8, 2
        rng = np.random.default_rng(0)
        weight, x = rng.normal(size=(heads * dim, 5)), rng.normal(size=5)
        angle = np.arange(dim // 2) + 0.5
        cos, sin = np.cos(angle), np.sin(angle)
        a, b = np.split((weight @ x).reshape(heads, dim), 2, axis=1)
        halves = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)
        pairs = (gguf.interleaved(weight, dim) @ x).reshape(heads, dim // 2, 2)
        even, odd = pairs[..., 0], pairs[..., 1]
        turned = np.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
        assert np.allclose(np.sort(turned.reshape(heads, -1)), np.sort(halves))
        assert np.allclose(turned[..., 0], halves[:, : dim // 2])

    def test_names_and_what_is_refused(self, gguf: ModuleType, tiny_folder: Path) -> None:
        config = json.loads((tiny_folder / "config.json").read_text())
        found = {gguf.renamed(n, a, config)[0] for n, a, _ in gguf.tensors(tiny_folder)}
        assert {"token_embd.weight", "blk.1.attn_k.weight", "output.weight"} <= found
        assert len(found) == 2 * 9 + 3
        assert gguf.architecture(config).name == "llama"
        with pytest.raises(NotImplementedError, match="cannot convert 'gpt2' to GGUF, only llama"):
            gguf.architecture({"model_type": "gpt2"})
        with pytest.raises(NotImplementedError, match="rope of type 'yarn'"):
            gguf.architecture({"model_type": "llama", "rope_parameters": {"rope_type": "yarn"}})
        with pytest.raises(NotImplementedError, match="sliding window"):
            gguf.architecture({"model_type": "mistral", "sliding_window": 4096})
        layers = ["sliding_attention"] * 5 + ["full_attention"]
        gemma = {"model_type": "gemma3_text", "layer_types": layers}
        assert gguf.architecture(gemma).name == "gemma3"
        local = {"sliding_attention": {"rope_theta": 5e3}}
        with pytest.raises(NotImplementedError, match="fixed rope_theta"):
            gguf.architecture(gemma | {"rope_parameters": local})
        with pytest.raises(NotImplementedError, match="a global layer after every 5"):
            gguf.architecture(gemma | {"layer_types": layers[::-1]})
        windows = {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
        assert gguf.architecture(windows).name == "qwen2"
        with pytest.raises(NotImplementedError, match="is unknown in GGUF"):
            gguf.renamed("model.layers.0.self_attn.q_norm.weight", np.ones(4), config)

    @pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3-biased", "gemma3_text"])
    def test_a_file_holds_every_tensor_of_a_checkpoint(
        self, gguf: ModuleType, case: str, tmp_path: Path
    ) -> None:
        library = pytest.importorskip("gguf")
        options: dict[str, Any] = {"qwen2": {"use_sliding_window": False}}.get(case, {})
        if case == "gemma3_text":
            every = [f"{'full' if i == 5 else 'sliding'}_attention" for i in range(7)]
            options = {"num_hidden_layers": 7, "layer_types": every, "head_dim": 16}
            options |= {"sliding_window": 8, "tie_word_embeddings": True}
        state = saved(case, tmp_path, **options).state_dict()
        gguf.write(tmp_path, tmp_path / "model.gguf", "float32")
        reader = library.GGUFReader(tmp_path / "model.gguf")
        kind = gguf.architecture(json.loads((tmp_path / "config.json").read_text()))
        assert reader.fields["general.architecture"].contents() == kind.name
        found = {tensor.name: tensor.data.view(np.float32) for tensor in reader.tensors}
        kept = {n: t for n, t in state.items() if n != "lm_head.weight" or "gemma" not in case}
        assert len(found) == len(kept)
        known = library.get_tensor_name_map(getattr(library.MODEL_ARCH, kind.name.upper()), 8)
        for name, tensor in kept.items():
            stem, _, part = name.rpartition(".")
            mine = found[f"{known.get_name(stem)}.{part}"].reshape(tensor.shape)
            theirs = tensor.numpy() + kind.norm_offset * (stem.endswith("norm"))
            if kind.is_interleaved and stem.endswith(("q_proj", "k_proj")):
                theirs = gguf.interleaved(theirs, 12)
            assert np.array_equal(mine, theirs), name
        window = reader.fields.get(f"{kind.name}.attention.sliding_window")
        assert (window.contents() if window else None) == options.get("sliding_window")


def test_a_library_that_is_not_there_is_not_preloaded(tmp_path: Path) -> None:
    assert "LD_PRELOAD" not in install.env_of(tmp_path, "vllm")
    library = tmp_path / "vllm" / "lib" / "libiomp5.so"
    library.parent.mkdir(parents=True)
    library.touch()
    found = install.env_of(tmp_path, "vllm")
    assert found["LD_PRELOAD"] == str(library) and "VLLM_CACHE_ROOT" in found
    assert install.env_of(tmp_path, "transformers").keys().isdisjoint({"LD_PRELOAD"})
