"""Searches sample the target's law: steps in a row are one plain sample; selection is as computed.

All is enumerated, as in `test_lossless`: equality at 1e-12, with drafts from a shared memory.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from test_stopping import EOS, LENGTH, REQUESTS, TARGET, expected

from fakes import FakeTarget, exact_law, table_law
from forerun import registry
from forerun.api import Model
from forerun.core.dice import Dice, EnumeratedDice
from forerun.core.sampling import Sampling
from forerun.core.tree_template import grid
from forerun.search.best_of import best_of
from forerun.search.dvts import dvts
from forerun.search.step_beam import step_beam

LAW, PROMPT, EXACT = table_law(1), [0, 1], 1e-12


class Letters:
    """A tokenizer of three letters, as `Model` needs it."""

    def __init__(self, eos_ids: tuple[int, ...] = ()) -> None:
        self.eos_ids = eos_ids

    def decode(self, ids: Any) -> str:
        return "".join("abc"[i] for i in ids)


def small(**options: Any) -> Any:
    return registry.make("drafter", "stand", context=1, entries=2, template=grid(2), **options)


def law_of(run: Callable[[EnumeratedDice], Any]) -> dict[Any, float]:
    """The law of what a search returns when all its sequences draw from one enumerated dice."""
    found: dict[Any, float] = defaultdict(float)
    for outcome, probability in EnumeratedDice().outcomes(run):
        found[outcome] += probability
    assert sum(found.values()) == pytest.approx(1.0)
    return found


def parts(dice: Dice, **options: Any) -> dict[str, Any]:
    return {
        "drafter": small(),
        "controller": "fixed:nodes=2,depth=1",
        "verifier": "recursive",
        "dice": lambda *key: dice,
    } | options


def texts(found: Any, length: int) -> tuple[int, ...]:
    return tuple(found.chosen.tokens[len(PROMPT) :][:length])


def flat(prompt: str, text: str) -> float:
    return 1.0


@pytest.mark.parametrize("method", [step_beam, dvts])
@pytest.mark.parametrize(
    "step", [{"step_end": "a"}, {"step_end": "cb"}, {"step_tokens": 1}], ids=str
)
def test_steps_in_a_row_are_one_plain_sample(method: Callable, step: dict) -> None:
    model = Model(FakeTarget(LAW), Letters())  # type: ignore[arg-type]
    own = {"step_end": "ccc", "step_tokens": 3} | step

    def run(dice: Dice) -> tuple[int, ...]:
        options = parts(dice, max_new_tokens=4)
        return texts(method(model, PROMPT, scorer=flat, n=1, width=1, **own, **options), 4)

    found = law_of(run)
    law = exact_law(LAW, PROMPT, 4, Sampling())
    assert max(abs(found[text] - p) for text, p in law.items()) <= EXACT


def test_two_trees_that_share_a_memory_are_independent() -> None:
    model = Model(FakeTarget(LAW), Letters())  # type: ignore[arg-type]

    def run(dice: Dice) -> tuple[tuple[int, ...], ...]:
        options = parts(dice, max_new_tokens=2)
        found = dvts(model, PROMPT, scorer=flat, n=2, width=1, step_tokens=1, **options)
        ends = [branch for branch in found.tree if branch.finish]
        return tuple(tuple(b.tokens[2:]) for b in sorted(ends, key=lambda b: b.group))

    found = law_of(run)
    law = exact_law(LAW, PROMPT, 2, Sampling())
    for a, b in itertools.product(law, law):
        assert abs(found[a, b] - law[a] * law[b]) <= EXACT


@pytest.mark.parametrize("method", [step_beam, dvts])
def test_the_chosen_step_is_the_better_of_two_plain_ones(method: Callable) -> None:
    """Width 2, steps of one token: P(text) follows from the order of scores, step by step."""
    model = Model(FakeTarget(LAW), Letters())  # type: ignore[arg-type]
    worth = {"a": 0.0, "b": 2.0, "c": 1.0}

    def run(dice: Dice) -> tuple[int, ...]:
        options = parts(dice, max_new_tokens=2)
        scorer = lambda prompt, text: worth[text[-1]]  # noqa: E731
        return texts(
            method(model, PROMPT, scorer=scorer, n=2, width=2, step_tokens=1, **options), 2
        )

    def best_of_two(tokens: list[int], token: int) -> float:
        p = LAW(tokens)
        below = sum(p[t] for t in range(3) if worth["abc"[t]] < worth["abc"[token]])
        return (below + p[token]) ** 2 - below**2

    found = law_of(run)
    for a, b in itertools.product(range(3), repeat=2):
        exact = best_of_two([*PROMPT], a) * best_of_two([*PROMPT, a], b)
        assert abs(found[a, b] - exact) <= EXACT


def test_best_of_samples_before_selection_are_plain_and_independent() -> None:
    model = Model(FakeTarget(LAW), Letters())  # type: ignore[arg-type]

    def run(dice: Dice) -> tuple[tuple[int, ...], ...]:
        options = parts(dice, max_new_tokens=2)
        found = best_of(model, PROMPT, n=2, batch=2, scorer=lambda p, t: t.count("b"), **options)
        return tuple(tuple(sample.tokens) for sample in found.samples)

    found = law_of(run)
    law = exact_law(LAW, PROMPT, 2, Sampling())
    for a, b in itertools.product(law, law):
        assert abs(found[a, b] - law[a] * law[b]) <= EXACT


@pytest.mark.parametrize("request_", REQUESTS)
def test_where_a_trajectory_ends_does_not_depend_on_its_steps(request_: str) -> None:
    """End tokens, stop strings across steps, minimum lengths, penalties: as in plain decoding."""
    sampling = REQUESTS[request_]
    model = Model(FakeTarget(TARGET), Letters((EOS,)))  # type: ignore[arg-type]

    def run(dice: Dice) -> tuple[str, str]:
        options = parts(dice, sampling=sampling, max_new_tokens=LENGTH)
        found = dvts(
            model, PROMPT, scorer=flat, n=1, width=1, step_end="c", step_tokens=2, **options
        )
        return found.text, found.chosen.finish

    found = law_of(run)
    law: dict[tuple[str, str], float] = defaultdict(float)
    for (tokens, reason), p in expected(sampling).items():
        ends = tokens[-1:] == (EOS,) and not sampling.ignore_eos  # an end token has no text
        law[Letters().decode(tokens[:-1] if ends else tokens), reason] += p
    assert set(found) == set(law)
    assert max(abs(found[key] - p) for key, p in law.items()) <= EXACT
