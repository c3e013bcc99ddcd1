"""Drafts of another vocabulary: every method keeps the target's law; two biased variants do not."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
from two_vocabularies import TARGET as TOKENS
from two_vocabularies import WIDTH, HiddenLetters, crossed

from fakes import DeadEnd, FakeTarget, NoRepeats, exact_law, sequence, table_law
from forerun import registry
from forerun.constraints._penalties import Adjust
from forerun.controllers.acceptance_head import AcceptanceHead, Head
from forerun.core.dice import Dice, EnumeratedDice, SeededDice
from forerun.core.growing import Path
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.drafters import cross_vocab
from forerun.drafters._ngram_law import NgramTrie, TokenLaw
from forerun.engine.engine import Engine
from forerun.models.vocab_map import NONE, VocabMap
from forerun.verifiers.base import draw_residual
from harness import EXACT, Given, distance

PROMPT = (1, 2)  # "a", "ab": the trie begins with a, b
LENGTH = 3
P, Q, SIZE = table_law(1, len(TOKENS)), table_law(2, 2), len(TOKENS)
REQUESTS = {
    "free": (Sampling(), tuple),
    "greedy": (Sampling(temperature=0), tuple),
    "top-k 2": (Sampling(top_k=2), tuple),
    "temperature 0.5": (Sampling(temperature=0.5), tuple),
    "no repeats": (Sampling(), lambda: (NoRepeats(),)),
    "dead end": (Sampling(), lambda: (DeadEnd(),)),
    "penalties": (
        Sampling(repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.3),
        lambda: (Adjust(),),
    ),
}
DRAFTS = {
    "omni": ({"method": "omni"}, Plan(2, 2), (3,)),
    "omni, ragged batch": ({"method": "omni"}, Plan(1, 1), (1, 2)),
    "omni, stops after doubt": (
        {"method": "omni"},
        Plan(2, 2, lambda q, token: bool(q.probs[0] < 0.35)),
        (3,),
    ),
    "omni, ends where q says little": ({"method": "omni"}, Plan(3, 3, min_acceptance=0.3), (3,)),
    "tli": ({"method": "tli"}, Plan(2, 2), (3,)),
    "tli, gumbel": ({"method": "tli", "grower": "gumbel"}, Plan(2, 1), (2,)),
    "tli, ragged batch": ({"method": "tli"}, Plan(1, 1), (1, 2)),
    "slem": ({"method": "slem"}, Plan(3, 3), (3,)),
    "slem, ragged batch": ({"method": "slem"}, Plan(2, 2), (1, 3)),
}


def arguments(draft: str, request: str) -> dict:
    options, plan, lengths = DRAFTS[draft]
    sampling, shapers = REQUESTS[request]
    make = partial(crossed, Q, **options)
    request_ = {"sampling": sampling, "shapers": shapers}
    return {"make": make, "plan": plan, "lengths": lengths} | request_


def step_error(
    make, plan, sampling, shapers, verifier: str = "speculative", p=P, controller=None, **_
) -> float:
    """Largest error of P(text) if one step is enumerated and plain decoding goes on after it.

    controller: makes a controller in place of the plan.
    """
    exact = exact_law(p, PROMPT, LENGTH, sampling, shapers(), SIZE)
    found: dict[tuple[int, ...], float] = defaultdict(float)

    def program(dice: Dice) -> tuple[int, ...]:
        engine = Engine(
            FakeTarget(p, SIZE),
            make(),
            registry.make("verifier", verifier),
            Given(plan) if controller is None else controller(),
            shapers=shapers(),
        )
        seq = sequence(PROMPT, LENGTH, dice, sampling)
        engine.submit(seq)
        engine.step()
        return tuple(seq.generated)

    for begun, probability in EnumeratedDice().outcomes(program):
        texts = {text: share for text, share in exact.items() if text[: len(begun)] == begun}
        mass = sum(texts.values())
        assert mass > 0, f"{begun} has probability 0"
        for text, share in texts.items():
            found[text] += probability * share / mass
    return max(abs(found[text] - share) for text, share in exact.items())


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_step_keeps_the_law(draft: str, request_: str) -> None:
    assert step_error(**arguments(draft, request_)) <= EXACT


@pytest.mark.parametrize("verifier", ["recursive", "match"])
@pytest.mark.parametrize("draft", ["omni", "tli", "slem"])
def test_other_verifiers(draft: str, verifier: str) -> None:
    assert step_error(**arguments(draft, "free"), verifier=verifier) <= EXACT


def whole_error(draft: str, request: str) -> float:
    given = arguments(draft, request)
    make, verifier = given.pop("make"), registry.make("verifier", "speculative")
    other = {"target": FakeTarget(P, SIZE), "vocab": SIZE, "prompt": PROMPT}
    return distance(P, make, verifier, **given, **other)


SHORT = "omni, ragged batch", "tli, ragged batch", "slem", "slem, ragged batch"


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("draft", SHORT)
def test_whole_texts_and_ragged_batches(draft: str, request_: str) -> None:
    assert whole_error(draft, request_) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["omni", "tli"])
def test_whole_longer_texts(draft: str) -> None:
    assert whole_error(draft, "free") <= EXACT


def acceptance_head(seed: int, bias: float = 0.0) -> AcceptanceHead:
    """An untrained head; bias: towards rejection."""
    rng = np.random.default_rng(seed)
    none = np.zeros((0, WIDTH, WIDTH)), np.zeros((0, WIDTH))
    head = Head(*none, 2 * rng.normal(size=(2, WIDTH)), np.array([bias, 0.0]))
    return AcceptanceHead(head=head, threshold=0.5, least=1, most=3)


@pytest.mark.parametrize("request_", ["free", "top-k 2", "penalties"])
@pytest.mark.parametrize("method", ["omni", "tli"])
@pytest.mark.parametrize(("seed", "bias"), [(0, 0.0), (1, 0.0), (0, 50.0), (0, -50.0)])
def test_an_acceptance_head_keeps_the_law(
    method: str, request_: str, seed: int, bias: float
) -> None:
    sampling, shapers = REQUESTS[request_]
    make = partial(crossed, Q, runner=HiddenLetters, method=method)
    how = {"controller": partial(acceptance_head, seed, bias)}
    assert step_error(make, Plan(), sampling, shapers, **how) <= EXACT


LETTERS = {0: (1,), 1: (0,), 2: (0, 1)}  # the draft tokens of "b", "a", "ab"


def test_a_head_scores_the_rows_after_whole_target_tokens() -> None:
    """n-grams by their last draft token, and never the newest token; lengths vary."""
    drafter = crossed(Q, runner=HiddenLetters)
    engine = Engine(
        FakeTarget(P, SIZE), drafter, registry.make("verifier", "speculative"), acceptance_head(0)
    )
    runner, sizes = drafter.runner, set[int]()

    def check(step) -> None:
        (tree,) = step.trees
        sizes.add(len(tree))
        paths = [tree.path(node) for node in range(len(tree) - 1)]
        scored = [tuple(draft for token in path for draft in LETTERS[token]) for path in paths]
        assert runner.asked == scored
        runner.asked.clear()

    engine.listeners.append(check)
    seq = sequence(PROMPT, 60, SeededDice(1))
    engine.submit(seq)
    engine.run()
    assert len(sizes) > 1 and 2 in seq.generated  # 2 is "ab", an n-gram


class Uncorrected(TokenLaw):
    """Biased: longer entries are subtracted only on the path that was drawn."""

    def draw(self, dice):
        found = yield from super().draw(dice)
        self.drawn = set(self._rows)
        return found

    def _longer(self, run, node):
        return super()._longer(run, node) if run in self.drawn else 0.0


class Leaky(TokenLaw):
    """Biased: a draw beyond a match becomes the first draw of the next token."""

    ahead: ClassVar[list[int]] = []

    def draw(self, dice):
        ahead = list(self.ahead)
        self.ahead.clear()

        class Noted:
            def choice(self, probs):
                drawn.append(ahead.pop() if ahead else dice.choice(probs))
                return drawn[-1]

        drawn: list[int] = []
        token, run = yield from super().draw(Noted())
        self.ahead.extend(drawn[len(run) :])
        return token, run


@pytest.mark.parametrize("biased", [Uncorrected, Leaky])
def test_biased_variants_are_caught(biased: type, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments("omni", "free")

    def make():
        Leaky.ahead.clear()
        return crossed(Q)

    assert step_error(**given | {"make": make}) <= EXACT
    monkeypatch.setattr(cross_vocab, "TokenLaw", biased)
    assert step_error(**given | {"make": make}) > 1e-3


# The sheet's examples: draft tokens a, b, c; target tokens A, B, C, AB

ROWS = {(): (0.5, 0.3, 0.2), (0,): (0.3, 0.6, 0.1)}


def sheet_law(has_ngram: bool = True) -> TokenLaw:
    trie = NgramTrie(VocabMap(np.arange(3), 4))
    if has_ngram:
        trie.add(3, (0, 1))
    return TokenLaw(trie, lambda run: np.array(ROWS[run]))


def test_the_law_of_the_sheet() -> None:
    q = [sheet_law().prob(token) for token in range(4)]
    assert q == pytest.approx([0.2, 0.3, 0.2, 0.3])
    p = np.array([0.25, 0.3, 0.1, 0.35])
    found = np.zeros(4)
    for token, share in EnumeratedDice().outcomes(lambda d: draw_residual(p, sheet_law(), d)):
        found[token] += share
    assert found == pytest.approx([0.5, 0.0, 0.0, 0.5])


def test_acceptance_of_the_sheet() -> None:
    p = np.array([0.1, 0.3, 0.2, 0.4])
    plain = [sheet_law(False).prob(token) for token in range(4)]
    merged = np.array([sheet_law().prob(token) for token in range(4)])
    assert np.minimum(p, plain).sum() == pytest.approx(0.6)
    assert np.minimum(p, merged).sum() == pytest.approx(0.9)
    assert (p * merged).sum() == pytest.approx(0.27)


@pytest.mark.parametrize("seed", range(8))
def test_draws_follow_the_law_of_any_trie(seed: int) -> None:
    """Random tries with nested entries and draft tokens without a counterpart."""
    rng = np.random.default_rng(seed)
    num, size = 4, 12
    forward = np.where(rng.random(num) < 0.7, np.arange(num), NONE)
    forward[0] = 0
    trie = NgramTrie(VocabMap(forward, size))
    for token in range(num, size):
        trie.add(token, tuple(rng.integers(0, num, rng.integers(2, 5)).tolist()))
    known: dict[Path, np.ndarray] = {}

    def row(run: Path) -> np.ndarray:
        if run not in known:
            weights = rng.dirichlet(np.ones(num)) * (rng.random(num) < 0.8)
            known[run] = weights / weights.sum() if weights.sum() else np.eye(num)[0]
        return known[run]

    def program(dice: Dice) -> int:
        draws = TokenLaw(trie, row).draw(dice)
        run = next(draws)
        while True:
            try:
                run = draws.send(row(run))
            except StopIteration as end:
                token, path = end.value
                expected = trie.runs.get(token, (token,))
                assert path == expected
                return token

    if TokenLaw(trie, row).is_empty:
        pytest.skip("no token can be reached")
    found = np.zeros(size)
    for token, share in EnumeratedDice().outcomes(program):
        found[token] += share
    law = TokenLaw(trie, row)
    assert found == pytest.approx([law.prob(token) for token in range(size)], abs=1e-12)
    assert found.sum() == pytest.approx(1.0)
