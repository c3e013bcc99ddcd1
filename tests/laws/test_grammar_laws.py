"""Every constraint keeps its masked law exactly, with drafts that ask it: enumerated, to 1e-12."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from made_drafts import DRAFTERS, TREE, Says, composed, grown, made, stand
from three_tokens import END, TOKENS, three_tokens, word_tokens

from fakes import exact_law, sequence
from forerun.constraints._after import After
from forerun.constraints._all_of import AllOf
from forerun.constraints._penalties import Adjust
from forerun.constraints._request import RequestConstraint
from forerun.constraints.base import Constraint
from forerun.constraints.choice import Choice
from forerun.constraints.grammar import Grammar
from forerun.constraints.json_schema import JsonSchema
from forerun.constraints.python import Predicate
from forerun.constraints.regex import Regex
from forerun.core.allowed import AllowedTokens, legal_part
from forerun.core.dice import SeededDice
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.core.tree import IID, POINT, Proposal, TreeBuilder
from forerun.core.tree_template import grid
from harness import PROMPT, TARGET, Draft, check

TOKENIZER = three_tokens()
TEXTS = r"ab|abb|ba?"  # after "ab" the end, or one more
MADE: dict[str, Callable[[], Constraint]] = {
    "regex": lambda: Regex(TEXTS),
    "choice": lambda: Choice(("ab", "abb", "bbb")),
    "lark": lambda: Grammar('start: "a" start "b" | "a" | "b"'),
    "gbnf": lambda: Grammar('root ::= "a" root "b" | "b"'),
    "predicate": lambda: Predicate(
        lambda text: any(word.startswith(text) for word in (b"ab", b"abb", b"ba")),
        lambda text: text in (b"ab", b"abb", b"ba"),
    ),
    "dead end": lambda: Predicate(lambda text: text in (b"a", b"ab"), lambda text: False),
    "nothing": lambda: Predicate(lambda text: False),
    "after a marker": lambda: After("ab", Regex("b+a?")),
    "two": lambda: AllOf([Regex("a*b*").bind(TOKENIZER, 3), Regex("[ab]{0,2}").bind(TOKENIZER, 3)]),
}
SAMPLINGS = {
    "free": Sampling(),
    "temperature .5": Sampling(temperature=0.5),
    "top-k 2": Sampling(top_k=2),
    "top-p .7": Sampling(top_p=0.7),
    "min-p .4": Sampling(min_p=0.4),
    "greedy": Sampling(temperature=0),
    "penalties": Sampling(repetition_penalty=1.7, frequency_penalty=0.3, logit_bias={1: 0.5}),
    "ban": Sampling(banned_tokens=(1,)),
}
DRAFTS: dict[str, Draft] = {
    "none": (made("none"), TREE, (4,)),
    "chain": DRAFTERS["chain"],
    "gumbel 2x1": DRAFTERS["gumbel 2x1"],
    "i.i.d. 2, ragged batch": DRAFTERS["i.i.d. 2, ragged batch"],
    "stand": DRAFTERS["stand"],
    "stand, best tokens, two sequences": (
        stand(context=1, entries=3, choice="top"),
        TREE,
        (2, 3),
    ),
    "forced": (made("forced"), Plan(3, 3), (2, 4)),
    "a chain that may be forbidden": (lambda: Says((1, 0, 1)), Plan(3, 3), (4,)),
    "fuse forced + stand": (
        composed("fuse", made("forced"), stand(context=1, entries=3, template=grid(2, 1))),
        Plan(4, 2),
        (4,),
    ),
    "fuse chosen + drawn": (
        composed("fuse", lambda: Says((1, 0)), grown("gumbel", template=grid(2))),
        Plan(4, 2),
        (3,),
    ),
}
HEAVY = {"i.i.d. 2, ragged batch", "stand, best tokens, two sequences", "fuse chosen + drawn"}


def bound(name: str) -> Constraint:
    made = MADE[name]()
    return made if name == "two" else made.bind(TOKENIZER, 3)


def cases() -> list:
    """All constraints with two kinds of sampling; all kinds of sampling with the regex."""
    found = []
    for name in MADE:
        for sampling in SAMPLINGS:
            for draft in DRAFTS:
                is_quick = (name == "regex" or sampling in ("free", "greedy")) and (
                    draft not in HEAVY or sampling == "greedy" or name == "after a marker"
                )
                marks = [] if is_quick else [pytest.mark.slow]
                found.append(pytest.param(name, sampling, draft, marks=marks))
    return found


@pytest.mark.parametrize(("name", "sampling", "draft"), cases())
def test_the_masked_law_is_kept(name: str, sampling: str, draft: str) -> None:
    from dataclasses import replace

    asked = replace(SAMPLINGS[sampling], constraint=bound(name))
    check(
        DRAFTS[draft], (asked, lambda: (Adjust([END]), RequestConstraint(TOKENIZER))), "recursive"
    )


@pytest.mark.parametrize("verifier", ["speculative", "match", "block"])
@pytest.mark.parametrize("draft", ["chain", "forced", "a chain that may be forbidden"])
def test_other_rules_keep_it(verifier: str, draft: str) -> None:
    asked = Sampling(constraint=bound("regex"))
    shapers = (Adjust([END]), RequestConstraint(TOKENIZER))
    check(DRAFTS[draft], (asked, lambda: shapers), verifier)


def words_of(name: str) -> Callable[[str], tuple[bool, bool]]:
    """Whether a text may be begun, and whether it may end, in plain Python; all texts up to 5."""
    import itertools

    pattern = {"regex": TEXTS, "choice": "ab|abb|bbb", "predicate": "ab|abb|ba"}[name]
    every = ("".join(w) for n in range(6) for w in itertools.product("ab", repeat=n))
    words = {word for word in every if re.fullmatch(pattern, word)}
    return lambda text: (any(w.startswith(text) for w in words), text in words)


@pytest.mark.parametrize("name", ["regex", "choice", "predicate"])
def test_the_law_is_that_of_the_definition(name: str) -> None:
    """Step by step the target's law on the tokens after which an allowed text is possible."""
    states = words_of(name)
    law = exact_law(
        TARGET, PROMPT, 4, Sampling(constraint=bound(name)), (RequestConstraint(TOKENIZER),)
    )
    assert abs(sum(law.values()) - 1) < 1e-12
    for tokens, found in law.items():
        text, prob, before, has_ended = "", 1.0, list(PROMPT), False
        for token in tokens:
            allowed = [t for t in (0, 1) if not has_ended and states(text + TOKENS[t])[0]]
            allowed += [END] if has_ended or states(text)[1] else []
            probs = TARGET(before)
            prob *= probs[token] / probs[allowed].sum() if token in allowed else 0.0
            has_ended = has_ended or token == END
            text += "" if token == END else TOKENS[token]
            before.append(token)
        assert abs(found - prob) < 1e-12


