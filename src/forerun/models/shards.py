"""The safetensors files of a checkpoint, and which of them holds which tensor."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import ModelError
from forerun.models.downloads import repair
from forerun.models.families import Unsupported
from forerun.models.gguf import GgufFile
from forerun.models.gguf_folder import linked_file
from forerun.models.gguf_names import hf_tensors
from forerun.models.paths import is_gguf

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
log = logging.getLogger("forerun")
MAX_HEADER_BYTES = 100 << 20  # limit of the safetensors format


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, or its GGUF file. Raises Unsupported without any.

    As in transformers, model.safetensors comes before a shard index.
    """
    if linked := linked_file(folder):
        return [linked]
    single = folder / SINGLE
    if single.exists():
        return [single]
    names = sorted(set(weight_map(folder).values()))
    missing = [name for name in names if not (folder / name).exists()]
    if names and not missing:
        return [folder / name for name in names]
    if missing:
        raise ModelError(f"{INDEX} names {missing[0]}, which is not in {folder}; copy it there")
    raise Unsupported("there is no model.safetensors")


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name of a shard index; {} without one. Raises ModelError."""
    index = folder / INDEX
    if not index.exists():
        return {}
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not found or not all(isinstance(name, str) for name in found.values()):
            raise ValueError("weight_map must name a file for every tensor")
        if outside := next((name for name in found.values() if _leaves(name)), None):
            raise ValueError(f"weight_map names {outside!r}, which is outside of the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise ModelError(f"{index} is not a safetensors index: {cause}") from cause
    return dict(found)


def warn_of_two(folder: Path) -> None:
    """Warns of a folder with both forms of a checkpoint; their weights may differ."""
    if (folder / SINGLE).exists() and (folder / INDEX).exists():
        log.warning(
            "%s has both %s and %s; using the first, as transformers does; remove the other",
            folder,
            SINGLE,
            INDEX,
        )


def _leaves(name: str) -> bool:
    """Whether a file name leads out of its folder, also on other systems."""
    parts = name.replace("\\", "/").split("/")
    return ".." in parts or parts[0] == "" or parts[0].endswith(":")


def owners(files: list[Path]) -> dict[str, Path]:
    """The file of every tensor of safetensors files.

    With a shard index these are the tensors of its weight_map, each in the file that it names;
    other copies are ignored. Raises ModelError for a file that cannot be read.
    """
    held = {path: _names(path) for path in files}
    folders = {path.parent for path in files if path.name != SINGLE}
    mapped = {folder: weight_map(folder) for folder in folders}
    found: dict[str, Path] = {}
    for path, names in held.items():
        places = mapped.get(path.parent, {})
        if path.name not in places.values():  # no index, or one that was left behind
            found |= {name: path for name in names if name not in found}
            continue
        for name in names:
            place = path.parent / places[name] if name in places else None
            if place == path:
                found[name] = path
            elif place is not None and name not in held.get(place, {name}):
                raise ModelError(
                    f"{path.parent / INDEX} places {name} in {place.name}, which does not hold it; "
                    "fetch or copy the checkpoint again"
                )
    return found


def tensors(files: list[Path], dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the shards, each once. Raises ModelError for a file that cannot be read.

    dtype: for dequantised GGUF weights; safetensors keep their stored dtype.
    """
    if any(map(is_gguf, files)):
        for path in files:
            yield from hf_tensors(GgufFile(path), dtype)
        return
    places = owners(files)
    for path in files:
        try:
            with safe_open(path, framework="pt") as shard:
                for name in [name for name, place in places.items() if place == path]:
                    yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as cause:
            raise _unreadable(path, cause) from cause


def file_of(name: str, files: list[Path]) -> Path:
    """The file that holds a tensor."""
    if is_gguf(files[0]):
        return files[0]
    return owners(files)[name]


def _names(path: Path) -> list[str]:
    """The tensors in a safetensors file. Raises ModelError if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as shard:
            return list(shard.keys())
    except (SafetensorError, OSError) as cause:
        raise _unreadable(path, cause) from cause


def _unreadable(path: Path, cause: Exception) -> ModelError:
    if not os.access(path, os.R_OK):
        return ModelError(f"{path} may not be read; check its permissions")
    return ModelError(f"{path} {_damage(path, cause)}; {repair(path)}")


def _damage(path: Path, cause: Exception) -> str:
    """What is wrong with a safetensors file: 8-byte header length, JSON header, data."""
    unknown = f"is not a readable safetensors file ({cause})"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                return unknown
            header = json.loads(file.read(length)) if 8 + length <= size else {}
        ends = [row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return unknown
    if whole == size:
        return unknown
    return f"has {size:,} bytes, but its header declares {whole:,}{' or more' * (not ends)}"
