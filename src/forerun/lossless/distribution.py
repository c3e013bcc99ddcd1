"""Do sampled tokens follow the target's own law? A test on the user's own model and machine.

Many short samples are drawn with drafts. At every position the ranks of the tokens, under the
processed probabilities of a plain pass after their own beginning, must be uniform. The plain
passes compute their cells anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.logits import Adjust, TargetProbs
from forerun.core.records import Sequence, Step
from forerun.core.sampling import Sampling, to_probs
from forerun.core.tree import EMPTY
from forerun.engine.stats import Stats
from forerun.lossless.greedy import Parts, forget, rounding, tolerance_of
from forerun.lossless.truncation import Borders, law_within
from forerun.utils.stats import detectable, fit, holm, ranks, samples_for

if TYPE_CHECKING:
    from forerun.api import Model

MOST = 400  # beginnings of one length whose laws are computed
ALPHA = 1e-3  # a corrected p-value below this is a violation
POWER = 0.8  # with which the deviations that are called detectable are found


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
    num_border: int = 0  # samples whose law rounding cut elsewhere than in a plain pass
    detectable: float = 1.0  # share of probability; a mistake that moves it is found at POWER

    @property
    def passed(self) -> bool:
        return self.corrected >= ALPHA


@dataclass(frozen=True)
class LawReport:
    """All tests of the sampled law: verdict, whether drafts took part, what could be found."""

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

    @property
    def detectable(self) -> float:
        """A mistake that moves this share of probability, at any one position, is found at POWER.

        Total variation between the laws of the binned ranks; 1 if nothing could have been found.
        """
        return max((test.detectable for test in self.tests), default=1.0)

    def samples_for(self, share: float) -> int | None:
        """About how many samples per prompt make that share detectable."""
        level = ALPHA / max(len(self.tests), 1)
        needed = [samples_for(share, test.num_bins, level, POWER) for test in self.tests]
        return max(needed, default=None)


@dataclass(frozen=True)
class PromptLaw:
    """Samples of one prompt: their tests, not yet corrected for the number of all."""

    tests: list[LawTest]
    num_samples: int
    stats: Stats


def check_law(
    model: Model, prompts: Many[Any], parts: Parts, sampling: Sampling, **options: Any
) -> LawReport:
    """The report on all prompts; `options` are those of `prompt_laws`."""
    return law_report(list(prompt_laws(model, prompts, parts, sampling, **options)))


def law_report(laws: Many[PromptLaw]) -> LawReport:
    """Puts prompts together: p-values are corrected, and the power is that of so many tests."""
    total, tests = Stats(), [test for law in laws for test in law.tests]
    for law in laws:
        total.add(law.stats)
    corrected = holm([test.p_value for test in tests])
    level = ALPHA / max(len(tests), 1)
    tests = [
        replace(
            test,
            corrected=p,
            detectable=detectable(test.num_samples, test.num_bins, level, POWER),
        )
        for test, p in zip(tests, corrected, strict=True)
    ]
    return LawReport(tests, sum(law.num_samples for law in laws), total)


def prompt_laws(
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
) -> Iterator[PromptLaw]:
    """Samples beginnings of `num_tokens` tokens and tests them; at most `seconds` per prompt."""
    sampling = replace(sampling, max_new_tokens=num_tokens)
    for i, prompt in enumerate(prompts):
        tokens = model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        found, total = list[Drawn](), Stats()
        deadline, chunk = time.monotonic() + seconds, 250
        while len(found) < num_samples and (not found or time.monotonic() < deadline):
            asked = replace(
                sampling,
                n=min(chunk, num_samples - len(found)),
                seed=(sampling.seed or 0) + 1000 * i + len(found) // chunk,
            )
            watch = Watch()
            for sample in model.run([tokens], asked, batch=batch, on_step=watch, **parts.options()):
                found.append(watch.drawn(sample.index, sample.tokens))
                total.add(sample.stats)
                if on_sample:
                    on_sample()
        tests = [replace(t, prompt_index=i) for t in law_tests(model, tokens, found, sampling)]
        yield PromptLaw(tests, len(found), total)


class Drawn(NamedTuple):
    """A sample of the law test."""

    tokens: tuple[int, ...]
    first_draft: int  # position of its first accepted draft token
    borders: tuple[bytes, ...] = ()  # per token the set that its pass admitted, where cut at all


class Watch:
    """Listener: where the first draft token was accepted, and what each pass admitted."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._borders = Borders()

    def __call__(self, step: Step) -> None:
        self._borders(step)
        for seq, verdict, new in zip(step.seqs, step.verdicts, step.emitted, strict=True):
            if verdict.nodes and new:
                self._first.setdefault(seq.index, len(seq.tokens) - seq.num_prompt - len(new))

    def drawn(self, index: int, tokens: list[int]) -> Drawn:
        """The finished sample of a trajectory."""
        borders = self._borders.of.get(index, [])
        return Drawn(tuple(tokens), self._first.get(index, len(tokens)), tuple(borders))


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
        u, laws, num_border = [], [], 0
        for beginning, group in common:
            logits = next_logits(model, prompt, list(beginning), sampling)
            for law, same, is_moved in _by_border(model, logits, position, group, sampling):
                u.append(ranks(law, np.array([drawn.tokens[position] for drawn in same]), rng))
                laws.append(len(same) * np.sort(law)[::-1])
                num_border += is_moved * len(same)
        pooled = np.concatenate(u)
        bins, statistic, p_value = fit(pooled, np.sum(laws, axis=0) / len(pooled))
        drafted = sum(drawn.first_draft < position for _, group in common for drawn in group)
        test = LawTest(0, position, len(common), len(pooled), drafted, bins, statistic, p_value)
        if bins > 1 or p_value == 0.0:
            yield replace(test, num_border=num_border)


def _by_border(
    model: Model, logits: np.ndarray, position: int, group: Many[Drawn], sampling: Sampling
) -> Iterator[tuple[np.ndarray, list[Drawn], bool]]:
    """The law [V] of each part of the samples whose passes cut alike, and whether rounding moved
    the border."""
    tolerance = tolerance_of(logits[np.isfinite(logits)], rounding(model))
    parts: dict[bytes | None, list[Drawn]] = {}
    for drawn in group:
        parts.setdefault(drawn.borders[position] if drawn.borders else None, []).append(drawn)
    for bits, same in parts.items():
        law, is_moved = to_probs(logits, sampling), False
        if bits is not None:
            law, is_moved = law_within(logits, sampling, bits, tolerance)
        yield law.astype(np.float64), same, is_moved


def next_logits(model: Model, prompt: list[int], generated: list[int], sampling: Sampling) -> Any:
    """The shaped logits [V] of the next token from one plain pass."""
    adjust = Adjust(model.tokenizer.eos_ids)
    tokens = [*prompt, *generated]
    seq = Sequence(tokens, len(prompt), sampling, SeededDice(0), limit=sampling.max_new_tokens)
    seq.states = (adjust.start(seq),)
    with model.target.turns:
        try:
            (rows,) = model.target.forward(ForwardBatch([seq], [EMPTY]))
            return TargetProbs(rows, seq, EMPTY, (adjust,)).logits(-1)
        finally:
            model.target.release(seq)


def next_law(model: Model, prompt: list[int], generated: list[int], sampling: Sampling) -> Any:
    """The processed law [V] of the next token from one plain pass, float64."""
    return to_probs(next_logits(model, prompt, generated, sampling), sampling).astype(np.float64)
