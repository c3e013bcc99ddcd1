"""GGUF files of every architecture give the logits of the model that they were written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import write_gguf  # noqa: E402
from parity import LLAMA3, branching, forward, prompt, sequence, tiny, worst  # noqa: E402
from tiny import make_tiny  # noqa: E402

import forerun  # noqa: E402
from forerun.core.tree import EMPTY  # noqa: E402
from forerun.errors import ModelError  # noqa: E402
from forerun.models.gguf import GgufFile  # noqa: E402
from forerun.models.gguf_folder import LINK, gguf_folder, linked_file  # noqa: E402
from forerun.models.gguf_names import hf_tensors  # noqa: E402
from forerun.models.load import load_target  # noqa: E402
from forerun.runner.model_runner import ModelRunner  # noqa: E402

REAL_LLAMA3 = LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased-tied": {},
    "llama-linear": {},
    "llama-llama3": {},  # of no published model: its factors are taken as they are
    "llama-published": {"rope_parameters": REAL_LLAMA3, "head_dim": 64},
    "mistral": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "qwen3-biased": {},
    "phi3": {},
    "phi3-partial": {},
    "phi3-longrope": {},
    "gemma2": {},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "num_hidden_layers": 7,  # the sixth sees all
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_model(case: str, tmp_path: Path) -> None:
    model = tiny(case, **CASES[case])
    runner = load_target(write_gguf(model, tmp_path / "model.gguf"), context=128)
    assert isinstance(runner, ModelRunner)
    seq = sequence(prompt(21))
    assert worst(model, seq, EMPTY, forward(runner, [seq], [EMPTY])[0]) < 1e-5
    assert worst(model, seq, branching(), forward(runner, [seq], [branching()])[0]) < 1e-5


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_types_are_dequantised(kind: str, tmp_path: Path) -> None:
    """Against the package's own dequantisation of the whole tensor at once."""
    import gguf

    model = tiny("qwen2", hidden_size=64, intermediate_size=96)
    path = write_gguf(model, tmp_path / "model.gguf", kind)
    found = dict(hf_tensors(GgufFile(path), torch.float32))
    assert found.keys() == model.state_dict().keys()
    code = gguf.GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        if tensor.dim() > 1:
            packed = gguf.quantize(tensor.numpy(), code)
            tensor = torch.from_numpy(gguf.dequantize(packed, code).reshape(tensor.shape).copy())
        assert torch.equal(found[name], tensor), name


