"""A disk without room: a clear error, and nothing half written, wherever the write stops.

A limit of the size of files stands for the full disk: the system then refuses every further byte,
also to libraries that are not written in Python.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from pull_shop import NAME, Shop
from tiny import make_tiny
from transformers import AutoTokenizer

from forerun.compression.vocab_trim import write_trimmed
from forerun.core.records import Snapshot
from forerun.errors import CapacityError
from forerun.models.gguf_folder import gguf_folder
from forerun.models.pull import pull
from forerun.state import array_file
from forerun.training.checkpoints import load_checkpoint, save_checkpoint
from forerun.training.export import save

resource = pytest.importorskip("resource", reason="limits of Unix")


@contextmanager
def room(size: int) -> Iterator[None]:
    """A block in which no file may grow beyond `size` bytes."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def files(folder: Path) -> dict[str, bytes]:
    """The files below a folder and their contents."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(write: Callable[[], object], size: int) -> str:
    """The message of a write without room."""
    with room(size), pytest.raises(CapacityError) as caught:
        write()
    said = str(caught.value)
    assert "File too large" in said and "raise the limit of file sizes" in said
    assert "\n" not in said
    return said


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_a_training_checkpoint(tmp_path: Path, size: int) -> None:
    path, weight = tmp_path / "checkpoint.pt", torch.nn.Parameter(torch.ones(100, 100))
    save_checkpoint(path, {"w": weight}, [], {"step": 1})
    before = files(tmp_path)
    said = refused(lambda: save_checkpoint(path, {"w": weight}, [], {"step": 2}), size)
    assert "checkpoint.pt" in said and files(tmp_path) == before
    assert load_checkpoint(path)["progress"] == {"step": 1}


@pytest.mark.parametrize("size", [0, 2_000, 20_000])
def test_a_draft_with_a_reduced_head(tmp_path: Path, size: int) -> None:
    draft, out = make_tiny(tmp_path / "draft"), tmp_path / "out"
    refused(lambda: write_trimmed(draft, out, np.arange(50), 288), size)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    write_trimmed(draft, out, np.arange(50), 288)


@pytest.mark.parametrize("size", [0, 100, 20_000])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_trained_head(tmp_path: Path, size: int, is_new: bool) -> None:
    folder = tmp_path / "head"
    if not is_new:
        save({"w": torch.zeros(100, 100)}, folder, card="old")
    before = files(tmp_path)
    said = refused(lambda: save({"w": torch.ones(100, 100)}, folder, card="new"), size)
    assert str(tmp_path) in said and files(tmp_path) == before
    assert folder.exists() is not is_new


@pytest.mark.parametrize("size", [0, 500])
def test_a_tokenizer_of_a_trained_model(tiny_folder: Path, tmp_path: Path, size: int) -> None:
    inner = AutoTokenizer.from_pretrained(tiny_folder)
    refused(lambda: save({"w": torch.ones(2)}, tmp_path / "model", tokenizer=inner), size)
    assert not files(tmp_path)


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_a_memory_file(tmp_path: Path, size: int) -> None:
    path, origin = tmp_path / "memory", array_file.Origin()
    old = Snapshot("stand", {"a": np.zeros(4)}, {}, {})
    new = Snapshot("stand", {"a": np.ones(10_000)}, {}, {})
    array_file.write(path, old, origin)
    before = files(tmp_path)
    refused(lambda: array_file.write(path, new, origin), size)
    assert files(tmp_path) == before
    assert array_file.read(path)[0].arrays["a"].tolist() == [0.0] * 4


@pytest.mark.parametrize("size", [0, 500, 5000])
def test_a_gguf_file(
    packed_gguf: Path, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config, then the tokenizer, which a library in Rust writes."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("FORERUN_CACHE", str(cache))
    said = refused(lambda: gguf_folder(packed_gguf), size)
    assert str(cache) in said and "set FORERUN_CACHE" in said
    assert not files(cache)
    assert (gguf_folder(packed_gguf) / "tokenizer.json").is_file()


def test_the_weights_of_a_pulled_model(shop: Shop) -> None:
    """They are larger than the downloaded file; that file stays for the next try."""
    with (
        room(shop.gguf.stat().st_size + 1000),
        pytest.raises(CapacityError, match="file-size limit .* raise the limit .* complete parts"),
    ):
        pull(NAME)
    assert shop.kept() == ["model.gguf"] and shop.nothing_looks_whole()
    shop.asked()
    assert pull(NAME).is_dir() and shop.asked() == []
