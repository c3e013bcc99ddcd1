"""TVD++: the worked example, gradient identities, normalisation, and the sampled form."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.training.losses import forward_kl, tvd, tvd_pp

P = torch.tensor([[0.50, 0.30, 0.15, 0.05]], dtype=torch.double)
LOGITS = torch.tensor([[0.2, 0.9, -0.3, 0.1]], dtype=torch.double)
GRADIENT = torch.tensor([[-0.14253, 0.15799, -0.08645, 0.07099]], dtype=torch.double)
NORMALISED = torch.tensor([[-0.29786, 0.33017, -0.18066, 0.14835]], dtype=torch.double)
SIGMA = 0.4785


def gradient(loss, logits: Tensor, teacher: Tensor, *more, **options) -> Tensor:
    x = logits.clone().requires_grad_()
    return torch.autograd.grad(loss(x, teacher, *more, **options), x)[0]


def rows(seed: int, n: int = 6, vocab: int = 5) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(n, vocab, dtype=torch.double), torch.randn(n, vocab, dtype=torch.double)


def test_the_worked_example():
    q = torch.softmax(LOGITS, -1)
    torch.testing.assert_close(
        q, torch.tensor([[0.2210, 0.4450, 0.1340, 0.2000]]).double(), atol=6e-5, rtol=0
    )
    assert float(tvd(LOGITS, P.log())) == pytest.approx(0.2950, abs=6e-5)
    m = float(q[0, 0] + q[0, 2])
    assert m == pytest.approx(0.3550, abs=6e-5)
    sigma = (m * (1 - m)) ** 0.5
    assert sigma == pytest.approx(SIGMA, abs=6e-5)
    plain = gradient(tvd, LOGITS, P.log())
    torch.testing.assert_close(plain, GRADIENT, atol=6e-6, rtol=0)
    unnormalised = gradient(tvd_pp, LOGITS, P.log(), norm="none")
    torch.testing.assert_close(unnormalised, plain, atol=1e-12, rtol=0)
    for norm in ("batch", "position"):  # one position: the same
        found = gradient(tvd_pp, LOGITS, P.log(), norm=norm)
        torch.testing.assert_close(found, NORMALISED, atol=6e-6, rtol=0)
        torch.testing.assert_close(found, plain / sigma, atol=1e-12, rtol=0)


def test_the_gradient_is_that_of_finite_differences_of_tvd():
    step, found = 1e-6, torch.zeros(4, dtype=torch.double)
    for i in range(4):
        moved = torch.zeros(1, 4, dtype=torch.double)
        moved[0, i] = step
        found[i] = (tvd(LOGITS + moved, P.log()) - tvd(LOGITS - moved, P.log())) / (2 * step)
    torch.testing.assert_close(
        gradient(tvd_pp, LOGITS, P.log(), norm="none")[0], found, atol=1e-6, rtol=0
    )


def test_the_value_without_norm_is_tvd_less_the_mass_that_the_target_prefers():
    logits, teacher = rows(0)
    p, q = torch.softmax(teacher, -1), torch.softmax(logits, -1)
    expected = tvd(logits, teacher) - (p * (p > q)).sum(-1).mean()
    assert float(tvd_pp(logits, teacher, norm="none")) == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.parametrize("norm", ["batch", "batch_uniform", "position", "none"])
def test_gradients_sum_to_zero_and_vanish_at_the_target(norm):
    logits, teacher = rows(1)
    found = gradient(tvd_pp, logits, teacher, norm=norm)
    assert found.abs().max() > 0.01
    torch.testing.assert_close(found.sum(-1), torch.zeros(6).double(), atol=1e-12, rtol=0)
    equal = gradient(tvd_pp, teacher, teacher, norm=norm)
    assert not equal.any()  # ties have reward 0, and sigma its minimum


def test_norms_rescale_the_gradient_of_tvd():
    """One factor for the batch, one for each position; no baseline."""
    logits, teacher = rows(2)
    p, q = torch.softmax(teacher, -1), torch.softmax(logits, -1)
    plain, reward = gradient(tvd, logits, teacher), (p > q).double()
    m = (reward * q).sum(-1)

    def deviation(mean: Tensor) -> Tensor:
        return (mean * (1 - mean)).sqrt()

    expected = {
        "batch": plain / deviation(m.mean()),
        "batch_uniform": plain / deviation(reward.mean()),
        "position": plain / deviation(m)[:, None],
    }
    for norm, wanted in expected.items():
        found = gradient(tvd_pp, logits, teacher, norm=norm)
        torch.testing.assert_close(found, wanted, atol=1e-7, rtol=0)


def test_batch_norm_uses_masked_positions_only():
    logits, teacher = rows(3)
    mask = torch.tensor([1, 1, 0, 1, 0, 0], dtype=torch.bool)
    expected = gradient(tvd_pp, logits[mask], teacher[mask])
    for extra in (0, 5):  # more padding
        padding = torch.zeros(extra, 5, dtype=torch.double)
        longer = torch.cat([mask, torch.zeros(extra, dtype=torch.bool)])
        found = gradient(
            tvd_pp, torch.cat([logits, padding]), torch.cat([teacher, padding]), longer
        )
        torch.testing.assert_close(found[:6][mask], expected)


def test_the_sampled_form_has_the_gradient_of_the_full_one():
    """By enumeration of the draws at one position: sum over x of q(x) times the gradient."""
    logits, teacher = rows(4, n=2)
    q = torch.softmax(logits, -1)
    for norm in ("batch", "position", "none"):
        expected = torch.zeros_like(logits)
        for x in product(range(5), repeat=2):
            tokens = torch.tensor(x)[:, None]
            chance = float(q.gather(-1, tokens).prod())
            sampled = partial(tvd_pp, norm=norm, estimator="sampled", samples=tokens)
            expected += chance * gradient(sampled, logits, teacher)
        found = gradient(tvd_pp, logits, teacher, norm=norm)
        torch.testing.assert_close(expected, found, atol=1e-12, rtol=0)


def sampled_moments(with_baseline: bool) -> tuple[Tensor, float]:
    """Mean and total variance of the sampled gradient in the worked example, by enumeration."""
    q, mean, second = torch.softmax(LOGITS, -1), torch.zeros(1, 4).double(), 0.0
    scale = 1.0 if with_baseline else 1 / SIGMA
    for x in range(4):
        norm = "batch" if with_baseline else "none"
        sampled = partial(tvd_pp, norm=norm, estimator="sampled", samples=torch.tensor([[x]]))
        found = scale * gradient(sampled, LOGITS, P.log())
        mean, second = mean + q[0, x] * found, second + float(q[0, x] * (found**2).sum())
    return mean, second - float((mean**2).sum())


def test_the_baseline_keeps_the_mean():
    with_it, variance = sampled_moments(True)
    without, other = sampled_moments(False)
    torch.testing.assert_close(with_it, without, atol=1e-4, rtol=0)
    assert variance != pytest.approx(other, rel=0.01)


def test_the_baseline_lowers_the_variance_where_most_tokens_are_rewarded():
    teacher = torch.tensor([[0.35, 0.35, 0.25, 0.05]], dtype=torch.double).log()
    logits = torch.tensor([[0.28, 0.30, 0.20, 0.22]], dtype=torch.double).log()  # m = 0.78
    variance = {}
    q = torch.softmax(logits, -1)
    m = 0.78
    for norm, scale in (("position", (m * (1 - m)) ** 0.5), ("none", 1.0)):
        draws = [
            scale
            * gradient(
                partial(tvd_pp, norm=norm, estimator="sampled", samples=torch.tensor([[x]])),
                logits,
                teacher,
            )
            for x in range(4)
        ]
        mean = sum(q[0, x] * draws[x] for x in range(4))
        variance[norm] = float(sum(q[0, x] * ((draws[x] - mean) ** 2).sum() for x in range(4)))
    assert variance["position"] < 0.8 * variance["none"]


def test_samples_are_drawn_from_the_draft():
    """The mean over many draws is near the full gradient; equal seeds, equal draws, any chunk."""
    logits, teacher = rows(5, n=3)
    found = []
    for chunk in (1, 512):
        torch.manual_seed(0)
        many = partial(tvd_pp, estimator="sampled", num_samples=20_000, chunk=chunk)
        found.append(gradient(many, logits, teacher))
    full = gradient(tvd_pp, logits, teacher)
    torch.testing.assert_close(found[1], full, atol=0.02, rtol=0)
    torch.testing.assert_close(found[0], full, atol=0.02, rtol=0)


def test_unknown_choices_are_refused():
    with pytest.raises(ConfigError, match="no norm 'sequence'; use batch"):
        tvd_pp(LOGITS, P.log(), norm="sequence")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no estimator 'some'; use full or sampled"):
        tvd_pp(LOGITS, P.log(), estimator="some")  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", ["batch", "position"])
def test_it_raises_acceptance_from_a_pretrained_start(norm):
    """1 - TVD rises while it is optimised; the start is some steps of forward KL."""
    torch.manual_seed(0)
    teacher, x = torch.randn(5, 8), torch.zeros(5, 8)
    for _ in range(20):
        x = x - gradient(forward_kl, x, teacher)
    path = [float(tvd(x, teacher))]
    for _ in range(60):
        x = x - 0.3 * gradient(tvd_pp, x, teacher, norm=norm)
        path.append(float(tvd(x, teacher)))
    means = [sum(path[i : i + 10]) / 10 for i in range(0, 60, 10)]
    assert all(b < a for a, b in zip(means, means[1:], strict=False))
    assert path[-1] < 0.5 * path[0]
