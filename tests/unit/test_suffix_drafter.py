"""SuffixDecoding as a drafter: which tree drafts, what a plan allows, who shares."""

from __future__ import annotations

import numpy as np
import pytest

from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence, Step
from forerun.core.sampling import Sampling
from forerun.core.tree import POINT, Tree
from forerun.drafters.suffix import Suffix
from forerun.errors import ConfigError
from forerun.ngrams.tables.suffix.response_store import CONTEXT_TOKENS, READ_TOKENS
from forerun.ngrams.tables.suffix.tree import warm_up

WIDE = Plan(nodes=32, depth=32)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    warm_up()


def sequence(tokens: list[int], group: object = None, tenant: str = "") -> Sequence:
    seq = Sequence(list(tokens), len(tokens), Sampling(), SeededDice(0), 10**6, group)
    seq.tenant = tenant
    return seq


def step(*seqs: Sequence) -> Step:
    return Step(list(seqs), [], [], [], [], [])


def said(drafter: Suffix, tokens: list[int], **whose: object) -> None:
    """A request that has ended."""
    seq = sequence([99], **whose)
    drafter.start(seq)
    seq.tokens += tokens
    drafter.observe(step(seq))
    drafter.finish(seq)


def paths(tree: Tree) -> set[tuple[int, ...]]:
    return {tuple(tree.path(node)) for node in range(len(tree))}


def test_drafts_as_many_tokens_as_the_match_is_long() -> None:
    drafter, seq = Suffix(), sequence([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    tree = drafter.propose([seq], [WIDE], [seq.dice])[0]
    assert tree.tokens.tolist() == [4, 5, 6] and tree.parents.tolist() == [-1, 0, 1]
    assert tree.laws.tolist() == [POINT] * 3 and tree.rows.tolist() == [-1] * 3
    assert drafter.best(seq, WIDE).score == 3
    assert len(Suffix(factor=0.5).propose([seq], [WIDE], [seq.dice])[0]) == 1
    assert len(Suffix(factor=2).propose([seq], [WIDE], [seq.dice])[0]) == 6
    assert len(Suffix(offset=2).propose([seq], [WIDE], [seq.dice])[0]) == 5


def test_frequent_continuations_form_a_tree() -> None:
    text = [1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2, 9, 1, 2]

    def draft(**options: object) -> Tree:
        drafter = Suffix(factor=2, scope="request", **options)
        return drafter.propose([sequence(text)], [WIDE], [SeededDice(0)])[0]

    assert paths(draft()) == {(7,), (7, 1), (7, 1, 2), (9,)}  # 2/4, 2/4, 2/4, and 1/4: the latest
    assert paths(draft(min_prob=0.4)) == {(7,), (7, 1), (7, 1, 2)}
    tree = draft(branches=False)
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))


