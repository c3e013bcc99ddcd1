"""RASD: pruning and fusion against the sheet's examples and brute force."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeRunner, FakeTarget, TableSource, run_all, sequence, table_law
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence
from forerun.core.roles import Drafter
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY, IID, POINT, Proposal, Tree, TreeBuilder, chain
from forerun.core.tree_template import grid
from forerun.drafters.base import Grown
from forerun.drafters.rasd import Rasd, first_law, graft, pruned
from forerun.engine.engine import Engine
from forerun.errors import ConfigError
from forerun.ngrams.index.query.continuation_kernels import FirstTokens
from forerun.ngrams.index.query.continuations import Continuations
from forerun.ngrams.index.query.engine import Index

A, B, C, D, E, F, G, H = range(8)
Paths = Many[Many[int]]


def tree_of(paths: Paths) -> Tree:
    """The trie of some paths, chosen nodes."""
    tree, where = TreeBuilder(), {(): -1}
    for path in paths:
        for i in range(len(path)):
            key = tuple(path[: i + 1])
            if key not in where:
                where[key] = tree.add(path[i], where[key[:-1]])
    return tree.build()


def found_of(paths: Paths) -> Continuations:
    tree = tree_of(paths)
    return Continuations(tree.tokens, tree.parents, np.ones(len(tree), np.int64), 2, 1)


def paths_of(tree: Tree | Continuations) -> set[tuple[int, ...]]:
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len(set(found)) == len(found), "a token stands twice under one parent"
    return set(found)


def firsts(*ids: int) -> FirstTokens:
    return FirstTokens(np.array(ids, np.int64), np.ones(len(ids)))


NAMES = ["draft_model", "rest", "prompt_lookup"]
MANY = 1000


def test_the_sheets_example() -> None:
    g, r = tree_of([[A, B], [A, C]]), found_of([[A, B, D, E], [F, G]])
    kept = pruned(r, firsts(A, H))
    assert paths_of(kept) == {(A,), (A, B), (A, B, D), (A, B, D, E)}
    fused = graft(g, [kept], MANY, NAMES)
    assert paths_of(fused) == {(A,), (A, B), (A, C), (A, B, D), (A, B, D, E)}
    assert fused.sources == ("draft_model",) * 3 + ("rest",) * 2


PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=8)


@given(g=PATHS, r=PATHS, s=PATHS)
def test_fusion_is_the_union_of_paths(g: Paths, r: Paths, s: Paths) -> None:
    tree, one, two = tree_of(g), found_of(r), found_of(s)
    fused = graft(tree, [one, two], MANY, NAMES)
    assert paths_of(fused) == paths_of(tree) | paths_of(one) | paths_of(two)
    assert np.array_equal(fused.tokens[: len(tree)], tree.tokens)
    assert (fused.parents < np.arange(len(fused))).all()
    same = graft(tree, [Continuations(tree.tokens, tree.parents, tree.rows, 1, 1)], MANY, NAMES)
    assert same is tree is graft(tree, [found_of([])], MANY, NAMES)


@given(g=PATHS, r=PATHS, room=st.integers(0, 6))
def test_fusion_keeps_to_the_room(g: Paths, r: Paths, room: int) -> None:
    tree = tree_of(g)
    fused = graft(tree, [found_of(r), found_of(r[::-1])], room, NAMES)
    assert len(fused) <= len(tree) + room
    assert paths_of(tree) <= paths_of(fused) <= paths_of(tree) | paths_of(found_of(r))


@given(r=PATHS, k=st.integers(0, 4))
def test_pruning_is_monotone(r: Paths, k: int) -> None:
    found, order = found_of(r), [2, 0, 3, 1]
    fewer, more = (paths_of(pruned(found, firsts(*order[:n]))) for n in (k, k + 1))
    assert fewer <= more
    assert paths_of(pruned(found, firsts(*order))) == paths_of(found)
    assert not len(pruned(found, firsts()).tokens)
    assert pruned(found, None) is found


def test_labels_of_drawn_nodes_stay() -> None:
    q = Proposal(np.array([A, B], np.int32), np.array([0.5, 0.5]))
    tree = TreeBuilder()
    for _ in range(2):
        tree.add(A, -1, IID, q)
    fused = graft(tree.build(), [found_of([[A, C], [B]])], MANY, NAMES)
    assert fused.laws.tolist() == [IID, IID, POINT, POINT]
    assert fused.parents.tolist() == [-1, -1, 0, -1]
    assert first_law(fused) is not None and first_law(EMPTY) is None
    assert first_law(tree_of([[A]])) is None


DOCS = [[1, 2, 0, 2], [1, 2, 0, 1], [1, 2, 1, 1], [0, 1, 2, 2, 2]]


def rasd(seed: int = 2, **options: object) -> Rasd:
    draft = Grown(TableSource(table_law(seed)), registry.make("grower", "template"))
    draft.grower.template = grid(2, 2)
    made = Rasd(drafter=draft, **{"index": Index.of(DOCS), "retrievers": ()} | options)
    made.bind(FakeTarget(table_law(1)))
    return made


def tree_after(drafter: Rasd, tokens: list[int], plan: Plan | None = None) -> Tree:
    return drafter.propose([sequence(tokens, 50, SeededDice(0))], [plan or Plan(12, 4)], [None])[0]


def test_top_bounds_the_first_tokens() -> None:
    """k = 0 gives the draft alone, k = V what retrieval has; in between more with each k."""
    alone = tree_after(rasd(top=0), [0, 1, 2])
    assert len(alone) == 6
    trees = [tree_after(rasd(top=k, share=0.5, bypass=0), [0, 1, 2]) for k in range(4)]
    assert paths_of(trees[0]) == paths_of(alone)
    seq = sequence([1, 2], 50, SeededDice(0))
    law = table_law(2)([1, 2])
    q = Proposal.of(law)
    found = [paths_of(rasd(top=k, bypass=0).retrieved(seq, Plan(40, 4), q)[0]) for k in range(1, 4)]
    assert found[0] < found[1] < found[2]
    assert {path[0] for path in found[0]} == {int(law.argmax())}
    assert found[2] == {(0,), (1,), (2,), (0, 2), (0, 1), (1, 1), (2, 2)}


def test_long_matches_are_not_pruned() -> None:
    seq, law = sequence([1, 2], 50, SeededDice(0)), Proposal.of(np.array([0.0, 0.0, 1.0]))
    plan = Plan(40, 4)
    assert paths_of(rasd(top=1, bypass=3).retrieved(seq, plan, law)[0]) == {(2,), (2, 2)}
    free = rasd(top=1, bypass=2).retrieved(seq, plan, law)[0]
    assert {path[0] for path in paths_of(free)} == {0, 1, 2}


def test_the_models_law_weighs_counts() -> None:
    seq, law = sequence([1, 2], 50, SeededDice(0)), Proposal.of(np.array([0.1, 0.2, 0.7]))
    weighed, plain = (
        rasd(top=2, weigh=w, bypass=0).retrieved(seq, Plan(2, 1), law)[0] for w in (True, False)
    )
    assert weighed.tokens.tolist() == [2, 1] and plain.tokens.tolist() == [1, 2]


def test_the_budget_holds_and_what_retrieval_leaves_is_the_drafts() -> None:
    for nodes in range(1, 12):
        for text in ([0, 1, 2], [2, 2], [0, 0]):
            tree = tree_after(rasd(share=0.5), text, Plan(nodes, 3))
            assert len(tree) <= nodes and paths_of(tree)
    nothing_found = tree_after(rasd(share=0.9), [0, 0], Plan(6, 3))
    assert paths_of(nothing_found) == paths_of(tree_after(rasd(top=0), [0, 0], Plan(6, 3)))


def test_a_batch_equals_one_by_one() -> None:
    drafter = rasd(retrievers=("prompt_lookup",))
    seqs = [sequence(t, 50, SeededDice(0)) for t in ([0, 1, 2], [0, 0], [1, 2], [2, 1, 2])]
    plans = [Plan(9, 3), Plan(2, 2), Plan(0, 0), Plan(12, 2)]
    for seq, plan, tree in zip(
        seqs, plans, drafter.propose(seqs, plans, [s.dice for s in seqs]), strict=True
    ):
        one = drafter.propose([seq], [plan], [seq.dice])[0]
        assert np.array_equal(one.tokens, tree.tokens) and one.sources == tree.sources


def greedy_rounds(drafter, prompt: Many[int], length: int) -> list[tuple[tuple[int, ...], int]]:
    """Text before each round and how many drafts were accepted in it."""
    found = []

    def note(step) -> None:
        before = len(step.seqs[0].tokens) - len(step.emitted[0])
        found.append((tuple(step.seqs[0].tokens[:before]), len(step.verdicts[0].nodes)))

    engine = Engine(
        FakeTarget(table_law(1)),
        drafter,
        registry.make("verifier", "greedy"),
        Fixed(nodes=12, depth=4),
        listeners=[note],
    )
    run_all(engine, [sequence(prompt, length, SeededDice(1), Sampling(temperature=0))])
    return found


def test_never_accepts_less_than_the_draft_alone_in_the_same_place() -> None:
    """The fused tree holds the draft's: 6 of the 12 nodes are all that the template has."""
    for seed in range(2, 8):
        for text, accepted in greedy_rounds(rasd(seed, share=0.5), [0, 1, 2], 30):
            left = 30 - (len(text) - 3)
            alone = greedy_rounds(rasd(seed, top=0), text, left)[0][1]
            assert accepted >= alone


