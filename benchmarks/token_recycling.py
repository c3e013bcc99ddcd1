"""Costs of Token Recycling and lookahead: drafting a tree and learning a step, in microseconds.

    python benchmarks/token_recycling.py [--vocab 32000 128256]

The matrix is full of random successors, so that every place of the tree is filled and every look-up
misses the cache; the lookahead pool has seven n-grams after the last token. Prints the median and
the least of repeated calls; nothing is asserted.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch

from forerun.dice import SeededDice
from forerun.drafters.lookahead import Lookahead
from forerun.drafters.token_recycling import TokenRecycling
from forerun.records import Plan, Rows, Sequence, Step, Verdict
from forerun.sampling import Sampling
from forerun.shaping import Laws


def measure(work: Callable[[], object], repeats: int, between: Callable[[], object]) -> str:
    """Median and least time of a call in microseconds; `between` is not timed."""
    times = []
    for _ in range(repeats):
        between()
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return f"{1e6 * np.median(times):9.1f} {1e6 * min(times):9.1f}"


def show(what: str, figures: str) -> None:
    print(f"{what:<58}{figures}")


class Case:
    """A drafter, a sequence, and a step over the drafter's own tree with random logits."""

    def __init__(self, drafter: TokenRecycling | Lookahead, nodes: int, vocab: int) -> None:
        self.drafter, self.plan, self.vocab = drafter, Plan(nodes, 16), vocab
        self.rng = np.random.default_rng(0)
        self.logits = torch.randn(nodes + 1, vocab)
        tokens = self.rng.integers(0, vocab, 50).tolist()
        self.seq = Sequence(tokens, 50, Sampling(), SeededDice(0), limit=10**9)

    def draft(self) -> None:
        (self.tree,) = self.drafter.propose([self.seq], [self.plan])

    def prepare(self) -> None:
        """The next step: a tree, nothing accepted, a random token."""
        self.draft()
        token = int(self.rng.integers(self.vocab))
        self.seq.tokens.append(token)
        laws = Laws(Rows(self.logits[: len(self.tree) + 1]), self.seq, self.tree, ())
        verdict = Verdict([], token)
        self.step = Step([self.seq], [self.plan], [self.tree], [laws], [verdict], [[token]])

    def learn(self) -> None:
        self.drafter.observe(self.step)

    def report(self, name: str, ready: Callable[[], object]) -> None:
        """Times of both verbs; `ready` sets the state before each draft."""
        ready()
        self.draft()
        show(f"{name}: draft {len(self.tree)} nodes", measure(self.draft, 2000, ready))

        def next_step() -> None:
            ready()
            self.prepare()

        show(f"{name}: learn {len(self.tree) + 1} rows", measure(self.learn, 100, next_step))


def recycling(vocab: int) -> None:
    case = Case(TokenRecycling(), 80, vocab)
    case.drafter.warm_up()
    case.prepare()
    case.learn()
    matrix = case.drafter.matrix(case.seq)
    matrix.fill(case.rng.integers(0, vocab, (vocab, 8)).astype(np.int32))
    size = matrix.nbytes / 2**20

    def move() -> None:
        case.seq.tokens[-1] = int(case.rng.integers(vocab))

    case.report(f"token_recycling, V = {vocab}, {size:.2f} MiB", move)


def lookahead(vocab: int) -> None:
    case = Case(Lookahead(), 55, vocab)
    for _ in range(10):
        case.prepare()
        case.learn()
    pool = case.drafter._states[case.seq].pool

    def fill() -> None:
        root = case.seq.tokens[-1]
        while len(pool.of(root)) < 7:
            pool.add(root, tuple(case.rng.integers(0, vocab, 4).tolist()))

    case.report(f"lookahead, V = {vocab}", fill)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 128_256])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"machine: {platform.processor() or platform.machine()}, numpy {np.__version__}")
    show("microseconds", f"{'median':>9} {'least':>9}")
    for vocab in options.vocab:
        recycling(vocab)
        lookahead(vocab)


if __name__ == "__main__":
    main()
