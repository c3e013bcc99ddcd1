"""Target logits at prompt positions, for memories that learn from prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from forerun.core.records import Sequence

CHUNK_ROWS = 64  # logits rows computed at once


def prompt_rows(target: Any, seq: Sequence) -> Iterator[tuple[int, np.ndarray]]:
    """Logits [m, V] after prompt[:at] and after each of the next m - 1 prompt tokens.

    Yields (at, rows) in chunks, for all prompt positions except the last. The target keeps its KV
    cache of the prompt for the first pass of `seq`. target: needs `rows_at` with draft paths.
    """
    prompt = seq.tokens[: seq.num_prompt]
    probe = Sequence(prompt[:1], 1, seq.sampling, seq.dice, limit=0)
    try:
        for at in range(1, len(prompt), CHUNK_ROWS):
            probe.tokens += prompt[len(probe.tokens) : at]
            path = tuple(prompt[at : min(at + CHUNK_ROWS, len(prompt)) - 1])
            rows = target.rows_at([(probe, path[:n]) for n in range(len(path) + 1)])
            wide = rows.float() if rows.element_size() < 4 else rows
            yield at, wide.cpu().numpy()
    finally:
        target.release(probe)
