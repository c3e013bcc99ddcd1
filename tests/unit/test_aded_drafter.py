"""The tree search, its compiled form against the plain one, and the drafter around them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeTarget, TableSource, run_all, sequence, table_law
from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence
from forerun.core.sampling import Sampling
from forerun.core.tree import POINT, Tree
from forerun.drafters.aded import Aded, MemorySource
from forerun.drafters.base import grow
from forerun.engine.engine import Engine
from forerun.engine.stats import Recorder
from forerun.errors import ConfigError, DataError, UnknownName
from forerun.growers import monte_carlo
from forerun.growers.best_first import BestFirst
from forerun.growers.monte_carlo import REWARDS, MonteCarlo, Node, Reward, selected, shortest
from forerun.models.tokenizer import Tokenizer
from harness import Given

LAW = table_law(5, vocab=4)


def grown(search: MonteCarlo, plan: Plan, seed: int = 0) -> Tree:
    """A tree from a law over four tokens."""
    seq = sequence([0, 1], 10, SeededDice(seed))
    return grow([seq], [plan], [seq.dice], TableSource(LAW), search)[0]


def paths(tree: Tree) -> list[tuple[int, ...]]:
    return [tuple(tree.path(node)) for node in range(len(tree))]


def one_level(c1: float, iterations: int, **options: object) -> np.ndarray:
    """Visits of the children of the root when only they are searched, most likely first."""
    seq = sequence([0, 1], 10, SeededDice(0))
    search = MonteCarlo(c1=c1, iterations=iterations, length=2, **options)
    visits: list[int] = []

    def spy(nodes: list[Node]) -> list[Node]:
        visits.extend(node.visits for node in nodes[1:])
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monte_carlo, "ranked", spy)
        grow([seq], [Plan()], [seq.dice], TableSource(LAW), search)
    return np.array(visits)


@pytest.mark.parametrize("reward", REWARDS)
def test_one_iteration_per_child_visits_every_child(reward: str) -> None:
    assert one_level(32.0, 4, reward=reward).tolist() == [1, 1, 1, 1]
    assert one_level(32.0, 3, reward=reward).tolist() == [1, 1, 1, 0]  # the likeliest first


def test_great_exploration_makes_visits_follow_the_prior() -> None:
    visits = one_level(1e9, 4000)
    p = np.sort(LAW([0, 1]))[::-1]
    assert (np.diff(visits) <= 0).all()
    np.testing.assert_allclose(visits / visits.sum(), p, atol=0.02)


def test_without_exploration_the_search_exploits() -> None:
    wide, narrow = one_level(32.0, 400), one_level(0.0, 400)
    assert narrow.max() > wide.max()


def test_published_score_by_hand() -> None:
    root = Node((), visits=10)
    rare, tried = Node((0,), 0.1, 0.1, root, None, 1, 1.5), Node((1,), 0.9, 0.9, root, None, 9, 9.0)
    root.children = [rare, tried]
    search = MonteCarlo().search  # c1 32, c2 8: bonus = (32 + ln(19 / 8)) sqrt(10) p / (1 + N)
    bonus = (32 + np.log(19 / 8)) * np.sqrt(10)
    assert 1.5 + bonus * 0.1 / 2 < 1.0 + bonus * 0.9 / 10
    assert selected(root, search) is tried
    tried.prior = 0.4
    assert 1.5 + bonus * 0.1 / 2 > 1.0 + bonus * 0.4 / 10
    assert selected(root, search) is rare
    rare.visits = 0
    assert selected(root, search._replace(c1=0.0)) is rare  # before anything that was visited


def test_rewards() -> None:
    worth = []
    for kind in range(3):
        reward = Reward(kind)
        for score, share in ((0.5, 0.25), (2.0, 0.5)):
            reward.add(score, share)
        worth.append(reward.value)
    assert worth == [1.0, 1 + 0.5 + 2.0, 1 + 0.25 + 0.125]


def test_longest_paths_are_dropped_first() -> None:
    ends = [(0, 1, 2), (0, 1, 3), (4,), (5, 6)]
    assert shortest(ends, 7) == {(0,), (0, 1), (0, 1, 2), (0, 1, 3), (4,), (5,), (5, 6)}
    assert shortest(ends, 6) == {(0,), (0, 1), (0, 1, 2), (4,), (5,), (5, 6)}  # the later of two
    assert shortest(ends, 3) == {(4,), (5,), (5, 6)}
    assert shortest(ends, 2) == {(4,)}


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 30),
    st.integers(1, 6),
    st.integers(2, 5),
    st.sampled_from(REWARDS),
    st.sampled_from(["longest", "rarest"]),
    st.booleans(),
)
def test_trees_are_tries_within_the_plan(
    nodes: int, depth: int, length: int, reward: str, drop: str, visit_all: bool
) -> None:
    search = MonteCarlo(
        length=length, iterations=40, top=10, reward=reward, drop=drop, visit_all=visit_all
    )
    tree = grown(search, Plan(nodes, depth))
    assert len(tree) <= min(nodes, 20) and (tree.laws == POINT).all()
    assert len(set(paths(tree))) == len(tree)
    assert tree.depths.max(initial=0) <= min(depth, length)  # length - 1 searched, one more
    if drop == "rarest":
        assert len(tree) > 0


def test_best_first_is_the_best_tree() -> None:
    def worth(path: tuple[int, ...]) -> float:
        text, product = [0, 1], 1.0
        for token in path:
            product *= LAW(text)[token]
            text.append(token)
        return product

    everything = [()]
    for _ in range(3):
        everything += [(*path, t) for path in everything for t in range(4)]
    best = sorted({p for p in everything if p}, key=worth, reverse=True)[:12]
    seq = sequence([0, 1], 10, SeededDice(0))
    tree = grow([seq], [Plan(12, 3)], [seq.dice], TableSource(LAW), BestFirst())[0]
    assert sorted(paths(tree)) == sorted(best)


def text_of(seed: int, vocab: int, length: int = 80) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


@settings(deadline=None, max_examples=150)
@given(
    st.integers(0, 10**6),
    st.integers(2, 8),
    st.tuples(st.integers(1, 40), st.integers(1, 6)),
    st.fixed_dictionaries(
        {
            "length": st.integers(2, 6),
            "iterations": st.integers(1, 60),
            "top": st.integers(1, 40),
            "c1": st.sampled_from([0.0, 1.0, 32.0]),
            "c2": st.sampled_from([1.0, 8.0]),
            "reward": st.sampled_from(REWARDS),
            "visit_all": st.booleans(),
            "drop": st.sampled_from(["longest", "rarest"]),
            "renormalise": st.booleans(),
            "entries": st.integers(1, 8),
        }
    ),
    st.booleans(),
)
def test_compiled_search_equals_the_plain_one(
    seed: int, vocab: int, size: tuple[int, int], options: dict, has_corpus: bool
) -> None:
    drafter, plan = Aded(**options), Plan(*size)
    if has_corpus:
        drafter = with_corpus(drafter, [text_of(seed + 1, vocab)])
    text = text_of(seed, vocab)
    for end in range(3, len(text)):
        drafter.layer().nudge(text[max(0, end - 16) : end])
    fast, plain = (sequence(text, 10, SeededDice(seed)) for _ in range(2))
    ours = drafter.propose([fast], [plan], [fast.dice])[0]
    oracle = grow([plain], [plan], [plain.dice], MemorySource(drafter), drafter.grower)[0]
    assert ours.tokens.tolist() == oracle.tokens.tolist()
    assert ours.parents.tolist() == oracle.parents.tolist()
    assert fast.dice.uniform() == plain.dice.uniform()  # both used as many


def with_corpus(drafter: Aded, documents: list[list[int]]) -> Aded:
    """The drafter above counts of these documents."""
    base = drafter._new_layer()
    base.count([np.array(document, np.int32) for document in documents])
    drafter.base = base
    drafter._layers.clear()
    return drafter


def test_drafts_are_paths_of_the_matrix() -> None:
    drafter, text = Aded(), text_of(3, 5, 400)
    seq = sequence(text, 10, SeededDice(0))
    for end in range(3, len(text) + 1):
        drafter.layer().nudge(text[max(0, end - 16) : end])
    tree = drafter.propose([seq], [Plan(64)], [seq.dice])[0]
    assert len(tree) > 20
    for path in paths(tree):
        whole = [*text[-2:], *path]
        row = drafter.layer().row(*whole[-3:-1])
        assert row is not None and path[-1] in row.ids


def test_unknown_pairs_and_short_texts_draft_nothing() -> None:
    drafter = Aded()
    for tokens in ([1], [1, 2]):
        seq = sequence(tokens, 10, SeededDice(0))
        drafter.start(seq)
        assert len(drafter.propose([seq], [Plan()], [seq.dice])[0]) == 0
    seq = sequence([1, 2, 3, 1, 2], 10, SeededDice(0))
    drafter.start(seq)
    assert paths(drafter.propose([seq], [Plan(8, 2)], [seq.dice])[0]) == [(3,), (3, 1)]
    assert len(drafter.propose([seq], [Plan(0)], [seq.dice])[0]) == 0


def tau(drafter: Aded, text: list[int]) -> float:
    """tau where the target writes this text and no other."""
    recorder = Recorder()
    engine = Engine(
        FakeTarget(lambda tokens: np.eye(40)[text[len(tokens)]] * 0.9 + 0.0025, 40),
        drafter,
        registry.make("verifier", "recursive"),
        Given(Plan(16, 8)),
        listeners=[recorder],
    )
    seq = sequence(text[:2], len(text) - 9, SeededDice(0), Sampling(temperature=0))
    assert run_all(engine, [seq]) == (tuple(text[2:-7]),)
    return recorder.of(seq).tau


def test_the_same_text_twice_is_accepted_better() -> None:
    drafter, frozen, text = Aded(), Aded(increment=0.0), text_of(7, 40, 300)
    first, second = tau(drafter, text), tau(drafter, text)
    print(f"tau {first:.2f}, then {second:.2f}")
    assert first < 1.3 and second > 2.5
    assert tau(frozen, text) == tau(frozen, text) == 1.0


def test_updates_count_once_a_step_for_the_last_window() -> None:
    drafter = Aded(window=4)
    seq = sequence([5, 6, 7, 8, 9], 10, SeededDice(0))
    drafter.start(seq)
    matrix = drafter.layer()
    assert matrix.row(5, 6) is None and matrix.row(6, 7) and matrix.row(7, 8)
    assert matrix.learned == 1


def test_tenants_learn_apart_above_one_corpus() -> None:
    drafter = with_corpus(Aded(), [[1, 2, 3, 4]])
    for tenant, token in (("a", 5), ("b", 6)):
        seq = sequence([1, 2, token], 10, SeededDice(0))
        seq.tenant = tenant
        drafter.start(seq)
    rows = {tenant: set(drafter.layer(tenant).row(1, 2).ids.tolist()) for tenant in "abc"}
    assert rows == {"a": {3, 5}, "b": {3, 6}, "c": {3}}
    assert drafter.memory_report()["tri-gram corpus"] == drafter.base.nbytes


def test_idle_tenants_make_room() -> None:
    drafter = Aded(budget_mb=0.3)
    seqs: list[Sequence] = []
    for i in range(12):
        seq = sequence(text_of(i, 500), 10, SeededDice(i))
        seq.tenant = str(i)
        drafter.start(seq)
        seqs.append(seq)
        if i:
            drafter.finish(seq)
    assert sum(drafter.memory_report().values()) <= 0.3 * 2**20
    assert drafter.layer("0").learned == 1  # in use, so kept
    assert drafter.layer("1").learned == 0  # gone, and begun anew


def test_snapshots_go_around_and_merge() -> None:
    one, two = Aded(), Aded()
    for drafter, text in ((one, [1, 2, 3, 4]), (two, [1, 2, 4, 5])):
        drafter.start(sequence(text, 10, SeededDice(0)))
    both = Aded.merge([one.snapshot(), two.snapshot()])
    assert both.counts == {"tokens": 2, "evicted": 0, "rows": 3}
    third = Aded()
    third.restore(both)
    row = third.layer().row(1, 2)
    assert row is not None and row.ids.tolist() == [3, 4]
    small = Aded.merge([one.snapshot(), two.snapshot()], max_bytes=2 * 112)
    assert small.counts["rows"] == 2 and small.counts["evicted"] == 1
    with pytest.raises(ConfigError, match="entries=12"):
        Aded(entries=4).restore(both)
    with pytest.raises(ConfigError, match="learns nothing to save"):
        Aded(increment=0.0).snapshot()


def test_a_corpus_comes_from_files(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer, file = Tokenizer.load(tiny_folder), tmp_path / "text.txt"
    file.write_text("the cat sat on the mat and the cat sat on the log\n" * 3)
    drafter = registry.make("drafter", f"aded:corpus={file}", tokenizer=tokenizer)
    tail = tokenizer.encode("the cat sat on the", special=False)
    seq = sequence(tail, 10, SeededDice(0))
    assert len(drafter.propose([seq], [Plan()], [seq.dice])[0])
    drafter.save_corpus(tmp_path / "counts")
    again = registry.make("drafter", f"aded:matrix={tmp_path / 'counts'}", tokenizer=tokenizer)
    assert len(again.base) == len(drafter.base)
    with pytest.raises(ConfigError, match="not both"):
        Aded(corpus=(str(file),), matrix="counts", tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="no corpus to save"):
        Aded().save_corpus(tmp_path / "nothing")
    target = FakeTarget(LAW)
    with pytest.raises(ConfigError, match=r"holds token \d+, but the ids of this model end at 2"):
        drafter.bind(target)


@pytest.mark.parametrize("data", [b"", b"a", b"\n"])
def test_an_empty_corpus_is_refused(tiny_folder: Path, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "text.txt").write_bytes(data)
    with pytest.raises(DataError, match="the corpus is too small"):
        Aded(corpus=(str(tmp_path / "text.txt"),), tokenizer=Tokenizer.load(tiny_folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 2}, "window must be at least 3"),
        ({"increment": -1.0}, "increment at least 0"),
        ({"length": 1}, "a length of at least 2"),
        ({"iterations": 0}, "iterations and top from 1 to 10000"),
        ({"c2": 0.0}, "c2 > 0"),
        ({"c1": float("nan")}, "c1 >= 0"),
        ({"reward": "gold"}, "unknown reward .*; use one of constant, path, expected"),
        ({"drop": "all"}, "unknown drop .*; use one of longest, rarest"),
        ({"entries": 0}, "entries must be in"),
        ({"budget_mb": 0.001}, "raise the budget"),
    ],
)
def test_options_are_checked(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Aded(**options)


def test_other_growers_take_the_matrix_for_a_law() -> None:
    drafter = registry.make("drafter", "aded:grower=gumbel")
    assert drafter.labels == {"swor"}
    seq = sequence(text_of(1, 4, 60), 10, SeededDice(0))
    drafter.layer().nudge(seq.tokens)
    tree = drafter.propose([seq], [Plan(8)], [seq.dice])[0]
    assert len(tree) and tree.q(0).probs.sum() == pytest.approx(1.0)
    with pytest.raises(UnknownName):
        Aded(grower="no_such")
