"""Token Recycling (arXiv 2408.08696): tau between 2 and 3.5 on 80 nodes, from any start, any task.

The embedded reasoner on held-out problems, greedy, 80 nodes. The paper's tables: tau 2.70 on
Spec-Bench and 2.93 on MBPP (7B, greedy), 1.64 for lookahead and 1.75 for prompt lookup; a matrix
kept over requests; no gain from more trajectories (2.76 with 4, 2.77 with 16, STAND's table).
Measured when written: tau 2.75 whole, 2.16 with an empty matrix for each request, 1.96 when only
the path teaches, 1.56 with one successor per token; first and second four prompts 2.51 and 3.01;
levels 1, 3, 5: 2.59, 3.14, 3.17; trajectories 1-4 and 5-8: 3.01 and 3.04; lookahead 1.87, prompt
lookup 1.41.
The tree and the matrix are compared with an oracle, step by step.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import forerun
from fakes import FakeTarget, run_all, sequence, table_law
from forerun import registry
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Snapshot, Step
from forerun.core.sampling import Sampling
from forerun.drafters.token_recycling import PUBLISHED, TokenRecycling
from forerun.engine.engine import Engine
from forerun.engine.stats import Stats
from forerun.ngrams.tables.adjacency.pool import snapshot
from forerun.tasks.reasoning import ReasoningTask

pytestmark = pytest.mark.paper

REASONER = Path(forerun.__file__).parent / "assets" / "reasoner"
LENGTH = 120


@pytest.fixture(scope="module")
def model() -> forerun.Model:
    if not REASONER.is_dir():
        pytest.skip("the embedded reasoner is not built here; `forerun train reasoner` makes it")
    return forerun.load("reasoner")


def prompts(*levels: int, count: int = 8, first: int = 0) -> list[str]:
    task = ReasoningTask("heldout", levels=levels)
    return [task.example(i).prompt for i in range(first, first + count)]


def run(model, drafter, texts, nodes: int = 80, **sampling) -> tuple[list[list[int]], list[Stats]]:
    """Token lists and statistics of all samples; a `fresh` drafter has an empty matrix."""
    given = {"temperature": 0.0, "max_new_tokens": LENGTH, "seed": 5, **sampling}
    results = model.generate(
        texts, drafter=drafter, controller=f"fixed:nodes={nodes}", batch=1, **given
    )
    samples = [sample for result in results for sample in result.samples]
    return [sample.tokens for sample in samples], [sample.stats for sample in samples]


def tau(stats: list[Stats]) -> float:
    total = Stats()
    for one in stats:
        total.add(one)
    return total.tau


def fresh(spec: str):
    return forerun.registry.make("drafter", spec)


@pytest.fixture(scope="module")
def greedy(model) -> dict[str, list[Stats]]:
    specs = {
        "whole": "token_recycling",
        "cold": "token_recycling:scope=request",
        "path": "token_recycling:update_from=path",
        "chain": "token_recycling:entries=1",
    }
    texts = prompts(1, 2, 3, 4)
    return {name: run(model, fresh(spec), texts)[1] for name, spec in specs.items()}


# The method by its definition


class Oracle:
    """Matrix and tree of the sheet in plain Python, checked against every step of a run."""

    def __init__(self, drafter: TokenRecycling, vocab: int) -> None:
        self.drafter, self.law = drafter, table_law(2, vocab)
        self.rows: dict[int, list[int]] = {}
        self.largest = self.rejected = self.conflicts = 0

    def tree(self, root: int, plan: Plan) -> dict[tuple[int, ...], int]:
        """Place -> token, by breadth first look-ups."""
        found = {(): root}
        for place in sorted(PUBLISHED.places[: plan.nodes], key=lambda place: (len(place), place)):
            row = self.rows.get(found.get(place[:-1], -1), [])
            if place[-1] < len(row) and len(place) <= plan.depth:
                found[place] = row[place[-1]]
        return found

    def top(self, tokens: list[int]) -> list[int]:
        """The eight likeliest next tokens."""
        law = self.law(tokens)
        return sorted(range(len(law)), key=lambda token: (-law[token], token))[:8]

    def __call__(self, step: Step) -> None:
        (seq,), (tree,), (verdict,) = step.seqs, step.trees, step.verdicts
        text = seq.tokens[: step.start(0)]
        drafted = self.tree(text[-1], step.plans[0])
        paths = [tuple(drafted[p[:n]] for n in range(1, len(p) + 1)) for p in drafted if p]
        assert Counter(tuple(tree.path(node)) for node in range(len(tree))) == Counter(paths)
        by_depth = sorted(range(len(tree)), key=lambda node: (tree.depths[node], node))
        tokens = tree.tokens.tolist()
        self.conflicts += len(tokens) - len(set(tokens))
        for node in (*by_depth, -1, *verdict.nodes):
            token = text[-1] if node < 0 else tokens[node]
            self.rows[token] = self.top([*text, *tree.path(node)])
        self.largest = max(self.largest, len(tree))
        self.rejected += len(tree) - len(verdict.nodes)


def test_every_step_is_that_of_the_oracle() -> None:
    """Two requests after each other: the second starts with the matrix of the first."""
    vocab, drafter = 24, TokenRecycling()
    oracle = Oracle(drafter, vocab)
    target = FakeTarget(oracle.law, vocab)
    verifier = registry.make("verifier", "speculative")
    engine = Engine(target, drafter, verifier, Fixed(nodes=80, depth=9), listeners=[oracle])
    for temperature, group in ((0.0, "a"), (1.0, "b")):
        seq = sequence([1, 2], 120, SeededDice(4), Sampling(temperature=temperature))
        seq.group = group
        run_all(engine, [seq])
        matrix = drafter.matrix(seq).to_numpy()
        for token in range(vocab):
            known = oracle.rows.get(token, [-1] * 8)
            assert matrix[token].tolist() == known
    assert oracle.largest == 80 and oracle.rejected > 1000 and oracle.conflicts > 1000


def test_the_published_tree() -> None:
    by_level = Counter(map(len, PUBLISHED.places))
    assert [by_level[level] for level in range(1, 7)] == [8, 21, 25, 15, 8, 3]
    by_rank = Counter(place[-1] for place in PUBLISHED.places)
    assert [by_rank[rank] for rank in range(8)] == [41, 13, 8, 5, 4, 3, 3, 3]
    assert {(0, 0, 0, 0, 0, 1), (1, 1, 0), (3, 0, 0, 0), (7, 0)} <= set(PUBLISHED.places)


def test_the_hand_made_matrix_of_the_sheet() -> None:
    drafter, seq = TokenRecycling(entries=2), sequence([1], 9, SeededDice(0))
    drafter.restore(snapshot_of({1: [2, 3], 2: [4, 5], 3: [0, 1]}, vocab=6))
    (tree,) = drafter.propose([seq], [Plan(80, 2)], [seq.dice])
    assert tree.tokens.tolist()[:5] == [2, 3, 4, 5, 0]
    assert tree.parents.tolist()[:5] == [-1, -1, 0, 0, 1]


def snapshot_of(rows: dict[int, list[int]], vocab: int) -> Snapshot:
    """A saved matrix with these rows."""
    width = len(next(iter(rows.values())))
    matrix = np.full((vocab, width), -1, np.int32)
    for token, row in rows.items():
        matrix[token] = row
    return snapshot("token_recycling", matrix)


# Accepted length


def test_greedy_texts_are_those_of_plain_decoding(model) -> None:
    exact = forerun.load("reasoner", dtype="fp32")
    texts = prompts(1, 2, 3, count=3)
    plain, stats = run(exact, fresh("none"), texts, max_new_tokens=60)
    assert tau(stats) == 1.0
    assert run(exact, fresh("token_recycling"), texts, max_new_tokens=60)[0] == plain


def test_accepted_length_and_what_it_owes_to_what(greedy) -> None:
    """Hot above cold; all rows above the path's; eight successors above one."""
    taus = {name: tau(stats) for name, stats in greedy.items()}
    print({name: round(value, 2) for name, value in taus.items()})
    assert 2.0 < taus["whole"] < 3.5
    assert taus["whole"] > 1.15 * taus["cold"]
    assert taus["whole"] > 1.15 * taus["path"]
    assert taus["whole"] > 1.3 * taus["chain"] > 1.3


