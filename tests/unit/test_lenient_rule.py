"""Lenient rejection: closed forms by hand, by enumeration of drafts and of whole texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_drafts import CHAIN, DRAFTERS, TREE, grown

from fakes import FakeTarget, NoRepeats, exact_law, run_all, sequence
from forerun import registry
from forerun.constraints._penalties import Adjust
from forerun.core.dice import EnumeratedDice, SeededDice
from forerun.core.records import Verdict
from forerun.core.sampling import Sampling
from forerun.core.tree import IID, POINT, Proposal, Tree, TreeBuilder, chain
from forerun.core.tree_template import grid
from forerun.engine.engine import Engine
from forerun.errors import ConfigError
from forerun.verifiers.base import reject_recursively
from forerun.verifiers.lenient import Lenient, acceptance, distance, law, relaxed
from harness import DRAFT, EXACT, PROMPT, TARGET, Given
from harness import distance as distance_of

P, Q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.3, 0.5])
KINDS = ("lin", "sq", "exp")


class SameLaws(dict):
    """laws[node] = p at every node."""

    sampling = Sampling()

    def __init__(self, tree: Tree, p: np.ndarray) -> None:
        super().__init__(dict.fromkeys(range(-1, len(tree)), p))


def emitted(p: np.ndarray, q: np.ndarray, rule: Lenient, *, draws: int = 1) -> tuple:
    """(law of the first token, probability that a draft is accepted), by enumeration."""

    def program(dice: EnumeratedDice) -> tuple[Verdict, Tree]:
        builder, proposal = TreeBuilder(), Proposal.of(q)
        for _ in range(draws):
            builder.add(int(proposal.ids[dice.choice(proposal.probs)]), -1, IID, proposal)
        tree = builder.build()
        return rule.verify(tree, SameLaws(tree, p), dice), tree

    found, accepted = np.zeros(len(p)), 0.0
    for (verdict, tree), weight in EnumeratedDice().outcomes(program):
        found[verdict.tokens(tree)[0]] += weight
        accepted += weight * bool(verdict.nodes)
    return found, accepted


@pytest.mark.parametrize(
    ("kind", "eps", "alpha", "out", "tv"),
    [
        ("lin", 1.0, 0.60, (0.6, 0.3, 0.1), 0.0),
        ("lin", 0.5, 0.70, (0.5, 0.3, 0.2), 0.10),
        ("sq", 0.5, 0.90, (0.3, 0.3, 0.4), 0.30),
        ("exp", 0.5, 0.8162, (0.3838, 0.3, 0.3162), 0.2162),
    ],
)
def test_the_example_by_hand(kind, eps, alpha, out, tv):
    assert acceptance(P, Q, kind, eps) == pytest.approx(alpha, abs=5e-5)
    np.testing.assert_allclose(law(P, Q, kind, eps), out, atol=5e-5)
    assert distance(P, Q, kind, eps) == pytest.approx(tv, abs=5e-5)
    found, accepted = emitted(P, Q, Lenient(kind=kind, eps=eps))
    np.testing.assert_allclose(found, law(P, Q, kind, eps), atol=EXACT)
    assert accepted == pytest.approx(acceptance(P, Q, kind, eps), abs=EXACT)


laws = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4).map(lambda w: np.array(w) / sum(w))
partial_laws = laws.map(lambda p: np.where(np.arange(4) == 1, 0, p) / (1 - p[1]))  # one forbidden


@given(st.one_of(laws, partial_laws), laws, st.sampled_from(KINDS), st.floats(0.05, 1.0))
@settings(max_examples=60, deadline=None)
def test_one_draft_has_the_closed_form(p, q, kind, eps):
    found, accepted = emitted(p, q, Lenient(kind=kind, eps=eps))
    np.testing.assert_allclose(found, law(p, q, kind, eps), atol=EXACT)
    assert found.sum() == pytest.approx(1.0)
    assert accepted == pytest.approx(acceptance(p, q, kind, eps), abs=EXACT)
    assert not found[p == 0].any()


@given(laws, laws, st.sampled_from(KINDS), st.floats(0.05, 1.0))
@settings(max_examples=40, deadline=None)
def test_a_second_sibling_is_tried_against_the_residual(p, q, kind, eps):
    accepted = np.minimum(q, relaxed(p, kind, eps))
    left = np.maximum(p - q, 0)
    if accepted.sum() > 1 - 1e-9 or left.sum() < 1e-9:
        return
    expected = accepted + (1 - accepted.sum()) * law(left / left.sum(), q, kind, eps)
    found, _ = emitted(p, q, Lenient(kind=kind, eps=eps), draws=2)
    np.testing.assert_allclose(found, expected, atol=EXACT)


@given(laws, laws, st.sampled_from(KINDS), st.floats(0.05, 1.0), st.floats(0.05, 1.0))
@settings(max_examples=60, deadline=None)
def test_smaller_eps_accepts_more(p, q, kind, one, other):
    low, high = sorted((one, other))
    assert (np.asarray(relaxed(p, kind, low)) >= p * (1 - 1e-12)).all()
    assert acceptance(p, q, kind, low) >= acceptance(p, q, kind, high) - EXACT
    assert distance(p, q, kind, 1.0) == pytest.approx(0.0, abs=EXACT)


def text_law(kind: str, eps: float, depth: int, length: int) -> dict[tuple[int, ...], float]:
    """Law of the texts after PROMPT with drafted chains of `depth`, from the rule's definition."""
    found: dict[tuple[int, ...], float] = defaultdict(float)

    def extend(text: tuple[int, ...], drafts: int, weight: float) -> None:
        """drafts: number of draft tokens that the cycle still has."""
        p, q = TARGET([*PROMPT, *text]), DRAFT([*PROMPT, *text])
        kept = np.minimum(q, relaxed(p, kind, eps)) if drafts else np.zeros(len(p))
        left = np.maximum(p - q, 0) if drafts else p
        ended = (1 - kept.sum()) * left / left.sum()
        for x in range(len(p)):
            if drafts:
                extend((*text, x), drafts - 1, weight * kept[x])
            begin((*text, x), weight * ended[x])

    def begin(text: tuple[int, ...], weight: float) -> None:
        left = length - len(text)
        if left:
            extend(text, min(depth, left - 1), weight)
        else:
            found[text] += weight

    begin((), 1.0)
    return found


