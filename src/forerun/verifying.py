"""Is decoding lossless here? Greedy identity and the sampled law, on the user's own model.

Two checks of a drafter and a verifier against plain decoding with the same weights, on this
machine. Greedy texts must be equal, except where the plain pass itself has a numerical tie: the
two best logits closer than the number type resolves, and the tree pass no further off than that.
Sampled tokens must follow the target's own law: chi-square of many samples against the processed
probabilities of one plain pass, at the first token and after the most common beginnings.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forerun.dice import SeededDice
from forerun.engine.stats import Stats
from forerun.records import Sequence, Step
from forerun.sampling import Sampling
from forerun.shaping import Adjust, Laws
from forerun.tree import EMPTY

if TYPE_CHECKING:
    from forerun.engine.api import Model

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
TIES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.25}
KEPT = 16  # largest logits remembered per position
ALPHA = 1e-3  # a corrected p-value below this is a violation


@dataclass(frozen=True)
class Parts:
    """What is checked: a drafter, a verifier and a controller, by name or as objects."""

    drafter: Any = "stand"
    verifier: Any = "speculative"
    controller: Any = "fixed"

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `Model.run`."""
        return {
            "drafter": self.drafter,
            "verifier": self.verifier,
            "controller": self.controller,
        }


@dataclass(frozen=True)
class GreedyCase:
    """One greedy trajectory beside plain decoding of the same prompt."""

    prompt_index: int
    index: int  # trajectory; later ones draft from what earlier ones taught
    num_tokens: int
    accepted: int  # draft tokens
    noise: float  # largest difference of a logit between the two, where the texts agree
    position: int | None = None  # first differing token
    expected: int | None = None
    got: int | None = None
    gap: float = 0.0  # plain logit of the expected token over that of the one that came
    difference: float = 0.0  # of those logits between the passes, at most
    tolerance: float = 0.0

    @property
    def is_tie(self) -> bool:
        """The divergence is rounding: a gap within the tolerance, explained by the difference."""
        return self.position is not None and self.gap <= min(self.tolerance, 2 * self.difference)

    @property
    def passed(self) -> bool:
        return self.position is None or self.is_tie

    @property
    def cause(self) -> str:
        """identical, numerical tie, or violation."""
        if self.position is None:
            return "identical"
        return "numerical tie" if self.is_tie else "violation"


@dataclass(frozen=True)
class LawTest:
    """Chi-square of the tokens after one beginning."""

    prompt_index: int
    beginning: tuple[int, ...]  # generated tokens before the tested one
    num_samples: int
    num_bins: int
    statistic: float
    p_value: float
    corrected: float = 1.0  # Holm, over all tests of the report

    @property
    def passed(self) -> bool:
        return self.corrected >= ALPHA


@dataclass(frozen=True)
class LawReport:
    """All tests of the sampled law, and whether drafts took part in it."""

    tests: list[LawTest]
    num_samples: int
    stats: Stats = field(default_factory=Stats)

    @property
    def passed(self) -> bool:
        return all(test.passed for test in self.tests)

    @property
    def is_vacuous(self) -> bool:
        """No draft was accepted, or nothing could be tested: passing says little."""
        return not self.stats.accepted or not self.tests


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
        (plain,) = model.run([prompt], greedy, drafter="none", on_step=tops)
        drafted = Tops()
        run = model.run(
            [prompt], replace(greedy, n=num_repeats), on_step=drafted, **parts.options()
        )
        for sample in sorted(run, key=lambda s: s.index):
            case = GreedyCase(i, sample.index, len(sample.tokens), sample.stats.accepted, 0.0)
            tie = TIES.get(dtype_of(model), TIES[torch.float32])
            yield _compare(
                case, plain.tokens, sample.tokens, tops.of[0], drafted.of[sample.index], tie
            )


def dtype_of(model: Model) -> torch.dtype:
    """The number type of the target's weights."""
    return getattr(getattr(model.target, "model", None), "dtype", torch.float32)


def _compare(
    case: GreedyCase, plain: list[int], tokens: list[int], tops: list, drafted: list, tie: float
) -> GreedyCase:
    """Fills in the noise and, where the texts part, the cause."""
    pairs = zip(plain, tokens, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(tokens)))
    noise = max((_difference(*pair) for pair in zip(tops[:same], drafted, strict=False)), default=0)
    case = replace(case, noise=float(noise))
    if same == len(plain) == len(tokens):
        return case
    if same == min(len(plain), len(tokens)):  # one ended early: no tie can explain that
        return replace(case, position=same, gap=float("inf"))
    (ids, values), wanted, came = tops[same], plain[same], tokens[same]
    hits = np.flatnonzero(ids == came)
    return replace(
        case,
        position=same,
        expected=wanted,
        got=came,
        gap=float(values[0] - (values[hits[0]] if len(hits) else values[-1])),
        difference=_difference(tops[same], drafted[same]) if same < len(drafted) else 0.0,
        tolerance=tie * max(1.0, abs(float(values[0])) / 16) if len(hits) else 0.0,
    )