def test_a_matrix_is_warm_after_a_few_requests(greedy) -> None:
    halves = [tau(part) for part in np.array_split(np.array(greedy["whole"]), 2)]
    print("first and second half of the prompts:", np.round(halves, 2))
    assert halves[1] > halves[0] > 1.5


@pytest.mark.slow
def test_easy_and_hard_problems_gain_alike(model) -> None:
    """The paper's tasks lie within 1.8 to 2.4 of each other; here the levels of one task."""
    drafter = fresh("token_recycling")
    run(model, drafter, prompts(1, 2, 3, 4))
    taus = [tau(run(model, drafter, prompts(level, count=5, first=100))[1]) for level in (1, 3, 5)]
    print("levels 1, 3, 5:", np.round(taus, 2))
    assert max(taus) / min(taus) < 1.3


@pytest.mark.slow
def test_more_trajectories_are_no_gain(model) -> None:
    """The successors of one token are soon known: unlike STAND's, they do not grow with context."""
    drafter = fresh("token_recycling")
    run(model, drafter, prompts(1, 2, 3, 4))
    _, stats = run(model, drafter, prompts(3, count=2), temperature=0.6, n=8)
    by_index = [tau([stats[k], stats[8 + k]]) for k in range(8)]
    first, last = np.mean(by_index[:4]), np.mean(by_index[4:])
    print(f"trajectories 1-4: {first:.2f}, 5-8: {last:.2f}")
    assert abs(last / first - 1) < 0.15 and first > 1.8


def test_it_beats_the_others_without_a_model(model, greedy) -> None:
    """The order of the paper's table."""
    texts = prompts(1, 2, 3, 4)
    others = {"lookahead": 55, "prompt_lookup": 10}
    taus = {name: tau(run(model, fresh(name), texts, n)[1]) for name, n in others.items()}
    taus["token_recycling"] = tau(greedy["whole"])
    print({name: round(value, 2) for name, value in taus.items()})
    assert taus["token_recycling"] > 1.2 * max(taus["lookahead"], taus["prompt_lookup"])
