"""Samples of a prompt whose common rows are computed once are independent samples all the same.

A real transformer of three tokens behind the real runner, every outcome enumerated: all sequences
begin with one text, share its rows, and part where their dice, or their drafts, do.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_drafts import Says, drafted, grown, made, stand
from test_lossless import REQUESTS

from fakes import VOCAB, sequence
from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Plan
from forerun.core.sampling import log_softmax
from forerun.core.tree import EMPTY
from forerun.core.tree_template import grid
from forerun.models.load import load_target
from forerun.runner.model_runner import ModelRunner
from harness import Draft, distance

CLOSE = 1e-6  # laws are of fp32 logits; a row is the same in every pass
ONE, TWO = Plan(nodes=1, depth=1), Plan(nodes=2, depth=2)
DRAFTS: dict[str, Draft] = {
    "nothing": (registry.get("drafter", "none"), TWO, (2, 3, 2)),
    "the same": (lambda: Says((2, 0)), TWO, (2, 3, 2)),
    "the same, some short of room": (lambda: Says((2, 0)), TWO, (3, 1, 3)),
    "draws": (drafted("chain"), ONE, (2, 2)),
    "draws, sometimes": (grown("gumbel", lambda tokens: tokens[-1] > 0), ONE, (2, 3)),
    "what others said": (made("suffix", scope="group", factor=4.0), TWO, (2, 3)),
    "stand": (stand(context=1, entries=2, template=grid(2)), ONE, (2, 2)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of three tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.4)
    path = tmp_path_factory.mktemp("letters")
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("request_", ["free", "penalty and constraint", "top-k 2"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_samples_at_once_are_independent(folder: Path, draft: str, request_: str) -> None:
    target, alone = load_target(folder), load_target(folder)
    assert isinstance(target, ModelRunner)
    laws: dict[tuple[int, ...], np.ndarray] = {}

    def law(tokens: list[int]) -> np.ndarray:
        """Of a text in a pass of its own."""
        key = tuple(tokens)
        if key not in laws:
            seq = sequence(tokens, 1, SeededDice(0))
            laws[key] = np.exp(log_softmax(alone.forward(ForwardBatch([seq], [EMPTY]))[0].row(-1)))
            alone.release(seq)
        return laws[key]

    make, plan, lengths = DRAFTS[draft]
    sampling, shapers = REQUESTS[request_]
    error = distance(
        law,
        make,
        registry.make("verifier", "recursive"),
        plan=plan,
        sampling=sampling,
        shapers=shapers,
        lengths=lengths,
        max_seqs=len(lengths),
        target=target,
    )
    assert error <= CLOSE, error
    assert not target.num_held