def _difference(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> float:
    """Largest difference of the logits of the ids that both remember."""
    _, here, there = np.intersect1d(a[0], b[0], return_indices=True)
    return float(np.abs(a[1][here] - b[1][there]).max(initial=0.0))


def check_law(
    model: Model,
    prompts: Many[Any],
    parts: Parts,
    sampling: Sampling,
    *,
    num_samples: int = 2000,
    num_tokens: int = 3,
    batch: int = 1,
    seconds: float = 60.0,
    on_sample: Callable[[], None] | None = None,
) -> LawReport:
    """Samples beginnings of `num_tokens` tokens and tests them; at most `seconds` per prompt."""
    total, tests, count = Stats(), [], 0
    for i, prompt in enumerate(prompts):
        tokens = model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        found: list[tuple[int, ...]] = []
        deadline, chunk = time.monotonic() + seconds, 250
        while len(found) < num_samples and (not found or time.monotonic() < deadline):
            asked = replace(
                sampling,
                n=min(chunk, num_samples - len(found)),
                max_new_tokens=num_tokens,
                seed=(sampling.seed or 0) + 1000 * i + len(found) // chunk,
            )
            for sample in model.run([tokens], asked, batch=batch, **parts.options()):
                found.append(tuple(sample.tokens))
                total.add(sample.stats)
                if on_sample:
                    on_sample()
        count += len(found)
        asked = replace(sampling, max_new_tokens=num_tokens)
        tests += [replace(t, prompt_index=i) for t in law_tests(model, tokens, found, asked)]
    return LawReport(holm(tests), count, total)


def law_tests(
    model: Model,
    prompt: list[int],
    found: Many[tuple[int, ...]],
    sampling: Sampling,
    *,
    most: int = 3,
    least: int = 100,
) -> Iterator[LawTest]:
    """Tests of the next token after the `most` commonest beginnings of every length."""
    for length in range(max(map(len, found), default=0)):
        after = Counter(tokens[:length] for tokens in found if len(tokens) > length)
        for beginning, count in after.most_common(most):
            if count < min(least, len(found)):
                continue
            law = next_law(model, prompt, list(beginning), sampling)
            counts = np.zeros(len(law))
            for tokens in found:
                if len(tokens) > length and tokens[:length] == beginning:
                    counts[tokens[length]] += 1
            statistic, bins, p_value = chi_square(counts, law)
            if bins > 1 or p_value == 0.0:
                yield LawTest(0, beginning, count, bins, statistic, p_value)


def next_law(model: Model, prompt: list[int], generated: list[int], sampling: Sampling) -> Any:
    """The processed law [V] of the next token from one plain pass, float64."""
    adjust = Adjust(model.tokenizer.eos_ids)
    tokens = [*prompt, *generated]
    seq = Sequence(tokens, len(prompt), sampling, SeededDice(0), limit=sampling.max_new_tokens)
    seq.states = (adjust.start(seq),)
    try:
        (rows,) = model.target.forward([seq], [EMPTY], frozenset())
        return Laws(rows, seq, EMPTY, (adjust,))[-1].astype(np.float64)
    finally:
        model.target.release(seq)


def chi_square(counts: np.ndarray, law: np.ndarray) -> tuple[float, int, float]:
    """Statistic, number of bins and p-value of counts [V] under law [V].

    Bins that expect fewer than 5 are pooled. A token that the law excludes is a p-value of 0.
    """
    if (counts[law <= 0] > 0).any():
        return float("inf"), 1, 0.0
    expected = counts.sum() * law / law.sum()
    is_large = expected >= 5
    seen = np.append(counts[is_large], counts[~is_large].sum())
    due = np.append(expected[is_large], expected[~is_large].sum())
    if due[-1] < 5 and len(due) > 1:  # the pool joins the smallest bin
        at = int(np.argmin(due[:-1]))
        seen[at], due[at] = seen[at] + seen[-1], due[at] + due[-1]
        seen, due = seen[:-1], due[:-1]
    if len(due) < 2:
        return 0.0, len(due), 1.0
    statistic = float(((seen - due) ** 2 / due).sum())
    half = torch.tensor([(len(due) - 1) / 2, statistic / 2], dtype=torch.float64)
    return statistic, len(due), float(torch.special.gammaincc(half[0], half[1]))


def holm(tests: Many[LawTest]) -> list[LawTest]:
    """The tests with p-values corrected for their number (Holm's step-down rule)."""
    order = sorted(range(len(tests)), key=lambda i: tests[i].p_value)
    corrected, worst = list(tests), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(tests) - rank) * tests[i].p_value))
        corrected[i] = replace(tests[i], corrected=worst)
    return corrected
