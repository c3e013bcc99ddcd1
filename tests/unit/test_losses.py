"""Training losses: numbers worked out by hand, gradients by finite differences, laws."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.errors import ConfigError
from forerun.training import losses

P = torch.tensor([[0.5, 0.3, 0.2], [0.25, 0.25, 0.5]], dtype=torch.double)
Q = torch.tensor([[0.2, 0.3, 0.5], [0.25, 0.5, 0.25]], dtype=torch.double)
WEIGHTS = torch.tensor([0.75, 0.25], dtype=torch.double)
ONLY_FIRST = torch.tensor([1.0, 0.0], dtype=torch.double)


def shifted(probs: torch.Tensor) -> torch.Tensor:
    """Logits of probabilities, moved by a constant that no loss may see."""
    return probs.log() + 3.0


def test_cross_entropy_by_hand():
    targets = torch.tensor([2, 1])
    first, second = -math.log(0.5), -math.log(0.5)
    assert float(losses.cross_entropy(shifted(Q), targets)) == pytest.approx(first)
    assert float(losses.cross_entropy(shifted(Q), targets * 0)) == pytest.approx(
        (-math.log(0.2) - math.log(0.25)) / 2
    )
    found = losses.cross_entropy(shifted(Q), torch.tensor([0, 1]), WEIGHTS)
    assert float(found) == pytest.approx(-0.75 * math.log(0.2) + 0.25 * second)


def test_soft_cross_entropy_by_hand():
    expected = -(0.5 * math.log(0.2) + 0.3 * math.log(0.3) + 0.2 * math.log(0.5))
    found = losses.soft_ce(shifted(Q), P.log(), ONLY_FIRST)
    assert float(found) == pytest.approx(expected)


def test_divergences_by_hand():
    p, q = shifted(P), shifted(Q)
    forward = 0.5 * math.log(0.5 / 0.2) + 0.2 * math.log(0.2 / 0.5)
    reverse = 0.2 * math.log(0.2 / 0.5) + 0.5 * math.log(0.5 / 0.2)
    assert float(losses.forward_kl(q, p, ONLY_FIRST)) == pytest.approx(forward)
    assert float(losses.reverse_kl(q, p, ONLY_FIRST)) == pytest.approx(reverse)
    assert float(losses.tvd(q, p)) == pytest.approx((0.3 + 0.25) / 2)
    assert float(losses.expected_acceptance(q, p)) == pytest.approx((0.7 + 0.75) / 2)
    m = [(a + b) / 2 for a, b in zip((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), strict=True)]
    half = sum(a * math.log(a / b) for a, b in zip((0.5, 0.3, 0.2), m, strict=True)) / 2
    half += sum(a * math.log(a / b) for a, b in zip((0.2, 0.3, 0.5), m, strict=True)) / 2
    assert float(losses.jsd(q, p, ONLY_FIRST)) == pytest.approx(half)


DIVERGENCES = {
    "forward_kl": losses.forward_kl,
    "reverse_kl": losses.reverse_kl,
    "jsd": losses.jsd,
    "jsd 0.1": partial(losses.jsd, beta=0.1),
    "tvd": losses.tvd,
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_are_zero_only_for_equal_distributions(name):
    torch.manual_seed(1)
    p, q = torch.randn(20, 5, dtype=torch.double), torch.randn(20, 5, dtype=torch.double)
    loss = DIVERGENCES[name]
    assert float(loss(p + 2.0, p)) == pytest.approx(0.0, abs=1e-12)
    assert all(float(loss(a, b)) > 1e-4 for a, b in zip(q[:, None], p[:, None], strict=True))


def test_jsd_is_symmetric_at_one_half_and_becomes_kl_at_the_ends():
    torch.manual_seed(2)
    p, q = torch.randn(3, 6, dtype=torch.double), torch.randn(3, 6, dtype=torch.double)
    assert float(losses.jsd(p, q)) == pytest.approx(float(losses.jsd(q, p)))
    low = losses.jsd(q, p, beta=1e-6) / 1e-6
    high = losses.jsd(q, p, beta=1 - 1e-6) / 1e-6
    assert float(low) == pytest.approx(float(losses.forward_kl(q, p)), rel=1e-4)
    assert float(high) == pytest.approx(float(losses.reverse_kl(q, p)), rel=1e-4)
    with pytest.raises(ConfigError, match="0 < beta < 1"):
        losses.jsd(q, p, beta=1.0)


def test_temperature_applies_to_both():
    torch.manual_seed(3)
    p, q = torch.randn(3, 6), torch.randn(3, 6)
    found = losses.forward_kl(q, p, temperature=2.0)
    assert float(found) == pytest.approx(float(losses.forward_kl(q / 2, p / 2)))


ANY = {**DIVERGENCES, "soft_ce": losses.soft_ce, "tvd_pp": losses.tvd_pp}


@pytest.mark.parametrize("name", ANY)
def test_a_mask_is_the_mean_over_its_positions(name):
    """Masked positions may hold anything; bool masks and weights that sum to 1 agree."""
    torch.manual_seed(4)
    p, q = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    mask = torch.rand(2, 5) > 0.5
    expected = ANY[name](q[mask], p[mask])
    q[~mask], p[~mask] = torch.nan, torch.inf
    q.requires_grad_()
    found = ANY[name](q, p, mask)
    assert float(found.detach()) == pytest.approx(float(expected), abs=1e-6)
    same = ANY[name](q, p, mask / mask.sum())
    assert float(same.detach()) == pytest.approx(float(expected), abs=1e-6)
    found.backward()
    assert torch.isfinite(q.grad).all() and not q.grad[~mask].any() and q.grad[mask].any()


@pytest.mark.parametrize("name", ANY)
def test_chunks_change_neither_loss_nor_gradient(name):
    torch.manual_seed(5)
    p, q = torch.randn(11, 7, dtype=torch.double), torch.randn(11, 7, dtype=torch.double)
    weights = torch.rand(11, dtype=torch.double) * (torch.arange(11) != 4)
    found = []
    for chunk in (1, 3, 11, 512):
        x = q.clone().requires_grad_()
        loss = ANY[name](x, p, weights, chunk=chunk)
        found.append((float(loss.detach()), torch.autograd.grad(loss, x)[0]))
    for value, gradient in found[1:]:
        assert value == pytest.approx(found[0][0], abs=1e-12)
        torch.testing.assert_close(gradient, found[0][1], atol=1e-12, rtol=0)


class LargestResult(TorchDispatchMode):
    """Notes the largest tensor that a program allocates, in elements."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for made in results if isinstance(results, (list, tuple)) else [results]:
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in inputs:
                self.largest = max(self.largest, made.numel())
        return results


