"""What tests of batches over Ray share: prompts, settings, and what the local engine says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import forerun
from forerun.core.sampling import Sampling
from forerun.integrations.ray_worker import Request, Setup, Worker

TEXTS = ("the cat sat on", "one two three", "ten nine eight", "the rain fell", "and the dog")
SAMPLING = Sampling(temperature=0.8, max_new_tokens=10, n=2, seed=5, ignore_eos=True)
DRAWN = "stand:scope=request"


def setup(folder: Path, **options: Any) -> Setup:
    fixed = {"drafter": DRAWN, "controller": "fixed:nodes=6,depth=3"}
    return Setup(model=str(folder), **fixed | options)


def asked(sampling: Sampling = SAMPLING) -> list[Request]:
    return [Request(i, text, sampling) for i, text in enumerate(TEXTS)]


def local(folder: Path, **options: Any) -> dict[tuple[int, int], list[int]]:
    """The tokens of the local engine, by prompt and sample."""
    made = setup(folder, **options)
    how = {"drafter": made.drafter, "controller": made.controller, "verifier": made.verifier}
    run = forerun.load(made.model).run(list(TEXTS), SAMPLING, **how)
    return {(s.prompt_index, s.index): s.tokens for s in run}


def tokens(results: Any) -> dict[tuple[int, int], list[int]]:
    return {(s.prompt_index, s.index): s.tokens for _, samples in results for s in samples}


def worker(folder: Path, **options: Any) -> Worker:
    made = Worker(setup(folder, **options))
    assert made.ready()[0] == os.getpid()
    return made
