"""ASAp with drafts: texts drawn one after the other have the joint law of plain decoding."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Sequence as Many

import numpy as np
import pytest
from made_drafts import CHAIN, DRAFTERS, TREE, Draft, made, stand
from test_grammar_laws import TOKENIZER, bound

from fakes import FakeTarget, exact_law, run_all, sequence
from forerun import registry
from forerun.constraints._after import After
from forerun.constraints._penalties import Adjust
from forerun.constraints._request import RequestConstraint
from forerun.constraints.asap import Asap
from forerun.constraints.regex import Regex
from forerun.core.dice import EnumeratedDice, SeededDice
from forerun.core.sampling import Sampling
from forerun.engine.engine import Engine
from harness import EXACT, PROMPT, TARGET, Given

DRAFTS: dict[str, Draft] = {
    "chain": DRAFTERS["chain"],
    "gumbel 2x1": DRAFTERS["gumbel 2x1"],
    "stand": (stand(context=1, entries=3), TREE, ()),
    "forced": (made("forced"), CHAIN, ()),
}
SAMPLINGS = {
    "free": {},
    "temperature .5": {"temperature": 0.5},
    "penalty": {"frequency_penalty": 0.5},
}


def joint(draft: Draft, name: str, sampling: dict[str, float], lengths: tuple[int, ...]):
    """The joint law of texts that are drawn one after the other, sharing a trie."""
    make, plan, _ = draft

    def program(dice):
        constraint = Asap(bound(name))
        engine = engine_of(make, plan)
        asked = Sampling(constraint=constraint, **sampling)
        return run_all(engine, [sequence(PROMPT, n, dice, asked) for n in lengths])

    found: dict[tuple[tuple[int, ...], ...], float] = defaultdict(float)
    for texts, probability in EnumeratedDice().outcomes(program):
        found[texts] += probability
    return found


def engine_of(make, plan):
    return Engine(
        FakeTarget(TARGET),
        make(),
        registry.make("verifier", "recursive"),
        Given(plan),
        shapers=(Adjust([2]), RequestConstraint(TOKENIZER)),
        max_seqs=1,
    )


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", ["regex", "dead end"])
def test_drafts_keep_the_joint_law(name: str, sampling: str, draft: str) -> None:
    plain = joint((made("none"), TREE, ()), name, SAMPLINGS[sampling], (3, 3))
    drafted = joint(DRAFTS[draft], name, SAMPLINGS[sampling], (3, 3))
    assert sum(plain.values()) == pytest.approx(1.0)
    texts = plain.keys() | drafted.keys()
    assert max(abs(plain[t] - drafted[t]) for t in texts) <= EXACT


def test_the_second_text_is_not_drawn_as_the_first() -> None:
    """The equality above must not hold because nothing is learned."""
    found = joint((made("none"), TREE, ()), "regex", {}, (3, 3))
    first: dict[tuple[int, ...], float] = defaultdict(float)
    second: dict[tuple[int, ...], float] = defaultdict(float)
    for (one, two), p in found.items():
        first[one] += p
        second[two] += p
    assert max(abs(first[t] - second[t]) for t in first) > 0.01


def after_a_marker(tokens: Many[int]) -> np.ndarray:
    """Tokens a, b and the end; at most two letters a before the first b, and four in all."""
    text = list(tokens[len(PROMPT) :])
    never = 1e-300  # instead of 0, which has no logarithm
    if len(text) >= 4:
        return np.array([never, never, 1.0])
    if 1 in text:
        return np.array([0.3, 0.5, 0.2] if len(text) % 2 else [0.2, 0.2, 0.6])
    return np.array([0.5, 0.3, 0.2] if len(text) < 2 else [never, 0.6, 0.4])


def conditional_law(pattern: str) -> dict[tuple[int, ...], float]:
    """Texts of `pattern` with their end, and their probability given that a text is one."""
    found = {}
    for length in range(5):
        for text in itertools.product((0, 1), repeat=length):
            if re.fullmatch(pattern, "".join("ab"[t] for t in text)):
                whole = (*text, 2)
                steps = (after_a_marker([*PROMPT, *whole[:i]])[t] for i, t in enumerate(whole))
                found[whole] = math.prod(steps)
    return {text: p / sum(found.values()) for text, p in found.items()}


@pytest.mark.parametrize("is_optional", [False, True])
def test_the_law_after_a_marker_becomes_the_conditional_one(is_optional: bool) -> None:
    """A text that ends before its marker is not valid, unless the marker is optional."""
    inner = After("b", Regex("ab?|bb"), is_optional=is_optional).bind(TOKENIZER, 3)
    constraint = Asap(inner)
    engine = Engine(
        FakeTarget(after_a_marker),
        registry.make("drafter", "none"),
        registry.make("verifier", "recursive"),
        Given(CHAIN),
        shapers=(RequestConstraint(TOKENIZER),),
    )
    asked = Sampling(constraint=constraint)
    run_all(engine, [sequence(PROMPT, 6, SeededDice(i), asked) for i in range(300)])
    found = exact_law(after_a_marker, PROMPT, 5, asked, (RequestConstraint(TOKENIZER),))
    wanted = conditional_law("a*b(ab?|bb)|a*" if is_optional else "a*b(ab?|bb)")
    for text, p in wanted.items():
        total = sum(q for tokens, q in found.items() if tokens[: len(text)] == text)
        assert total == pytest.approx(p, abs=1e-9)