def started(constraint: Constraint, tokens: tuple[int, ...] = ()):
    """A sequence under a constraint that has generated some tokens."""
    seq = sequence(PROMPT, 9, SeededDice(0), Sampling(constraint=constraint))
    seq.tokens += tokens
    seq.shapers = (RequestConstraint(TOKENIZER),)
    seq.states = tuple(shaper.start(seq) for shaper in seq.shapers)
    return seq


def test_states_of_branches_do_not_disturb_each_other() -> None:
    """The matcher jumps between the nodes of a tree in any order, and masks stay those of a text
    that was read from its start."""
    constraint = bound("lark")
    rng = np.random.default_rng(0)
    states = {(): constraint.start(started(constraint))}
    for _ in range(60):
        path = list(states)[int(rng.integers(len(states)))]
        mask = constraint.allowed(states[path])
        fresh = constraint.start(started(constraint, path))
        assert np.array_equal(mask, constraint.allowed(fresh))
        assert [constraint.allows(states[path], t) for t in range(3)] == mask.tolist()
        for token in np.flatnonzero(mask).tolist():
            states[*path, token] = constraint.advance(states[path], token)
    assert max(map(len, states)) > 5


def test_forced_tokens_are_those_that_must_come() -> None:
    seq = started(bound("choice"))
    allowed = AllowedTokens.of(seq)
    assert allowed is not None
    assert allowed.forced(()) == [] and allowed.forced((1,)) == [1, 1]
    assert allowed.forced((1, 1, 1)) == [END]
    assert AllowedTokens(started(bound("choice"), (1,))).forced_run(9) == (1, 1, END)


def test_proposals_are_restricted_before_the_draw() -> None:
    allowed = AllowedTokens(started(bound("regex")))
    q = Proposal(np.array([0, 1, 2], np.int32), np.array([0.5, 0.3, 0.2]))
    left = allowed.restrict((0,), q)  # after a only b
    assert left is not None and left.ids.tolist() == [1] and left.probs.tolist() == [1.0]
    assert allowed.restrict((), Proposal(np.array([2], np.int32), np.ones(1))) is None


def test_a_forbidden_node_stays_where_its_absence_would_tell() -> None:
    """A chosen forbidden node goes with all below it, unless a drawn sibling follows."""
    seq = started(bound("regex"), (0,))  # text a: only b may follow
    tree = TreeBuilder()
    q = Proposal(np.array([0, 1], np.int32), np.array([0.5, 0.5]))
    wrong = tree.add(0, -1, POINT)
    tree.add(1, wrong, POINT)
    assert len(legal_part(tree.build(), AllowedTokens(seq))) == 0
    tree.add(1, -1, IID, q)
    kept = legal_part(tree.build(), AllowedTokens(seq))
    assert kept.tokens.tolist() == [0, 1] and kept.parents.tolist() == [-1, -1]


def test_without_a_constraint_nothing_is_asked() -> None:
    assert AllowedTokens.of(started(None)) is None  # type: ignore[arg-type]


def test_a_schema_of_json_over_bytes() -> None:
    """A tokenizer of single bytes: the mask at each place is that of the only possible document."""
    letters = word_tokens([*(f"<{i}>" for i in range(33)), *map(chr, range(33, 127)), "<end>"])
    schema = {"type": "object", "properties": {"x": {"const": 7}}, "required": ["x"]}
    schema["additionalProperties"] = False
    constraint = JsonSchema(schema, whitespace=False).bind(letters, 128)
    state = constraint.start(started(constraint))
    for letter in '{"x":7}':
        assert np.flatnonzero(constraint.allowed(state)).tolist() == [ord(letter)]
        state = constraint.advance(state, ord(letter))
    assert constraint.is_complete(state)
    assert np.flatnonzero(constraint.allowed(state)).tolist() == [127]
