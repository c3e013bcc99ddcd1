"""Losses as pure functions of tensors.

`...` are positions, V is the vocabulary, p the target (teacher), q the draft (student). Each
function returns a scalar: the sum over positions of `weights` [...] times the loss; without weights
the mean. The weights of a training step sum to 1 over its micro-batches (`data.Batches`). Weight 0
masks a position, even if its loss is infinite.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 1e-9  # minimum of divisors and of arguments of log


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """-log q(target): logits [..., V], targets int64 [...]."""
    each = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return weighted(each.view(targets.shape), weights)


def soft_cross_entropy(
    logits: Tensor, teacher_probs: Tensor, weights: Tensor | None = None
) -> Tensor:
    """-sum_v p(v) log q(v): logits and teacher_probs [..., V] (Hinton et al. 2015)."""
    each = -(teacher_probs * F.log_softmax(logits, -1)).sum(-1)
    return weighted(each, weights)


def topk_cross_entropy(
    logits: Tensor, ids: Tensor, logp: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Cross-entropy with a teacher that is stored as its k most likely tokens.

    logits [..., V]; ids int64 [..., k], logp [..., k]: the teacher's tokens and log-probabilities.
    All other tokens count as one outcome with the remaining mass, so the loss is a cross-entropy
    over k + 1 outcomes. It is minimal if q equals p on them.
    """
    logq = F.log_softmax(logits, -1).gather(-1, ids)
    inside = (logp.exp() * logq).sum(-1)
    rest_p = (1 - logp.exp().sum(-1)).clamp_min(0)
    rest_q = (1 - logq.exp().sum(-1)).clamp_min(TINY)
    return weighted(-(inside + rest_p * rest_q.log()), weights)


def forward_kl(p_logits: Tensor, q_logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """KL(p || q) = sum_v p (log p - log q), of logits [..., V]: mode-covering."""
    return _kl(p_logits, q_logits, weights)


def reverse_kl(p_logits: Tensor, q_logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """KL(q || p), of logits [..., V]: mode-seeking (Gu et al., MiniLLM, 2024)."""
    return _kl(q_logits, p_logits, weights)


def total_variation(p_logits: Tensor, q_logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """TV(p, q) = 1/2 sum_v |p - q|, of logits [..., V].

    1 - TV = sum_v min(p, q) is the acceptance rate of speculative sampling (Leviathan et al. 2023),
    so TV is the direct objective of draft training (Zhou et al., DistillSpec, 2024).
    """
    p, q = torch.softmax(p_logits, -1), torch.softmax(q_logits, -1)
    return weighted((p - q).abs().sum(-1) / 2, weights)


def expected_acceptance(
    p_logits: Tensor, q_logits: Tensor, weights: Tensor | None = None
) -> Tensor:
    """sum_v min(p, q), of logits [..., V]: the acceptance rate of a token drawn from q."""
    p, q = torch.softmax(p_logits, -1), torch.softmax(q_logits, -1)
    return weighted(torch.minimum(p, q).sum(-1), weights)


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


def weighted(each: Tensor, weights: Tensor | None) -> Tensor:
    """Sum of weights times losses [...]; the mean without weights."""
    if weights is None:
        return each.mean()
    return torch.where(weights > 0, each * weights, 0).sum()


def weighted_mean(each: Tensor, weights: Tensor | None) -> Tensor:
    """Weighted mean of [...]; weights need not sum to 1."""
    if weights is None:
        return each.mean()
    return weighted(each, weights) / weights.sum().clamp_min(TINY)


def _kl(a_logits: Tensor, b_logits: Tensor, weights: Tensor | None) -> Tensor:
    """KL(a || b); tokens with probability 0 under a contribute 0."""
    log_a, log_b = F.log_softmax(a_logits, -1), F.log_softmax(b_logits, -1)
    is_possible = log_a > -torch.inf
    finite = torch.where(is_possible, log_a, 0)  # before exp, or the gradient would be NaN
    parts = torch.where(is_possible, finite.exp() * (finite - log_b), 0)
    return weighted(parts.sum(-1), weights)
