"""Time of verification on a CPU: distributions of visited rows, the walk, verifiers, optimum.

    python benchmarks/rule_costs.py [--vocab 128000] [--model reasoner-0.3B]

Medians over rounds, one thread, microseconds unless stated otherwise.

law:     logits to probabilities for one row, by temperature, top-k and top-p
walk:    a tree of 64 nodes with known distributions: four children per node, each q with ten
         tokens; a walk ends with a draw from a whole row
rules:   drafts of a different model with a dense q, compared with one pass of --model for one
         sequence
optimum: `bench.optimum`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from time import perf_counter

import numpy as np
import scripts
import torch

import forerun
from forerun import registry
from forerun.bench import optimum
from forerun.core.dice import SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.logits import TargetProbs
from forerun.core.records import Rows, Sequence
from forerun.core.roles import Verifier
from forerun.core.sampling import Sampling, softmax
from forerun.core.tree import EMPTY, SWOR, Proposal, Tree, TreeBuilder

NODES, BRANCHES, SUPPORT = 64, 4, 10
LEAST = 100  # tokens of a vocabulary that trees of so many nodes are drawn from
SAMPLINGS = {
    "temperature 1": Sampling(),
    "temperature .6": Sampling(temperature=0.6),
    "top-p .95": Sampling(temperature=0.6, top_p=0.95),
    "top-k 50": Sampling(temperature=0.6, top_k=50),
}


def microseconds(work: Callable[[], object], rounds: int) -> float:
    """Median time of a call; one more before is not counted."""
    work()
    times = []
    for _ in range(rounds):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return 1e6 * float(np.median(times))


def noisy(vocab: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [V] of a target and of a draft that knows them with noise, float32."""
    rng = np.random.default_rng(seed)
    logits = 2.5 * rng.normal(size=vocab)
    return logits.astype(np.float32), (logits + rng.normal(size=vocab)).astype(np.float32)


class Table(dict):
    """Laws that are there."""

    sampling = Sampling()

    def unshaped(self) -> None:
        """No logits."""


def sparse_tree(p: np.ndarray, rng: np.random.Generator) -> Tree:
    """NODES nodes, children drawn without replacement from the SUPPORT likeliest tokens of p."""
    top = np.argsort(-p)[:SUPPORT].astype(np.int32)
    tree, parent = TreeBuilder(), -1
    while len(tree) < NODES:
        q = Proposal(top, rng.dirichlet(1 + 20 * p[top] / p[top].sum()))
        for i in rng.choice(SUPPORT, BRANCHES, replace=False, p=q.probs):
            if len(tree) < NODES:
                tree.add(int(top[i]), parent, SWOR, q)
        parent += 1
    return tree.build()


def law_table(vocab: int, rounds: int) -> None:
    logits, _ = noisy(vocab, 0)
    seq = Sequence([0], 1, Sampling(), SeededDice(0), limit=9)
    rows = Rows(torch.from_numpy(np.tile(logits, (NODES + 1, 1))))
    row("law of a row", "us")
    row("---", "---")
    for name, sampling in SAMPLINGS.items():
        seq.sampling = sampling

        def look() -> np.ndarray:
            return TargetProbs(rows, seq, EMPTY, ())[-1]

        row(name, f"{microseconds(look, rounds):.0f}")
    print()


def walk_table(vocab: int, rounds: int) -> None:
    """The walk, alone and with the laws that it looks at."""
    logits, _ = noisy(vocab, 0)
    p, rng = softmax(logits), np.random.default_rng(0)
    turns = cycle([sparse_tree(p, rng) for _ in range(32)])
    table = Table(dict.fromkeys(range(-1, NODES), p))
    seq = Sequence([0], 1, Sampling(), SeededDice(0), limit=99)
    rows = Rows(torch.from_numpy(np.tile(logits, (NODES + 1, 1))))
    rule, dice, visited = registry.make("verifier", "speculative"), SeededDice(1), list[int]()
    rule.warm_up()

    def walk() -> None:
        rule.verify(next(turns), table, dice)

    def draw() -> None:
        rule.verify(EMPTY, table, dice)

    def whole() -> None:
        tree = next(turns)
        laws = TargetProbs(rows, seq, tree, ())
        rule.verify(tree, laws, dice)
        visited.append(len(laws._probs))

    row(f"walk over {NODES} nodes", "us")
    row("---", "---")
    row("laws given", f"{microseconds(walk, rounds):.1f}")
    row("no tree: one draw from a row", f"{microseconds(draw, rounds):.1f}")
    row("laws computed where they are looked at", f"{microseconds(whole, rounds):.0f}")
    print(f"\nrows with a computed distribution: {np.mean(visited):.2f} of {NODES + 1}\n")


