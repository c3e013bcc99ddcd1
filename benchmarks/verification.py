"""Verifiers and growers on the embedded pair: acceptance, its expectation, tau.

    python benchmarks/verification.py [--tables position chain rules length budget] [--problems 8]

position: what every rule accepts of k candidates for one position, computed from p and q alone on
          the same positions, so the order of the rules shows without noise
chain:    tokens per pass of chains under each rule, on the same chains
rules:    every rule on every kind of draft
length, budget: the comparisons of the RSD paper: equal draft depth, and equal number of tokens to
          verify, the latter with the best of a few shapes

Acceptance: of all visited nodes with drafts, the share that went on to one of them. Expected: the
same from p and q at those nodes, by the closed form of the rule (averaged over drawn candidates for
draws without replacement, and over drafted chains for chains). The two must agree within the stated
error. Counts only, no times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import scripts

import forerun
from forerun.api import Model
from forerun.assets import embedded
from forerun.bench import optimum
from forerun.bench.acceptance import (
    by_k_seq,
    chain_weights,
    matched,
    single,
    with_replacement,
    without_replacement,
)
from forerun.bench.theory import memory_bound_speed_up, pass_cost
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Step
from forerun.core.tree import Proposal, Tree
from forerun.drafters.draft_model import DraftModel
from forerun.models.load import load_target
from forerun.tasks.reasoning import ReasoningTask

FIRST_SEED = 600_000  # held-out problems of this benchmark


class Case(NamedTuple):
    """A way to draft and a way to judge."""

    draws: str  # a row's name in the table
    rule: str
    grower: str
    verifier: str
    nodes: int
    depth: int


@dataclass
class Count:
    """What one case did."""

    examined: int = 0
    accepted: int = 0
    expected: list[float] = field(default_factory=list)  # acceptance per visited node, or per pass
    optima: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)  # expected kept drafts per chain
    whole: list[float] = field(default_factory=list)  # and the chance that all of it is kept
    tokens: list[int] = field(default_factory=list)  # per sequence
    passes: list[int] = field(default_factory=list)

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.examined if self.examined else None

    @property
    def error(self) -> float | None:
        """Standard error of the acceptance: positions are tried one after another."""
        rate = self.acceptance
        return None if rate is None else math.sqrt(rate * (1 - rate) / self.examined)

    @property
    def expectation(self) -> float | None:
        if self.kept:  # each chain that is not kept whole ends at one more position
            return sum(self.kept) / (sum(self.kept) + len(self.kept) - sum(self.whole))
        return mean(self.expected)

    @property
    def distance(self) -> float:
        """Distance of acceptance from expectation in standard errors; 0 if one is unknown."""
        if self.acceptance is None or self.expectation is None or not self.error:
            return 0.0
        return abs(self.acceptance - self.expectation) / self.error

    @property
    def tau(self) -> float:
        return sum(self.tokens) / sum(self.passes)

    @property
    def tau_error(self) -> float:
        """Standard error of the ratio of sums over sequences."""
        off = np.array(self.tokens) - self.tau * np.array(self.passes)
        return float(np.sqrt((off**2).sum()) / sum(self.passes))


Listener = Callable[[Step], None]
Chance = Callable[[np.ndarray, np.ndarray, int], float]
DICE = SeededDice(1)
EXPECTED: dict[str, Chance] = {
    "match": matched,
    "recursive, with": with_replacement,
    "k-SEQ": by_k_seq,
    "recursive, without": partial(without_replacement, dice=DICE),
}
COLUMNS: dict[str, Chance] = {
    "single": single,
    **{name: EXPECTED[name] for name in ("match", "recursive, with", "k-SEQ")},
    "optimum, i.i.d.": optimum.with_replacement,
    "recursive, without": EXPECTED["recursive, without"],
    "optimum, without": optimum.without_replacement,
    "greedy mix": optimum.greedy,
}


def listen(case: Case, count: Count) -> Listener:
    """The listener that fills a count."""

    def hear(step: Step) -> None:
        for tree, laws, verdict in zip(step.trees, step.laws, step.verdicts, strict=True):
            for node in (-1, *verdict.nodes):
                merged = case.rule == "k-SEQ"  # equal paths are judged together
                if drafts := optimum.candidates(tree, node) if merged else tree.children(node):
                    tally(case, count, laws[node], tree, drafts)
            count.accepted += len(verdict.nodes)
            if case.grower == "chain" and len(tree):
                weights = chain_weights(case.rule, tree, laws)
                count.kept.append(sum(weights))
                count.whole.append(weights[-1] if len(weights) == len(tree) else 0.0)

    return hear


def tally(case: Case, count: Count, p: np.ndarray, tree: Tree, drafts: list[int]) -> None:
    """Counts one visited node that has drafts."""
    count.examined += 1
    if (best := optimum.for_drafts(tree, drafts, p)) is not None:
        count.optima.append(best)
        if case.rule == "transport":  # which reaches it
            count.expected.append(best)
    q, chance = tree.q(drafts[0]), EXPECTED.get(case.rule)
    if q and chance and case.grower != "chain":
        count.expected.append(chance(*dense(p, q), len(drafts)))


def dense(p: np.ndarray, q: Proposal) -> tuple[np.ndarray, np.ndarray]:
    """p and q as float64 [V] that sum to 1."""
    wide, filled = p.astype(np.float64), np.zeros(len(p))
    filled[q.ids] = q.probs
    return wide / wide.sum(), filled / filled.sum()


class Pair:
    """The reasoner, its draft, and the problems."""

    def __init__(self, problems: int, samples: int, length: int) -> None:
        task = ReasoningTask("heldout", seed=FIRST_SEED)
        self.model: Model = forerun.load("reasoner", max_seqs=problems * samples)
        self.runner = load_target(embedded("draft"), max_seqs=problems * samples)
        self.prompts = [task.example(i).prompt for i in range(problems)]
        self.samples, self.length = samples, length

    @property
    def share(self) -> float:
        """What a pass of the draft reads over what one of the target reads."""
        costs = [pass_cost(runner) for runner in (self.runner, self.model.target)]
        draft, target = (cost.weight_bytes for cost in costs if cost)
        return draft / target

    def run(self, case: Case, temperature: float, hear: Listener | None = None) -> Count:
        count = Count()
        results = self.model.generate(
            self.prompts,
            drafter=DraftModel(model=self.runner, grower=case.grower),
            verifier=case.verifier,
            controller=Fixed(nodes=case.nodes, depth=case.depth),
            temperature=temperature,
            max_new_tokens=self.length,
            n=self.samples,
            seed=7,
            batch=len(self.prompts) * self.samples,
            on_step=hear or listen(case, count),
        )
        stats = [sample.stats for result in results for sample in result.samples]
        count.tokens = [s.generated for s in stats]
        count.passes = [s.passes for s in stats]
        return count

    def positions(self, temperature: float) -> list[tuple[np.ndarray, np.ndarray]]:
        """p [V] and q [V] along texts of the target."""
        found: list[tuple[np.ndarray, np.ndarray]] = []

        def hear(step: Step) -> None:
            for tree, laws in zip(step.trees, step.laws, strict=True):
                if q := tree.q(0) if len(tree) else None:
                    found.append(dense(laws[-1], q))

        self.run(Case("", "", "chain", "speculative", 1, 1), temperature, hear)
        return found


def chains(depth: int) -> list[Case]:
    rules = {"token by token": "speculative", "block": "block", "match": "match"}
    return [
        Case(f"chain of {depth}", rule, "chain", verifier, depth, depth)
        for rule, verifier in rules.items()
    ]


def draws(name: str, branching: tuple[int, ...]) -> list[Case]:
    """I.i.d. drafts under three rules, drafts without replacement and greedy ones under theirs."""
    levels = np.cumprod(branching)
    size, depth, text = int(levels.sum()), len(branching), "+".join(map(str, branching))
    iid, swor = f"iid:width={text}", f"gumbel:branching={text}"
    kinds = (
        ("i.i.d.", "match", iid, "match"),
        ("i.i.d.", "recursive, with", iid, "speculative"),
        ("i.i.d.", "k-SEQ", iid, "k_seq"),
        ("without", "recursive, without", swor, "speculative"),
        ("greedy", "transport", f"greedy_mix:branching={text}", "transport"),
    )
    return [Case(f"{name}, {kind}", *how, size, depth) for kind, *how in kinds]


def rule_cases(depth: int = 4) -> list[Case]:
    cases = [*chains(depth), *chains(2 * depth)]
    for k in (2, 4, 8):
        cases += draws(f"{k} chains of {depth}", (k, *[1] * (depth - 1)))
        cases.append(beam(k, depth, "recursive, without"))
    for branching in ((2, 2, 2), (4, 2, 1)):
        cases += draws("tree " + "x".join(map(str, branching)), branching)
    return cases


def beam(width: int, depth: int, rule: str = "RSD-S") -> Case:
    grower = f"stochastic_beam:width={width}"
    return Case(f"beam {width}x{depth}", rule, grower, "speculative", width * depth, depth)


def spectr(width: int, depth: int) -> Case:
    return Case(f"{width}x{depth}", "SpecTr", f"iid:width={width}", "k_seq", width * depth, depth)


def rsd_c(*branching: int) -> Case:
    size, text = int(np.cumprod(branching).sum()), "+".join(map(str, branching))
    grower = f"gumbel:branching={text}"
    return Case(text, "RSD-C", grower, "speculative", size, len(branching))


def lone(depth: int) -> list[Case]:
    return [
        Case(f"{depth}", "chain", "chain", "speculative", depth, depth),
        Case(f"{depth}", "chain, block", "chain", "block", depth, depth),
    ]


def length_cases() -> dict[int, list[Case]]:
    """Equal depth: one chain, four i.i.d. chains, and as many nodes without replacement."""
    return {
        depth: [*lone(depth), spectr(4, depth), rsd_c(4, *[1] * (depth - 1)), beam(4, depth)]
        for depth in (2, 3, 4, 5)
    }


SHAPES = {  # budget -> (paths, depth) for i.i.d. chains and beams, branching for trees
    6: ([(2, 3), (3, 2)], [(2, 1, 1), (3, 1), (2, 2)]),
    10: ([(2, 5), (5, 2)], [(2, 1, 1, 1, 1), (2, 2, 1), (5, 1)]),
    14: ([(2, 7), (7, 2)], [(2, *[1] * 6), (2, 2, 2)]),
    21: ([(3, 7), (7, 3)], [(3, *[1] * 6), (3, 2, 2)]),
    30: ([(3, 10), (6, 5)], [(3, *[1] * 9), (2, 2, 2, 2)]),
}


def budget_cases() -> dict[int, list[Case]]:
    return {
        budget: [
            *lone(budget),
            *(spectr(*shape) for shape in paths),
            *(rsd_c(*branching) for branching in trees),
            *(beam(*shape) for shape in paths),
        ]
        for budget, (paths, trees) in SHAPES.items()
    }


def mean(values: list[float]) -> float | None:
    """None where there is nothing to average."""
    return float(np.mean(values)) if values else None


def row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def position_table(pair: Pair, temperatures: Iterable[float]) -> None:
    print(row("T", "k", *COLUMNS))
    print(row(*["---"] * (2 + len(COLUMNS))))
    for temperature in temperatures:
        pairs = pair.positions(temperature)
        for k in (2, 4, 8):
            means = [mean([rule(*both, k) for both in pairs]) for rule in COLUMNS.values()]
            print(row(temperature, k, *(number(m) for m in means)), flush=True)
    print(f"\nmeans over {len(pairs)} positions\n")


def chain_table(pair: Pair, temperatures: Iterable[float]) -> None:
    rules = ["match", "token by token", "block"]
    print(row("T", "drafts", "chains", *rules, "block over token"))
    print(row(*["---"] * 7))
    for temperature in temperatures:
        for depth in (2, 4, 8, 16):
            kept: dict[str, list[float]] = {rule: [] for rule in rules}

            def hear(step: Step, depth: int = depth, kept: dict = kept) -> None:
                for tree, laws in zip(step.trees, step.laws, strict=True):
                    for rule in rules if len(tree) == depth else ():
                        kept[rule].append(1.0 + sum(chain_weights(rule, tree, laws)))

            pair.run(Case("", "", "chain", "speculative", depth, depth), temperature, hear)
            means = {rule: mean(values) for rule, values in kept.items()}
            block, token = means["block"], means["token by token"]
            gain = f"{block / token - 1:+.1%}" if block and token else "-"
            shown = (number(means[rule]) for rule in rules)
            print(row(temperature, depth, len(kept["block"]), *shown, gain), flush=True)
    print()


def rules_table(pair: Pair, temperatures: Iterable[float]) -> None:
    print(row("T", "drafts", "nodes", "rule", "acceptance", "expected", "optimum", "tau"))
    print(row(*["---"] * 8))
    worst = 0.0
    for temperature in temperatures:
        for case in rule_cases():
            found = pair.run(case, temperature)
            worst = max(worst, found.distance)
            print(
                row(
                    temperature,
                    case.draws,
                    case.nodes,
                    case.rule,
                    f"{number(found.acceptance)} ± {number(found.error)}",
                    number(found.expectation),
                    number(mean(found.optima)),
                    f"{found.tau:.2f} ± {found.tau_error:.2f}",
                ),
                flush=True,
            )
    print(f"\nlargest |acceptance - expected| in standard errors: {worst:.1f}\n")


def best_table(
    pair: Pair, temperatures: Iterable[float], name: str, groups: dict[int, list[Case]]
) -> None:
    """tau of the best shape of each rule, and tau / (L r + 1) with its L draft passes."""
    rules = ["chain", "chain, block", "SpecTr", "RSD-C", "RSD-S"]
    print("tau, in brackets tau / (1 + L r) for L draft passes, and the shape\n")
    print(row("T", name, *rules))
    print(row(*["---"] * 7))
    for temperature in temperatures:
        for value, cases in groups.items():
            best: dict[str, tuple[float, str]] = {}
            for case in cases:
                found = pair.run(case, temperature)
                bound = memory_bound_speed_up(found.tau, case.depth, pair.share)
                shape = case.draws.removeprefix("beam ")
                cell = f"{found.tau:.2f} ± {found.tau_error:.2f} ({bound:.2f}) {shape}"
                best[case.rule] = max(best.get(case.rule, (0.0, "")), (found.tau, cell))
            print(row(temperature, value, *(best[rule][1] for rule in rules)), flush=True)
    print(f"\nr = {pair.share:.3f}, what a pass of the draft reads over one of the target\n")


TABLES = {
    "position": position_table,
    "chain": chain_table,
    "rules": rules_table,
    "length": partial(best_table, name="depth", groups=length_cases()),
    "budget": partial(best_table, name="budget", groups=budget_cases()),
}


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--tables", nargs="+", default=[*TABLES], choices=[*TABLES])
    parser.add_argument("--temperatures", nargs="+", type=scripts.measure, default=[0.6, 1.0])
    parser.add_argument("--problems", type=scripts.count, default=8)
    parser.add_argument("--samples", type=scripts.count, default=4)
    parser.add_argument(
        "--length", type=scripts.count, default=128, help="maximum new tokens per sample"
    )
    options = parser.parse_args()
    pair = Pair(options.problems, options.samples, options.length)
    for name in options.tables:
        TABLES[name](pair, options.temperatures)


if __name__ == "__main__":
    scripts.run(main)