def generated(name: str, rule: Lenient, sampling: Sampling, shapers: Callable, length: int) -> dict:
    """Law of the texts that an engine generates, by enumeration."""
    make, plan, _ = DRAFTERS[name]

    def program(dice: EnumeratedDice) -> tuple[int, ...]:
        engine = Engine(FakeTarget(TARGET), make(), rule, Given(plan), shapers=shapers())
        return run_all(engine, [sequence(PROMPT, length, dice, sampling)])[0]

    found: dict[tuple[int, ...], float] = defaultdict(float)
    for text, probability in EnumeratedDice().outcomes(program):
        found[text] += probability
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_whole_texts_have_the_closed_form_along_a_chain(kind):
    found = generated("chain", Lenient(kind=kind, eps=0.4), Sampling(), tuple, 3)
    expected = text_law(kind, 0.4, CHAIN.depth, 3)
    assert max(abs(found.get(t, 0.0) - p) for t, p in expected.items()) <= EXACT
    plain = exact_law(TARGET, PROMPT, 3, Sampling())
    assert max(abs(expected[t] - plain[t]) for t in plain) > 0.01  # it does lose something


SHAPED = {
    "constraint": (Sampling(), lambda: (NoRepeats(),)),
    "penalties and constraint": (
        Sampling(temperature=0.7, frequency_penalty=0.5),
        lambda: (Adjust(), NoRepeats()),
    ),
    "top-k and ban": (Sampling(top_k=2, banned_tokens=(2,)), lambda: (Adjust(),)),
    "greedy": (Sampling(temperature=0), lambda: (NoRepeats(),)),
}


@pytest.mark.parametrize("request_", SHAPED)
@pytest.mark.parametrize("name", ["chain", "gumbel 2x1", "top 2x2"])
def test_impossible_texts_stay_impossible(name, request_):
    sampling, shapers = SHAPED[request_]
    found = generated(name, Lenient(eps=0.2), sampling, shapers, 3)
    possible = exact_law(TARGET, PROMPT, 3, sampling, shapers())
    assert sum(found.values()) == pytest.approx(1.0)
    if not sampling.is_greedy:
        assert all(possible[text] > 0 for text, p in found.items() if p > 0)
    if request_ != "top-k and ban":
        assert all(a != b for text in found for a, b in pairwise(text))


