"""Losses as pure functions of tensors.

`...` are positions, V is the vocabulary, p the target (teacher), q the draft (student). Each
function returns a scalar. `weights` [...] is a bool mask (the mean over its positions) or float
weights (the weighted sum; those of a training step sum to 1 over its micro-batches, see
`data.Batches`); without it the mean of all positions. Weight 0 masks a position, even if its loss
is infinite.

The divergences (`forward_kl` to `expected_acceptance`) take student logits [..., V] and a teacher:
logits [..., V], or `TopK` rows. They compute in float32 (float64 stays) on `chunk` positions at a
time and compute again during backward, so memory beyond the logits and their gradient is a few
arrays [chunk, V]. Gradients flow to the student only. `temperature` divides the logits of both.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import ConfigError

from .loss_rows import (
    TINY,
    Each,
    Rows,
    Teacher,
    unmasked,
    weighted,
    weighted_mean,
)
from .loss_rows import TopK as TopK
from .renamed import refuse

CHUNK = 512  # positions
MIN_SIGMA = 1e-3  # smallest standard deviation of TVD++ rewards
LOWEST = -1e4  # log-probability instead of -inf where -inf would make gradients NaN

Norm = Literal["batch", "batch_uniform", "position", "none"]
Estimator = Literal["full", "sampled"]


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """-log q(target): logits [..., V], targets int64 [...]."""
    each = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return weighted(each.view(targets.shape), weights)


def soft_ce(
    student: Tensor,
    teacher: Teacher,
    weights: Tensor | None = None,
    *,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> Tensor:
    """-sum_v p(v) log q(v): KL(p || q) plus the entropy of p (Hinton et al. 2015)."""
    return _chunked(_soft_ce, student, teacher, weights, temperature, chunk)


def forward_kl(
    student: Tensor,
    teacher: Teacher,
    weights: Tensor | None = None,
    *,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> Tensor:
    """KL(p || q) = sum_v p (log p - log q): mode-covering."""
    return _chunked(_forward_kl, student, teacher, weights, temperature, chunk)


def reverse_kl(
    student: Tensor,
    teacher: Teacher,
    weights: Tensor | None = None,
    *,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> Tensor:
    """KL(q || p): mode-seeking (Gu et al., MiniLLM, 2024)."""
    return _chunked(_kl, student, teacher, weights, temperature, chunk)


def jsd(
    student: Tensor,
    teacher: Teacher,
    weights: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q.

    Agarwal et al., GKD, 2024. JSD / beta -> KL(p || q) for beta -> 0; JSD / (1 - beta) -> KL(q ||
    p) for beta -> 1.
    """
    if not 0 < beta < 1:
        raise ConfigError(
            f"jsd needs 0 < beta < 1, got {beta=}; the ends are forward_kl and reverse_kl"
        )

    def each(logq: Tensor, logp: Tensor) -> Tensor:
        logq, logp = logq.clamp_min(LOWEST), logp.clamp_min(LOWEST)
        logm = torch.logaddexp(logp + math.log(beta), logq + math.log1p(-beta))
        return beta * _kl(logp, logm) + (1 - beta) * _kl(logq, logm)

    return _chunked(each, student, teacher, weights, temperature, chunk)


