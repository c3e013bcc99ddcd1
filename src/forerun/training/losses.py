"""Losses as pure functions of tensors.

Leading dimensions `...` are positions, V the vocabulary. p is the target (teacher), q the draft
(student). Each function returns one number: the sum of `weights` [...] times the loss of each
position. Weights of a training step sum to 1 over its micro-batches (`data.Batches`), so the sum of
the shares is the step's mean. Without weights the plain mean is returned. A position is masked by
weight 0, also where its loss is infinite.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 1e-9  # smallest divisor


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
    """Cross-entropy against a teacher of which only the k likeliest tokens are stored.

    logits [..., V]; ids int64 [..., k], logp [..., k]: the teacher's tokens and log-probabilities.
    All other tokens count as one event with the remaining mass, so the loss is a cross-entropy of
    distributions over k + 1 outcomes, and smallest where q equals p on them.
    """
    logq = F.log_softmax(logits, -1).gather(-1, ids)
    inside = (logp.exp() * logq).sum(-1)
    rest_p = (1 - logp.exp().sum(-1)).clamp_min(0)
    rest_q = (1 - logq.exp().sum(-1)).clamp_min(TINY)
    return weighted(-(inside + rest_p * rest_q.log()), weights)


def forward_kl(p_logits: Tensor, q_logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """KL(p || q) = sum_v p (log p - log q), of logits [..., V]: covers all of the teacher."""
    return _kl(p_logits, q_logits, weights)


def reverse_kl(p_logits: Tensor, q_logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """KL(q || p), of logits [..., V]: seeks the teacher's modes (Gu et al., MiniLLM, 2024)."""
    return _kl(q_logits, p_logits, weights)


def total_variation(p_logits: Tensor, q_logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """TV(p, q) = 1/2 sum_v |p - q|, of logits [..., V].

    1 - TV = sum_v min(p, q) is the acceptance rate of speculative sampling (Leviathan et al. 2023),
    which makes TV the loss that draft training means (Zhou et al., DistillSpec, 2024).
    """
    p, q = torch.softmax(p_logits, -1), torch.softmax(q_logits, -1)
    return weighted((p - q).abs().sum(-1) / 2, weights)


def expected_acceptance(
    p_logits: Tensor, q_logits: Tensor, weights: Tensor | None = None
) -> Tensor:
    """sum_v min(p, q), of logits [..., V]: how often a token drawn from q is accepted."""
    p, q = torch.softmax(p_logits, -1), torch.softmax(q_logits, -1)
    return weighted(torch.minimum(p, q).sum(-1), weights)


def smooth_l1(
    features: Tensor, targets: Tensor, weights: Tensor | None = None, beta: float = 1.0
) -> Tensor:
    """Smooth L1 of feature rows [..., d], averaged over d (Li et al., EAGLE, 2024).

    Per number with difference x: x^2 / (2 beta) where |x| < beta, else |x| - beta / 2.
    """
    each = F.smooth_l1_loss(features, targets, reduction="none", beta=beta).mean(-1)
    return weighted(each, weights)


def binary_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None, negative_weight: float = 1.0
) -> Tensor:
    """-[a log s + w (1 - a) log(1 - s)] with s = sigmoid(logits [...]), labels a in 0..1 [...].

    negative_weight w: cost of a missed negative. The sum is divided by the mean of a + w (1 - a),
    so that w changes the balance and not the scale (Huang et al., SpecDec++, 2024).
    """
    lost = -labels * F.logsigmoid(logits) - negative_weight * (1 - labels) * F.logsigmoid(-logits)
    mass = labels + negative_weight * (1 - labels)
    return weighted(lost, weights) / weighted_mean(mass, weights).clamp_min(TINY)


def weighted(each: Tensor, weights: Tensor | None) -> Tensor:
    """sum of weights times losses [...]; the mean without weights."""
    if weights is None:
        return each.mean()
    return torch.where(weights > 0, each * weights, 0).sum()


def weighted_mean(each: Tensor, weights: Tensor | None) -> Tensor:
    """The mean of [...] under weights that need not sum to 1."""
    if weights is None:
        return each.mean()
    return weighted(each, weights) / weights.sum().clamp_min(TINY)


def _kl(a_logits: Tensor, b_logits: Tensor, weights: Tensor | None) -> Tensor:
    """KL(a || b); a token of probability 0 under a adds nothing."""
    log_a, log_b = F.log_softmax(a_logits, -1), F.log_softmax(b_logits, -1)
    is_possible = log_a > -torch.inf
    finite = torch.where(is_possible, log_a, 0)  # before exp, or the gradient would be NaN
    parts = torch.where(is_possible, finite.exp() * (finite - log_b), 0)
    return weighted(parts.sum(-1), weights)