@pytest.mark.parametrize("request_", ["free", *SHAPED])
@pytest.mark.parametrize(
    "make",
    [grown("chain"), grown("gumbel", template=grid(2, 1)), grown("template", template=grid(2, 2))],
)
def test_with_eps_1_it_is_exact(make, request_):
    sampling, shapers = SHAPED.get(request_, (Sampling(), tuple))
    rule = Lenient(kind="exp", eps=1.0)
    error = distance_of(TARGET, make, rule, plan=TREE, sampling=sampling, shapers=shapers)
    assert error <= EXACT


def random_tree(rng: np.random.Generator) -> Tree:
    builder, parents = TreeBuilder(), [-1]
    for _ in range(6):
        q, parent = Proposal.of(rng.dirichlet(np.ones(4))), int(rng.choice(parents))
        if rng.random() < 0.5:
            parents.append(builder.add(int(rng.choice(q.ids, p=q.probs)), parent, IID, q))
        else:
            parents.append(builder.add(int(rng.integers(4)), parent, POINT))
    return builder.build()


@pytest.mark.parametrize("kind", KINDS)
def test_with_eps_1_each_outcome_is_that_of_the_exact_rules(kind):
    """Equal draws, equal verdicts, equally many draws used."""
    exact = registry.make("verifier", "speculative")
    for seed in range(100):
        rng = np.random.default_rng(seed)
        tree, p = random_tree(rng), rng.dirichlet(np.ones(4))
        found = []
        for verify in (
            Lenient(kind=kind, eps=1.0).verify,
            reject_recursively,
            exact.verify_reference,
        ):
            dice = SeededDice(seed)
            verdict = verify(tree, SameLaws(tree, p), dice)
            found.append((verdict.nodes, verdict.token, dice.uniform()))
        assert found[0] == found[1] == found[2]


class GreedyLaws(SameLaws):
    """Logits of p1 at every node, at temperature 0."""

    sampling = Sampling(temperature=0)

    def logits(self, node: int) -> np.ndarray:
        return np.log(self[node])


@pytest.mark.parametrize(
    ("kind", "eps", "accepted"),
    [
        ("lin", 0.61, []),  # 0.3 / 0.61 < 0.5
        ("lin", 0.59, [0]),
        ("sq", 0.78, []),  # 0.3 / 0.6084 < 0.5
        ("sq", 0.77, [0]),
        ("exp", 0.58, []),  # 0.3 ** 0.58 = 0.497
        ("exp", 0.57, [0]),
        ("lin", 1.0, []),
    ],
)
def test_greedy_requests_accept_what_is_close_to_the_argmax(kind, eps, accepted):
    p1, tree = np.array([0.5, 0.3, 0.2]), chain([1])
    verdict = Lenient(kind=kind, eps=eps).verify(tree, GreedyLaws(tree, p1), SeededDice(0))
    assert verdict.nodes == accepted and verdict.token == 0


def test_greedy_requests_prefer_the_argmax_and_exact_ones_break_ties_as_decoding_does():
    builder = TreeBuilder()
    builder.add(1, -1)
    second = builder.add(0, -1)
    tree, p1 = builder.build(), np.array([0.5, 0.3, 0.2])
    verdict = Lenient(eps=0.1).verify(tree, GreedyLaws(tree, p1), SeededDice(0))
    assert verdict.nodes == [second]
    tie, tree = np.array([0.4, 0.4, 0.2]), chain([1])
    assert not Lenient(eps=1.0).verify(tree, GreedyLaws(tree, tie), SeededDice(0)).nodes
    assert Lenient(eps=0.99).verify(tree, GreedyLaws(tree, tie), SeededDice(0)).nodes == [0]


@pytest.mark.parametrize("options", [{"eps": 0.0}, {"eps": 1.5}, {"kind": "log"}])
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match=r"lenient needs .* and 0 < eps <= 1"):
        Lenient(**options)


def test_a_distribution_that_does_not_sum_to_1_is_an_error():
    tree = chain([0])
    with pytest.raises(ConfigError, match="should sum to 1"):
        Lenient().verify(tree, SameLaws(tree, np.zeros(3)), SeededDice(0))