@pytest.mark.parametrize(("nodes", "depth", "size"), [(2, 9, 2), (9, 2, 2), (9, 9, 3), (0, 9, 0)])
def test_is_bounded_by_the_plan(nodes: int, depth: int, size: int) -> None:
    seq = sequence([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert len(Suffix().propose([seq], [Plan(nodes, depth)], [seq.dice])[0]) == size


def test_no_match_or_no_text_no_draft() -> None:
    drafter = Suffix()
    for tokens in ([1], [1, 2, 3], []):
        assert len(drafter.propose([sequence(tokens)], [WIDE], [SeededDice(0)])[0]) == 0


def test_the_tree_with_the_better_score_drafts() -> None:
    drafter = Suffix()
    said(drafter, [1, 2, 3, 4, 5, 6, 7, 8])
    seq = sequence([3, 8, 8, 1, 2, 3])  # here 3 was followed by 8; there 1 2 3 by 4 5 6
    assert drafter.propose([seq], [WIDE], [seq.dice])[0].tokens.tolist() == [4, 5, 6]
    seq = sequence([50, 2, 3, 60, 51, 2, 3])  # a tie: 2 3 by 60 51 here, by 4 5 there
    assert drafter.propose([seq], [WIDE], [seq.dice])[0].tokens.tolist() == [60, 51]


def test_a_response_is_found_from_its_prompts_end_on() -> None:
    drafter = Suffix()
    prompt = [40, 41, 42]
    first = sequence(prompt, "g")
    drafter.start(first)
    first.tokens += [1, 2, 3, 4]
    drafter.observe(step(first))
    second = sequence(prompt, "g")
    drafter.start(second)
    assert drafter.propose([second], [WIDE], [second.dice])[0].tokens.tolist() == [1, 2, 3]


def test_others_are_heard_while_they_run_if_the_scope_says_so() -> None:
    for scope, drafted in (("request", 0), ("group", 2), ("tenant", 2), ("global", 2)):
        drafter = Suffix(scope=scope)
        one, two = sequence([7], "g"), sequence([8], "g")
        drafter.start(one)
        drafter.start(two)
        one.tokens += [1, 2, 3, 4]
        two.tokens += [1, 2]
        drafter.observe(step(one, two))
        assert len(drafter.propose([two], [WIDE], [two.dice])[0]) == drafted


@pytest.mark.parametrize("asked_at", [(), (0, 1, 2, 3, 4, 5, 6), (3,)])
def test_what_is_drafted_does_not_hang_on_when_texts_are_read(asked_at: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    drafter, seqs = Suffix(scope="group"), [sequence([7], "g"), sequence([8], "g")]
    for seq in seqs:
        drafter.start(seq)
    for i in range(7):
        for seq in seqs:
            seq.tokens += rng.integers(0, 3, 4).tolist()
        drafter.observe(step(*seqs))
        if i in asked_at:
            drafter.propose(seqs, [WIDE, WIDE], [s.dice for s in seqs])
    fresh = Suffix(scope="group")
    for seq in seqs:
        fresh.start(seq)
    for a, b in zip(
        drafter.propose(seqs, [WIDE] * 2, [s.dice for s in seqs]),
        fresh.propose(seqs, [WIDE] * 2, [s.dice for s in seqs]),
        strict=True,
    ):
        assert len(a) and sorted(map(a.path, range(len(a)))) == sorted(map(b.path, range(len(b))))


def test_who_is_never_asked_reads_nothing_and_loses_nothing() -> None:
    drafter = Suffix()
    said(drafter, [1, 2, 3, 4, 5])
    assert [*drafter.memory_report().values()] == [0, 0, 4 * 6]
    seq = sequence([50, 1, 2])
    drafter.start(seq)
    drafter.observe(step(seq))
    assert [*drafter.memory_report().values()] == [0, 0, 4 * 6]
    assert drafter.propose([seq], [WIDE], [seq.dice])[0].tokens.tolist() == [3, 4]
    own, shared, unread = drafter.memory_report().values()
    assert own > 0 and shared > 0 and unread == 0


def test_ended_responses_are_read_some_at_a_time() -> None:
    drafter, size = Suffix(), READ_TOKENS // 2 - 1
    texts = [list(range(i * size, (i + 1) * size)) for i in range(6)]
    for text in texts:
        said(drafter, text)
    seqs = [sequence([-1, *text[7:11]]) for text in texts]
    found = [len(drafter.propose([seq], [WIDE], [seq.dice])[0]) for seq in (*seqs[::-1], *seqs)]
    assert found == [0, 0, *[4] * 10]  # two texts with every draft, the oldest first


def test_tenants_are_kept_apart() -> None:
    drafter = Suffix()
    said(drafter, [1, 2, 3, 4], tenant="a")
    for tenant, drafted in (("a", 2), ("b", 0)):
        seq = sequence([50, 1, 2], tenant=tenant)
        assert len(drafter.propose([seq], [WIDE], [seq.dice])[0]) == drafted


def test_weak_drafts_are_left_out() -> None:
    seq = sequence([1, 2, 5, 1, 3, 6, 1])
    assert drafted(Suffix(), seq) and not drafted(Suffix(min_score=0.9), seq)


def drafted(drafter: Suffix, seq: Sequence) -> int:
    return len(drafter.propose([seq], [WIDE], [seq.dice])[0])


@pytest.mark.parametrize("scope", ["request", "group", "global"])
def test_batch_equals_one_by_one(scope: str) -> None:
    rng = np.random.default_rng(1)
    spec = f"suffix:scope={scope},factor=2"
    together, alone = registry.make("drafter", spec), registry.make("drafter", spec)
    seqs = [sequence(t, i % 2) for i, t in enumerate(rng.integers(0, 3, (4, 9)).tolist())]
    twins = [sequence(seq.tokens, seq.group) for seq in seqs]
    for seq, twin in zip(seqs, twins, strict=True):
        together.start(seq)
        alone.start(twin)
    for _ in range(10):
        trees = together.propose(seqs, [WIDE] * 4, [s.dice for s in seqs])
        for tree, twin in zip(trees, twins, strict=True):
            assert paths(tree) == paths(alone.propose([twin], [WIDE], [twin.dice])[0])
        for seq, twin in zip(seqs, twins, strict=True):
            seq.tokens += rng.integers(0, 3, rng.integers(1, 4)).tolist()
            twin.tokens[:] = seq.tokens
        together.observe(step(*seqs))
        alone.observe(step(*twins))


def test_old_responses_go_when_the_budget_is_spent() -> None:
    rng, drafter = np.random.default_rng(0), Suffix(budget_mb=0.5)
    first = rng.integers(0, 50, 300).tolist()
    said(drafter, first)
    again = first[50 : 50 + CONTEXT_TOKENS]
    assert drafted(drafter, sequence([98, *again])) == CONTEXT_TOKENS
    for _ in range(40):
        said(drafter, rng.integers(0, 50, 300).tolist())
        assert drafted(drafter, sequence([97])) == 0  # it reads now
        assert drafter.memory_report()["suffix trees, shared texts"] <= 2**19
    assert drafter.best(sequence([98, *again]), WIDE).match < CONTEXT_TOKENS


def test_what_was_learned_is_saved_and_restored() -> None:
    drafter, other = Suffix(), Suffix(depth=16)
    said(drafter, [1, 2, 3, 4, 5])
    drafter.keep()
    other.restore(drafter.snapshot())
    assert drafted(other, sequence([50, 1, 2])) == 2
    both = Suffix.merge([drafter.snapshot(), other.snapshot()])
    assert both.counts["texts"] == 3  # the open request of the line above is one


def test_bad_options() -> None:
    for spec, said_ in (
        ("min_prob=0", "min_prob must be more than 0"),
        ("min_prob=1.5", "at most 1"),
        ("factor=-1", "factor and min_score must be at least 0"),
        ("factor=0", "factor \\+ offset above 0"),
        ("scope=all", "scope must be one of"),
        ("depth=1", "depth must be in 2..64"),
        ("texts=0", "at least 1 text"),
        ("budget_mb=0.01", "raise the budget"),
    ):
        with pytest.raises(ConfigError, match=said_):
            registry.make("drafter", f"suffix:{spec}")