@pytest.mark.parametrize("name", ANY)
def test_no_intermediate_is_as_large_as_the_logits(name):
    p, q = torch.randn(64, 10), torch.randn(64, 10, requires_grad=True)
    held = 0

    def pack(saved):
        nonlocal held
        is_input = saved.untyped_storage().data_ptr() in (
            x.untyped_storage().data_ptr() for x in (p, q)
        )
        held += 0 if is_input else saved.numel()
        return saved

    with LargestResult() as seen, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = ANY[name](q, p, chunk=8)
    assert 8 * 10 <= seen.largest <= 8 * 11
    assert held < q.numel()  # backward computes the chunks again
    loss.backward()
    assert torch.isfinite(q.grad).all()


@pytest.mark.parametrize("name", ANY)
def test_low_precision_logits_are_computed_in_float32(name):
    torch.manual_seed(6)
    p, q = torch.randn(3, 50).bfloat16(), torch.randn(3, 50).bfloat16()
    found = ANY[name](q, p)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(ANY[name](q.float(), p.float())), abs=1e-7)


def stored(p: torch.Tensor, k: int) -> losses.TopK:
    top = torch.log_softmax(p, -1).topk(k, -1)
    return losses.TopK(top.indices.int(), top.values)


@pytest.mark.parametrize("name", ANY)
def test_a_stored_teacher_counts_its_tail_as_one_outcome(name):
    """The same loss as of distributions whose tails were summed by hand."""
    torch.manual_seed(7)
    p, q = torch.randn(4, 9, dtype=torch.double), torch.randn(4, 9, dtype=torch.double)
    teacher = stored(p, 3)

    def joined(x: torch.Tensor) -> torch.Tensor:
        probs = torch.softmax(x, -1).gather(-1, teacher.ids.long())
        return torch.cat([probs, 1 - probs.sum(-1, keepdim=True)], -1).log()

    found = ANY[name](q, teacher, chunk=3)
    assert float(found) == pytest.approx(float(ANY[name](joined(q), joined(p))), abs=1e-10)
    full = float(ANY[name](q, p))
    assert float(ANY[name](q, stored(p, 9))) == pytest.approx(full, abs=1e-12)
    if name in DIVERGENCES:
        assert float(found) < full


