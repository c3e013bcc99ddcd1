"""The target's rows at prompt positions, which a prefill does not compute: for memories that learn
from prompts, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from forerun.core.records import Sequence

CHUNK = 64  # rows that are held at once, a vocabulary wide each


def prompt_rows(target: Any, seq: Sequence) -> Iterator[tuple[int, np.ndarray]]:
    """Logits [m, V] after prompt[:at] and after each of the next m - 1 prompt tokens.

    All positions but the prompt's last, chunk by chunk: (at, rows). The target computes
    the prompt here and keeps its state, so the first pass of `seq` finds most of it done. `target`
    is one whose `rows_at` gives rows after draft paths.
    """
    prompt = seq.tokens[: seq.num_prompt]
    probe = Sequence(prompt[:1], 1, seq.sampling, seq.dice, limit=0)
    try:
        for at in range(1, len(prompt), CHUNK):
            probe.tokens += prompt[len(probe.tokens) : at]
            path = tuple(prompt[at : min(at + CHUNK, len(prompt)) - 1])
            rows = target.rows_at([(probe, path[:n]) for n in range(len(path) + 1)])
            wide = rows.float() if rows.element_size() < 4 else rows
            yield at, wide.cpu().numpy()
    finally:
        target.release(probe)
