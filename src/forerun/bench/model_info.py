"""Size, hashes and cost of a pass of a checkpoint, for the manifest of a run."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.models.gguf import GgufFile
from forerun.models.gguf_folder import linked_file
from forerun.models.identity import model_hash

if TYPE_CHECKING:
    from forerun.api import Model

HASH_DIGITS = 16


def describe_model(model: Model, path: Path | None) -> dict[str, Any]:
    """Path, name, size, hashes, and the cost of a pass of a model."""
    from forerun.bench.inflate import MARK, inflated_from
    from forerun.bench.theory import pass_cost

    headers = tensor_headers(path) if path else []
    report = model.memory_report()
    found = {
        "path": str(path or ""),
        "name": Path(model.name).name or model.name,
        "parameters": sum(map(num_parameters, headers)),
        "weight_bytes": report.get("weights", 0),
        "context": model.target.context,
        "hash": shape_hash(path, headers) if path else "",
        "weights_hash": model_hash(str(path))[:HASH_DIGITS] if path else "",
    }
    cost = pass_cost(model.target)
    source = inflated_from(path) if path else None
    return found | (cost.to_dict() if cost else {}) | ({MARK: source} if source else {})


def tensor_headers(folder: Path) -> list[bytes]:
    """The JSON headers of all safetensors files of a folder, or an equivalent of a GGUF file."""
    if linked := linked_file(folder):
        return [json.dumps({t.name: vars(t) for t in GgufFile(linked).tensors.values()}).encode()]
    headers = []
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            headers.append(file.read(length))
    return headers


def num_parameters(header: bytes) -> int:
    """Number of weights in the tensors of a header."""
    entries = json.loads(header)
    return sum(math.prod(e["shape"]) for name, e in entries.items() if name != "__metadata__")


def shape_hash(folder: Path, headers: Sequence[bytes]) -> str:
    """A hash of config.json and of the tensors' names, types, shapes and offsets.

    Fine-tuned copies of a model have the same; `weights_hash` tells them apart.
    """
    config = folder / "config.json"
    digest = hashlib.sha256(config.read_bytes() if config.exists() else b"")
    for header in headers:
        digest.update(header)
    return digest.hexdigest()[:HASH_DIGITS]
