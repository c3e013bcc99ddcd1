"""The real peers, as far as their environments are there (PEERS_DIR).

PEERS_MODELS names folders of checkpoints, separated by ":", in addition to the embedded model.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import forerun
from forerun.bench.contestants import CacheDemand, Setup, SkippedPeer
from forerun.bench.peers import law, make, methods
from forerun.core.sampling import Sampling
from forerun.tasks.base import Example

PEERS_DIR = Path(os.environ.get("PEERS_DIR", ".peers"))
MODELS = ["reasoner", *filter(None, os.environ.get("PEERS_MODELS", "").split(":"))]
TEXT = "Question: Ann has 5 apples and buys 7 more."
ESTIMATE_MARGIN = 1.25  # what a process may take of its estimate: libraries touch pages later


@pytest.mark.slow
@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("name", methods())
def test_an_installed_peer(name: str, model_name: str) -> None:
    """Every mode of every peer that `make peers` installed: its memory, law and greedy text."""
    model = forerun.load(model_name, device="cpu")
    folder = Path(forerun.assets.embedded(model_name))
    one = make(name, Setup(folder, "auto", 2, None, PEERS_DIR))
    one.size_for(CacheDemand(4 if one.is_batched else 1, 1024))
    try:
        one.start()
    except SkippedPeer as reason:
        pytest.skip(str(reason))
    try:
        example = Example("a", TEXT, "")
        sampling = Sampling(temperature=1.0, max_new_tokens=48, n=4, seed=1)
        one.warm_up(example, sampling)
        plan = one.memory_plan()
        assert plan["process_bytes"] < ESTIMATE_MARGIN * plan["estimate_bytes"]
        prompt = model.tokenizer.encode(TEXT)
        start = law.widest(model, [prompt], sampling)
        wide = law.first_law(model, start, sampling)
        assert law.check_law(one, wide, start, sampling, n=100).passed
        outcome = one.run(example, sampling)
        assert len(outcome.samples) == 4 and outcome.seconds > 0
        assert law.check_texts(model, prompt, one.tokens, sampling).passed
        longer = Example("b", prompt * (700 // len(prompt)), "")  # type: ignore[arg-type]
        outcome = one.run(longer, replace(sampling, n=1))  # more than a batch of any library
        assert outcome.samples[0].tokens
        one.run(example, Sampling(temperature=0.0, max_new_tokens=64))
        length, gap = law.first_difference(model, prompt, one.tokens[0])
        assert length == len(one.tokens[0]) or gap < 0.5  # rounding in bf16
    finally:
        one.close()
