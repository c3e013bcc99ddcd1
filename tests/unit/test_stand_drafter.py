"""STAND: the fast path against the plain one, what it learns, who shares a memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fakes import PlainDice
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence, Step, Verdict
from forerun.core.sampling import Sampling
from forerun.core.tree import POINT, SWOR, Tree, chain
from forerun.core.tree_template import grid
from forerun.drafters.stand import Stand
from forerun.errors import ConfigError, DataError
from forerun.ngrams.tables.logits.table import LogitMemory, warm_up

ARRAYS = ("tokens", "parents", "laws", "rows", "starts", "q_ids", "q_probs")


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    warm_up()


def sequence(
    tokens: list[int], seed: int = 0, group: object = 0, index: int = 0, **sampling: float
) -> Sequence:
    return Sequence(
        list(tokens),
        len(tokens),
        Sampling(**sampling),
        SeededDice(seed),
        limit=10**9,
        group=group,
        index=index,
    )


def fill(memory: LogitMemory, rng: np.random.Generator, vocab: int, updates: int = 60) -> None:
    """Random truncated laws after random contexts."""
    for _ in range(updates):
        size = int(rng.integers(1, vocab + 1))
        probs = rng.dirichlet(np.full(size, 0.5)) * rng.uniform(0.3, 1)
        context = rng.integers(0, vocab, rng.integers(1, 6)).tolist()
        memory.update(context, rng.choice(vocab, size, replace=False), probs)


class PlainLaws(dict):
    """Laws from two dicts: as sampled from, and at temperature 1."""

    top_entries = None  # they lie on the host

    def __init__(self, processed: dict, model: dict | None = None) -> None:
        super().__init__(processed)
        self.model = model or {}

    def logits(self, node: int) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.log(self.model[node])

    def at(self, nodes: list[int]) -> list[np.ndarray]:
        return [self[node] for node in nodes]


def step_of(seq: Sequence, tree: Tree, verdict: Verdict, laws: PlainLaws, num: int = 99) -> Step:
    """A step whose tokens, cut to `num`, have just been appended to the sequence."""
    emitted = verdict.tokens(tree)[:num]
    seq.tokens += emitted
    return Step([seq], [Plan()], [tree], [laws], [verdict], [emitted])


def law_of(drafter: Stand, seq: Sequence, tokens: list[int]) -> dict[int, float] | None:
    q = drafter.memory(seq).lookup(tokens)
    return None if q is None else dict(zip(q.ids.tolist(), q.probs.tolist(), strict=True))


# the fast path


def random_case(seed: int) -> tuple[Stand, Sequence, Plan]:
    """A drafter with a random memory, a sequence and a plan, over all options that matter."""
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(3, 30))
    drafter = Stand(
        entries=int(rng.integers(1, 11)),
        context=int(rng.integers(1, 5)),
        store=["auto", "model"][seed // 4 % 2],
        scope=["group", "tenant", "global"][seed // 8 % 3],
        choice="top" if seed % 7 == 0 else "sampled",
    )
    seq = sequence(
        rng.integers(0, vocab, rng.integers(1, 6)).tolist(),
        seed,
        temperature=[1.0, 0.6, 0.0, 2.0][seed % 4],
        top_p=0.8 if seed % 3 == 0 else 1.0,
        top_k=3 if seed % 5 == 0 else 0,
        min_p=0.05 if seed % 11 == 0 else 0.0,
    )
    memory = drafter.memory(seq)
    if memory.fallback is None:
        fill(memory, rng, vocab)
    else:
        fill(memory, rng, vocab, 20)
        fill(memory.fallback, rng, vocab)
    return drafter, seq, Plan(nodes=int(rng.integers(1, 100)), depth=int(rng.integers(1, 9)))


def test_fast_path_equals_plain_path() -> None:
    sizes = []
    for seed in range(200):
        drafter, seq, plan = random_case(seed)
        twin = SeededDice(seed)
        fast = drafter.propose([seq], [plan], [seq.dice])[0]
        (plain,) = drafter.propose([seq], [plan], [PlainDice(twin)])
        for name in ARRAYS:
            ours, theirs = getattr(fast, name), getattr(plain, name)
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs, err_msg=f"{name}, seed {seed}")
        assert seq.dice.uniform() == twin.uniform()  # as many uniforms were used
        sizes.append(len(fast))
    assert np.mean(sizes) > 10


def test_trees_are_well_formed() -> None:
    for seed in range(60):
        drafter, seq, plan = random_case(seed)
        tree = drafter.propose([seq], [plan], [seq.dice])[0]
        assert len(tree) <= plan.nodes
        assert np.all(tree.parents < np.arange(len(tree)))
        assert np.all(tree.depths <= plan.depth)
        for node in range(-1, len(tree)):
            tokens = [int(tree.tokens[child]) for child in tree.children(node)]
            assert len(set(tokens)) == len(tokens)  # without replacement
        for node in range(len(tree)):
            above, at = set(), node
            while at >= 0:
                above.add(at)
                at = int(tree.parents[at])
            assert set(np.flatnonzero(tree.ancestors[node])) == above


def test_an_empty_plan_and_an_empty_memory_draft_nothing() -> None:
    drafter, seq = Stand(), sequence([1, 2])
    trees = drafter.propose([seq, seq], [Plan(nodes=0), Plan()], [seq.dice, seq.dice])
    assert [len(tree) for tree in trees] == [0, 0]
    assert seq.dice.uniform() == SeededDice(0).uniform()


def test_labels() -> None:
    for options, temperature, law in (
        ({}, 1.0, SWOR),
        ({}, 0.0, POINT),
        ({"choice": "top"}, 1.0, POINT),
    ):
        drafter = Stand(template=grid(2), **options)
        seq = sequence([1], temperature=temperature)
        drafter.memory(seq).update([1], [4, 7, 2], [0.2, 0.5, 0.3])
        tree = drafter.propose([seq], [Plan(nodes=3, depth=1)], [seq.dice])[0]
        assert tree.laws.tolist() == [law] * 2
        assert (tree.q(0) is None) == (law == POINT)
        if law == POINT:
            assert tree.tokens.tolist() == [7, 2]
    assert Stand().labels == {"swor", "point"} and Stand(choice="top").labels == {"point"}


# what it learns


def test_learns_each_emitted_position_once_from_its_own_law() -> None:
    drafter, seq = Stand(context=2), sequence([5])
    rows = {n: np.eye(9)[n + 1] * 0.5 + np.eye(9)[8] * 0.5 for n in range(-1, 3)}
    drafter.observe(step_of(seq, chain([6, 7, 3]), Verdict([0, 1], 1), PlainLaws(rows)))
    assert seq.tokens == [5, 6, 7, 1]
    assert law_of(drafter, seq, [5]) == {0: 0.5, 8: 0.5}
    assert law_of(drafter, seq, [5, 6]) == {1: 0.5, 8: 0.5}
    assert law_of(drafter, seq, [6, 7]) == {2: 0.5, 8: 0.5}
    assert law_of(drafter, seq, [7, 1]) is None  # the next root; learned when it is visited
    memory = drafter.memory(seq)
    assert memory.observed == 3 and memory.table.counts.max() == 1


def test_does_not_learn_beyond_the_end() -> None:
    drafter, seq = Stand(context=1), sequence([5])
    rows = {n: np.eye(9)[n + 1] for n in range(-1, 3)}
    drafter.observe(step_of(seq, chain([6, 7, 3]), Verdict([0, 1], 1), PlainLaws(rows), num=1))
    assert seq.tokens == [5, 6]
    assert law_of(drafter, seq, [5]) == {0: 1.0} and law_of(drafter, seq, [6]) is None
    drafter.observe(step_of(seq, chain([]), Verdict([], 1), PlainLaws(rows), num=0))
    assert drafter.memory(seq).observed == 1


@pytest.mark.parametrize(
    ("options", "temperature", "is_model"),
    [
        ({}, 0.5, False),
        ({}, 0.0, True),
        ({"store": "model"}, 0.5, True),
        ({"scope": "global"}, 0.5, True),
        ({"scope": "global", "store": "processed"}, 0.5, False),
        ({"scope": "request"}, 0.5, False),
    ],
)
def test_which_law_is_stored(options: dict, temperature: float, is_model: bool) -> None:
    drafter, seq = Stand(**options), sequence([5], temperature=temperature)
    laws = PlainLaws({-1: np.array([0.0, 1.0])}, {-1: np.array([0.75, 0.25])})
    drafter.observe(step_of(seq, chain([]), Verdict([], 1), laws))
    assert law_of(drafter, seq, [5]) == ({0: 0.75, 1: 0.25} if is_model else {1: 1.0})


def test_a_memory_of_the_model_is_tempered_for_each_request() -> None:
    drafter = Stand(scope="global")
    cool, hot = sequence([1], temperature=0.5), sequence([1], temperature=1.0)
    drafter.memory(cool).update([1], [0, 1], [0.75, 0.25])
    trees = drafter.propose([cool, hot], [Plan(nodes=1, depth=1)] * 2, [cool.dice, hot.dice])
    np.testing.assert_allclose(trees[0].q_probs, [0.9, 0.1], atol=1e-7)
    np.testing.assert_allclose(trees[1].q_probs, [0.75, 0.25], atol=1e-7)


def test_a_batch_drafts_before_it_learns() -> None:
    drafter = Stand(context=1)
    one, two = sequence([5], 1), sequence([5], 2)
    plans = [Plan(nodes=2, depth=2)] * 2
    assert [len(tree) for tree in drafter.propose([one, two], plans, [one.dice, two.dice])] == [
        0,
        0,
    ]
    laws = [PlainLaws({-1: np.eye(4)[0]}), PlainLaws({-1: np.eye(4)[1]})]
    for seq in (one, two):
        seq.tokens.append(2)
    empty, verdict = chain([]), Verdict([], 2)
    drafter.observe(Step([one, two], plans, [empty] * 2, laws, [verdict] * 2, [[2], [2]]))
    assert law_of(drafter, one, [5]) == {0: 0.5, 1: 0.5}


# who shares


def test_a_group_shares_and_its_memory_outlives_its_sequences() -> None:
    drafter = Stand()
    first, second, other = (
        sequence([1], group="a"),
        sequence([1], group="a"),
        sequence([1], group="b"),
    )
    drafter.start(first)
    drafter.memory(first).update([1], [2], [1.0])
    drafter.finish(first)
    drafter.start(second)
    assert law_of(drafter, second, [1]) == {2: 1.0}
    assert law_of(drafter, other, [1]) is None
    assert drafter.memory(second) is not drafter.memory(other)


def test_a_request_keeps_its_memory_to_itself() -> None:
    for drafter, group in ((Stand(scope="request"), "a"), (Stand(), None)):
        one, two = sequence([1], group=group), sequence([1], group=group)
        drafter.start(one)
        drafter.memory(one).update([1], [2], [1.0])
        assert law_of(drafter, two, [1]) is None
        drafter.finish(one)
        drafter.finish(two)  # a sequence that never ran may be cancelled
        assert drafter.memory_report() == {"logit memory": 0}


def test_a_global_memory_serves_everybody() -> None:
    drafter = Stand(scope="global")
    drafter.memory(sequence([1], group="a")).update([1], [2], [1.0])
    assert law_of(drafter, sequence([1], group="b"), [1]) == {2: 1.0}


@pytest.mark.parametrize("group", ["b", None])
def test_in_a_wide_scope_a_group_believes_itself_first(group: object) -> None:
    """At every length: what it taught, then what others did; both learn, and one goes with it."""
    drafter = Stand(scope="tenant", context=2)

    def says(seq: Sequence, token: int) -> None:
        laws = PlainLaws({}, {-1: np.eye(9)[token]})
        drafter.observe(step_of(seq, chain([]), Verdict([], token), laws))
        del seq.tokens[-1]

    other, mine = sequence([4, 1], group="a"), sequence([4, 1], group=group)
    drafter.start(other)
    drafter.start(mine)
    says(other, 2)
    assert law_of(drafter, mine, [4, 1]) == {2: 1.0}
    says(mine, 3)
    assert law_of(drafter, mine, [4, 1]) == law_of(drafter, mine, [7, 1]) == {3: 1.0}
    assert law_of(drafter, other, [4, 1]) == {2: 1.0}
    third = sequence([4, 1], group="c")
    assert law_of(drafter, third, [4, 1]) == {2: 0.5, 3: 0.5}
    mine.tokens[:] = [5, 1]
    says(other, 2)
    mine.tokens[:] = [4, 8]
    assert law_of(drafter, mine, [4, 8]) is None
    other.tokens[:] = [4, 8, 1]
    says(other, 6)  # a longer context of others goes before a shorter one of its own
    assert law_of(drafter, mine, [8, 1]) == {6: 1.0}
    drafter.finish(mine)
    drafter.forget("b")
    back = sequence([4, 1], group=group)
    assert drafter.memory(back).observed == 0 and drafter.memory(back).fallback.observed == 4
    assert drafter.memory(back).acceptance is drafter.memory(other).acceptance


def test_all_memories_together_keep_to_the_budget() -> None:
    """Idle groups go first, the least recently used first; then the running one forgets."""
    drafter = Stand(budget_mb=1, context=1)
    running = sequence([0], group="running")
    drafter.start(running)
    drafter.memory(running).update([1], [2], [1.0])
    for group in range(30):
        drafter.memory(sequence([0], group=group))
        assert drafter.memory_report()["logit memory"] <= 2**20
    assert law_of(drafter, running, [1]) == {2: 1.0}
    rows = PlainLaws({-1: np.eye(4)[1]})
    for token in range(20_000):
        running.tokens[-1] = token
        drafter.observe(step_of(running, chain([]), Verdict([], 1), rows))
        del running.tokens[1:]
    assert drafter.memory_report()["logit memory"] <= 2**20
    assert drafter.memory(running).evicted > 0
    assert law_of(drafter, running, [19_999]) == {1: 1.0}


def test_a_group_has_room_beside_a_wide_memory() -> None:
    drafter = Stand(scope="tenant", budget_mb=1, context=1)
    seqs = [sequence([0], group=group) for group in range(2)]
    for i, seq in enumerate(seqs):
        drafter.start(seq)
        for token in range(10_000 * i, 10_000 * (i + 1)):
            seq.tokens[-1] = token
            rows = PlainLaws({}, {-1: np.eye(4)[1]})
            drafter.observe(step_of(seq, chain([]), Verdict([], 1), rows))
            del seq.tokens[1:]
            assert drafter.memory_report()["logit memory"] <= 2**20
        memory = drafter.memory(seq)
        assert (
            len(memory.fallback) > len(memory) > 600 and memory.evicted and memory.fallback.evicted
        )
        assert len(memory.lookup([token]).ids) == 1
        drafter.finish(seq)


def test_bad_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scope must be one of"):
        Stand(scope="groups")
    with pytest.raises(ConfigError, match="raise the budget"):
        Stand(budget_mb=0.001)
    with pytest.raises(DataError, match="not a template"):
        Stand(template=str(tmp_path / "absent.json"))
    grid(2, 1).save(tmp_path / "t.json")
    assert Stand(template=str(tmp_path / "t.json")).template == grid(2, 1)