def test_a_stored_teacher_in_half_precision_may_have_no_tail():
    """Rounded probabilities may sum to more than 1."""
    teacher = losses.TopK(torch.tensor([[0, 1]]), torch.tensor([[0.6, 0.401]]).log().half())
    q = torch.zeros(1, 4, requires_grad=True)
    for loss in ANY.values():
        value = loss(q, teacher)
        assert torch.isfinite(value)
        (gradient,) = torch.autograd.grad(value, q)
        assert torch.isfinite(gradient).all()


def test_teachers_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="has positions"):
        losses.tvd(torch.zeros(3, 5), torch.zeros(2, 5))
    with pytest.raises(ConfigError, match="has 6 tokens, but the student 5"):
        losses.tvd(torch.zeros(3, 5), torch.zeros(3, 6))
    with pytest.raises(ConfigError, match="1 with stored top-k rows"):
        losses.tvd(torch.zeros(1, 5), stored(torch.zeros(1, 5), 2), temperature=0.5)


def test_acceptance_is_one_minus_total_variation():
    torch.manual_seed(0)
    p, q = torch.randn(7, 11), torch.randn(7, 11)
    tv, accepted = losses.tvd(q, p), losses.expected_acceptance(q, p)
    assert float(tv + accepted) == pytest.approx(1.0, abs=1e-6)


def test_smooth_l1_by_hand():
    features = torch.tensor([[0.5, 3.0], [0.0, 0.0]])
    found = losses.smooth_l1(features, torch.zeros(2, 2), torch.tensor([1.0, 0.0]))
    assert float(found) == pytest.approx((0.125 + 2.5) / 2)
    wide = losses.smooth_l1(features, torch.zeros(2, 2), torch.tensor([1.0, 0.0]), beta=2.0)
    assert float(wide) == pytest.approx((0.0625 + 2.0) / 2)


def test_binary_cross_entropy_by_hand():
    logits = torch.tensor([math.log(3.0), 0.0])  # chances 0.75 and 0.5
    found = losses.binary_cross_entropy(logits, torch.tensor([1.0, 0.0]))
    assert float(found) == pytest.approx(-(math.log(0.75) + math.log(0.5)) / 2)
    heavy = losses.binary_cross_entropy(logits, torch.tensor([1.0, 0.0]), None, 3.0)
    assert float(heavy) == pytest.approx(-(math.log(0.75) + 3 * math.log(0.5)) / 4)


def test_weighted_binary_cross_entropy_is_that_of_specdec_pp():
    """-[a log s + w (1 - a) log(1 - s)] over kept places, divided by the sum of a + w (1 - a)."""
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 5), torch.rand(4, 5)
    keep = torch.rand(4, 5) > 0.4
    a, s = labels[keep], torch.sigmoid(logits[keep])
    expected = -(a * s.log() + 6 * (1 - a) * (1 - s).log()).sum() / (a + 6 * (1 - a)).sum()
    found = losses.binary_cross_entropy(logits, labels, keep / keep.sum(), 6.0)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    half = losses.binary_cross_entropy(logits, labels, 0.5 * keep / keep.sum(), 6.0)
    assert float(half) == pytest.approx(float(expected) / 2, rel=1e-5)


