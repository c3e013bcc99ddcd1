"""ADED (arXiv 2407.12021): a matrix counted in a corpus drafts, and adapts while it is used.

The embedded reasoner, greedy, 12 held-out problems, 16 nodes; the corpus is 100 training problems
with solutions, or as many stories. The sheet's check: (i) best-first expansion of the matrix, (ii)
the search, (iii) search and updates; and a corpus of another kind. Measured when written, tau:
(i) 2.16, (ii) 2.11, (iii) 2.19; stories without and with updates 1.02 and 1.55, of 2.11 - 1.02
that is half brought back. Drafting took 9 % of a pass, both on a busy machine.
The rows of the matrix and the trees of the search are compared with oracles in plain Python.
The paper's own figures (1.8 to 2.5 times faster, 7B to 33B models) need such models.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import forerun
from fakes import sequence
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Step, Verdict
from forerun.core.tree import EMPTY
from forerun.drafters.aded import Aded
from forerun.engine.stats import Stats
from forerun.growers.monte_carlo import MonteCarlo
from forerun.tasks.reasoning import ReasoningTask
from forerun.tasks.story import StoryTask

pytestmark = pytest.mark.paper

PROBLEMS, DOCUMENTS, NODES = 12, 100, 16
SETTINGS = {
    "(i) best first, no updates": ("problems", {"grower": "best_first", "increment": 0.0}),
    "(ii) search, no updates": ("problems", {"increment": 0.0}),
    "(iii) search and updates": ("problems", {}),
    "stories, no updates": ("stories", {"increment": 0.0}),
    "stories and updates": ("stories", {}),
}

Row = dict[int, float]


# The matrix


def nudged(rows: dict[tuple[int, int], Row], window: list[int]) -> None:
    """The sheet's update: + .04 for every tri-gram, at most 3; 12 entries, the smallest goes."""
    for a, b, c in zip(window, window[1:], window[2:], strict=False):
        row = rows.setdefault((a, b), {})
        if c not in row and len(row) == 12:
            del row[min(row, key=lambda t: (row[t], -t))]
        row[c] = float(np.float32(min(3.0, row.get(c, 0.0) + 0.04)))