def test_large_tensors_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(
        tiny("llama", hidden_size=64, intermediate_size=96), tmp_path / "model.gguf", "Q8_0"
    )
    whole = dict(hf_tensors(GgufFile(path), torch.bfloat16))
    monkeypatch.setattr("forerun.models.gguf.CHUNK", 96)
    for name, tensor in hf_tensors(GgufFile(path), torch.bfloat16):
        assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize(
    "kind, dtype",
    [("F32", torch.float32), ("F16", torch.float16), ("Q8_0", torch.bfloat16)],
)
def test_number_types(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = write_gguf(
        tiny("llama", hidden_size=64, intermediate_size=96), tmp_path / "m.gguf", kind
    )
    target = load_target(path)
    assert isinstance(target, ModelRunner) and target.model.dtype == dtype
    target = load_target(path, dtype="fp32")
    assert isinstance(target, ModelRunner) and target.model.dtype == torch.float32


def test_text_and_its_end(tmp_path: Path) -> None:
    """The same tokens, the same greedy text, and the same end as of the folder."""
    from transformers import AutoModelForCausalLM

    folder = make_tiny(tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(folder)
    path = write_gguf(
        model,
        tmp_path / "Tiny.GGUF",
        tokenizer=folder,
        fields={"tokenizer.chat_template": "{{ messages[0].content }}!"},
    )
    ours, theirs = forerun.load(str(path)), forerun.load(str(folder))
    text = "the cat sat on the mat, naïve 12  3\n\n日本"
    assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)
    assert ours.tokenizer.decode(ours.tokenizer.encode(text)) == text
    assert ours.tokenizer.eos_ids == theirs.tokenizer.eos_ids == (0,)
    assert ours.tokenizer.chat_text("hello") == "hello!"
    how: dict[str, Any] = {"temperature": 0, "max_new_tokens": 32}
    (a,), (b,) = ours.generate("the cat", **how), theirs.generate("the cat", **how)
    assert a.samples[0].tokens == b.samples[0].tokens and len(a.samples[0].tokens) > 3


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """The description in the cache is of one file, not of its name."""
    path = write_gguf(tiny("llama"), tmp_path / "model.gguf")
    first = load_target(path)
    write_gguf(tiny("llama", num_hidden_layers=2), path)
    second = load_target(path)
    assert isinstance(first, ModelRunner) and isinstance(second, ModelRunner)
    assert (first.model.config.num_layers, second.model.config.num_layers) == (3, 2)


@pytest.mark.parametrize("name", [LINK, "config.json"])
def test_a_damaged_folder_in_the_cache_is_made_again(name: str, tmp_path: Path) -> None:
    path = write_gguf(tiny("llama"), tmp_path / "model.gguf")
    folder = gguf_folder(path)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(b"")
    if name == LINK:
        with pytest.raises(ModelError, match="is damaged; load the GGUF file by its own path"):
            linked_file(folder)
    assert gguf_folder(path) == folder and (folder / name).read_bytes() == whole
    assert linked_file(folder) == path.resolve()


def test_memory_holds_the_model_once(tmp_path: Path) -> None:
    """A tensor is freed before the next one is read."""
    import weakref

    path = write_gguf(tiny("llama"), tmp_path / "model.gguf")
    alive: list[weakref.ref[torch.Tensor]] = []
    for _, tensor in hf_tensors(GgufFile(path), torch.bfloat16):
        assert sum(ref() is not None for ref in alive) == 0
        alive = [weakref.ref(tensor)]
        del tensor


def test_what_else_reads_model_folders(tmp_path: Path) -> None:
    """Hashes, counts and names are of the file; padding and peers refuse it by name."""
    from forerun.bench.contestants import Setup, SkippedPeer
    from forerun.bench.inflate import inflate
    from forerun.bench.method_names import make
    from forerun.bench.model_info import num_parameters, tensor_headers
    from forerun.models.identity import model_hash, model_name
    from forerun.models.paths import located, model_folder

    model = tiny("llama")
    path = write_gguf(model, tmp_path / "model.gguf")
    folder = model_folder(path)
    assert located(str(path)) == str(folder) and located("nonsuch.gguf") == "nonsuch.gguf"
    assert sum(map(num_parameters, tensor_headers(folder))) == model.num_parameters()
    other = write_gguf(tiny("llama", seed=1), tmp_path / "other.gguf")
    assert model_hash(str(path)) == model_hash(str(folder)) != model_hash(str(other))
    assert model_name(str(path)) == "model.gguf"
    with pytest.raises(forerun.ForerunError, match="model.gguf is a GGUF file"):
        inflate(str(path), tmp_path / "big", "30M")
    peer = make("transformers", lambda: None, Setup(folder, "auto", 1, None, tmp_path))  # type: ignore[arg-type, return-value]
    with pytest.raises(SkippedPeer, match="model.gguf is a GGUF file"):
        peer.start()


def test_commands_take_gguf_files(tmp_path: Path, call: Any) -> None:
    folder = make_tiny(tmp_path / "tiny")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    path = write_gguf(model, tmp_path / "tiny.gguf", tokenizer=folder)
    for words in (
        ("generate", "-m", path, "-p", "the cat", "--max-new-tokens", 4),
        ("search", "-m", path, "-p", "the cat", "-n", 2, "--max-new-tokens", 4),
        ("replay", tmp_path / "traces.jsonl", "--tokenizer", path),
    ):
        (tmp_path / "traces.jsonl").write_text('{"prompt": "the cat", "text": "the cat sat on"}\n')
        status, out, err = call(*words)
        assert status == 0 and out, err
    status, out, err = call("generate", "-m", tmp_path / "no.gguf", "-p", "x")
    assert status == 2 and "there is no file" in err and "no.gguf" in err


def test_a_longrope_model_keeps_its_switch_on_transformers(tmp_path: Path) -> None:
    """transformers' config of phi3 has a default for it, which would win."""
    model = tiny("phi3-longrope")
    target = load_target(write_gguf(model, tmp_path / "model.gguf"))
    assert not isinstance(target, ModelRunner)
    for length in (127, 140):
        seq = sequence(prompt(length))
        assert worst(model, seq, EMPTY, forward(target, [seq], [EMPTY])[0]) < 1e-5
