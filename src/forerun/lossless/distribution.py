"""Test of sampled tokens against the target's distribution, on the user's model and machine.

Many short samples are drawn with drafts. At every position the ranks of the tokens, under the
processed probabilities of a plain pass after the same prefix, must be uniform. The plain passes
start with an empty cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from forerun.constraints._penalties import Adjust
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.logits import TargetProbs
from forerun.core.records import Sequence, Step, Verdict
from forerun.core.roles import Shaper
from forerun.core.sampling import Sampling, to_probs
from forerun.core.tree import EMPTY
from forerun.engine.stats import Stats
from forerun.lossless.greedy import Parts, empty_cache, rounding, tolerance_of
from forerun.lossless.truncation import KeptSets, law_within
from forerun.utils.stats import detectable, fit, holm, ranks, samples_for

if TYPE_CHECKING:
    from forerun.api import Model

MAX_PREFIXES = 400  # of one length, the most common ones
ALPHA = 1e-3  # a corrected p-value below this is a violation
POWER = 0.8  # of the test at a detectable deviation


@dataclass(frozen=True)
class LawTest:
    """Test of the tokens at one position, over all prefixes before it."""

    prompt_index: int
    position: int  # generated tokens before the tested one
    num_beginnings: int  # distinct prefixes
    num_samples: int
    num_drafted: int  # samples with an accepted draft before the tested token
    num_bins: int
    statistic: float
    p_value: float
    corrected: float = 1.0  # Holm, over all tests of the report
    num_border: int = 0  # samples with a different truncation by rounding
    detectable: float = 1.0  # share of probability that an error must move to be found at POWER

    @property
    def passed(self) -> bool:
        return self.corrected >= ALPHA


@dataclass(frozen=True)
class LawReport:
    """All tests of sampled tokens, with the detectable deviation."""

    tests: list[LawTest]
    num_samples: int
    stats: Stats = field(default_factory=Stats)

    @property
    def passed(self) -> bool:
        return all(test.passed for test in self.tests)

    @property
    def is_vacuous(self) -> bool:
        """Whether no tested token came after an accepted draft, so that passing proves little."""
        return not any(test.num_drafted for test in self.tests)

    @property
    def detectable(self) -> float:
        """Share of probability that an error at one position must move to be found at POWER.

        Total variation between distributions of binned ranks; 1 if no error can be found.
        """
        return max((test.detectable for test in self.tests), default=1.0)

    def samples_for(self, share: float) -> int | None:
        """Approximate samples per prompt to detect that share."""
        level = ALPHA / max(len(self.tests), 1)
        needed = [samples_for(share, test.num_bins, level, POWER) for test in self.tests]
        return max(needed, default=None)


@dataclass(frozen=True)
class PromptLaw:
    """Tests of one prompt, not yet corrected for multiple testing."""

    tests: list[LawTest]
    num_samples: int
    stats: Stats


def check_law(
    model: Model, prompts: Many[Any], parts: Parts, sampling: Sampling, **options: Any
) -> LawReport:
    """The report on all prompts; `options` are those of `prompt_laws`."""
    return law_report(list(prompt_laws(model, prompts, parts, sampling, **options)))


def law_report(laws: Many[PromptLaw]) -> LawReport:
    """Combines prompts: corrects p-values and computes the power for all tests."""
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
    """Samples `num_tokens` tokens per text and tests them; at most `seconds` per prompt."""
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
            watch = SampleWatcher()
            for sample in model.run([tokens], asked, batch=batch, on_step=watch, **parts.options()):
                found.append(watch.drawn(sample.index, sample.tokens))
                total.add(sample.stats)
                if on_sample:
                    on_sample()
        shapers = [model.constraint(one) for one in parts.constraint]
        tested = law_tests(model, tokens, found, sampling, shapers)
        tests = [replace(t, prompt_index=i) for t in tested]
        yield PromptLaw(tests, len(found), total)


class Drawn(NamedTuple):
    """One drawn sample."""

    tokens: tuple[int, ...]
    first_draft: int  # position of its first accepted draft token
    kept: tuple[bytes, ...] = ()  # set of kept tokens at each token, if truncated


class SampleWatcher:
    """Listener: position of the first accepted draft, and the sets of kept tokens."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._kept = KeptSets()

    def __call__(self, step: Step) -> None:
        self._kept(step)
        for seq, verdict, new in zip(step.seqs, step.verdicts, step.emitted, strict=True):
            if verdict.nodes and new:
                self._first.setdefault(seq.index, len(seq.tokens) - seq.num_prompt - len(new))

    def drawn(self, index: int, tokens: list[int]) -> Drawn:
        """The finished sample of a trajectory."""
        kept = self._kept.of.get(index, [])
        return Drawn(tuple(tokens), self._first.get(index, len(tokens)), tuple(kept))


