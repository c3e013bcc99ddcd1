"""Acceptance metrics with the values of the papers, held-out acceptance, and draft shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import make_tiny

from forerun.core.modelled_speedup import best_gamma, block_efficiency, speedup, tau_of_ratio
from forerun.errors import ConfigError
from forerun.training.data.documents import Documents
from forerun.training.data.tokenizer import train_tokenizer
from forerun.training.drafts.acceptance import Rows, held_out_acceptance
from forerun.training.drafts.measure import frozen
from forerun.training.drafts.phases import Budget
from forerun.training.drafts.shapes import candidates, choose, num_parameters, rated, shape, widest
from forerun.training.language_model import Size, build_model
from forerun.training.progress import silent


def test_block_efficiency_by_hand():
    assert block_efficiency(0.6, 5) == pytest.approx(2.3834, abs=5e-5)
    assert block_efficiency(0.8, 5) == pytest.approx(3.6893, abs=5e-5)
    assert block_efficiency(0.8, 5) == pytest.approx((1 - 0.8**6) / 0.2)
    assert block_efficiency(1.0, 4) == 5 and block_efficiency(0.0, 4) == 1


@pytest.mark.parametrize(
    ("c", "gamma", "gain"), [(0.01, 7, 2.297), (0.02, 6, 2.170), (0.05, 4, 1.921), (0.1, 3, 1.674)]
)
def test_the_best_length_of_the_online_speculation_paper(c, gamma, gain):
    found, modelled = best_gamma(0.6, c)
    assert found == gamma and modelled == pytest.approx(gain, abs=6e-4)


def test_memory_bound_speedup_of_the_fastdraft_paper():
    """Accepted over proposed tokens, drafts of 3, 150M for 8.03B."""
    tau = tau_of_ratio(0.649, 3)
    assert tau == pytest.approx(2.947)
    assert speedup(tau, 3, 0.150 / 8.03) == pytest.approx(2.79, abs=5e-3)


class Fixed(torch.nn.Module):
    """A model with the same logits after every token."""

    device = torch.device("cpu")

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.rows = torch.tensor(logits)

    def forward(self, input_ids, use_cache=False):
        found = type("Output", (), {})()
        found.logits = self.rows.expand(*input_ids.shape, -1)
        return found


class ByToken(Fixed):
    """A model with logits that depend on the token before."""

    def __init__(self, logits: list[list[float]]) -> None:
        super().__init__(logits[0])
        self.rows = torch.tensor(logits)

    def forward(self, input_ids, use_cache=False):
        found = type("Output", (), {})()
        found.logits = self.rows[input_ids]
        return found


def test_held_out_acceptance_is_the_overlap_on_answers():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    made = Documents.of([([0, 1, 2, 0], 2), ([0, 1], 1), ([2, 2, 2], 3)])
    documents = Documents(made.tokens, made.starts, made.prompts, numbers=np.array([0, 1, 2]))
    target, draft = Fixed(p.log().tolist()), Fixed(q.log().tolist())
    found = held_out_acceptance(
        draft, target, documents, np.array([0, 1]), {0: "a", 1: "b", 2: "c"}
    )
    assert found == pytest.approx({"all": 0.7, "greedy": 0.0, "a": 0.7, "b": 0.7}, abs=1e-6)
    same = held_out_acceptance(target, target, documents, np.array([0]))
    assert same == pytest.approx({"all": 1.0, "greedy": 1.0}, abs=1e-6)


def test_acceptance_in_half_precision_is_that_of_float32(tmp_path):
    made = [([*range(20 * i, 20 * i + 20)], 5 + i) for i in range(12)]
    models = [frozen(str(make_tiny(tmp_path / name, seed=1))) for name in ("target", "draft")]
    head = models[1].lm_head.weight
    with torch.no_grad():  # large logits: in bfloat16 they would be multiples of 1/8
        head.add_(0.001 * torch.randn_like(head))
        for model in models:
            model.lm_head.weight.mul_(6)
    found = held_out_acceptance(*models, Documents.of(made), np.arange(12), budget=64)
    overlaps = list[float]()
    for ids, num_prompt in made:
        p, q = (model(torch.tensor([ids])).logits[0, num_prompt - 1 : -1] for model in models)
        overlaps += torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).tolist()
    assert 0.99 < np.mean(overlaps) < 0.999
    assert found["all"] == pytest.approx(np.mean(overlaps), abs=0.002)


def test_the_target_reads_held_out_answers_once(tmp_path):
    models = [frozen(str(make_tiny(tmp_path / str(i), seed=i))) for i in range(3)]
    target, drafts = models[0], models[1:]
    made = [([*range(20 * i, 20 * i + 20)], 5 + i) for i in range(12)]
    texts = Documents.of(made)
    documents = Documents(texts.tokens, texts.starts, texts.prompts, numbers=np.arange(12))
    data = documents, np.arange(12), {i: "ab"[i % 2] for i in range(12)}, 64
    fresh = [held_out_acceptance(draft, target, *data) for draft in drafts]
    kept: Rows = {}
    with pytest.MonkeyPatch.context() as patch:
        calls, forward = [], target.model.forward
        patch.setattr(target.model, "forward", lambda **kw: calls.append(1) or forward(**kw))
        found = [held_out_acceptance(draft, target, *data, kept) for draft in drafts]
    assert found == fresh and fresh[0] != fresh[1]
    assert len(calls) == sum(map(len, kept.values())) > len(kept) == 2


def test_prompts_without_a_domain_count_once():
    """Accepted after token 0 always, after token 1 in 0.7."""
    p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    target, draft = ByToken(np.log([p, p]).tolist()), ByToken(np.log([p, q]).tolist())
    made = Documents.of([([0, 0], 1), ([1, 1], 1), ([1, 1], 1)])
    documents = Documents(made.tokens, made.starts, made.prompts, numbers=np.array([0, 1, 2]))
    for domains in ({0: "a", 1: "all", 2: "all"}, {0: "a", 1: "b", 2: "b"}, None):
        found = held_out_acceptance(draft, target, documents, np.arange(3), domains)
        assert found["all"] == pytest.approx(0.8, abs=1e-6)
        assert domains is None or found["a"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("size", [shape(64, 2), shape(256, 3), Size(96, 1, 4, 2, 160)])
def test_the_number_of_parameters_is_exact(size):
    tokenizer = train_tokenizer(["one two three\n"] * 4, vocab_size=270, context=64)
    model = build_model(size, tokenizer, vocab_size=320)
    assert num_parameters(size, 320) == sum(p.numel() for p in model.parameters())


def test_the_published_size_of_a_draft():
    """52.1M with untied embeddings of 32064 tokens: one more matrix than here."""
    size = Size(hidden=512, layers=6, heads=8, kv_heads=8, inner=1408)
    assert num_parameters(size, 32064) + 32064 * 512 == pytest.approx(52.1e6, rel=1e-3)


def test_candidates_fill_the_same_size_with_several_depths():
    found = candidates(vocab=2048, max_parameters=2_000_000)
    assert [size.layers for size in found] == [1, 2, 4, 8]
    counts = [num_parameters(size, 2048) for size in found]
    assert all(1_000_000 < n <= 2_000_000 for n in counts)
    widths = [size.hidden for size in found]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) == 4
    with pytest.raises(ConfigError, match="has no room for 100000 tokens"):
        candidates(100_000, 1_000_000)


def test_a_costly_shape_needs_more_acceptance():
    fast = rated(shape(64, 1), 512, c=0.05, alpha=0.6)
    slow = rated(shape(64, 4), 512, c=0.2, alpha=0.65)
    better = rated(shape(64, 4), 512, c=0.2, alpha=0.85)
    assert slow.speedup < fast.speedup < better.speedup
    assert fast.gamma == 4 and fast.parameters == num_parameters(shape(64, 1), 512)


def test_shapes_that_are_measured_are_not_measured_again(tmp_path):
    path, measured = tmp_path / "shapes.json", []

    def rate(size):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append((size.layers, size.hidden))
        return rated(size, 288, c=0.1 * size.layers, alpha=size.hidden / 1000)

    how = path, 288, 200_000, (1, 2, 4), rate, silent
    with pytest.raises(KeyboardInterrupt):
        choose(*how)
    assert measured == [(1, 96), (1, 32)]
    measured.clear()
    assert choose(*how).size.layers == 1
    assert measured == [(2, 64), (4, 32)]
    measured.clear()
    assert choose(*how).size.hidden == 96
    assert not measured


def test_smaller_drafts_are_taken_while_acceptance_does_not_fall(tmp_path):
    """A quarter of the parameters again and again, then the depths of that size."""
    measured = []
    alphas = iter([0.10, 0.12, 0.12, 0.11, 0.20])

    def rate(size):
        measured.append((size.layers, num_parameters(size, 288)))
        return rated(size, 288, c=0.1, alpha=next(alphas))

    chosen = choose(tmp_path / "shapes.json", 288, 8_000_000, (2, 4), rate, silent)
    limits = [8_000_000, 2_000_000, 500_000, 125_000, 500_000]  # of parameters
    assert measured == [
        (layers, num_parameters(widest(288, limit, layers), 288))
        for layers, limit in zip([2, 2, 2, 2, 4], limits, strict=True)
    ]
    assert (chosen.size.layers, chosen.alpha) == (4, 0.2)


def test_a_probe_ends_after_its_steps_or_a_twentieth_of_the_minutes():
    assert Budget(max_steps=8).probe(60).minutes is None
    found = Budget(minutes=10).probe(60)
    assert found.max_steps == 60 and found.minutes == pytest.approx(0.5)
