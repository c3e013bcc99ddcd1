"""A drafter that learns from a whole step at once, beside one that learns row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forerun.core.dice import SeededDice
from forerun.core.logits import TargetProbs
from forerun.core.records import Plan, Rows, Sequence, Step, Verdict
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY, Tree, TreeBuilder
from forerun.drafters.stand import Stand
from forerun.ngrams.tables.logits import draft_dynamic
from forerun.ngrams.tables.logits.top_k import BLOCK, select_top
from forerun.ngrams.tables.logits.top_probs import top_probs


class OneByOne(Stand):
    """Learns by definition: each sequence of each step alone, by `LogitMemory.learn`."""

    def observe(self, step: Step) -> None:
        for i, seq in enumerate(step.seqs):
            if nodes := step.visited(i):
                self.learn(seq, step.start(i), step.trees[i], nodes, step.laws[i])

    def learn(
        self, seq: Sequence, start: int, tree: Tree, nodes: list[int], laws: TargetProbs
    ) -> None:
        memory = self.memory(seq)
        ids = np.zeros((len(nodes), self.entries), np.int32)
        probs = np.zeros((len(nodes), self.entries), np.float32)
        for i, node in enumerate(nodes):
            if self._learns_model(seq):
                ids[i : i + 1], probs[i : i + 1] = top_probs([laws.logits(node)], self.entries)
            else:
                select_top(laws[node], ids[i], probs[i])
        self._memories.enlarge(memory, len(nodes))
        root = memory.context(seq.tokens[:start])
        memory.learn(root, tree, np.array(nodes, np.int32), ids, probs)


class Text:
    """Steps of a batch of sequences with random trees, laws, accepted paths and ends."""

    def __init__(self, seed: int, vocab: int, *, num: int = 6, groups: int = 2) -> None:
        self.rng, self.vocab = np.random.default_rng(seed), vocab
        self.seqs = [self.sequence(i, groups) for i in range(num)]

    def sequence(self, i: int, groups: int) -> Sequence:
        tokens = self.rng.integers(0, self.vocab, self.rng.integers(1, 7)).tolist()
        sampling = Sampling(
            temperature=float(self.rng.choice([0.0, 0.6, 1.0])), top_p=1.0 if i % 2 else 0.9
        )
        group = int(self.rng.integers(groups + 1)) or None
        return Sequence(tokens, len(tokens), sampling, SeededDice(i), limit=9**9, group=group)

    def step(self, *, drafts: bool) -> Step:
        """One step of some of the sequences, in an order of its own."""
        some = self.rng.permutation(len(self.seqs))[: self.rng.integers(1, len(self.seqs) + 1)]
        seqs = [self.seqs[i] for i in some]
        trees = [self.tree() if drafts and self.rng.random() < 0.7 else EMPTY for _ in seqs]
        verdicts = [self.verdict(tree) for tree in trees]
        laws = [self.laws(seq, tree) for seq, tree in zip(seqs, trees, strict=True)]
        starts = [len(seq.tokens) for seq in seqs]
        emitted = []
        for seq, tree, verdict in zip(seqs, trees, verdicts, strict=True):
            tokens = verdict.tokens(tree)
            if self.rng.random() < 0.1:  # a stop cuts them
                tokens = tokens[: self.rng.integers(len(tokens) + 1)]
            seq.tokens += tokens
            emitted.append(tokens)
        plans = [Plan()] * len(seqs)
        return Step(seqs, plans, trees, laws, verdicts, emitted, starts=starts)

    def laws(self, seq: Sequence, tree: Tree) -> TargetProbs:
        logits = self.rng.normal(size=(len(tree) + 1, self.vocab)).astype(np.float32) * 3
        return TargetProbs(Rows(logits), seq, tree, ())

    def tree(self) -> Tree:
        builder = TreeBuilder()
        for node in range(int(self.rng.integers(1, 12))):
            builder.add(int(self.rng.integers(self.vocab)), int(self.rng.integers(-1, node)))
        return builder.build()

    def verdict(self, tree: Tree) -> Verdict:
        path: list[int] = []
        while self.rng.random() < 0.8:
            children = list(tree.children(path[-1] if path else -1))
            if not children:
                break
            path.append(int(self.rng.choice(children)))
        return Verdict(path, int(self.rng.integers(self.vocab)))


def contents(drafter: Stand) -> dict[Any, Any]:
    """All that the memories of a drafter hold."""
    found = {}
    for key, memory in drafter._memories._pool._memories.items():
        facts = len(memory), len(memory.table.keys), memory.observed, memory.evicted
        found[key] = facts, memory.rows(), memory.table
    return found


def assert_equal(ours: Stand, theirs: Stand) -> None:
    """Bit for bit, slot for slot."""
    one, two = contents(ours), contents(theirs)
    assert set(one) == set(two) and one
    for key, (facts, rows, table) in one.items():
        other = two[key]
        assert facts == other[0]
        held = table.keys != 0
        np.testing.assert_array_equal(table.keys, other[2].keys)
        for mine, its in zip(rows, other[1], strict=True):
            np.testing.assert_array_equal(mine, its)
        for mine, its in zip(table, other[2], strict=True):
            np.testing.assert_array_equal(mine[held], its[held])


CASES = [
    {"scope": "group", "entries": 1, "context": (32, 7, 2)},
    {"scope": "group"},
    {"scope": "request", "context": (3, 1), "entries": 256},
    {"scope": "tenant"},
    {"scope": "global", "entries": 3, "store": "processed"},
]


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("vocab", [5, 300])
def test_a_batch_teaches_as_its_rows_one_by_one_do(options: dict, vocab: int) -> None:
    for seed in range(4):
        ours, theirs, text = Stand(**options), OneByOne(**options), Text(seed, vocab)
        for _ in range(25):
            step = text.step(drafts=True)
            ours.observe(step)
            theirs.observe(step)
        assert_equal(ours, theirs)


@pytest.mark.parametrize("scope", ["group", "request", "tenant", "global"])
def test_a_full_memory_evicts_between_the_same_lessons(scope: str) -> None:
    evicted = 0
    for seed in range(4):
        options = {"scope": scope, "entries": 2, "budget_mb": 0.005}
        ours, theirs = Stand(**options), OneByOne(**options)
        text = Text(seed, 60, num=4, groups=1)
        for seq in text.seqs:
            ours.start(seq)
            theirs.start(seq)
        for _ in range(60):
            step = text.step(drafts=True)
            ours.observe(step)
            theirs.observe(step)
        evicted += sum(memory.evicted for memory in ours._memories._pool._memories.values())
        assert_equal(ours, theirs)
    assert evicted > 100


def test_laws_of_several_vocabularies() -> None:
    """Shorter and longer than a block, fewer blocks than entries and more."""
    for vocab in (BLOCK - 1, 3 * BLOCK, 9 * BLOCK + 1):
        ours, theirs = Stand(entries=4), OneByOne(entries=4)
        text = Text(0, vocab, num=5)
        steps = [text.step(drafts=False) for _ in range(3)]
        kinds = {seq.sampling.is_greedy for step in steps for seq in step.seqs}
        assert kinds == {True, False}
        for step in steps:
            ours.observe(step)
            theirs.observe(step)
        assert_equal(ours, theirs)


def spans(room: np.ndarray, parts: tuple[np.ndarray, ...]) -> list[tuple[int, int]]:
    """Where arrays lie in `room`, in bytes, as they come there."""
    starts = [part.ctypes.data - room.ctypes.data for part in parts]
    return sorted((at, at + part.nbytes) for at, part in zip(starts, parts, strict=True))


@pytest.mark.parametrize("entries", [1, 2, 7, 10, 256])
@pytest.mark.parametrize("longest", [1, 2, 3, 4, 31, 32])
def test_room_is_laid_out_without_overlaps(entries: int, longest: int) -> None:
    for nodes in (0, 1, 2, 33):
        room = draft_dynamic.new_workspace(nodes, entries, longest)
        assert_apart(room, draft_dynamic.split_workspace.py_func(room, nodes, entries, longest))


def assert_apart(room: np.ndarray, parts: tuple[np.ndarray, ...]) -> None:
    found = spans(room, parts)
    assert found[0][0] >= 0 and found[-1][1] <= room.nbytes
    assert all(end <= start for (_, end), (start, _) in zip(found, found[1:], strict=False))


def test_nothing_to_learn() -> None:
    drafter, text = Stand(), Text(0, 9, num=1)
    step = text.step(drafts=False)
    seq = step.seqs[0]
    nothing = Step([seq], step.plans, [EMPTY], step.laws, step.verdicts, [[]], starts=step.starts)
    drafter.observe(nothing)
    assert drafter.memory(seq).observed == 0 and len(drafter.memory(seq)) == 0