def law_tests(
    model: Model,
    prompt: list[int],
    found: Many[Drawn],
    sampling: Sampling,
    shapers: Many[Shaper] = (),
) -> Iterator[LawTest]:
    """One test per position, over the MAX_PREFIXES most common prefixes.

    Valid with a memory shared by trajectories: each token follows the target given its prefix.
    """
    rng = np.random.default_rng(sampling.seed)
    empty_cache(model)
    for position in range(max((len(drawn.tokens) for drawn in found), default=0)):
        after: dict[tuple[int, ...], list[Drawn]] = {}
        for drawn in found:
            if len(drawn.tokens) > position:
                after.setdefault(drawn.tokens[:position], []).append(drawn)
        common = sorted(after.items(), key=lambda item: -len(item[1]))[:MAX_PREFIXES]
        u, laws, num_border = [], [], 0
        for beginning, group in common:
            logits = next_logits(model, prompt, list(beginning), sampling, shapers)
            for law, same, is_moved in _by_kept_set(model, logits, position, group, sampling):
                u.append(ranks(law, np.array([drawn.tokens[position] for drawn in same]), rng))
                laws.append(len(same) * np.sort(law)[::-1])
                num_border += is_moved * len(same)
        pooled = np.concatenate(u)
        bins, statistic, p_value = fit(pooled, np.sum(laws, axis=0) / len(pooled))
        drafted = sum(drawn.first_draft < position for _, group in common for drawn in group)
        test = LawTest(0, position, len(common), len(pooled), drafted, bins, statistic, p_value)
        if bins > 1 or p_value == 0.0:
            yield replace(test, num_border=num_border)


def _by_kept_set(
    model: Model, logits: np.ndarray, position: int, group: Many[Drawn], sampling: Sampling
) -> Iterator[tuple[np.ndarray, list[Drawn], bool]]:
    """(distribution [V], samples, whether rounding changed the set) per set of kept tokens."""
    tolerance = tolerance_of(logits[np.isfinite(logits)], rounding(model))
    parts: dict[bytes | None, list[Drawn]] = {}
    for drawn in group:
        parts.setdefault(drawn.kept[position] if drawn.kept else None, []).append(drawn)
    for bits, same in parts.items():
        law, is_moved = to_probs(logits, sampling), False
        if bits is not None:
            law, is_moved = law_within(logits, sampling, bits, tolerance)
        yield law.astype(np.float64), same, is_moved


def next_logits(
    model: Model,
    prompt: list[int],
    generated: list[int],
    sampling: Sampling,
    shapers: Many[Shaper] = (),
) -> Any:
    """The processed logits [V] of the next token from one plain pass."""
    every = (Adjust(model.tokenizer.eos_ids), *shapers)
    is_stateful = model.target.is_stateful
    tokens = list(prompt) if is_stateful else [*prompt, *generated]
    seq = Sequence(tokens, len(prompt), sampling, SeededDice(0), limit=sampling.max_new_tokens)
    with model.target.lock:
        try:
            for token in generated if is_stateful else ():
                _commit(model, seq, token)
            seq.states = tuple(shaper.start(seq) for shaper in every)
            (rows,) = model.target.forward(ForwardBatch([seq], [EMPTY]))
            return TargetProbs(rows, seq, EMPTY, every).logits(-1)
        finally:
            model.target.release(seq)


def _commit(model: Model, seq: Sequence, token: int) -> None:
    """One plain step of a sequence, whatever its distribution, to this token."""
    model.target.forward(ForwardBatch([seq], [EMPTY]))
    seq.tokens.append(token)
    model.target.commit([seq], [EMPTY], [Verdict([], token)])


def next_law(model: Model, prompt: list[int], generated: list[int], sampling: Sampling) -> Any:
    """The processed probabilities [V] of the next token from one plain pass, float64."""
    return to_probs(next_logits(model, prompt, generated, sampling), sampling).astype(np.float64)
