"""Microseconds of drafting 64 nodes and of learning a step, for each drafter without a model.

    python benchmarks/draft_times.py [TEXT.gz ...] [--runs 120] [--temperature 1.0]

The history has a million tokens: words of the given files, as ids spread over a vocabulary of
128,256. Without files it follows Zipf's law, and half of it is repeated passages with changes. Each
drafter gets the history in its own way (`SETUPS`). Then all drafters continue the same unseen
passages in turn: a jump to a random place, three warm-up steps, five measured ones. A step is a
draft, then four accepted tokens and one more to learn. The logits favour what followed a token in
the history. They are written between drafting and learning, so that the caches hold them and not
the drafter.

Prints medians and 99th percentiles of one thread; "full" is the share of drafts with 63 nodes or
more. `prompt_lookup` reads the tokens of a step when it learns, `suffix` when it drafts.
"""

from __future__ import annotations

import gc
import gzip
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import scripts
import torch

from forerun import registry
from forerun.core.dice import SeededDice
from forerun.core.logits import TargetProbs
from forerun.core.mixins import parts_of
from forerun.core.records import Plan, Rows, Sequence, Step, Verdict
from forerun.core.roles import Drafter, name_of
from forerun.core.sampling import Sampling
from forerun.core.tree import EMPTY, Tree, chain
from forerun.drafters.rasd import graft
from forerun.drafters.token_recycling import MatrixSource
from forerun.ngrams.index.query.continuations import Continuations
from forerun.ngrams.index.query.datastore import in_memory
from forerun.ngrams.index.query.engine import Index
from forerun.ngrams.tables.adjacency import pool
from forerun.ngrams.tables.trigram.table import TrigramMatrix

VOCAB, PIECE, TOP = 128_256, 1000, 10
NODES, ACCEPTED, BEFORE, COUNTED = 64, 4, 3, 5
PROBS = 0.55 * 0.42 ** np.arange(TOP)  # what the logits say of a token's successors
PLAN = Plan(nodes=NODES, depth=NODES)
ROOM, WHOLE = "budget_mb=2048", 10**9


@dataclass
class Setup:
    """A drafter, its options, and how much of the history its own sequence holds."""

    spec: str
    own: int = PIECE
    options: Callable[[History], dict[str, Any]] = lambda history: {}


SETUPS = (
    Setup("prompt_lookup:tokens=64", WHOLE),
    Setup("lookahead:window=8,guesses=8,from_prompt=true", WHOLE),
    Setup("token_recycling"),
    Setup("aded:top=64"),
    Setup(f"suffix:factor=8,{ROOM}"),
    Setup(f"sam:tokens=64,{ROOM}"),
    Setup("rest", options=lambda history: {"index": history.index}),
    Setup("infini", options=lambda history: {"index": history.index}),
    Setup("rasd", options=lambda h: {"index": h.index, "drafter": stand_in(h), "retrievers": ()}),
    Setup(f"stand:{ROOM}"),
    Setup(f"auto:parts=stand:{ROOM}+suffix:{ROOM}"),
    Setup(f"cascade:parts=suffix:{ROOM}+stand:{ROOM}"),
    Setup(f"fuse:parts=prompt_lookup:tokens=64+stand:{ROOM}", WHOLE),
)


