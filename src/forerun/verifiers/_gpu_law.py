"""Sampling parameters as tensors: `core.sampling.to_probs` for many rows, on their device.

No step waits for the device or has a shape that depends on a value. Top-p needs no sort: the
smallest kept probability is found by bisection over the bits of float32, which rise with the value.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forerun.core.sampling import Sampling

ONE_BITS = int(np.float32(1.0).view(np.int32))  # the bits of the largest probability
TOP_P_SLACK = 1e-9  # as in `core.sampling`: a sum that rounding leaves just below p suffices


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [N, V] of logits [N, V] at a temperature above 0, with truncation.

    A row without a finite maximum gives NaN.
    """
    scaled = (logits - logits.amax(-1, keepdim=True)) / sampling.divisor
    if not sampling.truncates:
        return scaled.softmax(-1)
    probs = scaled.exp()  # softmax adds in float32 and may move the border of top-p
    probs = probs / probs.sum(-1, keepdim=True, dtype=torch.float64).to(probs.dtype)
    largest = probs  # all that are not 0, in any order
    if 0 < sampling.top_k < logits.shape[1]:
        probs = renormalised(probs, within_top_k(probs, sampling.top_k))
        largest = probs.topk(sampling.top_k, -1).values
    if sampling.top_p < 1.0:
        probs = renormalised(probs, within_top_p(probs, largest, sampling.top_p))
    least = sampling.min_p * probs.amax(-1, keepdim=True)
    return renormalised(probs, probs >= least)


def within_top_k(probs: Tensor, k: int) -> Tensor:
    """The k largest of each row, bool [N, V]; among ties the lowest ids."""
    border = probs.topk(k, -1).values[:, -1:]
    return _with_first(probs > border, probs == border, k)


def within_top_p(probs: Tensor, largest: Tensor, p: float) -> Tensor:
    """The smallest set of largest probabilities with a sum of at least p; bool [N, V].

    largest [N, k]: those of `probs` that are not 0; fewer are searched faster. Among ties the
    lowest ids.
    """
    least, num = smallest_kept(largest, p)
    return _with_first(_bits(probs) > least, _bits(probs) == least, num)


def smallest_kept(probs: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """The bits of the smallest probability in the set of top-p, and the size of the set; [N, 1]."""
    bits = _bits(probs)
    low = torch.zeros(len(probs), 1, dtype=torch.int32, device=probs.device)  # sum at it >= p
    high = torch.full_like(low, ONE_BITS + 1)  # sum at it < p
    for _ in range(ONE_BITS.bit_length()):
        middle = (low + high) // 2
        is_enough = _sum(probs, bits >= middle) >= p - TOP_P_SLACK
        low, high = torch.where(is_enough, middle, low), torch.where(is_enough, high, middle)
    larger, ties = bits > low, bits == low
    each = _sum(probs, ties) / ties.sum(-1, keepdim=True)
    missing = (p - TOP_P_SLACK - _sum(probs, larger)) / each
    return low, larger.sum(-1, keepdim=True) + missing.ceil().clamp(min=1.0)


def renormalised(probs: Tensor, kept: Tensor) -> Tensor:
    """Probabilities without those that are not kept; sums are 1 again."""
    probs = torch.where(kept, probs, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def _with_first(kept: Tensor, ties: Tensor, num: int | Tensor) -> Tensor:
    """`kept` and the first ties of each row, together `num` entries."""
    return kept | ties & (ties.cumsum(-1) <= num - kept.sum(-1, keepdim=True))


def _bits(probs: Tensor) -> Tensor:
    return probs.float().view(torch.int32)


def _sum(probs: Tensor, kept: Tensor) -> Tensor:
    """Sums of the kept entries in float64, [N, 1]."""
    return torch.where(kept, probs, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
