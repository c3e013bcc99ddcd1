"""Which sub-model of a sorted draft serves a target: the one with the highest modelled speed-up.

Kavehzadeh et al., "S2D: Sorted Speculative Decoding", 2024. All sub-models and the target read one
held-out text. alpha is the mean of sum min(p, q) over its positions, c the measured time of a step
over that of a target step; tau / (c gamma + 1) at the best gamma decides.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.modelled_speedup import best_gamma
from forerun.core.records import Sequence
from forerun.core.roles import Target
from forerun.core.sampling import Sampling, log_softmax
from forerun.core.tree import chain
from forerun.drafters._draft_runner import on_host
from forerun.engine.cost.step import DRAFT_MODEL_SECONDS, cost_of, with_own_cache
from forerun.models.sub_models import Exits, sub_runner

if TYPE_CHECKING:
    from forerun.runner.model_runner import ModelRunner

log = logging.getLogger("forerun")
MAX_TEXT = 128  # tokens


class RatedExit(NamedTuple):
    """A sub-model for a target, with its modelled speed-up at its best draft length."""

    layers: int
    alpha: float
    c: float
    gamma: int
    speedup: float


def rated_exits(parts: Mapping[int, Target], text: Many[int], target: Target) -> list[RatedExit]:
    """Sub-models by depth, measured against a target on a text."""
    both = [target, *parts.values()]
    known = [token for token in text if token < min(one.vocab_size for one in both)]
    known = known[: min(MAX_TEXT, *(one.context for one in both))]
    p, seconds, found = probs(target, known), cost_of(target).pass_time(1), []
    for layers, part in parts.items():
        alpha = overlap(p, probs(part, known))
        c = cost_of(part, DRAFT_MODEL_SECONDS).pass_time(1) / seconds
        found.append(RatedExit(layers, alpha, c, *best_gamma(alpha, c)))
    return found


def sub_runners(runner: Target, exits: Exits) -> dict[int, ModelRunner]:
    """The sub-models of a sorted draft by depth."""
    return {layers: sub_runner(runner, layers) for layers in exits.depths}


def fastest(found: Many[RatedExit]) -> RatedExit:
    """The sub-model with the highest modelled speed-up."""
    return max(found, key=lambda one: one.speedup)


def fitting(runner: ModelRunner, exits: Exits, target: Target) -> ModelRunner:
    """The runner of the fastest sub-model for a target."""
    parts = sub_runners(runner, exits)
    found = rated_exits(parts, exits.text, target)
    best = fastest(found)
    shown = ", ".join(
        f"{one.layers} layers: alpha {one.alpha:.3f}, c {one.c:.3f}, speed-up {one.speedup:.2f}"
        for one in found
    )
    log.info("sorted draft: the first %d layers draft (%s)", best.layers, shown)
    return parts[best.layers]


def probs(target: Target, text: Many[int]) -> np.ndarray:
    """Distributions [n, V] after every token of a text, at temperature 1.

    Tokens that a reduced head lacks have probability 0.
    """
    seq = Sequence(list(text[:1]), 1, Sampling(), SeededDice(0), limit=1)
    target = with_own_cache(target)
    with target.lock:
        try:
            (rows,) = target.forward(ForwardBatch([seq], [chain(text[1:])]))
            found = rows.logits if isinstance(rows.logits, np.ndarray) else on_host(rows.logits)
        finally:
            target.release(seq)
    narrow = np.exp(np.stack([log_softmax(row) for row in found]))
    head = getattr(target, "head_map", None)
    if head is None:
        return narrow
    wide = np.zeros((len(narrow), len(head.back)))
    wide[:, head.forward] = narrow
    return wide


def overlap(p: np.ndarray, q: np.ndarray) -> float:
    """Mean of sum min(p, q) over rows; surplus columns of either are padding."""
    num = min(p.shape[1], q.shape[1])
    return float(np.minimum(p[:, :num], q[:, :num]).sum(axis=1).mean())
