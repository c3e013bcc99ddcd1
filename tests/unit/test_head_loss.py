"""`head_cross_entropy` is cross-entropy of logits, without the logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.training.head_loss import head_cross_entropy
from forerun.training.losses import cross_entropy

N, D, V = 11, 6, 29


def parts(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, head, targets), the same in every call."""
    torch.manual_seed(0)
    hidden, head = torch.randn(1, N, D, dtype=dtype), torch.randn(V, D, dtype=dtype)
    return hidden.requires_grad_(), head.requires_grad_(), torch.randint(V, (1, N))


def results(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    """The loss and the gradients of 3 x loss."""
    return [loss.detach(), *torch.autograd.grad(3 * loss, leaves)]


WEIGHTS = {
    "none": None,
    "mask": torch.arange(N)[None] % 3 > 0,
    "weights": torch.linspace(0, 1, N)[None],
    "nothing": torch.zeros(1, N),
}


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("name", WEIGHTS)
def test_loss_and_gradients_are_those_of_the_logits(name: str, chunk: int) -> None:
    hidden, head, targets = parts()
    weights = WEIGHTS[name]
    found = results(head_cross_entropy(hidden, head, targets, weights, chunk), hidden, head)
    wanted = results(cross_entropy(hidden @ head.T, targets, weights), hidden, head)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_a_token_that_is_nearly_impossible_has_a_finite_loss() -> None:
    hidden, head = torch.ones(1, 1), torch.tensor([[0.0], [-300.0]])
    loss = head_cross_entropy(hidden, head, torch.tensor([1]))
    assert float(loss) == 300.0


def test_autocast_computes_products_in_its_type() -> None:
    hidden, head, targets = parts()
    exact = results(cross_entropy(hidden @ head.T, targets), hidden, head)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head_cross_entropy(hidden, head, targets)
    assert loss.dtype == torch.float32
    for a, b in zip(results(loss, hidden, head), exact, strict=True):
        assert a.dtype == torch.float32 and not torch.equal(a, b)
        torch.testing.assert_close(a, b, atol=0.05, rtol=0.05)


def test_no_array_is_as_large_as_the_logits() -> None:
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **kwargs or {})
            sizes.extend(x.numel() for x in [found] if isinstance(x, Tensor))
            return found

    hidden, head, targets = parts()
    with Sizes():
        head_cross_entropy(hidden, head, targets, None, 2).backward()
    assert max(sizes) == V * D
