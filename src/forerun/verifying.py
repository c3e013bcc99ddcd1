"""Is decoding lossless here? Greedy identity and the sampled law, on the user's own model.

Two checks of a drafter and a verifier against plain decoding with the same weights, on this
machine. Greedy texts must be equal, except where the plain pass itself has a numerical tie, and
the logits of both passes must agree within rounding: a wrong mask or cell shows there even when no
token changes. Sampled tokens must follow the target's own law: at every position, their ranks
under the processed probabilities of a plain pass after their own beginning must be uniform. The
plain passes compute their cells anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from forerun.dice import SeededDice
from forerun.engine.stats import Stats
from forerun.records import Sequence, Step
from forerun.sampling import Sampling
from forerun.shaping import Adjust, Laws
from forerun.statistics import fit, holm, ranks
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
# What rounding may do to a logit, as a share of the largest one of a text. Measured between plain
# and tree passes on CPU, a random llama and the embedded reasoner: 1e-6 in float32, 0.001 in
# float16, 0.010 in bfloat16 (0.17 of 23). A wrong cell or mask makes 0.03 and more.
ROUNDING = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 0.003,
    torch.bfloat16: 0.025,
}
MOST = 400  # beginnings of one length whose laws are computed
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


@dataclass(frozen=True)
class LawTest:
    """Whether the tokens at one position follow their laws, over all beginnings before it."""

    prompt_index: int
    position: int  # generated tokens before the tested one
    num_beginnings: int  # different ones
    num_samples: int
    num_drafted: int  # samples that accepted a draft before the tested token
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
        """No tested token came after an accepted draft: passing says little."""
        return not any(test.num_drafted for test in self.tests)


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
        (plain,) = model.run([prompt], greedy, drafter="none", on_step=tops)
        drafted = Tops()
        run = model.run(
            [prompt], replace(greedy, n=num_repeats), on_step=drafted, **parts.options()
        )
        for sample in sorted(run, key=lambda s: s.index):
            case = GreedyCase(i, sample.index, len(sample.tokens), sample.stats.accepted, 0.0)
            share = ROUNDING.get(dtype_of(model), ROUNDING[torch.float32])
            yield _compare(
                case, plain.tokens, sample.tokens, tops.of[0], drafted.of[sample.index], share
            )


def dtype_of(model: Model) -> torch.dtype:
    """The number type of the target's weights."""
    return getattr(getattr(model.target, "model", None), "dtype", torch.float32)


def _compare(
    case: GreedyCase, plain: list[int], tokens: list[int], tops: list, drafted: list, share: float
) -> GreedyCase:
    """Fills in the noise, what rounding explains of it and, where the texts part, the cause."""
    pairs = zip(plain, tokens, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(tokens)))
    beside = list(zip(tops[: same + 1], drafted, strict=False))  # laws after equal beginnings
    largest = max((float(np.abs(values).max()) for (_, values), _ in beside), default=0.0)
    case = replace(
        case,
        noise=max((_difference(*pair) for pair in beside), default=0.0),
        tolerance=share * max(1.0, largest),
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
    sampling = replace(sampling, max_new_tokens=num_tokens)
    for i, prompt in enumerate(prompts):
        tokens = model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        found: list[Drawn] = []
        deadline, chunk = time.monotonic() + seconds, 250
        while len(found) < num_samples and (not found or time.monotonic() < deadline):
            asked = replace(
                sampling,
                n=min(chunk, num_samples - len(found)),
                seed=(sampling.seed or 0) + 1000 * i + len(found) // chunk,
            )
            first = FirstDraft()
            for sample in model.run([tokens], asked, batch=batch, on_step=first, **parts.options()):
                found.append(Drawn(tuple(sample.tokens), first.at.get(sample.index, num_tokens)))
                total.add(sample.stats)
                if on_sample:
                    on_sample()
        count += len(found)
        tests += [replace(t, prompt_index=i) for t in law_tests(model, tokens, found, sampling)]
    corrected = holm([test.p_value for test in tests])
    tests = [replace(t, corrected=p) for t, p in zip(tests, corrected, strict=True)]
    return LawReport(tests, count, total)


class Drawn(NamedTuple):
    """A sample of the law test."""

    tokens: tuple[int, ...]
    first_draft: int  # position of its first accepted draft token


class FirstDraft:
    """Listener: position of the first accepted draft token, by trajectory."""

    def __init__(self) -> None:
        self.at: dict[int, int] = {}

    def __call__(self, step: Step) -> None:
        for seq, verdict, new in zip(step.seqs, step.verdicts, step.emitted, strict=True):
            if verdict.nodes and new:
                self.at.setdefault(seq.index, len(seq.tokens) - seq.num_prompt - len(new))


def law_tests(
    model: Model, prompt: list[int], found: Many[Drawn], sampling: Sampling
) -> Iterator[LawTest]:
    """A test for every position, over its MOST commonest beginnings.

    Valid with a memory that trajectories share: whatever came before, each follows the target.
    """
    rng = np.random.default_rng(sampling.seed)
    forget(model)
    for position in range(max((len(drawn.tokens) for drawn in found), default=0)):
        after: dict[tuple[int, ...], list[Drawn]] = {}
        for drawn in found:
            if len(drawn.tokens) > position:
                after.setdefault(drawn.tokens[:position], []).append(drawn)
        common = sorted(after.items(), key=lambda item: -len(item[1]))[:MOST]
        u, laws = [], []
        for beginning, group in common:
            law = next_law(model, prompt, list(beginning), sampling)
            u.append(ranks(law, np.array([drawn.tokens[position] for drawn in group]), rng))
            laws.append(len(group) * np.sort(law)[::-1])
        pooled = np.concatenate(u)
        bins, statistic, p_value = fit(pooled, np.sum(laws, axis=0) / len(pooled))
        drafted = sum(drawn.first_draft < position for _, group in common for drawn in group)
        if bins > 1 or p_value == 0.0:
            yield LawTest(0, position, len(common), len(pooled), drafted, bins, statistic, p_value)


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


def forget(model: Model) -> None:
    """Empties the free slots of the cache: a reference reads no cell that a tree pass left."""
    cache = getattr(model.target, "cache", None)
    for slot in cache.slots if cache else ():
        if slot.is_free:
            slot.truncate(0)
