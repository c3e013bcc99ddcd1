"""Cross-entropy through a model's head, without an array of all logits.

N positions have N x V logits, and autograd keeps several arrays of that size: at 49,152 tokens they
cost more time and memory than all else in a small draft. Here chunks of positions are computed in
turn in the same buffers, and their gradients with them (as in Liger Kernel, Hsu et al., 2024).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .loss_rows import as_weights, unmasked

CHUNK = 256  # positions


def head_cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor | None = None, chunk: int = CHUNK
) -> Tensor:
    """`losses.cross_entropy` of the logits `hidden @ head.T`, a scalar.

    hidden [..., D], head [V, D], targets int64 [...], weights [...] as in `losses`. Products are in
    the type of the current autocast, if it is on, and all else in float32. Gradients of the first
    order only.
    """
    kept = as_weights(weights, hidden.new_empty(targets.shape, dtype=torch.float32))
    rows, kept, labels = unmasked(hidden.flatten(0, -2), kept.flatten(), targets.flatten())
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        rows, head = rows.to(kind), head.to(kind)
    loss: Tensor = _HeadCrossEntropy.apply(rows, head, labels, kept, chunk)
    return loss


class _HeadCrossEntropy(torch.autograd.Function):
    """hidden [N, D], head [V, D], targets [N], weights [N] -> scalar."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, chunk: int
    ) -> Tensor:
        """The loss; computes both gradients on the way, as the logits do not stay."""
        size = min(chunk, len(hidden))
        logits, probs = hidden.new_empty(size, len(head)), weights.new_empty(size, len(head))
        of_hidden, part = torch.empty_like(hidden), torch.empty_like(head)
        of_head = torch.zeros_like(head, dtype=torch.float32)
        loss = weights.new_zeros(())
        for start in range(0, len(hidden), chunk):
            here = slice(start, start + chunk)
            x, label, weight = hidden[here], targets[here, None], weights[here, None]
            out, p = logits[: len(x)], probs[: len(x)]
            p.copy_(torch.mm(x, head.T, out=out))
            ahead = p.amax(-1, keepdim=True) - p.gather(-1, label)
            torch.softmax(p, -1, out=p)
            log_sum = -p.amax(-1, keepdim=True).log()  # the largest p is 1 / sum e^(x - max x)
            loss += (weight * (ahead + log_sum)).sum()
            p.scatter_add_(-1, label, torch.full_like(weight, -1.0)).mul_(weight)
            out.copy_(p)
            torch.mm(out, head, out=of_hidden[here])
            of_head += torch.mm(out.T, x, out=part)
        ctx.save_for_backward(of_hidden, of_head.to(head.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_head = ctx.saved_tensors
        return of_hidden * grads[0], of_head * grads[0], None, None, None
