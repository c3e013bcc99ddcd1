"""GGUF files that cannot be used: each gives one ModelError that names the file and the cause."""

from __future__ import annotations

import errno
import math
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf  # noqa: E402
from parity import tiny  # noqa: E402

from forerun.errors import ForerunError, ModelError  # noqa: E402
from forerun.models.load import load_target  # noqa: E402
from forerun.models.paths import located, model_folder  # noqa: E402

TYPE_OF_KEY = struct.pack("<I", 4)  # uint32


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file that loads."""
    path = write_gguf(tiny("llama"), tmp_path_factory.mktemp("gguf") / "whole.gguf")
    load_target(path)
    return path.read_bytes()


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[bytes], str]:
    """Loads these bytes as a file, which must fail; gives what is said."""

    def load(data: bytes) -> str:
        path = tmp_path / "bad.gguf"
        path.write_bytes(data)
        with pytest.raises(ModelError) as caught:
            load_target(path)
        said = str(caught.value)
        assert str(path) in said and "\n" not in said and len(said) < 600
        return said

    return load


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    """Writes a llama with changes, which must not load; gives what is said."""

    def write(case: str = "llama", options: dict[str, Any] | None = None, **changes: Any) -> str:
        path = write_gguf(tiny(case, **(options or {})), tmp_path / "bad.gguf", **changes)
        with pytest.raises(ModelError) as caught:
            load_target(path)
        assert str(path) in str(caught.value)
        return str(caught.value)

    return write


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.01, 0.1, 0.5, 0.999])
def test_a_cut_file(share: float, whole: bytes, refused: Callable[[bytes], str]) -> None:
    said = refused(whole[: max(5, int(len(whole) * share))])
    assert "is cut" in said and "bytes" in said and "fetch or copy it again" in said


def test_a_file_cut_within_its_first_word(refused: Callable[[bytes], str]) -> None:
    assert "is cut: it has 3 bytes" in refused(b"GGU")


def test_an_empty_file(refused: Callable[[bytes], str]) -> None:
    assert "is empty" in refused(b"")


def test_another_kind_of_file(whole: bytes, refused: Callable[[bytes], str]) -> None:
    assert "is not a GGUF file" in refused(b"\x80\x02" + whole)
    assert "give a .gguf file" in refused(b"hello")


@pytest.mark.parametrize("version", [1, 4, 77])
def test_another_version(version: int, whole: bytes, refused: Callable[[bytes], str]) -> None:
    said = refused(whole[:4] + struct.pack("<I", version) + whole[8:])
    assert f"GGUF version {version}" in said and "2 and 3" in said


def test_big_endian(whole: bytes, refused: Callable[[bytes], str]) -> None:
    said = refused(whole[:4] + struct.pack(">I", 3) + whole[8:])
    assert "big-endian" in said and "gguf-convert-endian" in said


def test_impossible_counts(whole: bytes, refused: Callable[[bytes], str]) -> None:
    assert "claims to hold" in refused(whole[:8] + struct.pack("<Q", 1 << 40) + whole[16:])
    assert "claims to hold" in refused(whole[:16] + struct.pack("<Q", 1 << 60) + whole[24:])
    huge = whole[:24] + struct.pack("<Q", (1 << 64) - 8) + whole[32:]  # length of the first key
    assert "is cut" in refused(huge)


@pytest.mark.parametrize("seed", range(25))
def test_flipped_bytes_never_crash(seed: int, whole: bytes, tmp_path: Path) -> None:
    """Whatever a damaged header says, it is refused in our words, or the model loads."""
    dice, data = random.Random(seed), bytearray(whole)
    end = whole.index(b"token_embd.weight") + 2000
    for _ in range(3):
        data[dice.randrange(8, end)] = dice.randrange(256)
    path = tmp_path / "flipped.gguf"
    path.write_bytes(data)
    try:
        load_target(path)
    except ForerunError as error:
        assert "\n" not in str(error)


def test_missing_tensors(written: Callable[..., str]) -> None:
    lost = "blk.1.ffn_up.weight"
    assert f"lacks the tensor {lost}" in written(leaves_out=lambda name: name == lost)
    assert "token_embd.weight" in written(leaves_out=lambda name: name == "token_embd.weight")
    biases = written("qwen2", leaves_out=lambda name: name == "blk.2.attn_k.bias")
    assert "blk.2.attn_k.bias" in biases
    more_layers = written(fields={"ARCH.block_count": 9})
    assert "lacks the tensor blk.3." in more_layers
    assert "blk.3." in written(fields={"ARCH.block_count": 4_000_000_000})


def test_tensors_without_a_place(written: Callable[..., str]) -> None:
    import numpy as np

    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    assert "blk.0.attn_sinks.weight" in written(more=extra)
    too_few = written(fields={"ARCH.block_count": 2})
    assert "blk.2." in too_few and "llama of 2 layers" in too_few


def test_unknown_architectures(written: Callable[..., str]) -> None:
    said = written(architecture="nonsuch")
    assert "'nonsuch'" in said and "llama, qwen2, qwen3, phi3, gemma2, gemma3" in said
    assert "'adapter'" in written(fields={"general.type": "adapter"})


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"ARCH.expert_count": 8}, "expert_count is 8"),
        ({"ARCH.rope.scaling.type": "su"}, "rope scaling is 'su'"),
        ({"ARCH.attention.scale": 0.5}, "attention.scale"),
        ({"ARCH.logit_scale": 16.0}, "logit_scale"),
        ({"ARCH.attention.causal": False}, "not causal"),
        ({"ARCH.rope.dimension_count": 6}, "6 of 12 dimensions"),
        ({"ARCH.attention.value_length": 6}, "differ in size"),
        ({"ARCH.attention.head_count_kv": [2, 1, 2]}, "differs from layer to layer"),
        ({"ARCH.attention.head_count": 3}, "blk.0.attn_q.weight"),
        ({"ARCH.embedding_length": None}, "embedding_length"),
        ({"ARCH.context_length": 0}, "context_length"),
        ({"ARCH.attention.layer_norm_rms_epsilon": "small"}, "layer_norm_rms_epsilon"),
        ({"ARCH.feed_forward_length": 81}, "mlp"),
    ],
)
def test_fields_that_change_the_model(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = write_gguf(tiny("llama"), tmp_path / "bad.gguf", fields=fields)
    with pytest.raises(ModelError, match=named):
        load_target(path)


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"tokenizer.ggml.tokens": 3}, "tokenizer.ggml.tokens is missing"),
        ({"split.count": 3, "split.no": "x"}, "one part of 3"),
        ({"ARCH.rope.freq_base": math.nan}, "rope.freq_base must be a finite number, got nan"),
        ({"ARCH.attention.head_count": [[4, 4], [2, 2]]}, "head_count differs from layer to layer"),
    ],
)
def test_fields_of_another_type(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    """One error names the field; none is a traceback."""
    path = write_gguf(tiny("llama"), tmp_path / "bad.gguf", fields=fields)
    with pytest.raises(ModelError, match=named):
        load_target(path)


def test_token_types_of_another_type_count_as_none(tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.token_type": 7}
    path = write_gguf(tiny("llama"), tmp_path / "odd.gguf", fields=fields)
    assert load_target(path).vocab_size > 0


def test_types_that_cannot_be_dequantised(whole: bytes, refused: Callable[[bytes], str]) -> None:
    """The row of a tensor: name, dimensions, sizes, type, offset."""
    name = b"blk.0.attn_q.weight"
    at = whole.index(name) + len(name) + 4 + 16
    assert whole[at : at + 4] == struct.pack("<I", 0)
    unknown = refused(whole[:at] + struct.pack("<I", 250) + whole[at + 4 :])
    assert "blk.0.attn_q.weight is quantised as number 250" in unknown
    known = refused(whole[:at] + struct.pack("<I", 24) + whole[at + 4 :])
    assert "quantised as I8" in known and "Q4_K_M" in known


def test_split_files(written: Callable[..., str]) -> None:
    said = written(fields={"split.count": 3, "split.no": 1})
    assert "part 2 of 3" in said and "llama-gguf-split --merge" in said


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokenizer.ggml.pre": "default"}, "rule 'default', which is unknown; known are gpt-2"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["q nonsuch"]}, "nonsuch"),
        ({"tokenizer.ggml.merges": ["alone"]}, "alone"),
        ({"tokenizer.ggml.eos_token_id": 4000}, "the eos token is 4000"),
        ({"tokenizer.ggml.tokens": [f"t{i}" for i in range(101)]}, "101 tokens and 100 embeddings"),
    ],
)
def test_tokenizers_that_cannot_be_built(
    fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = write_gguf(tiny("llama"), tmp_path / "bad.gguf", fields=fields)
    with pytest.raises(ModelError, match=named):
        load_target(path)


def test_nothing_is_left_in_the_cache(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tiny("llama"), tmp_path / "bad.gguf", fields={"tokenizer.ggml.pre": "?"})
    with pytest.raises(ModelError, match="cannot be built"):
        load_target(path)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []
    path.write_bytes(whole)
    load_target(path)
    (made,) = (tmp_path / "cache" / "gguf").iterdir()
    assert (made / "config.json").is_file()


def test_a_cache_that_cannot_be_written(
    whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "taken"))
    (tmp_path / "model.gguf").write_bytes(whole)
    with pytest.raises(ForerunError, match="set FORERUN_CACHE to another folder"):
        load_target(tmp_path / "model.gguf")


def test_a_file_that_goes_while_it_is_used(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    folder = model_folder(path)
    path.unlink()
    with pytest.raises(ModelError, match="moved or changed"):
        load_target(folder)
    with pytest.raises(ModelError, match="there is no file"):
        load_target(path)


def test_without_the_package(whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    path = write_gguf(tiny("qwen2", hidden_size=64), tmp_path / "model.gguf", "F32")
    load_target(path)  # needs nothing of it
    path = write_gguf(
        tiny("qwen2", hidden_size=64, intermediate_size=96), tmp_path / "small.gguf", "Q8_0"
    )
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"pip install gguf"):
        load_target(path)


def test_a_file_without_the_suffix_is_known_by_its_first_bytes(
    whole: bytes, tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    for name in ("model", "model.bin", "sha256-0f3a"):  # as other programs store them
        path = tmp_path / name
        path.write_bytes(whole)
        assert load_target(path).vocab_size > 0
        assert located(str(path)) != str(path)
    status, out, err = call("generate", "--model", path, "--prompt", "a", "--max-new-tokens", 2)
    assert status == 0, err
    (tmp_path / "other").write_bytes(b"GGUX" + whole[4:])
    with pytest.raises(ModelError, match="is a file, and no GGUF file"):
        load_target(tmp_path / "other")


@pytest.mark.parametrize("name", ["fifo.gguf", "fifo"])
def test_a_named_pipe_is_no_regular_file(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=f"{name} is not a regular file; give a"):
        load_target(tmp_path / name)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOENT, "make the folder, or make it writable"),
        (errno.EACCES, "make the folder, or make it writable"),
        (errno.EFBIG, "raise the limit of file sizes"),
        (errno.ENOSPC, "free some space"),
    ],
)
def test_the_advice_for_a_cache_depends_on_the_cause(
    number: int, advice: str, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(whole)
    monkeypatch.setattr("forerun.models.gguf_folder.tempfile.TemporaryDirectory", fail)
    with pytest.raises(ForerunError) as caught:
        load_target(tmp_path / "model.gguf")
    assert f"{os.strerror(number)}; {advice}" in str(caught.value)
    assert ("space" in str(caught.value).partition("; ")[2]) == (number == errno.ENOSPC)
