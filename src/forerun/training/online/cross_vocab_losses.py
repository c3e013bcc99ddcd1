"""Losses of a draft with another vocabulary than its target (OmniDraft).

Ramakrishnan et al., "OmniDraft: A Cross-vocabulary, Online Adaptive Drafter for On-device
Speculative Decoding", 2025. A position is one target token. It is direct if one draft token has its
bytes; else it is an n-gram, the draft tokens d_1 .. d_n of its text.

    L = L_DM + lambda L_ngram
    L_DM = KL(q || p) at direct positions, both restricted to the mapped tokens and renormalised
    L_ngram = -sum_j log q(d_j | d_<j) at n-gram positions
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.training.loss_rows import Teacher
from forerun.training.losses import CHUNK, cross_entropy, reverse_kl


def mapped_kl(
    student: Tensor,
    teacher: Teacher,
    mapped: Tensor,
    weights: Tensor | None = None,
    *,
    chunk: int = CHUNK,
) -> Tensor:
    """L_DM: KL(q || p) of student logits [..., V_d] restricted to the draft tokens `mapped` [M].

    teacher: the target over the same M tokens in the same order: logits [..., M], or `TopK` with
    ids in 0..M-1.
    """
    return reverse_kl(student.index_select(-1, mapped), teacher, weights, chunk=chunk)


def hybrid_loss(
    student: Tensor,
    labels: Tensor,
    position: Tensor,
    is_direct: Tensor,
    teacher: Teacher,
    mapped: Tensor,
    ngram_weights: Tensor,
) -> Tensor:
    """L per position: (sum of KL at direct ones + sum of w times -log q at n-grams) / number.

    student: logits [k, V_d] at one row per draft token. labels: int64 [k], that draft token.
    position: int64 [k], its position, ascending. is_direct: bool [n]. teacher: of the direct
    positions. ngram_weights: w [n], lambda or p(t); ignored at direct positions.
    """
    share = 1.0 / len(is_direct)
    is_row_direct = is_direct[position]
    direct = student[is_row_direct]
    weights = torch.full((len(direct),), share, dtype=student.dtype)
    loss = mapped_kl(direct, teacher, mapped, weights) if len(direct) else student.sum() * 0.0
    own = torch.where(is_direct, 0.0, ngram_weights)[position] * share
    return loss + cross_entropy(student, labels, own.to(student.dtype))


def run_logq(student: Tensor, labels: Tensor, position: Tensor, num: int) -> Tensor:
    """log q(d_1) + .. + log q(d_n) of each position, [num]."""
    each = student.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return each.new_zeros(num).index_add(0, position, each)
