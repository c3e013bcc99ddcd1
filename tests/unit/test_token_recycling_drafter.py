"""Token Recycling: the published tree, what a step teaches, who shares, what is saved."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from fakes import FakeTarget, run_all, sequence, table_law
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.logits import TargetProbs
from forerun.core.records import Plan, Rows, Sequence, Step, Verdict
from forerun.core.sampling import Sampling
from forerun.core.tree import Tree, TreeBuilder, chain
from forerun.core.tree_template import DEFAULT, grid
from forerun.drafters.base import grow
from forerun.drafters.token_recycling import PUBLISHED, MatrixSource, TokenRecycling
from forerun.engine.engine import Engine
from forerun.engine.stats import Recorder
from forerun.errors import ConfigError, DataError
from forerun.growers.template import TopTemplate
from forerun.ngrams.tables.adjacency.cpu import UNKNOWN, Adjacency
from forerun.ngrams.tables.adjacency.gpu import TensorAdjacency

VOCAB = 40


def a_sequence(tokens: list[int], group: object = "g", tenant: str = "") -> Sequence:
    return Sequence(
        list(tokens),
        len(tokens),
        Sampling(),
        SeededDice(0),
        limit=10**6,
        group=group,
        tenant=tenant,
    )


def step_of(seq: Sequence, tree: Tree, nodes: list[int], logits: torch.Tensor, num: int = 99):
    """A step that accepted `nodes` and then token 1, cut to `num` tokens, already appended."""
    verdict = Verdict(nodes, 1)
    laws = TargetProbs(Rows(logits), seq, tree, ())
    emitted = verdict.tokens(tree)[:num]
    seq.tokens += emitted
    return Step([seq], [Plan()], [tree], [laws], [verdict], [emitted])


def top(logits: torch.Tensor, entries: int) -> list[list[int]]:
    return logits.topk(entries).indices.tolist()


def random_tree(rng: np.random.Generator, size: int, vocab: int) -> Tree:
    tree = TreeBuilder()
    for node in range(size):
        tree.add(int(rng.integers(vocab)), int(rng.integers(-1, node)) if node else -1)
    return tree.build()


def rows_of(drafter: TokenRecycling, seq: Sequence) -> np.ndarray:
    matrix = drafter.matrix(seq)
    assert matrix is not None
    return matrix.to_numpy()


# the tree


def test_the_published_tree() -> None:
    assert len(PUBLISHED) == 80
    assert Counter(map(len, PUBLISHED.places)) == {1: 8, 2: 21, 3: 25, 4: 15, 5: 8, 6: 3}
    by_rank = Counter(place[-1] for place in PUBLISHED.places)
    assert [by_rank[rank] for rank in range(8)] == [41, 13, 8, 5, 4, 3, 3, 3]
    assert {(0, 0, 0, 0, 0, 1), (1, 1, 0), (3, 0, 0, 0), (7, 0)} <= set(PUBLISHED.places)


def test_a_small_plan_takes_the_best_places() -> None:
    """A plan of N nodes gets the first N; by level, eight nodes would all be children of the root.

    `Template` refuses places before their parents or elder siblings.
    """
    assert PUBLISHED.places[:5] == ((0,), (0, 0), (0, 0, 0), (1,), (0, 0, 0, 0))
    assert PUBLISHED.first(8).depths.max() >= 4


# drafting


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_fast_paths_equal_the_plain_one(seed: int, tensors: bool) -> None:
    rng = np.random.default_rng(seed)
    template = ["published", "best_first", grid(3, 2, 1)][seed % 3]
    drafter = TokenRecycling(
        entries=int(rng.integers(1, 9)), template=template, tensors=tensors, scope="group"
    )
    seqs = [a_sequence([int(rng.integers(VOCAB))], group=i % 2) for i in range(6)]
    for seq in seqs[:2]:  # two groups, each with a matrix that knows half the tokens
        for _ in range(3):
            logits = torch.from_numpy(rng.normal(size=(9, VOCAB)).astype(np.float32))
            drafter.observe(step_of(seq, random_tree(rng, 8, VOCAB), [], logits))
    plans = [Plan(int(rng.integers(0, 100)), int(rng.integers(0, 8))) for _ in seqs]
    trees = drafter.propose(seqs, plans, [s.dice for s in seqs])
    for seq, plan, tree in zip(seqs, plans, trees, strict=True):
        plain = chain([])
        if not plan.is_empty:
            best = TopTemplate(template=drafter.template)
            (plain,) = grow([seq], [plan], [seq.dice], MatrixSource(drafter), best)
        assert tree.tokens.tolist() == plain.tokens.tolist()
        assert tree.parents.tolist() == plain.parents.tolist()
        assert tree.laws.tolist() == plain.laws.tolist()
        assert len(tree) <= plan.nodes and tree.depths.max(initial=0) <= plan.depth
    assert sum(map(len, trees)) > 0
    kind = TensorAdjacency if tensors else Adjacency
    assert isinstance(drafter.matrix(seqs[0]), kind)


def test_nothing_is_drafted_from_nothing() -> None:
    drafter, seq = TokenRecycling(), a_sequence([3])
    assert len(drafter.propose([seq], [Plan(80)], [seq.dice])[0]) == 0
    drafter.observe(step_of(seq, chain([]), [], torch.randn(1, VOCAB)))
    assert seq.tokens[-1] == 1  # not seen yet: zeros would be drafted as token 0
    assert len(drafter.propose([seq], [Plan(80)], [seq.dice])[0]) == 0


# learning


@pytest.mark.parametrize("seed", range(20))
def test_every_row_teaches_and_the_accepted_path_comes_last(seed: int) -> None:
    rng = np.random.default_rng([1, seed])
    drafter, seq = TokenRecycling(entries=5), a_sequence([int(rng.integers(12))])
    expected = np.full((VOCAB, 5), UNKNOWN)
    for _ in range(4):
        tree = random_tree(rng, 20, 12)
        node, path = int(rng.integers(-1, 20)), []
        while node >= 0:
            path.insert(0, node)
            node = int(tree.parents[node])
        logits = torch.from_numpy(rng.normal(size=(21, VOCAB)).astype(np.float32))
        order = sorted(range(20), key=lambda n: (tree.depths[n], n))
        for node in [*order, -1, *path]:  # the rule of the sheet, one row after the other
            token = seq.tokens[-1] if node < 0 else int(tree.tokens[node])
            expected[token] = top(logits[node + 1 : node + 2], 5)[0]
        drafter.observe(step_of(seq, tree, path, logits))
        assert (rows_of(drafter, seq) == expected).all()


def test_path_mode_learns_at_emitted_tokens_only() -> None:
    drafter, seq = TokenRecycling(entries=2, update_from="path"), a_sequence([9])
    logits = torch.randn(4, VOCAB)
    drafter.observe(step_of(seq, chain([4, 5, 6]), [0, 1], logits, num=2))
    matrix, best = rows_of(drafter, seq), top(logits, 2)
    assert matrix[9].tolist() == best[0] and matrix[4].tolist() == best[1]
    assert (matrix[[5, 6]] == UNKNOWN).all()  # 5 was cut off, 6 was rejected


def test_a_step_that_emitted_nothing_teaches_nothing() -> None:
    drafter, seq = TokenRecycling(), a_sequence([9])
    drafter.observe(step_of(seq, chain([4]), [0], torch.randn(2, VOCAB), num=0))
    assert drafter.matrix(seq) is None and drafter.memory_report() == {"adjacency matrix": 0}


def test_learns_the_models_logits_not_the_shaped_ones() -> None:
    """A matrix serves many requests; a ban of one of them is not for the next."""
    from forerun.constraints._penalties import Adjust

    drafter = TokenRecycling(entries=1)
    seq = sequence([9], 5, SeededDice(0), Sampling(banned_tokens=(7,)))
    shaper = Adjust()
    seq.states = (shaper.start(seq),)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 5.0
    laws = TargetProbs(Rows(logits), seq, chain([]), [shaper])
    assert laws[-1][7] == 0
    seq.tokens.append(3)
    drafter.observe(Step([seq], [Plan()], [chain([])], [laws], [Verdict([], 3)], [[3]]))
    assert rows_of(drafter, seq)[9].tolist() == [7]


def test_a_batch_drafts_before_it_learns_and_later_sequences_overwrite() -> None:
    drafter = TokenRecycling(entries=1)
    one, two = a_sequence([5]), a_sequence([5])
    logits = torch.eye(VOCAB)[[3, 8]]
    steps = [step_of(seq, chain([]), [], logits[i : i + 1]) for i, seq in enumerate((one, two))]
    names = ("seqs", "plans", "trees", "laws", "verdicts", "emitted")
    drafter.observe(Step(*(getattr(steps[0], n) + getattr(steps[1], n) for n in names)))
    assert rows_of(drafter, one)[5].tolist() == [8]


# exactness of greedy texts, whatever the matrix holds


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("is_garbage", [False, True])
def test_greedy_texts_are_plain_greedy_texts(is_garbage: bool, tensors: bool) -> None:
    law = table_law(3, vocab=VOCAB, order=1)
    texts, recorder = {}, Recorder()
    for name in ("none", "token_recycling"):
        options = {} if name == "none" else {"tensors": tensors}
        drafter = registry.make("drafter", name, **options)
        if is_garbage and name != "none":
            rng = np.random.default_rng(0)
            drafter.observe(
                step_of(a_sequence([0]), chain(range(VOCAB)), [], torch.randn(VOCAB + 1, VOCAB))
            )
            garbage = rng.integers(0, VOCAB, (VOCAB, 8)).astype(np.int32)
            drafter.matrix(a_sequence([0])).matrix[:] = (
                torch.from_numpy(garbage) if tensors else garbage
            )
        target = FakeTarget(law, VOCAB)
        verifier = registry.make("verifier", "speculative")
        engine = Engine(target, drafter, verifier, Fixed(nodes=80), listeners=[recorder])
        seqs = [sequence([1, 2], 80, SeededDice(0), Sampling(temperature=0), i) for i in range(2)]
        texts[name] = run_all(engine, seqs)
    assert texts["none"] == texts["token_recycling"]
    assert all(recorder.of(seq).tau >= 1 for seq in seqs)
    assert recorder.of(seqs[1]).tau > 3  # the second text repeats the first


# memory and sharing


@pytest.mark.parametrize("kind", [Adjacency, TensorAdjacency])
def test_memory(kind: type) -> None:
    assert kind(32_000, 8).nbytes == 32_000 * 8 * 4 < 2 * 10**6
    assert kind(128_256, 8).nbytes == 4_104_192


def taught(drafter: TokenRecycling, seq: Sequence) -> Sequence:
    """The sequence, after a step that taught token 9."""
    drafter.observe(step_of(seq, chain([]), [], torch.randn(1, VOCAB)))
    seq.tokens[-1] = 9
    return seq


@pytest.mark.parametrize(
    ("scope", "same_group", "other_group", "other_tenant"),
    [
        ("request", False, False, False),
        ("group", True, False, False),
        ("tenant", True, True, False),
        ("global", True, True, True),
    ],
)
def test_who_shares(scope: str, same_group: bool, other_group: bool, other_tenant: bool) -> None:
    drafter = TokenRecycling(scope=scope)
    first = taught(drafter, a_sequence([9], "a", "x"))
    others = [("a", "x", same_group), ("b", "x", other_group), ("c", "y", other_tenant)]
    for group, tenant, shares in others:
        other = a_sequence([9], group, tenant)
        assert bool(len(drafter.propose([other], [Plan()], [other.dice])[0])) == shares
    assert len(drafter.propose([first], [Plan()], [first.dice])[0])
    drafter.finish(first)
    drafter.forget("a")
    stays = scope in ("tenant", "global")
    assert bool(drafter.memory_report()["adjacency matrix"]) == stays


def test_matrices_keep_to_the_budget() -> None:
    size = VOCAB * 8 * 4
    drafter = TokenRecycling(scope="group", budget_mb=3.5 * size / 2**20)
    running = a_sequence([9], "running")
    for group in range(6):
        taught(drafter, running)
        taught(drafter, a_sequence([9], group))
        assert drafter.memory_report()["adjacency matrix"] <= 3 * size
    assert drafter.matrix(running) is not None and drafter.matrix(a_sequence([9], 5)) is not None
    assert drafter.matrix(a_sequence([9], 0)) is None


def test_a_matrix_belongs_to_a_target() -> None:
    drafter, law = TokenRecycling(), table_law(0, vocab=VOCAB)
    targets = [FakeTarget(law, VOCAB), FakeTarget(law, VOCAB)]
    drafter.bind(targets[0])
    seq = taught(drafter, a_sequence([9]))
    drafter.bind(targets[0])
    assert drafter.matrix(seq) is not None
    drafter.bind(targets[1])
    assert drafter.matrix(seq) is None


# saving


def test_what_was_learned_is_saved_and_restored() -> None:
    drafter, fresh = TokenRecycling(), TokenRecycling(tensors=True)
    seq = taught(drafter, a_sequence([9], tenant="x"))
    saved = drafter.snapshot("x")
    assert saved.settings == {"vocab": VOCAB, "entries": 8} and saved.counts == {"tokens": 1}
    fresh.restore(saved, "x")
    plan = [Plan(8, 1)]
    assert (
        fresh.propose([seq], plan, [seq.dice])[0].tokens.tolist()
        == drafter.propose([seq], plan, [seq.dice])[0].tokens.tolist()
        != []
    )
    before = rows_of(fresh, seq)[9].tolist()
    fresh.observe(step_of(a_sequence([4], tenant="x"), chain([]), [], torch.randn(1, VOCAB)))
    assert isinstance(fresh.matrix(seq), TensorAdjacency)  # moved to where the logits are
    assert rows_of(fresh, seq)[9].tolist() == before
    assert fresh.snapshot("x").counts == {"tokens": 2}
    with pytest.raises(ConfigError, match="nothing to save"):
        drafter.snapshot("y")


def test_merging_prefers_the_later_and_keeps_the_rest() -> None:
    first, second = TokenRecycling(entries=1), TokenRecycling(entries=1)
    for drafter, tokens, best in ((first, [4, 5], 7), (second, [5, 6], 8)):
        logits = torch.eye(VOCAB)[[best]].expand(3, -1)
        drafter.observe(step_of(a_sequence([0]), chain(tokens), [], logits))
    merged = TokenRecycling.merge([first.snapshot(), second.snapshot()])
    assert merged.arrays["successors"][[4, 5, 6, 9]].ravel().tolist() == [7, 8, 8, UNKNOWN]
    assert merged.counts == {"tokens": 4}  # 0, 4, 5 and 6
    TokenRecycling(entries=1).restore(merged)
    with pytest.raises(ConfigError, match="expected at least 160 bytes"):
        TokenRecycling.merge([merged], max_bytes=100)


def test_what_does_not_fit_is_refused() -> None:
    drafter = TokenRecycling()
    taught(drafter, a_sequence([9]))
    saved = drafter.snapshot()
    with pytest.raises(ConfigError, match="entries=8"):
        TokenRecycling(entries=4).restore(saved)
    other = TokenRecycling()
    target = FakeTarget(table_law(0), 3)
    other.bind(target)
    with pytest.raises(ConfigError, match="vocab=40"):
        other.restore(saved)
    for scope, tenant in (("request", ""), ("group", ""), ("global", "x")):
        with pytest.raises(ConfigError, match="use token_recycling:scope=tenant"):
            TokenRecycling(scope=scope).keep(tenant)
    TokenRecycling(scope="global").keep()


# options


def test_templates(tmp_path: Path) -> None:
    grid(2, 1).save(tmp_path / "own.json")
    assert TokenRecycling().template is PUBLISHED
    assert TokenRecycling(template="best_first").template is DEFAULT
    assert TokenRecycling(template=tmp_path / "own.json").template == grid(2, 1)
    made = registry.make("drafter", f"token_recycling:template={tmp_path / 'own.json'},entries=3")
    assert made.template == grid(2, 1)
    with pytest.raises(DataError, match="not a template"):
        TokenRecycling(template=str(tmp_path / "absent.json"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "all"}, "scope must be one of"),
        ({"update_from": "root"}, "update_from must be one of"),
        ({"entries": 0}, r"entries must be in 1\.\.256, got 0"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenRecycling(**options)


def test_a_budget_below_one_matrix_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise budget_mb or use fewer entries"):
        TokenRecycling(budget_mb=0.001).bind(FakeTarget(table_law(0), VOCAB))