def test_rows_are_counts_of_the_corpus_raised_by_what_is_generated(tmp_path: Path) -> None:
    """A corpus with 20 successors of one pair, then 100 steps of a text that repeats itself."""
    tokenizer, rng = forerun.load().tokenizer, np.random.default_rng(0)
    texts = [" ".join(rng.choice(list("abcd"), 60)) + f" x y {chr(97 + i)}" for i in range(20)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    drafter = Aded(corpus=(str(tmp_path / "corpus.jsonl"),), tokenizer=tokenizer)
    counts: dict[tuple[int, int], Counter[int]] = {}
    for text in texts:
        ids = tokenizer.encode(text)
        for a, b, c in zip(ids, ids[1:], ids[2:], strict=False):
            counts.setdefault((a, b), Counter())[c] += 1
    rows = {}
    for pair, row in counts.items():
        best = sorted(row, key=lambda t: (-row[t], t))[:12]
        rows[pair] = {t: float(np.float32(row[t] / row.total())) for t in best}
    assert max(map(len, counts.values())) > 12
    seq = sequence(tokenizer.encode(texts[3]), 10**6, SeededDice(0))
    drafter.start(seq)
    nudged(rows, seq.tokens[-16:])
    for i in range(100):
        emitted = tokenizer.encode(texts[i % 3][-12:] if i < 60 else "a b c")[: 1 + i % 4]
        seq.tokens += emitted
        drafter.observe(Step([seq], [Plan()], [EMPTY], [], [Verdict([], 0)], [emitted]))
        nudged(rows, seq.tokens[-16:])
    assert max(max(row.values()) for row in rows.values()) == 3.0
    for pair, row in rows.items():
        q = drafter.layer().row(*pair)
        found = dict(zip(q.ids.tolist(), q.probs.tolist(), strict=True))
        assert found.keys() == row.keys()
        assert all(abs(found[t] - row[t]) < 1e-5 for t in row)
    assert drafter.layer().row(10**6, 1) is None  # no back-off


# The search


def searched(
    rows: dict[tuple[int, int], Row],
    tail: tuple[int, ...],
    nodes: int,
    dice: SeededDice,
    c1: float = 32.0,
    is_rewarded: bool = True,
    *,
    c2: float = 8.0,
) -> list[tuple[int, ...]]:
    """Paths of the tree by the sheet: 150 iterations, 3 tokens, the 24 most visited paths."""
    visits, totals = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    prior: dict[tuple[int, ...], float] = {}

    def row(path: tuple[int, ...]) -> Row:
        known = rows.get((*tail, *path)[-2:], {})
        return dict(sorted(known.items(), key=lambda item: (-item[1], item[0])))

    def score(child: tuple[int, ...]) -> float:
        n, parent = visits[child], visits[child[:-1]]
        if not n:
            return math.inf
        explored = (c1 + math.log((parent + c2 + 1) / c2)) * math.sqrt(parent)
        return totals[child] / n + explored * prior[child] / (1 + n)

    for _ in range(150):
        path: tuple[int, ...] = ()
        while children.get(path) and len(path) < 3:
            path = max(children[path], key=score)
        if path not in children and len(path) < 3:
            children[path] = [(*path, token) for token in row(path)]
            prior |= dict(zip(children[path], row(path).values(), strict=True))
            path = children[path][0] if children[path] else path
        reward, rolled = 1 + sum(prior[path[:n]] for n in range(1, len(path) + 1)), path
        while len(rolled) < 3 and (known := row(rolled)):
            at = dice.choice(np.array(list(known.values())))
            reward += list(known.values())[at]
            rolled = (*rolled, list(known)[at])
        for n in range(len(path) + 1):
            visits[path[:n]] += 1
            totals[path[:n]] += reward if is_rewarded else 0
    best = sorted(
        (c for kids in children.values() for c in kids if visits[c]), key=lambda c: -visits[c]
    )
    ends = [(*path, *list(row(path))[:1]) for path in best[:24]]
    return list(dict.fromkeys([*best[:24], *ends]))[:nodes]


@pytest.mark.parametrize("c1", [0.0, 1.0, 32.0])
def test_trees_are_those_of_the_published_search(c1: float) -> None:
    """Random matrices over five tokens; without rewards, or without exploration, trees differ.

    The last value is the default.
    """
    differ, options = [0, 0], {} if c1 == 32 else {"c1": c1}
    for seed in range(12):
        rng, drafter = np.random.default_rng(seed), Aded(increment=0.5, **options)
        rows: dict[tuple[int, int], Row] = {}
        for _ in range(100):
            a, b, c = (int(t) for t in rng.integers(5, size=3))
            drafter.layer().nudge([a, b, c], increment := float(rng.integers(1, 5)) / 8, 3.0)
            row = rows.setdefault((a, b), {})
            row[c] = min(3.0, row.get(c, 0.0) + increment)
        tail = next(iter(rows))
        for nodes in (6, 16, 64):
            seq = sequence(tail, 9, SeededDice(seed))
            (tree,) = drafter.propose([seq], [Plan(nodes, 9)], [seq.dice])
            paths = {tuple(tree.path(node)) for node in range(len(tree))}
            assert paths == set(searched(rows, tail, nodes, SeededDice(seed), c1))
            others = ((0.0, True, 1e9), (c1, False, 8.0))  # without exploration, without rewards
            for i, (other, is_rewarded, c2) in enumerate(others):
                found = searched(rows, tail, nodes, SeededDice(seed), other, is_rewarded, c2=c2)
                differ[i] += set(found) != paths
    print("without exploration, without rewards, of 36 trees others:", differ)
    assert differ[0] > 3 and (differ[1] > 3 or c1 > 1)


def test_the_grower_alone_has_the_published_settings() -> None:
    """Its defaults are those of the drafter, which the trees above compare."""
    assert MonteCarlo().search == Aded().search.search


# Accepted length


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stats]:
    """Statistics by setting, on the same problems."""
    model, folder = forerun.load(), tmp_path_factory.mktemp("aded")
    train, story = ReasoningTask("train"), StoryTask(size=DOCUMENTS)
    solved = (train.example(i) for i in range(DOCUMENTS))
    corpora = {
        "problems": [e.prompt + e.reference for e in solved],
        "stories": [story.example(i).turns[0] for i in range(DOCUMENTS)],
    }
    for name, texts in corpora.items():
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), "utf-8")
    prompts = [ReasoningTask("heldout").example(i).prompt for i in range(PROBLEMS)]
    stats = {}
    for name, (corpus, options) in SETTINGS.items():
        drafter = Aded(
            corpus=(str(folder / f"{corpus}.jsonl"),), tokenizer=model.tokenizer, **options
        )
        results = model.generate(
            prompts,
            temperature=0,
            max_new_tokens=150,
            seed=1,
            drafter=drafter,
            controller=Fixed(nodes=NODES),
        )
        stats[name] = Stats()
        for result in results:
            stats[name].add(result.stats)
        print(f"{name}: tau {stats[name].tau:.2f}")
    return stats


def test_updates_help_and_the_search_is_about_best_first(found: dict[str, Stats]) -> None:
    first, search, updated = (found[name].tau for name in list(SETTINGS)[:3])
    assert updated > search
    assert search > 0.9 * first


def test_updates_bring_back_part_of_what_another_domain_loses(found: dict[str, Stats]) -> None:
    search, shifted, updated = (found[name].tau for name in [*SETTINGS][1:2] + [*SETTINGS][3:])
    print(f"lost {search - shifted:.2f}, brought back {updated - shifted:.2f}")
    assert search - shifted > 0.5
    assert updated - shifted > 0.25 * (search - shifted)


def test_the_search_costs_little_of_a_pass(found: dict[str, Stats]) -> None:
    """The sheet asks for a warning above 20 % of a pass: measured, said, and bounded loosely."""
    stats = found["(iii) search and updates"]
    share = stats.seconds["draft"] / stats.seconds["forward"]
    print(f"drafting {1e6 * stats.seconds['draft'] / stats.passes:.0f} us, {share:.0%} of a pass")
    assert share < 2  # the reasoner is small, and test machines are busy
