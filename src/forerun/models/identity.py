"""Hashes that identify a model and a tokenizer, for files that are valid only with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import ModelError
from forerun.models.gguf_folder import linked_file
from forerun.models.paths import located
from forerun.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from forerun.ngrams.index.build.encoders import Encoder

WHOLE = 64 << 20  # weight files up to this size are hashed whole
PIECES, PIECE = 16, 1 << 16  # of larger files: number and bytes of evenly spaced pieces


def tokenizer_hash(tokenizer: Tokenizer | Encoder) -> str:
    """SHA-256 of the vocabulary: equal if every id is the same token."""
    pairs = sorted((i, token) for token, i in tokenizer.vocabulary().items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def model_hash(name: str, target: Any = None) -> str:
    """SHA-256 of a model's config and weights; of large weights only samples.

    name: a folder, a hub id or an embedded model; else the parameters of `target` are hashed.
    "" if neither is available.
    """
    folder = local_folder(name)
    parts = _of_folder(folder) if folder else _of_module(getattr(target, "model", None))
    total, is_empty = hashlib.sha256(), True
    for part in parts:
        total.update(part)
        is_empty = False
    return "" if is_empty else total.hexdigest()


def model_name(name: str) -> str:
    """A model's name for files, without local folders."""
    if is_object(name):
        return name.partition("(")[0]
    return Path(name).resolve().name if Path(name).exists() else name


def is_object(name: str) -> bool:
    """Whether a name is the repr of a loaded model."""
    return "(\n" in name


def local_folder(name: str) -> Path | None:
    """The local folder of a model; uses no network."""
    if is_object(name):
        return None
    place = Path(located(name)).expanduser()
    if place.is_dir():
        return place
    from forerun.models.paths import is_hub_id

    if not is_hub_id(name):
        return None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # the hub client raises many kinds
        return None


def _of_folder(folder: Path) -> Iterator[bytes]:
    linked = linked_file(folder)
    weights = [linked] if linked else sorted(folder.glob("*.safetensors"))
    for path in [folder / "config.json", *weights]:
        try:
            size = path.stat().st_size
            yield f"\0{path.name} {size}\0".encode()
            yield from _pieces(path, size)
        except OSError as cause:
            raise ModelError(f"cannot read {path}: {cause.strerror}") from None


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        if size <= WHOLE:
            yield file.read()
            return
        for i in range(PIECES):
            file.seek((size - PIECE) * i // (PIECES - 1))
            yield file.read(PIECE)


def _of_module(module: Any) -> Iterator[bytes]:
    """Config and parameter samples of a transformers model."""
    if not hasattr(module, "named_parameters"):
        return
    yield module.config.to_json_string().encode()
    for name, tensor in module.named_parameters():
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // 64)].float().cpu().numpy()
        yield f"\0{name} {tuple(tensor.shape)}\0".encode() + sample.tobytes()
