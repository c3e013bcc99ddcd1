"""Is decoding lossless here? Greedy identity, on the user's own model; `sampled_law` has the rest.

A check of a drafter and a verifier against plain decoding with the same weights, on this machine.
Greedy texts must be equal, except where the plain pass itself has a numerical tie, and the logits
of both passes must agree within rounding: a wrong mask or cell shows there even when no token
changes. The plain passes compute their cells anew.
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
# What rounding may do to a logit, as a share of the largest one of a text. Measured between plain
# and tree passes on CPU, a random llama and the embedded reasoner: 1e-6 in float32, 0.001 in
# float16, 0.010 in bfloat16 (0.17 of 23). A wrong cell or mask makes 0.03 and more.
ROUNDING = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 0.003,
    torch.bfloat16: 0.025,
}
KEPT = 16  # largest logits remembered per position


@dataclass(frozen=True)
class Parts:
    """What is checked: a drafter, a verifier and a controller, by name or as objects.

    constraint: what changes the model's distribution, which drafts must keep then.
    """

    drafter: Any = registry.BRANCHING
    verifier: Any = registry.VERIFIER
    controller: Any = "fixed"  # drafts also where they do not pay
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
    """One greedy trajectory beside plain decoding of the same prompt."""

    prompt_index: int
    index: int  # trajectory; later ones draft from what earlier ones taught
    num_tokens: int
    accepted: int  # draft tokens
    noise: float  # largest difference of a logit between the two after equal beginnings
    tolerance: float = 0.0  # what rounding may do to a logit here
    position: int | None = None  # first differing token
    expected: int | None = None
    got: int | None = None
    gap: float = 0.0  # plain logit of the expected token over that of the one that came
    difference: float = 0.0  # of those logits between the passes, at most

    @property
    def is_tie(self) -> bool:
        """The divergence is rounding: a gap within the tolerance, explained by the difference."""
        return self.position is not None and self.gap <= min(self.tolerance, 2 * self.difference)

    @property
    def passed(self) -> bool:
        return self.cause in ("identical", "numerical tie")

    @property
    def cause(self) -> str:
        """identical, numerical tie, violation, or: the passes differ (by more than rounding)."""
        if self.position is not None and not self.is_tie:
            return "violation"
        if self.noise > self.tolerance:
            return "the passes differ"
        return "identical" if self.position is None else "numerical tie"


class Tops:
    """Listener: ids and values of the largest shaped logits behind every emitted token."""

    def __init__(self) -> None:
        self.of: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}

    def __call__(self, step: Step) -> None:
        for i, seq in enumerate(step.seqs):
            for node in step.visited(i):
                row = step.laws[i].logits(node)
                ids = np.argsort(-row, kind="stable")[:KEPT]
                self.of.setdefault(seq.index, []).append((ids, row[ids].astype(np.float64)))


def check_greedy(
    model: Model,
    prompts: Many[Any],
    parts: Parts,
    *,
    max_new_tokens: int = 64,
    num_repeats: int = 2,
) -> Iterator[GreedyCase]:
    """Greedy texts with drafts beside the plain one; repeats draft from a memory that knows.

    prompts: texts or lists of token ids.
    """
    greedy = Sampling(temperature=0.0, max_new_tokens=max_new_tokens, seed=0)
    for i, prompt in enumerate(prompts):
        tops = Tops()
        forget(model)
        run = model.run([prompt], greedy, drafter="none", constraint=parts.constraint, on_step=tops)
        (plain,) = run
        drafted = Tops()
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
    """The number type of the target's weights."""
    return getattr(getattr(model.target, "model", None), "dtype", torch.float32)


def rounding(model: Model) -> float:
    """What rounding may do to a logit, as a share of the largest one."""
    return ROUNDING.get(dtype_of(model), ROUNDING[torch.float32])


def tolerance_of(logits: np.ndarray, share: float) -> float:
    """What rounding may do to a logit: a share of the largest of these, at least of 1."""
    return share * max(1.0, float(np.abs(logits).max(initial=0.0)))


def _compare(
    case: GreedyCase, plain: list[int], tokens: list[int], tops: list, drafted: list, share: float
) -> GreedyCase:
    """Fills in the noise, what rounding explains of it and, where the texts part, the cause."""
    pairs = zip(plain, tokens, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(tokens)))
    beside = list(zip(tops[: same + 1], drafted, strict=False))  # laws after equal beginnings
    largest = np.array([np.abs(values).max() for (_, values), _ in beside])
    case = replace(
        case,
        noise=max((_difference(*pair) for pair in beside), default=0.0),
        tolerance=tolerance_of(largest, share),
    )
    if same == len(plain) == len(tokens):
        return case
    if same == min(len(plain), len(tokens)):  # one ended early: no tie can explain that
        return replace(case, position=same, gap=math.inf)
    (ids, values), came = tops[same], tokens[same]
    hits = np.flatnonzero(ids == came)
    return replace(
        case,
        position=same,
        expected=plain[same],
        got=came,
        gap=float(values[0] - values[hits[0]]) if len(hits) else math.inf,
        difference=_difference(tops[same], drafted[same]) if same < len(drafted) else 0.0,
    )


def _difference(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> float:
    """Largest difference of the logits of the ids that both remember."""
    _, here, there = np.intersect1d(a[0], b[0], return_indices=True)
    return float(np.abs(a[1][here] - b[1][there]).max(initial=0.0))


def forget(model: Model) -> None:
    """Empties the free slots of the cache: a reference reads no cell that a tree pass left."""
    cache = getattr(model.target, "cache", None)
    for slot in cache.slots if cache else ():
        if slot.is_free:
            slot.truncate(0)