def tvd(
    student: Tensor,
    teacher: Teacher,
    weights: Tensor | None = None,
    *,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> Tensor:
    """Total variation distance 1/2 sum_v |p - q|.

    1 - TVD = sum_v min(p, q) is the acceptance rate of speculative sampling (Leviathan et al.
    2023), so TVD is the direct objective of draft training (Zhou et al., DistillSpec, 2024).
    """
    return _chunked(_tvd, student, teacher, weights, temperature, chunk)


def expected_acceptance(
    student: Tensor,
    teacher: Teacher,
    weights: Tensor | None = None,
    *,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> Tensor:
    """sum_v min(p, q) = 1 - TVD: the acceptance rate of a token drawn from q."""
    return _chunked(_overlap, student, teacher, weights, temperature, chunk)


def tvd_pp(
    student: Tensor,
    teacher: Teacher,
    weights: Tensor | None = None,
    *,
    norm: Norm = "batch",
    estimator: Estimator = "full",
    num_samples: int = 1,
    samples: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> Tensor:
    """TVD++: total variation as policy gradient with a normalised reward (Goel et al. 2024).

    Reward r(x) = 1 if p(x) > q(x), else 0; advantage A = (r - mu) / sigma, a constant for the
    gradient. full: -sum_x A(x) q(x). sampled: -mean over x_1..x_M ~ q of A(x) log q(x), which has
    the same expected gradient. Only the gradient has a meaning, not the value.

    norm: mu and sigma of r under q at each "position", over all positions of the "batch" by their
    weights, over the batch with equal weight for all V tokens ("batch_uniform"), or "none", which
    has the gradient of TVD. In the full form mu cancels and 1 / sigma is the whole effect: another
    step size ("batch") or other weights of positions ("position"). mu and sigma are exact, not
    estimated from the samples, so the sampled form is unbiased.
    num_samples: M. samples: int64 [..., M], tokens drawn from q (with `TopK`: outcomes); None:
    drawn here, from torch's global generator.
    """
    if norm not in ("batch", "batch_uniform", "position", "none"):
        raise ConfigError(
            f"tvd_pp knows no norm {norm!r}; use batch, batch_uniform, position, none"
        )
    if estimator not in ("full", "sampled"):
        raise ConfigError(f"tvd_pp knows no estimator {estimator!r}; use full or sampled")
    rows = Rows.of(student, teacher, weights, temperature)
    to_draw = num_samples if estimator == "sampled" and samples is None else 0
    mu, sigma, drawn = _reward_stats(rows, norm, to_draw, chunk)
    if samples is not None:
        drawn = samples.flatten(0, -2)

    def each(logq: Tensor, logp: Tensor, mu: Tensor, sigma: Tensor, drawn: Tensor) -> Tensor:
        with torch.no_grad():
            advantage = (_reward(logq, logp) - mu[:, None]) / sigma[:, None]
        if estimator == "full":
            return -(advantage * logq.exp()).sum(-1)
        return -(advantage.gather(-1, drawn) * logq.gather(-1, drawn)).mean(-1)

    return rows.sum(each, chunk, mu, sigma, drawn)


def smooth_l1(
    features: Tensor, targets: Tensor, weights: Tensor | None = None, beta: float = 1.0
) -> Tensor:
    """Smooth L1 of feature rows [..., d], averaged over d (Li et al., EAGLE, 2024).

    For a difference x: x^2 / (2 beta) if |x| < beta, else |x| - beta / 2.
    """
    each = F.smooth_l1_loss(features, targets, reduction="none", beta=beta).mean(-1)
    return weighted(each, weights)


def binary_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None, negative_weight: float = 1.0
) -> Tensor:
    """-[a log s + w (1 - a) log(1 - s)] with s = sigmoid(logits [...]), labels a in 0..1 [...].

    negative_weight w: weight of negatives. The result is divided by the mean of a + w (1 - a), so w
    does not change the scale (Huang et al., SpecDec++, 2024).
    """
    lost = -labels * F.logsigmoid(logits) - negative_weight * (1 - labels) * F.logsigmoid(-logits)
    mass = labels + negative_weight * (1 - labels)
    return weighted(lost, weights) / weighted_mean(mass, weights).clamp_min(TINY)


def _chunked(
    each: Each,
    student: Tensor,
    teacher: Teacher,
    weights: Tensor | None,
    temperature: float,
    chunk: int,
) -> Tensor:
    return Rows.of(student, teacher, weights, temperature).sum(each, chunk)


def _soft_ce(logq: Tensor, logp: Tensor) -> Tensor:
    """-sum p log q; tokens with p = 0 contribute 0."""
    is_possible = logp > -torch.inf
    return -torch.where(is_possible, logp.exp() * torch.where(is_possible, logq, 0), 0).sum(-1)


def _forward_kl(logq: Tensor, logp: Tensor) -> Tensor:
    return _kl(logp, logq)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b) of rows [n, V]; tokens with probability 0 under a contribute 0."""
    is_possible = log_a > -torch.inf
    finite = torch.where(is_possible, log_a, 0)  # before exp, or the gradient would be NaN
    return torch.where(is_possible, finite.exp() * (finite - log_b), 0).sum(-1)


def _tvd(logq: Tensor, logp: Tensor) -> Tensor:
    return (logp.exp() - logq.exp()).abs().sum(-1) / 2


def _overlap(logq: Tensor, logp: Tensor) -> Tensor:
    return torch.minimum(logp.exp(), logq.exp()).sum(-1)


def _reward(logq: Tensor, logp: Tensor) -> Tensor:
    """1 where p > q, else 0: float [n, V]."""
    return (logp > logq).to(logq.dtype)


@torch.no_grad()
def _reward_stats(
    rows: Rows, norm: Norm, num_samples: int, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """mu and sigma of the reward at each position [N], and tokens drawn from q [N, M]."""
    means, drawn = list[Tensor](), list[Tensor]()
    for student, weights, *teacher in rows.chunks(chunk):
        kept, _, *stored = unmasked(student, weights, *teacher)
        logq, logp = rows.logs(kept, *stored)
        reward, q, keep = _reward(logq, logp), logq.exp(), weights > 0
        mean = reward.mean(-1) if norm == "batch_uniform" else (reward * q).sum(-1)
        means.append(mean.new_zeros(len(student)).masked_scatter(keep, mean))
        tokens = torch.zeros(len(student), num_samples, dtype=torch.int64, device=q.device)
        if num_samples:
            tokens[keep] = torch.multinomial(q, num_samples, replacement=True)
        drawn.append(tokens)
    mu = torch.cat(means)
    if norm == "none":
        return torch.zeros_like(mu), torch.ones_like(mu), torch.cat(drawn)
    if norm != "position":
        mu = weighted_mean(mu, rows.weights.to(mu.dtype)).expand_as(mu)
    sigma = (mu * (1 - mu)).clamp_min(0).sqrt().clamp_min(MIN_SIGMA)
    return mu, sigma, torch.cat(drawn)


__getattr__ = refuse(
    __name__,
    {
        "total_variation": "tvd(student, teacher)",
        "soft_cross_entropy": "soft_ce(student, teacher)",
        "topk_cross_entropy": "soft_ce(student, TopK(ids, logp))",
    },
)
