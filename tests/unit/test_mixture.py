"""Packing, windows of running text, and mixtures of documents by tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import make_tiny

from forerun.errors import ConfigError
from forerun.training.data.documents import Batches, Documents
from forerun.training.data.mixture import Mixture, PackedBatches, windows
from forerun.training.language_model import LanguageModel
from forerun.training.loop import Loop, LoopOptions
from forerun.training.losses import cross_entropy


def documents(num: int, seed: int = 0, low: int = 5, high: int = 40) -> Documents:
    rng = np.random.default_rng(seed)
    return Documents.of(
        (rng.integers(2, 200, size=rng.integers(low, high)).tolist(), 3) for _ in range(num)
    )


@pytest.fixture(scope="module")
def module(tiny_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


def test_packed_rows_hold_every_document_once():
    made = documents(50)
    batches = PackedBatches(made, budget=300, width=64, seed=3)
    groups = batches.groups(0)
    assert sorted(np.concatenate(groups).tolist()) == list(range(50))
    assert np.concatenate(groups).tolist() != np.concatenate(batches.groups(1)).tolist()
    for group in groups:
        micro = batches.micro(group)
        assert micro.tokens.numel() <= 300 and micro.num_tokens == made.lengths()[group].sum()
        for row, docs in enumerate(batches.rows_of(group)):
            assert made.lengths()[docs].sum() <= 64
            text = np.concatenate([made.document(i) for i in docs])
            assert micro.tokens[row, : len(text)].tolist() == text.tolist()
            learned = np.concatenate([np.arange(n) >= 3 for n in made.lengths()[docs]])
            assert ((micro.weights[row, : len(text)] == 1).numpy() == learned).all()
            assert not micro.weights[row, len(text) :].any()
    assert sum(len(batches.rows_of(group)) for group in groups) < 30


@pytest.mark.parametrize("kind", [Batches, PackedBatches])
def test_by_text_a_short_document_counts_as_much_as_a_long_one(kind):
    made = Documents.of([([5] * 4, 3), ([6] * 13, 3), ([7] * 1, 0)])
    step = next(kind(made, accumulate=1, prompt_weight=0.0, by_text=True).steps())
    found = {i: sum(float(m.weights[m.tokens == i].sum()) for m in step) for i in (5, 6)}
    assert found == pytest.approx({5: 0.5, 6: 0.5})
    step = next(kind(made, accumulate=1, prompt_weight=0.0).steps())
    found = {i: sum(float(m.weights[m.tokens == i].sum()) for m in step) for i in (5, 6)}
    assert found == pytest.approx({5: 1 / 11, 6: 10 / 11})


def test_by_text_keeps_the_shares_of_a_mixture():
    answers = PackedBatches(documents(40), budget=256, width=64, prompt_weight=0.0, by_text=True)
    text = PackedBatches(documents(40, seed=1), budget=256, width=64, prompt_weight=1.0)
    mixture = Mixture({"answers": answers, "text": text}, {"answers": 1.0, "text": 1.0})
    shares = Counter[str]()
    for step, _ in zip(mixture.steps(), range(20), strict=False):
        for micro in step:
            shares[micro.source] += float(micro.weights.sum()) / 20
    assert 0.4 < shares["answers"] < 0.5  # prompts are not learned


def test_a_document_longer_than_a_row_has_its_own():
    made = Documents.of([([3] * 90, 1), ([4] * 10, 1), ([5] * 10, 1)])
    rows = PackedBatches(made, width=32).rows_of(np.array([1, 0, 2]))
    assert [row.tolist() for row in rows] == [[1], [0], [2]]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_documents_have_the_logits_of_single_ones(module, attention):
    made = documents(12)
    batches = PackedBatches(made, budget=10_000, width=100, accumulate=1)
    (group,) = batches.groups(0)
    micro = batches.micro(group)
    module.set_attn_implementation(attention)
    with torch.no_grad():
        packed = module(
            input_ids=micro.tokens, position_ids=micro.positions, use_cache=False
        ).logits
        for row, docs in enumerate(batches.rows_of(group)):
            at = 0
            assert len(docs) > 1 or len(batches.rows_of(group)) > 3
            for i in docs:
                ids = torch.from_numpy(made.document(i).astype(np.int64))[None]
                alone = module(input_ids=ids, use_cache=False).logits[0]
                found = packed[row, at : at + ids.shape[1]]
                torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-4)
                at += ids.shape[1]


def test_the_loss_of_packed_documents_is_that_of_unpacked_ones(module):
    made = documents(12)
    found = []
    for batches in (
        Batches(made, 10_000, accumulate=1),
        PackedBatches(made, 10_000, accumulate=1, width=100),
    ):
        (micro,) = next(batches.steps())
        with torch.no_grad():
            found.append(float(LanguageModel(module, batches).loss(micro)))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_loss_is_that_of_the_logits(module):
    """Also for the models that never make all logits; packed, with weights."""
    batches = PackedBatches(documents(12), 10_000, accumulate=1, width=100, prompt_weight=0.5)
    (micro,) = next(batches.steps())
    one = LanguageModel(module, batches)
    wanted = cross_entropy(one.logits(micro).float(), micro.tokens[:, 1:], micro.weights[:, 1:])
    gradients = []
    for loss in (one.loss(micro), wanted):
        module.zero_grad()
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters()})
    torch.testing.assert_close(one.loss(micro), wanted)
    torch.testing.assert_close(*gradients)


def test_windows_are_running_text_with_separators():
    made = Documents.of([([5, 6, 7], 2), ([8, 9], 0), ([10], 0)])
    cut = windows(made, 4, separator=1)
    rows = [cut.document(i).tolist() for i in range(len(cut))]
    assert rows == [[5, 6, 7, 1], [8, 9, 1, 10]]  # the last separator alone is dropped
    assert all(cut.is_learned(i).all() for i in range(len(cut)))


def shares(mixture: Mixture, steps: int) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for _, micros in zip(range(steps), mixture.steps(), strict=False):
        for micro in micros:
            counts[micro.source] += micro.num_tokens
    return {name: n / sum(counts.values()) for name, n in counts.items()}


def make_mixture() -> Mixture:
    sources = {
        "code": Batches(documents(60, 1, 20, 80), 256, seed=1),
        "text": PackedBatches(documents(30, 2), 256, width=64, seed=2),
        "chat": Batches(documents(5, 3), 128, seed=3),
    }
    return Mixture(sources, {"code": 0.5, "text": 0.25, "chat": 0.25})


def test_shares_are_those_of_tokens():
    found = shares(make_mixture(), 100)
    assert found == pytest.approx({"code": 0.5, "text": 0.25, "chat": 0.25}, abs=0.01)


def test_a_mixture_starts_anywhere_and_its_weights_sum_to_1():
    steps = [micros for _, micros in zip(range(9), make_mixture().steps(), strict=False)]
    for start in (1, 5, 8):
        later = next(make_mixture().steps(start))
        assert [m.source for m in later] == [m.source for m in steps[start]]
        assert all(
            torch.equal(a.tokens, b.tokens) for a, b in zip(later, steps[start], strict=True)
        )
    for micros in steps:
        assert sum(float(m.weights.sum()) for m in micros) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("given", [{"a": 1.0}, {"a": 1.0, "b": 0.0}, {"a": 1.0, "c": 1.0}])
def test_wrong_shares_are_refused(given):
    sources = {name: Batches(documents(3)) for name in "ab"}
    with pytest.raises(ConfigError, match="needs a share above 0 for each source"):
        Mixture(sources, given)


def test_a_chosen_part_of_the_documents_is_used():
    batches = Batches(documents(20), budget=200, only=np.array([3, 7, 11]))
    assert sorted(np.concatenate(batches.groups(0)).tolist()) in ([3, 7, 11], [3, 3, 7, 7, 11, 11])
    packed = PackedBatches(documents(20), budget=200, only=np.array([3, 7, 11]))
    assert set(np.concatenate(packed.groups(0)).tolist()) == {3, 7, 11}


def test_prompts_without_weight_give_no_gradient(tiny_folder):
    """A batch of prompts only: loss and gradients are 0."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    made = Documents.of((document.tolist(), len(document)) for document in [np.arange(5, 20)])
    batches = Batches(made, accumulate=1, prompt_weight=0.0)
    (micro,) = next(batches.steps())
    loss = LanguageModel(module, batches).loss(micro)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not any(p.grad.any() for p in module.parameters() if p.grad is not None)


def make_loop(folder: Path, checkpoint: Path) -> Loop:
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = LoopOptions(max_steps=6, warmup_steps=2, decay_share=0.5)
    return Loop(LanguageModel(module, make_mixture()), options, torch.device("cpu"), checkpoint)


def test_a_resumed_run_on_a_packed_mixture_is_bit_for_bit_the_same(tmp_path):
    folder = make_tiny(tmp_path / "model", seed=2)
    losses: dict[str, list[float]] = {"whole": [], "parts": []}

    def run(name: str, stop: int | None = None) -> Loop:
        loop = make_loop(folder, tmp_path / f"{name}.pt")
        loop.resume()
        step = loop.gradients

        def gradients(micros):
            losses[name].append(step(micros))
            return losses[name][-1]

        def watch(progress):
            if progress.step == stop:
                raise KeyboardInterrupt

        loop.gradients, loop.on_step = gradients, watch
        loop.run()
        return loop

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("parts", stop=3)
    rest = run("parts")
    assert losses["parts"] == losses["whole"] and len(losses["whole"]) == 6
    for name, p in whole.parameters.items():
        assert torch.equal(rest.parameters[name], p)
