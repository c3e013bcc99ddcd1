"""Positions of a loss as rows: masks, chunks, and teachers stored as their top k."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from forerun.errors import ConfigError

TINY = 1e-9  # minimum of divisors and of the mass of a tail

Each = Callable[..., Tensor]  # (log q, log p, further rows), each [n, ...] -> losses [n]


@dataclass(frozen=True)
class TopK:
    """A teacher stored as its k most likely tokens; all other tokens are one further outcome.

    Divergences are computed over these k + 1 outcomes, for p and q alike. That is a lower bound of
    the divergence over V outcomes, and equal to it if k = V.
    """

    ids: Tensor  # int64 [..., k]
    logp: Tensor  # [..., k], log-probabilities at temperature 1
    tail: Tensor | None = None  # [...], log of the mass of all other tokens; None: 1 - sum

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """(ids [N, k], logp [N, k], tail [N])."""
        logp = self.logp if self.logp.dtype == torch.float64 else self.logp.float()
        tail = self.tail
        if tail is None:
            tail = (1 - logp.exp().sum(-1)).clamp_min(TINY).log()
        return self.ids.flatten(0, -2).long(), logp.flatten(0, -2), tail.flatten()


Teacher = Tensor | TopK


@dataclass(frozen=True)
class Rows:
    """Student logits [N, V], teacher ([N, V],) or `TopK.rows`, and weights [N]."""

    student: Tensor
    teacher: tuple[Tensor, ...]
    weights: Tensor
    temperature: float

    @classmethod
    def of(
        cls, student: Tensor, teacher: Teacher, weights: Tensor | None, temperature: float
    ) -> Rows:
        """Rows of [..., V] tensors. Raises ConfigError if they do not fit each other."""
        is_stored, places = isinstance(teacher, TopK), student.shape[:-1]
        given = teacher.ids if isinstance(teacher, TopK) else teacher
        if given.shape[:-1] != places:
            raise ConfigError(
                f"the teacher has positions {tuple(given.shape[:-1])}, but the student "
                f"{tuple(places)}; align them (the logits at token t predict token t + 1)"
            )
        if not is_stored and given.shape != student.shape:
            raise ConfigError(
                f"the teacher has {given.shape[-1]} tokens, but the student "
                f"{student.shape[-1]}; cut the padding of the larger vocabulary"
            )
        if not temperature > 0 or (temperature != 1 and is_stored):
            raise ConfigError(
                f"got temperature {temperature}; it must be above 0, and 1 with stored top-k rows, "
                "as their tail has no logits"
            )
        kept = as_weights(weights, student.new_empty(places, dtype=float_type(student)))
        rows = teacher.rows() if isinstance(teacher, TopK) else (teacher.flatten(0, -2),)
        flat = tuple(part.detach() for part in rows)
        return cls(student.flatten(0, -2), flat, kept.flatten(), temperature)

    def chunks(self, size: int, *more: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """(student, weights, *teacher, *more) of `size` positions at a time."""
        parts = (self.student, self.weights, *self.teacher, *more)
        return zip(*(part.split(size) for part in parts), strict=True)

    def sum(self, each: Each, size: int, *more: Tensor) -> Tensor:
        """Sum of weights times losses, chunk by chunk; masked positions are not computed.

        more: rows [N, ...] that `each` gets after log q and log p.
        """
        total = self.student.new_zeros((), dtype=float_type(self.student))

        def run(student: Tensor, weights: Tensor, *rows: Tensor) -> Tensor:
            student, weights, *kept = unmasked(student, weights, *rows)
            teacher, more = kept[: len(self.teacher)], kept[len(self.teacher) :]
            return (each(*self.logs(student, *teacher), *more) * weights).sum()

        is_saved = len(self.student) <= size or not torch.is_grad_enabled()
        for chunk in self.chunks(size, *more):
            part = run(*chunk) if is_saved else checkpoint(run, *chunk, use_reentrant=False)
            total = total + part
        return total

    def logs(self, student: Tensor, *teacher: Tensor) -> tuple[Tensor, Tensor]:
        """(log q, log p) of some rows, over V outcomes or over k + 1."""
        kind = float_type(student)
        logits = student.to(kind) / self.temperature
        if len(teacher) == 1:
            logp = F.log_softmax(teacher[0].to(kind) / self.temperature, -1)
            return F.log_softmax(logits, -1), logp
        ids, logp, tail_p = teacher[0], teacher[1].to(kind), teacher[2].to(kind)[:, None]
        total = logits.logsumexp(-1, keepdim=True)
        logq = logits.gather(-1, ids) - total
        if ids.shape[-1] == logits.shape[-1]:  # no tail
            return logq, logp
        tail_q = logits.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True) - total
        return torch.cat([logq, tail_q], -1), torch.cat([logp, tail_p], -1)


def float_type(logits: Tensor) -> torch.dtype:
    """The type to compute in: float64 stays, all others become float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def unmasked(rows: Tensor, weights: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """The rows with a weight above 0."""
    keep = weights > 0
    if bool(keep.all()):
        return rows, weights, *more
    return tuple(part[keep] for part in (rows, weights, *more))


def as_weights(weights: Tensor | None, each: Tensor) -> Tensor:
    """Float weights for losses [...]; those of a bool mask, and of None, sum to 1."""
    if weights is None:
        return torch.full_like(each, 1 / max(1, each.numel()))
    if weights.dtype == torch.bool:
        return weights.to(each.dtype) / weights.sum().clamp_min(1)
    return weights


def weighted(each: Tensor, weights: Tensor | None) -> Tensor:
    """Losses [...] as a scalar: the mean, the mean over a mask, or the weighted sum."""
    if weights is None:
        return each.mean()
    weights = as_weights(weights, each)
    return torch.where(weights > 0, each * weights, 0).sum()


def weighted_mean(each: Tensor, weights: Tensor | None) -> Tensor:
    """Weighted mean of [...]; weights need not sum to 1."""
    if weights is None:
        return each.mean()
    return weighted(each, weights) / as_weights(weights, each).sum().clamp_min(TINY)
