"""Cross-entropy through a model's head, without an array of all logits.

N positions have N x V logits, and autograd keeps several arrays of that size: at 49,152 tokens they
cost more time and memory than all else in a small draft. Here chunks of positions are computed in
turn in the same buffers, and their gradients with them (as in Liger Kernel, Hsu et al., 2024). On
a CPU the distributions of a few rows at a time stay in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .loss_rows import as_weights, unmasked

CHUNK_POSITIONS = 1024
CACHED_LOGITS = 2**18  # 1 MiB in float32


def head_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    chunk: int = CHUNK_POSITIONS,
) -> Tensor:
    """`losses.cross_entropy` of the logits `hidden @ head.T`, a scalar.

    hidden [..., D], head [V, D], targets int64 [...], weights [...] as in `losses`. Products are in
    the type of the current autocast, if it is on, and all else in float32; of float16, in which
    gradients would overflow, products are in float32 too. Gradients of the first order only.
    """
    kept = as_weights(weights, hidden.new_empty(targets.shape, dtype=torch.float32))
    rows, kept, labels = unmasked(hidden.flatten(0, -2), kept.flatten(), targets.flatten())
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        kind = torch.float32 if kind == torch.float16 else kind
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
        logits = hidden.new_empty(min(chunk, len(hidden)), len(head))
        of_hidden, part = torch.empty_like(hidden), torch.empty_like(head)
        of_head = torch.zeros_like(head, dtype=torch.float32)
        loss = weights.new_zeros(())
        for start in range(0, len(hidden), chunk):
            here = slice(start, start + chunk)
            x, out = hidden[here], logits[: len(hidden[here])]
            found, sums = _losses_and_gradients_(torch.mm(x, head.T, out=out), targets[here])
            loss += (weights[here] * found).sum()
            factors = (weights[here] / sums)[:, None]  # of gradients, after products: D < V columns
            torch.mm(out, head, out=of_hidden[here]).mul_(factors)
            of_head += torch.mm(out.T, (x * factors).to(x.dtype), out=part)
        ctx.save_for_backward(of_hidden, of_head.to(head.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_head = ctx.saved_tensors
        return of_hidden * grads[0], of_head * grads[0], None, None, None


def _losses_and_gradients_(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies [n] and s [n] = sum_v e^(x_v - max x), float32.

    Overwrites logits x [n, V] with s times their gradient: e^(x - max x), minus s at the target.
    On a CPU a few rows at a time, so that they stay in the cache.
    """
    losses = torch.empty(len(logits), device=logits.device)
    sums, rows = torch.empty_like(losses), len(logits)
    if logits.device.type == "cpu":
        rows = max(1, CACHED_LOGITS // logits.shape[1])
    for at in range(0, len(logits), rows):
        some, label = logits[at : at + rows], targets[at : at + rows, None]
        x = some.to(torch.float32, copy=True)
        x -= x.amax(-1, keepdim=True)
        ahead = -x.gather(-1, label)
        s = x.exp_().sum(-1, keepdim=True)
        losses[at : at + rows, None] = ahead + s.log()
        sums[at : at + rows, None] = s
        some.copy_(x.scatter_add_(-1, label, -s))
    return losses, sums