def dense_tree(draw: str, q: Proposal, dice: SeededDice) -> Tree:
    """Three levels: a chain, three i.i.d. chains, or 3 x 3 x 3 greedy drafts."""
    from forerun.core.growing import Source
    from forerun.core.records import Plan
    from forerun.drafters.base import Grown

    class Same(Source):
        def next(self, requests):  # type: ignore[no-untyped-def]
            return [q] * len(requests)

    seq = Sequence([0], 1, Sampling(), dice, limit=99)
    return Grown(Same(), registry.make("grower", draw)).propose([seq], [Plan(39, 3)], [dice])[0]


def rule_table(vocab: int, rounds: int, step: float) -> None:
    ours, theirs = noisy(vocab, 1)
    p, q = softmax(ours), Proposal.of(softmax(theirs))
    table, dice = Table(dict.fromkeys(range(-1, 40), p)), SeededDice(2)
    row("rule", "drafts", "us per step", "share of a pass")
    row(*["---"] * 4)
    for name, draw in (
        ("speculative", "chain"),
        ("block", "chain"),
        ("speculative", "gumbel:branching=3+3+3"),
        ("k_seq", "iid:width=3+1+1"),
        ("transport", "greedy_mix:branching=3+3+3"),
        ("typical", "chain"),
    ):
        rule: Verifier = registry.make("verifier", name)
        rule.warm_up()
        turns = cycle([dense_tree(draw, q, dice) for _ in range(16)])

        def judge(rule: Verifier = rule, turns: Iterator[Tree] = turns) -> None:
            rule.verify(next(turns), table, dice)

        took = microseconds(judge, rounds)
        row(name, draw, f"{took:.0f}", f"{took / step:.2%}" if step else "-")
    print()


def optimum_table(vocab: int) -> None:
    p, q = (softmax(logits).astype(np.float64) for logits in noisy(vocab, 3))
    row("best acceptance", f"ms at V = {vocab}")
    row("---", "---")
    for name, bound, count in (
        ("2 drafts with replacement", optimum.with_replacement, 2),
        ("2 without", optimum.without_replacement, 2),
        ("3 without", optimum.without_replacement, 3),
        ("greedy drafts, 2", optimum.greedy, 2),
    ):
        took = microseconds(lambda bound=bound, count=count: bound(p, q, count), 7)
        row(name, f"{took / 1000:.1f}")
    print()


def pass_time(name: str, rounds: int) -> float:
    """Microseconds of a pass of a model for one sequence and no draft."""
    target = forerun.load(name, max_seqs=1).target
    seq = Sequence(list(range(5, 37)), 32, Sampling(), SeededDice(0), limit=9999)

    def step() -> None:
        target.forward(ForwardBatch([seq], [EMPTY]))
        seq.tokens.append(5 + len(seq.tokens) % 90)

    return microseconds(step, rounds)


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--vocab", type=scripts.count, default=128_000)
    parser.add_argument("--model", default="", help="model with the pass to compare with")
    parser.add_argument("--rounds", type=scripts.count, default=300)
    o = parser.parse_args()
    if o.vocab < LEAST or o.rounds < 4:
        parser.error(f"expected --vocab of {LEAST} and --rounds of 4, or more")
    step = pass_time(o.model, 40) if o.model else 0.0
    if step:
        print(f"a pass of {o.model} for one sequence: {step / 1000:.1f} ms\n")
    torch.set_num_threads(1)
    law_table(o.vocab, o.rounds)
    walk_table(o.vocab, o.rounds)
    rule_table(32_000, o.rounds // 4, step)
    optimum_table(32_000)


if __name__ == "__main__":
    scripts.run(main)