@dataclass
class History:
    """A text int64 [n] that drafters know, and one that they do not."""

    text: np.ndarray
    unseen: np.ndarray
    rng: np.random.Generator
    index: Index = field(init=False)
    after: np.ndarray = field(init=False)  # [V, TOP]: what followed a token, most often first

    def __post_init__(self) -> None:
        self.index = in_memory([self.text], None)
        pairs, counts = np.unique(self.text[:-1] * VOCAB + self.text[1:], return_counts=True)
        first, second = np.divmod(pairs[np.lexsort((-counts, pairs // VOCAB))], VOCAB)
        rank = np.arange(len(first)) - np.searchsorted(first, first)
        self.after = self.rng.integers(0, VOCAB, (VOCAB, TOP))  # where fewer are known
        self.after[first[rank < TOP], rank[rank < TOP]] = second[rank < TOP]


def words(files: list[Path], rng: np.random.Generator) -> np.ndarray:
    """Ids of all words and signs of files, in passages of PIECE that are shuffled."""
    found: list[str] = []
    for file in files:
        with gzip.open(file) as stream:
            found += re.findall(r"\w+|[^\w\s\0]", stream.read().decode("utf-8", "replace"))
    _, ids = np.unique(found, return_inverse=True)
    text = rng.permutation(VOCAB)[ids % VOCAB]
    pieces = text[: len(text) // PIECE * PIECE].reshape(-1, PIECE)
    return rng.permutation(pieces).ravel()


def made_up(count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` ids or more by Zipf's law, in passages: every second one is a copy with changes."""
    num = -(-count // PIECE)
    stock, ids = rng.integers(0, num // 5, num), rng.permutation(VOCAB)

    def fresh(*shape: int) -> np.ndarray:
        return ids[np.minimum(rng.zipf(1.2, shape), VOCAB) - 1]

    pieces, known = fresh(len(stock), PIECE), fresh(stock.max() + 1, PIECE)
    is_copied = (np.arange(len(stock)) % 2 == 0)[:, None] & (rng.random(pieces.shape) > 0.02)
    return np.where(is_copied, known[stock], pieces).ravel()


def read_responses(drafter: Drafter, history: History) -> None:
    for start in range(0, len(history.text), PIECE):
        seq = sequence(history.text[start : start + PIECE].tolist(), 0)
        drafter.start(seq)
        drafter.propose([seq], [Plan(1)], [seq.dice])
        drafter.finish(seq)


def hold_successors(drafter: Any, history: History) -> None:
    rows = history.after[:, :8].astype(np.int32)
    drafter.restore(pool.snapshot("token_recycling", rows))


def count_trigrams(drafter: Any, history: History) -> None:
    drafter.base = TrigramMatrix(budget=1 << 30)
    drafter.base.count([history.text.astype(np.int32)])


def learn_laws(drafter: Any, history: History) -> None:
    """At every position a law that favours what came; four contexts each."""
    memory = drafter.memory(sequence([0], 0))
    probs = np.tile(PROBS.astype(np.float32), (PIECE, 1))
    for start in range(0, len(history.text) - 1, PIECE):
        part = history.text[start : start + PIECE + 1]
        ids = believed(history, part[:-1], part[1:]).astype(np.int32)
        nodes = np.arange(len(ids), dtype=np.int32)
        memory.learn(memory.context([]), chain(part[:-1]), nodes, ids, probs[: len(ids)])


KNOWS = {  # how parts come to know the history; others read their own sequence
    "suffix": read_responses,
    "sam": read_responses,
    "token_recycling": hold_successors,
    "aded": count_trigrams,
    "stand": learn_laws,
}


def stand_in(history: History) -> Drafter:
    """For a draft model: 48 nodes by look-ups in a table, and the law of the next token."""
    drafter = registry.make("drafter", "token_recycling")
    drafter.source = MatrixSource(drafter)
    return drafter


def believed(history: History, tokens: np.ndarray, following: np.ndarray) -> np.ndarray:
    """Different ids [m, TOP] after tokens [m], likeliest first; `following` [k <= m] lead."""
    ids = history.after[tokens]
    lead = ids[: len(following)]
    lead[lead == following[:, None]] = lead[:, 0][np.where(lead == following[:, None])[0]]
    lead[:, 0] = following
    return ids


def sequence(tokens: list[int], temperature: float) -> Sequence:
    return Sequence(tokens, 1, Sampling(temperature), SeededDice(0), limit=10**9, group=0)


class Case:
    """A drafter that has read the history, its sequence, and what was measured."""

    def __init__(self, setup: Setup, history: History, temperature: float) -> None:
        self.name = setup.spec.partition(":")[0]
        self.drafter = registry.make("drafter", setup.spec, **setup.options(history))
        for part in parts_of(self.drafter):
            if knows := KNOWS.get(type(part).__module__.rpartition(".")[2]):
                knows(part, history)
        self.seq = sequence(history.text[-setup.own :].tolist(), temperature)
        self.drafter.start(self.seq)
        self.drafter.propose([self.seq], [PLAN], [self.seq.dice])
        self.figures: list[tuple[float, float, int]] = []  # microseconds of both verbs, nodes

    def jump(self, tokens: list[int]) -> None:
        """The text goes on elsewhere."""
        self.seq.tokens += tokens
        laws: Any = None  # unused: nothing was verified
        step = Step([self.seq], [PLAN], [EMPTY], [laws], [Verdict([], 0)], [[]])
        self.drafter.observe(step)

    def step(self, ahead: np.ndarray, teacher: Teacher, counts: bool) -> None:
        """Drafts, and learns that the text goes on with `ahead` [ACCEPTED + 1]."""
        start = perf_counter()
        drafted = self.drafter.propose([self.seq], [PLAN], [self.seq.dice])[0]
        drafting = perf_counter() - start
        text = chain(ahead[:-1])
        found = Continuations(text.tokens, text.parents, np.ones(len(text), np.int64), 0, 0)
        tree = graft(drafted, [found], ACCEPTED, [name_of(self.drafter), "text"])
        nodes = [-1]
        for token in ahead[:-1]:
            nodes += [c for c in tree.children(nodes[-1]) if tree.tokens[c] == token][:1]
        laws, emitted = teacher.laws(self.seq, tree, nodes, ahead), ahead.tolist()
        self.seq.tokens += emitted
        verdict = Verdict(nodes[1:], emitted[-1])
        step = Step([self.seq], [PLAN], [tree], [laws], [verdict], [emitted])
        start = perf_counter()
        self.drafter.observe(step)
        learning = perf_counter() - start
        if counts:
            self.figures.append((1e6 * drafting, 1e6 * learning, len(drafted)))

    def line(self) -> str:
        drafts, steps, sizes = np.array(self.figures).T
        full = drafts[sizes >= NODES - 1]
        cells = [f"{value:7.0f}" for value in (*np.quantile(drafts, (0.5, 0.99)), sizes.mean())]
        cells.append(f"{np.median(full):8.0f}" if len(full) >= 20 else "       -")
        cells.append(f"{len(full) / len(drafts):6.0%}")
        cells += [f"{value:7.0f}" for value in np.quantile(steps, (0.5, 0.99))]
        return f"{self.name:<16}" + "".join(cells)


class Teacher:
    """Logits float32 [nodes, V] that favour what followed a token in the history."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.logits = torch.randn(NODES + ACCEPTED + 1, VOCAB)
        self.before: tuple[np.ndarray, np.ndarray] | None = None  # ids written over, their noise

    def laws(self, seq: Sequence, tree: Tree, nodes: list[int], ahead: np.ndarray) -> TargetProbs:
        """The laws of a step; those of the accepted nodes are known, as after verification."""
        held = self.logits.numpy()
        if self.before is not None:
            np.put_along_axis(held[: len(self.before[0])], *self.before, axis=1)
        order = [*nodes, *sorted(set(range(-1, len(tree))) - set(nodes))]
        tokens = np.array([*tree.tokens, seq.tokens[-1]])[order]
        ids = np.empty((len(order), TOP), np.int64)
        ids[np.array(order) + 1] = believed(self.history, tokens, ahead)
        rows = held[: len(ids)]
        self.before = ids, np.take_along_axis(rows, ids, axis=1)
        np.put_along_axis(rows, ids, np.log(PROBS, dtype=np.float32)[None] + 17, axis=1)
        laws = TargetProbs(Rows(self.logits[: len(ids)]), seq, tree, ())
        for node in nodes:
            laws[node]
        return laws


def measure(cases: list[Case], history: History, runs: int) -> None:
    """Runs of steps from random places of the unseen text, all drafters in turn."""
    teacher, length = Teacher(history), ACCEPTED + 1
    most = len(history.unseen) - 20 - length * (BEFORE + COUNTED)
    for start in history.rng.integers(0, most, runs).tolist():
        at = start + 20
        for case in cases:
            case.jump(history.unseen[start:at].tolist())
        for step in range(BEFORE + COUNTED):
            ahead = history.unseen[at : at + length]
            for i in history.rng.permutation(len(cases)):
                cases[i].step(ahead, teacher, step >= BEFORE)
            at += length


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="gzipped texts")
    parser.add_argument(
        "--tokens", type=scripts.count, default=1_000_000, help="tokens of the history"
    )
    parser.add_argument("--runs", type=scripts.count, default=120)
    parser.add_argument("--temperature", type=scripts.measure, default=1.0)
    parser.add_argument(
        "--only",
        type=scripts.pattern,
        default="",
        help="only drafters that match this regular expression",
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    if given.tokens < 3:
        parser.error(f"expected --tokens of 3 or more, got {given.tokens}")
    least = given.tokens + 20 * PIECE
    most = max(least, given.tokens * 5 // 4)
    text = words(given.files, rng) if given.files else made_up(most, rng)
    if len(text) < least:
        parser.error(f"expected {least} words or more, got {len(text)}; try fewer --tokens")
    history = History(text[: given.tokens], text[given.tokens :], rng)
    print(f"machine: {platform.processor() or platform.machine()}; {given}; V = {VOCAB}")
    setups = [setup for setup in SETUPS if given.only.search(setup.spec.partition(":")[0])]
    cases = [Case(setup, history, given.temperature) for setup in setups]
    gc.collect()
    gc.freeze()  # a full collection would walk all that was filled
    measure(cases, history, given.runs)
    print(f"{'microseconds':<16}  draft    p99  nodes    full share  learn    p99")
    for case in cases:
        print(case.line())


if __name__ == "__main__":
    scripts.run(main)
