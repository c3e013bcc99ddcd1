"""What tests of indexes on disk share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from forerun.ngrams.index.build import manifest
from forerun.ngrams.index.build.build import Options
from forerun.ngrams.index.build.documents import Reading

TEXTS = ["to be or not to be", "not to be", "", "that is the question", "to be", "be"]
IDS = Options(tokenizer="ids", reading=Reading("tokens", is_ids=True), workers=1)
BYTES = Options(tokenizer="bytes", workers=1)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def corpus_file(folder: Path) -> Path:
    """TEXTS with a number each."""
    return write_lines(folder / "c.jsonl", [{"text": t, "n": i} for i, t in enumerate(TEXTS)])


def numbers_file(folder: Path) -> Path:
    """30 documents of 40 ids below 5."""
    rng = np.random.default_rng(0)
    rows = [{"tokens": rng.integers(0, 5, 40).tolist()} for _ in range(30)]
    return write_lines(folder / "n.jsonl", rows)


def data(path: Path) -> dict[str, bytes]:
    """Every file of an index by name."""
    folder = path / manifest.read_manifest(path).folder
    return {f.name: f.read_bytes() for f in sorted(folder.iterdir()) if f.is_file()}


def file_of(path: Path, kind: str, shard: int) -> Path:
    """A shard's file of that kind."""
    return path / manifest.read_manifest(path).folder / manifest.file_name(kind, shard)