def test_masked_places_change_neither_loss_nor_gradient():
    """Also where their loss is infinite."""
    logits = torch.tensor([[0.0, 1.0], [0.0, -torch.inf]], requires_grad=True)
    found = losses.cross_entropy(logits, torch.tensor([1, 1]), torch.tensor([1.0, 0.0]))
    found.backward()
    assert float(found.detach()) == pytest.approx(math.log(1 + math.exp(-1)))
    assert torch.isfinite(logits.grad).all() and not logits.grad[1].any()


def test_tokens_that_the_teacher_excludes_cost_nothing():
    p = torch.tensor([[0.0, 0.0, -torch.inf]])
    q = torch.zeros(1, 3, requires_grad=True)
    found = losses.forward_kl(q, p)
    found.backward()
    assert float(found.detach()) == pytest.approx(math.log(3 / 2))
    assert torch.isfinite(q.grad).all()


IDS = torch.tensor([[0, 2], [1, 0], [3, 1]])
TEACHER = torch.log_softmax(torch.linspace(-1, 1, 12, dtype=torch.double).view(3, 4), -1)
SHARES = torch.tensor([0.5, 0.0, 0.5], dtype=torch.double)
STORED = losses.TopK(IDS, TEACHER.gather(-1, IDS))
GRADIENTS = {
    "cross_entropy": lambda x: losses.cross_entropy(x, torch.tensor([1, 0, 3]), SHARES),
    "soft_ce": lambda x: losses.soft_ce(x, TEACHER, SHARES),
    "forward_kl": lambda x: losses.forward_kl(x, TEACHER, SHARES, chunk=2),
    "reverse_kl": lambda x: losses.reverse_kl(x, TEACHER, SHARES),
    "jsd": lambda x: losses.jsd(x, TEACHER, SHARES, beta=0.3),
    "tvd": lambda x: losses.tvd(x, TEACHER, SHARES, temperature=0.7),
    "expected_acceptance": lambda x: losses.expected_acceptance(x, TEACHER, SHARES),
    "stored soft_ce": lambda x: losses.soft_ce(x, STORED, SHARES),
    "stored jsd": lambda x: losses.jsd(x, STORED, SHARES),
    "stored tvd": lambda x: losses.tvd(x, STORED, SHARES, chunk=1),
    "smooth_l1": lambda x: losses.smooth_l1(x, TEACHER, SHARES),
    "bce": lambda x: losses.binary_cross_entropy(x, TEACHER.exp(), None, 6.0),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_finite_differences(name):
    torch.manual_seed(3)
    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(GRADIENTS[name], (x,))


def test_analytic_gradients():
    """FKL: q - p. TVD: q (w - sum q w) with w = -1[p > q]."""
    torch.manual_seed(8)
    p = torch.randn(1, 6, dtype=torch.double)
    x = torch.randn(1, 6, dtype=torch.double, requires_grad=True)
    target, q = torch.softmax(p, -1), torch.softmax(x, -1).detach()
    (found,) = torch.autograd.grad(losses.forward_kl(x, p), x)
    torch.testing.assert_close(found, q - target)
    (found,) = torch.autograd.grad(losses.tvd(x, p), x)
    w = -(target > q).double()
    torch.testing.assert_close(found, q * (w - (q * w).sum()))


def test_descending_total_variation_raises_acceptance():
    torch.manual_seed(0)
    p, q = torch.randn(5, 8), torch.zeros(5, 8, requires_grad=True)
    before = float(losses.expected_acceptance(q, p).detach())
    for _ in range(100):
        (gradient,) = torch.autograd.grad(losses.tvd(q, p), q)
        q = (q - 2.0 * gradient).detach().requires_grad_()
    assert float(losses.expected_acceptance(q, p).detach()) > max(before + 0.1, 0.9)


@pytest.mark.parametrize("old", ["total_variation", "soft_cross_entropy", "topk_cross_entropy"])
def test_old_names_say_the_new_one(old):
    with pytest.raises(ImportError, match="was renamed in this release"):
        getattr(losses, old)
