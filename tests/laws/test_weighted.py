"""AWRS through the engine, enumerated: masked law of texts, and E[w 1{text}] = P(text) if allowed.

With chains, trees and memories as drafts; equality at 1e-12.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import pytest
from test_grammar_laws import DRAFTS, END, SAMPLINGS, TOKENIZER, bound

from fakes import FakeTarget, exact_law, run_all, sequence
from forerun.constraints._penalties import Adjust
from forerun.constraints._request import RequestConstraint
from forerun.constraints.awrs import Awrs
from forerun.core.dice import Dice, EnumeratedDice, SeededDice
from forerun.core.logits import TargetProbs
from forerun.core.records import Rows
from forerun.core.roles import Shaper, Verifier
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY, IID, Proposal, Tree, TreeBuilder
from forerun.engine.engine import Engine
from forerun.engine.stopping import Stops
from forerun.errors import ConfigError
from forerun.verifiers.match import Match
from forerun.verifiers.weighted import Weighted
from harness import EXACT, PROMPT, TARGET, Draft, Given

Texts = tuple[tuple[int, ...], ...]
Outcome = tuple[Texts, tuple[float, ...]]  # texts and log weights of a batch


def shapers() -> tuple[Shaper, ...]:
    return Adjust([END]), RequestConstraint(TOKENIZER)


def asked(constraint: str, sampling: Sampling = Sampling()) -> Sampling:  # noqa: B008
    return replace(sampling, constraint=Awrs(bound(constraint)), constraint_sampling="awrs")


def outcomes(
    draft: Draft,
    samplings: Many[Sampling],
    lengths: Many[int],
    rule: Callable[[], Verifier] = lambda: Weighted(rule="recursive", method="recursive"),
    stops: bool = False,
) -> dict[Outcome, float]:
    """The probability of all texts and weights of a batch."""
    make, plan, _ = draft

    def program(dice: Dice) -> Outcome:
        engine = Engine(
            FakeTarget(TARGET),
            make(),
            rule(),
            Given(plan),  # type: ignore[arg-type]
            shapers=shapers(),
            max_seqs=2,
            stops=Stops([END]) if stops else None,
        )
        pairs = zip(samplings, lengths, strict=True)
        seqs = [sequence(PROMPT, n, dice, own, index=i) for i, (own, n) in enumerate(pairs)]
        texts = run_all(engine, seqs)
        return texts, tuple(seq.logw for seq in seqs)

    found: dict[Outcome, float] = defaultdict(float)
    for outcome, probability in EnumeratedDice().outcomes(program):
        found[outcome] += probability
    return found


def masked(sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """The law of a text under the mask of the same constraint."""
    own = sampling.constraint
    plain = replace(sampling, constraint=own.inner if isinstance(own, Awrs) else own)
    return exact_law(TARGET, PROMPT, length, plain, shapers())


def free(sampling: Sampling, text: tuple[int, ...]) -> float:
    """P(text) without the constraint if each of its tokens is allowed, else 0."""
    own = sampling.constraint
    seq = sequence(PROMPT, len(text), SeededDice(0), replace(sampling, constraint=None))
    state, prob = own.start(seq), 1.0
    for token in text:
        laws = TargetProbs(Rows(np.log([TARGET(seq.tokens)])), seq, EMPTY, ())
        seq.states = ()
        prob *= laws[-1][token] if own.allows(state, token) else 0.0
        state = own.advance(state, token)
        seq.tokens.append(token)
    return prob


def check(found: dict[Outcome, float], samplings: Many[Sampling], lengths: Many[int]) -> None:
    """Texts have the product of their masked laws."""
    laws = [masked(*pair) for pair in zip(samplings, lengths, strict=True)]
    law: dict[Texts, float] = defaultdict(float)
    for (texts, _), probability in found.items():
        law[texts] += probability
    for texts in itertools.product(*laws):
        exact = math.prod(one[text] for one, text in zip(laws, texts, strict=True))
        assert abs(law[texts] - exact) <= EXACT, texts


QUICK = ("none", "chain", "gumbel 2x1", "stand", "forced", "a chain that may be forbidden")


@pytest.mark.parametrize(
    "draft",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in DRAFTS
        if name != "stand, best tokens, two sequences"
    ],
)
def test_tokens_have_the_masked_law_with_any_draft(draft: str) -> None:
    samplings, lengths = [asked("regex")], (2,) if draft == "stand" else (3,)
    check(outcomes(DRAFTS[draft], samplings, lengths), samplings, lengths)


@pytest.mark.parametrize("draft", ["none", "chain", "stand", "fuse chosen + drawn"])
@pytest.mark.parametrize("method", ["recursive", "two_run"])
def test_weights_lead_back_to_the_free_law(draft: str, method: str) -> None:
    """The sum of w over all runs that give a text is its probability without the constraint."""
    sampling = asked("regex")
    rule = lambda: Weighted(rule="recursive", method=method)  # noqa: E731
    length = 3 if method == "recursive" and draft != "fuse chosen + drawn" else 2
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for ((text,), (logw,)), probability in outcomes(
        DRAFTS[draft], [sampling], (length,), rule
    ).items():
        found[text] += probability * math.exp(logw)
    for text in itertools.product(range(3), repeat=length):
        assert abs(found[text] - free(sampling, text)) <= EXACT, text


@pytest.mark.parametrize(
    "constraint",
    ["choice", "lark", "predicate", "two", pytest.param("after a marker", marks=pytest.mark.slow)],
)
def test_each_constraint_keeps_its_law(constraint: str) -> None:
    samplings = [asked(constraint)]
    check(outcomes(DRAFTS["chain"], samplings, (3,)), samplings, (3,))


@pytest.mark.parametrize("name", ["temperature .5", "penalties", "ban"])
def test_each_kind_of_sampling_keeps_its_law(name: str) -> None:
    samplings = [asked("regex", SAMPLINGS[name])]
    check(outcomes(DRAFTS["gumbel 2x1"], samplings, (2,)), samplings, (2,))


def test_the_default_method_keeps_the_law() -> None:
    samplings = [asked("lark")]
    found = outcomes(DRAFTS["chain"], samplings, (2,), lambda: Weighted(rule="recursive"))
    check(found, samplings, (2,))
    weight = sum(math.exp(logw) * p for ((_,), (logw,)), p in found.items())
    exact = sum(free(samplings[0], text) for text in itertools.product(range(3), repeat=2))
    assert abs(weight - exact) <= EXACT


@pytest.mark.parametrize("draft", ["chain", "stand"])
def test_mixed_batches(draft: str) -> None:
    """One request with AWRS, one with a mask or without a constraint: laws and independence."""
    others = (Sampling(constraint=bound("regex")), Sampling())
    for other in others:
        samplings, lengths = [other, asked("choice")], (1, 2)
        found = outcomes(DRAFTS[draft], samplings, lengths)
        check(found, samplings, lengths)
        assert all(logws[0] == 0.0 for _, logws in found)


def test_nothing_allowed_ends_the_text_with_weight_0() -> None:
    for name in ("nothing", "dead end"):
        found = outcomes(DRAFTS["none"], [asked(name)], (4,), stops=True)
        assert {logws for _, logws in found} == {(-math.inf,)}
        assert all(text[-1] == END for (text,), _ in found)


def test_the_last_place_has_the_end_token_alone() -> None:
    """Texts of up to 3 tokens that end by themselves; the last weight is that of the end token."""
    sampling = asked("regex")
    rule = lambda: Weighted(rule="recursive", method="recursive", must_end=True)  # noqa: E731
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for ((text,), (logw,)), probability in outcomes(
        DRAFTS["chain"], [sampling], (3,), rule, stops=True
    ).items():
        assert text[-1] == END
        found[text] += probability * math.exp(logw)
    for text in [(0, 1, END), (1, END), (1, 0, END), (0, END)]:
        assert abs(found[text] - free(sampling, text)) <= EXACT, text
    assert sum(found.values()) == pytest.approx(
        sum(free(sampling, text) for text in [(0, 1, END), (1, END), (1, 0, END)])
    )


class Probing(Match):
    """Appends a probe to every tree and needs hidden rows."""

    needs = frozenset({"hidden", "probes"})
    judges = frozenset({"point"})

    def probe(self, tree: Tree, room: int) -> Tree:
        from forerun.core.tree import appended

        return appended(tree, [0], [len(tree) - 1])


class WithProbes(FakeTarget):
    """A target that counts the nodes it computes and gives hidden rows."""

    nodes = 0

    def forward(self, batch):
        assert batch.needs == {"hidden", "probes"}
        self.nodes += sum(map(len, batch.trees))
        return super().forward(batch)


def test_needs_and_probes_are_those_of_the_inner_rule() -> None:
    rule, target = Weighted(rule=Probing()), WithProbes(TARGET)
    assert rule.needs == {"hidden", "probes"} and rule.judges == {"point"}
    make, plan, _ = DRAFTS["forced"]
    engine = Engine(target, make(), rule, Given(plan), shapers=shapers(), max_seqs=2)  # type: ignore[arg-type]
    requests = (asked("regex"), Sampling())
    seqs = [sequence(PROMPT, 3, SeededDice(i), own) for i, own in enumerate(requests)]
    run_all(engine, seqs)
    assert target.nodes >= 2 and all(len(seq.generated) == 3 for seq in seqs)


def test_a_wrong_rule_is_caught() -> None:
    """A rule that keeps a draft without drawing breaks the law."""

    class Trusting(Weighted):
        def _followed(self, tree, laws, dice):
            kept = super()._followed(tree, laws, dice)
            hits = [child for child in tree.children(-1) if laws.allows(-1, tree.tokens[child])]
            if hits and not kept.nodes:
                kept.nodes = hits[:1]
                kept.token, more = self._drawn(laws, hits[0], dice)
                kept.logws = [0.0, more]
            return kept

    samplings = [asked("regex")]
    rule = lambda: Trusting(rule="recursive", method="recursive")  # noqa: E731
    with pytest.raises(AssertionError):
        check(outcomes(DRAFTS["chain"], samplings, (2,), rule), samplings, (2,))


def test_trees_with_a_duplicate_child() -> None:
    """Two drawn children may hold the same token; the first is followed."""
    q = Proposal(np.array([0, 1, 2], np.int32), np.array([0.2, 0.5, 0.3]))
    tree = TreeBuilder()
    tree.add(1, -1, IID, q)
    tree.add(1, -1, IID, q)
    built = tree.build()
    seq = sequence(PROMPT, 4, SeededDice(0), asked("choice"))
    seq.shapers = shapers()
    seq.states = tuple(shaper.start(seq) for shaper in seq.shapers)
    rows = Rows(np.log(np.stack([TARGET(PROMPT)] * 3)))
    laws = TargetProbs(rows, seq, built, seq.shapers)
    verdicts = [Weighted().verify(built, laws, SeededDice(i)) for i in range(20)]
    assert {tuple(v.nodes) for v in verdicts} == {(), (0,)}
    assert all(len(v.logws) == len(v.nodes) + 1 for v in verdicts)


def test_it_wraps_no_second_one() -> None:
    with pytest.raises(ConfigError, match="weighted"):
        Weighted(rule="weighted")
