"""Training losses: numbers worked out by hand, gradients by finite differences, laws."""

from __future__ import annotations

import math

import pytest
import torch

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
    found = losses.soft_cross_entropy(shifted(Q), P, ONLY_FIRST)
    assert float(found) == pytest.approx(expected)


def test_topk_cross_entropy_by_hand():
    """Two tokens are stored, the third is the rest: it is the full one here."""
    ids = torch.tensor([[0, 1], [2, 0]])
    logp = P.gather(-1, ids).log()
    full = losses.soft_cross_entropy(shifted(Q), P, WEIGHTS)
    found = losses.topk_cross_entropy(shifted(Q), ids, logp, WEIGHTS)
    assert float(found) == pytest.approx(float(full))
    one = losses.topk_cross_entropy(shifted(Q), ids[:, :1], logp[:, :1], ONLY_FIRST)
    assert float(one) == pytest.approx(-(0.5 * math.log(0.2) + 0.5 * math.log(0.8)))


def test_divergences_by_hand():
    p, q = shifted(P), shifted(Q)
    forward = 0.5 * math.log(0.5 / 0.2) + 0.2 * math.log(0.2 / 0.5)
    reverse = 0.2 * math.log(0.2 / 0.5) + 0.5 * math.log(0.5 / 0.2)
    assert float(losses.forward_kl(p, q, ONLY_FIRST)) == pytest.approx(forward)
    assert float(losses.reverse_kl(p, q, ONLY_FIRST)) == pytest.approx(reverse)
    assert float(losses.total_variation(p, q)) == pytest.approx((0.3 + 0.25) / 2)
    assert float(losses.expected_acceptance(p, q)) == pytest.approx((0.7 + 0.75) / 2)
    for loss in (losses.forward_kl, losses.reverse_kl, losses.total_variation):
        assert float(loss(p, p)) == pytest.approx(0.0, abs=1e-12)


def test_acceptance_is_one_minus_total_variation():
    torch.manual_seed(0)
    p, q = torch.randn(7, 11), torch.randn(7, 11)
    tv, accepted = losses.total_variation(p, q), losses.expected_acceptance(p, q)
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
    found = losses.forward_kl(p, q)
    found.backward()
    assert float(found.detach()) == pytest.approx(math.log(3 / 2))
    assert torch.isfinite(q.grad).all()


IDS = torch.tensor([[0, 2], [1, 0], [3, 1]])
TEACHER = torch.log_softmax(torch.linspace(-1, 1, 12, dtype=torch.double).view(3, 4), -1)
SHARES = torch.tensor([0.5, 0.0, 0.5], dtype=torch.double)
GRADIENTS = {
    "cross_entropy": lambda x: losses.cross_entropy(x, torch.tensor([1, 0, 3]), SHARES),
    "soft_cross_entropy": lambda x: losses.soft_cross_entropy(x, TEACHER.exp(), SHARES),
    "topk": lambda x: losses.topk_cross_entropy(x, IDS, TEACHER.gather(-1, IDS), SHARES),
    "forward_kl": lambda x: losses.forward_kl(TEACHER, x, SHARES),
    "reverse_kl": lambda x: losses.reverse_kl(TEACHER, x, SHARES),
    "total_variation": lambda x: losses.total_variation(TEACHER, x, SHARES),
    "expected_acceptance": lambda x: losses.expected_acceptance(TEACHER, x, SHARES),
    "smooth_l1": lambda x: losses.smooth_l1(x, TEACHER, SHARES),
    "bce": lambda x: losses.binary_cross_entropy(x, TEACHER.exp(), None, 6.0),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_finite_differences(name):
    torch.manual_seed(3)
    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(GRADIENTS[name], (x,))


def test_descending_total_variation_raises_acceptance():
    torch.manual_seed(0)
    p, q = torch.randn(5, 8), torch.zeros(5, 8, requires_grad=True)
    before = float(losses.expected_acceptance(p, q).detach())
    for _ in range(100):
        (gradient,) = torch.autograd.grad(losses.total_variation(p, q), q)
        q = (q - 2.0 * gradient).detach().requires_grad_()
    assert float(losses.expected_acceptance(p, q).detach()) > max(before + 0.1, 0.9)
