"""ASAp with drafts: texts drawn one after the other have the joint law of plain decoding."""

from __future__ import annotations

from collections import defaultdict

import pytest
from test_grammar_laws import TOKENIZER, bound

from drafts import CHAIN, DRAFTERS, TREE, Draft, made, stand
from fakes import FakeTarget, run_all, sequence
from forerun import registry
from forerun.constraints._penalties import Adjust
from forerun.constraints._request import RequestConstraint
from forerun.constraints.asap import Asap
from forerun.core.dice import EnumeratedDice
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
