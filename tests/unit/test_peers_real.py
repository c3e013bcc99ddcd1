"""The real peers, as far as their environments are there (PEERS_DIR)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import forerun
from forerun.bench.contestants import Setup, SkippedPeer
from forerun.bench.peers import law, make, methods
from forerun.bench.tasks.base import Example
from forerun.sampling import Sampling

PEERS_DIR = Path(os.environ.get("PEERS_DIR", ".peers"))


@pytest.mark.slow
@pytest.mark.parametrize("name", methods())
def test_an_installed_peer(name: str) -> None:
    """Every mode of every peer that `make peers` installed: its law, its greedy text."""
    model = forerun.load("reasoner")
    folder = Path(forerun.assets.embedded("reasoner"))
    one = make(name, Setup(folder, "auto", 2, None, PEERS_DIR))
    try:
        one.start()
    except SkippedPeer as reason:
        pytest.skip(str(reason))
    try:
        prompt = model.tokenizer.encode("Question: Ann has 5 apples and buys 7 more.")
        sampling = Sampling(temperature=1.0, max_new_tokens=48, n=4, seed=1)
        start = law.widest(model, [prompt], sampling)
        wide = law.first_law(model, start, sampling)
        assert law.check_law(one, wide, start, sampling, n=100).passed
        outcome = one.run(Example("a", "Question: Ann has 5 apples.", ""), sampling)
        assert len(outcome.samples) == 4 and outcome.seconds > 0
        ids = model.tokenizer.encode("Question: Ann has 5 apples.")
        assert law.check_texts(model, ids, one.tokens, sampling).passed
        one.run(Example("a", "Question: Ann has 5 apples.", ""), Sampling(temperature=0.0))
        length, gap = law.first_difference(model, ids, one.tokens[0])
        assert length == len(one.tokens[0]) or gap < 0.5  # rounding in bf16
    finally:
        one.close()