def test_a_model_by_name_and_a_drafter_without_a_source() -> None:
    drafter = registry.make(
        "drafter", "rasd:ids=0+1+2+0+1+2,share=0.5", model=FakeRunner(table_law(2))
    )
    assert drafter.names == ["draft_model", "rest", "prompt_lookup"]
    on_stand = registry.make("drafter", "rasd:drafter=stand,ids=0+1+2+0+1+2,retrievers=suffix")
    on_stand.bind(FakeTarget(table_law(1)))
    seq = sequence([0, 1], 9, SeededDice(0))
    on_stand.start(seq)
    tree = on_stand.propose([seq], [Plan(8, 4)], [seq.dice])[0]
    assert tree.tokens.tolist()[:1] == [2] and set(tree.sources) == {"rest"}
    assert on_stand.draft_seconds(8) == 0, "no pass of a draft model"
    assert "part 1: rest datastore in memory" in on_stand.memory_report()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="rasd:model=FOLDER or rasd:drafter=NAME"):
        Rasd(ids=(0, 1, 2))
    with pytest.raises(ConfigError, match="either a model or a drafter"):
        Rasd(ids=(0, 1, 2), drafter="stand", model="draft")
    with pytest.raises(ConfigError, match="nothing to retrieve from"):
        Rasd(drafter="stand", retrievers=())
    with pytest.raises(ConfigError, match="share in 0..1"):
        Rasd(drafter="stand", ids=(0, 1, 2), share=1.5)
    with pytest.raises(ConfigError, match="'stand' draws"):
        Rasd(drafter="suffix", retrievers=("stand",))


class Whole(Drafter):
    """Drafts batches only, as drafters with a kernel do best."""

    labels = frozenset({"point"})

    def propose(self, seqs: Many[Sequence], plans: Many[Plan], dice: object) -> list[Tree]:
        return [chain([0, 0]) for _ in seqs]


def test_retrievers_are_asked_the_fast_way() -> None:
    """A scalar reference may be many times slower: nothing that runs should enter it."""
    drafter, seq = rasd(top=3, share=0.5, retrievers=(Whole(),)), sequence([1, 2], 9, SeededDice(0))
    (tree,) = drafter.propose([seq], [Plan(12, 4)], [seq.dice])
    assert drafter.names[-1] in tree.sources
