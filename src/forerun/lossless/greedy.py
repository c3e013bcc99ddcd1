"""Greedy identity: drafted texts and logits against plain decoding on the same model and machine.

Greedy texts must be equal, except at numerical ties of the plain pass, and the logits of both
passes must agree within rounding: a wrong mask or KV cell shows there even if no token changes. The
plain passes start with an empty cache. `distribution` tests sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forerun import registry
from forerun.core.records import Step
from forerun.core.sampling import Sampling

if TYPE_CHECKING:
    from forerun.api import Model

PROMPTS = (
    "Once upon a time, in a small village by the sea,",
    "Question: A train travels 60 km in 45 minutes. How far does it travel in 2 hours?\nAnswer:",
    "def fibonacci(n):\n    ",
    "The three most important facts about photosynthesis are:\n1.",
    '{"name": "Ada", "year": 1843, "tags": [',
    "Dear Sir or Madam,\n\nI am writing to",
    "Paris is the capital of France. Paris is the capital of France. Paris is",
    "user: What is the difference between a list and a tuple in Python?\nassistant:",
)
# Largest rounding error of a logit, as a share of the largest logit of a text. Measured between
# plain and tree passes on CPU: 1e-6 in float32, 0.001 in float16, 0.010 in bfloat16. A wrong cell
# or mask changes 0.03 and more.
ROUNDING = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 0.003,
    torch.bfloat16: 0.025,
}
NUM_TOP_LOGITS = 16  # kept per position


@dataclass(frozen=True)
class Parts:
    """The checked drafter, verifier and controller, by name or as objects.

    constraint: changes the model's distribution; drafts must keep the changed one.
    """

    drafter: Any = registry.TREE_DRAFTER
    verifier: Any = registry.DEFAULT_VERIFIER
    controller: Any = "fixed"  # drafts even without a gain
    constraint: tuple[Any, ...] = ()

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `Model.run`."""
        return {
            "drafter": self.drafter,
            "verifier": self.verifier,
            "controller": self.controller,
            "constraint": self.constraint,
        }


@dataclass(frozen=True)
class GreedyCase:
    """One greedy trajectory compared with plain decoding of the same prompt."""

    prompt_index: int
    index: int  # trajectory; later ones draft from a memory of earlier ones
    num_tokens: int
    accepted: int  # draft tokens
    noise: float  # largest difference of a logit after equal prefixes
    tolerance: float = 0.0  # allowed rounding of a logit
    position: int | None = None  # first differing token
    expected: int | None = None
    got: int | None = None
    gap: float = 0.0  # plain logit of the expected token minus that of the one received
    difference: float = 0.0  # largest difference of these logits between the passes

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains the divergence: gap <= tolerance and <= 2 x difference."""
        return self.position is not None and self.gap <= min(self.tolerance, 2 * self.difference)

    @property
    def passed(self) -> bool:
        return self.cause in ("identical", "numerical tie")

    @property
    def cause(self) -> str:
        """identical, numerical tie, violation, or the passes differ (by more than rounding)."""
        if self.position is not None and not self.is_tie:
            return "violation"
        if self.noise > self.tolerance:
            return "the passes differ"
        return "identical" if self.position is None else "numerical tie"


class TopLogitRecorder:
    """Listener: ids and values of the largest processed logits at every emitted token."""

    def __init__(self) -> None:
        self.of: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

    def __call__(self, step: Step) -> None:
        for i, seq in enumerate(step.seqs):
            for node in step.visited(i):
                row = step.laws[i].logits(node)
                ids = np.argsort(-row, kind="stable")[:NUM_TOP_LOGITS]
                self.of.setdefault(seq.index, []).append((ids, row[ids].astype(np.float64)))


def check_greedy(
    model: Model,
    prompts: Many[Any],
    parts: Parts,
    *,
    max_new_tokens: int = 64,
    num_repeats: int = 2,
) -> Iterator[GreedyCase]:
    """Compares greedy texts with drafts to the plain one; repeats draft from a filled memory.

    prompts: texts or lists of token ids.
    """
    greedy = Sampling(temperature=0.0, max_new_tokens=max_new_tokens, seed=0)
    for i, prompt in enumerate(prompts):
        tops = TopLogitRecorder()
        empty_cache(model)
        run = model.run([prompt], greedy, drafter="none", constraint=parts.constraint, on_step=tops)
        (plain,) = run
        drafted = TopLogitRecorder()
        run = model.run(
            [prompt], replace(greedy, n=num_repeats), on_step=drafted, **parts.options()
        )
        for sample in sorted(run, key=lambda s: s.index):
            case = GreedyCase(i, sample.index, len(sample.tokens), sample.stats.accepted, 0.0)
            yield _compare(
                case,
                plain.tokens,
                sample.tokens,
                tops.of[0],
                drafted.of[sample.index],
                rounding(model),
            )


def dtype_of(model: Model) -> torch.dtype:
    """The dtype of the target's weights."""
    return getattr(getattr(model.target, "model", None), "dtype", torch.float32)


def rounding(model: Model) -> float:
    """Allowed rounding of a logit, as a share of the largest one."""
    return ROUNDING.get(dtype_of(model), ROUNDING[torch.float32])


def tolerance_of(logits: np.ndarray, share: float) -> float:
    """Allowed rounding of a logit: a share of the largest of these, or of 1."""
    return share * max(1.0, float(np.abs(logits).max(initial=0.0)))


def _compare(
    case: GreedyCase, plain: list[int], tokens: list[int], tops: list, drafted: list, share: float
) -> GreedyCase:
    """Fills in noise and tolerance and, if the texts diverge, position, gap and difference."""
    aligned = enumerate(zip(plain, tokens, strict=False))
    same = next((i for i, (a, b) in aligned if a != b), min(len(plain), len(tokens)))
    pairs = list(zip(tops[: same + 1], drafted, strict=False))  # logits after equal prefixes
    largest = np.array([np.abs(values).max() for (_, values), _ in pairs])
    case = replace(
        case,
        noise=max((_difference(*pair) for pair in pairs), default=0.0),
        tolerance=tolerance_of(largest, share),
    )
    if same == len(plain) == len(tokens):
        return case
    if same == min(len(plain), len(tokens)):  # one text ended early: not a tie
        return replace(case, position=same, gap=math.inf)
    (ids, values), got = tops[same], tokens[same]
    hits = np.flatnonzero(ids == got)
    return replace(
        case,
        position=same,
        expected=plain[same],
        got=got,
        gap=float(values[0] - values[hits[0]]) if len(hits) else math.inf,
        difference=_difference(tops[same], drafted[same]) if same < len(drafted) else 0.0,
    )


def _difference(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> float:
    """Largest difference of the logits of common ids."""
    _, here, there = np.intersect1d(a[0], b[0], return_indices=True)
    return float(np.abs(a[1][here] - b[1][there]).max(initial=0.0))


def empty_cache(model: Model) -> None:
    """Empties the free slots of the KV cache, so that the next run computes its prompt."""
    cache = getattr(model.target, "cache", None)
    for slot in cache.slots if cache else ():
        if slot.is_free:
            slot.truncate(0)
