"""Lossy verifiers compared with the exact one: tau, accuracy, distance from the target.

    python benchmarks/lossy.py [--tables rules judge reflective] [--problems 96] [--samples 2]

The embedded reasoner with chains of its draft model, on held-out problems. Accuracy is the share of
right answers with a 95 % interval over problems, and the difference from the exact rule on the same
problems. Distance is half the sum of |law - p| for the first emitted token, averaged over positions
in texts of the target. It is exact over coins, corrections and the first draft token (tokens with q
above 1e-3); the tokens after it are drawn once. Rows are what a pass of the target computes, with
probes and catching up. Counts only, no times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import scripts

import forerun
from forerun import registry
from forerun.api import Model
from forerun.assets import embedded
from forerun.controllers.fixed import Fixed
from forerun.core.dice import EnumeratedDice, SeededDice
from forerun.core.forward_batch import ForwardBatch
from forerun.core.logits import TargetProbs
from forerun.core.records import Plan, Sequence
from forerun.core.roles import Verifier
from forerun.core.sampling import Sampling
from forerun.core.tree import IID, Proposal, Tree, TreeBuilder
from forerun.drafters.draft_model import DraftModel
from forerun.models.load import load_target
from forerun.tasks.reasoning import MIX, ReasoningTask

FIRST_SEED = 700_000  # held-out problems of this benchmark
EXACT = "speculative"
RULES = (EXACT, "typical", "judge", "reflective", "judge:delta=0")
DELTAS = (0.0, 0.561, 0.866, 0.972, 0.988)  # 90, 95, 98, 99 % of mistakes
WEIGHTS = (0.1, 0.3, 0.5)
LEAST = 1e-3


@dataclass(frozen=True)
class Outcome:
    """What one rule did; right [problems] is the share of right samples of each."""

    tau: float
    rows: float  # of the target, per pass
    right: np.ndarray

    def accuracy(self) -> str:
        return f"{100 * self.right.mean():.1f} ± {half_width(self.right)}"

    def difference(self, other: Outcome) -> str:
        gaps = self.right - other.right
        return f"{100 * gaps.mean():+.1f} ± {half_width(gaps)}"


def half_width(values: np.ndarray) -> str:
    """Of the 95 % interval of a mean, in percent; one value has none."""
    if len(values) < 2:
        return "-"
    return f"{196 * values.std(ddof=1) / np.sqrt(len(values)):.1f}"


class LawDice(EnumeratedDice):
    """Walks coins; a draw of a token is not walked, its law is kept."""

    law: np.ndarray | None = None

    def choice(self, probs: np.ndarray) -> int:
        self.law = np.asarray(probs, dtype=np.float64) / np.sum(probs, dtype=np.float64)
        return int(np.argmax(probs))

    def coin(self, heads: float) -> bool:
        return super().choice(np.array([1.0 - heads, heads])) == 1


class Pair:
    """The reasoner, its draft, and the problems."""

    def __init__(self, problems: int, samples: int, nodes: int, length: int) -> None:
        self.task = ReasoningTask("heldout", MIX, seed=FIRST_SEED)
        self.examples = [self.task.example(i) for i in range(problems)]
        self.model: Model = forerun.load("reasoner", max_seqs=64)
        self.runner = load_target(embedded("draft"), max_seqs=64)
        self.samples, self.nodes, self.length = samples, nodes, length

    def rule(self, name: str) -> Verifier:
        return registry.make("verifier", name, tokenizer=self.model.tokenizer)

    def run(self, verifier: Verifier, temperature: float) -> Outcome:
        target = self.model.target
        before = target.num_rows  # type: ignore[attr-defined]
        results = self.model.generate(
            [example.prompt for example in self.examples],
            drafter=DraftModel(model=self.runner),
            verifier=verifier,
            controller=Fixed(nodes=self.nodes, depth=self.nodes),
            temperature=temperature,
            max_new_tokens=self.length,
            n=self.samples if temperature else 1,
            seed=7,
            batch=64,
        )
        score = self.task.score
        right = [
            np.mean([score(example, sample.text) for sample in result.samples])
            for example, result in zip(self.examples, results, strict=True)
        ]
        passes = sum(result.stats.passes for result in results)
        tokens = sum(result.stats.generated for result in results)
        rows = (target.num_rows - before) / passes  # type: ignore[attr-defined]
        return Outcome(tokens / passes, rows, np.array(right))

    def contexts(self, temperature: float, count: int) -> list[list[int]]:
        """Beginnings of texts of the target, prompt and all."""
        rng = np.random.default_rng(3)
        results = self.model.generate(
            [example.prompt for example in self.examples[:count]],
            drafter="none",
            controller="fixed",
            temperature=temperature,
            max_new_tokens=self.length,
            seed=11,
            batch=64,
        )
        found = []
        for example, result in zip(self.examples, results, strict=False):
            tokens = result.samples[0].tokens
            cut = int(rng.integers(len(tokens)))
            found.append(self.model.tokenizer.encode(example.prompt) + tokens[:cut])
        return found

    def distances(self, rules: dict[str, Verifier], temperature: float, count: int) -> dict:
        """Rule -> mean distance of the first emitted token's law from p."""
        sampling, sums = Sampling(temperature=temperature), dict.fromkeys(rules, 0.0)
        contexts = self.contexts(temperature, count)
        for number, tokens in enumerate(contexts):
            drafts = self.drafts(tokens, sampling, SeededDice(number))
            for name, rule in rules.items():
                law, p = np.zeros(0), np.zeros(0)
                for weight, tree in drafts:
                    one, p = self.first(rule, tree, tokens, sampling)
                    law = weight * one + (law if len(law) else 0.0)
                sums[name] += 0.5 * float(np.abs(law - p).sum())
        return {name: total / len(contexts) for name, total in sums.items()}

    def drafts(
        self, tokens: list[int], sampling: Sampling, dice: SeededDice
    ) -> list[tuple[float, Tree]]:
        """Each possible first token with its chance, at the head of a chain drawn behind it."""
        seq = Sequence(list(tokens), len(tokens), sampling, dice, limit=self.nodes + 1)
        drafter = DraftModel(model=self.runner)
        (q,) = drafter.source.next([(seq, ())])
        assert q is not None
        keep = q.probs > LEAST
        first = Proposal(q.ids[keep], q.probs[keep] / q.probs[keep].sum())
        found = []
        for token, weight in zip(first.ids.tolist(), first.probs.tolist(), strict=True):
            ahead = Sequence([*tokens, token], len(tokens), sampling, dice, limit=self.nodes + 1)
            rest = drafter.propose([ahead], [Plan(self.nodes - 1, self.nodes - 1)], [dice])[0]
            drafter.finish(ahead)
            builder = TreeBuilder()
            node = builder.add(token, -1, IID, first)
            for i, more in enumerate(rest.tokens.tolist()):
                node = builder.add(more, node, IID, rest.q(i))
            found.append((weight, builder.build()))
        drafter.finish(seq)
        return found

    def first(
        self, rule: Verifier, tree: Tree, tokens: list[int], sampling: Sampling
    ) -> tuple[np.ndarray, np.ndarray]:
        """Law [V] of the first token that a rule emits given a draft, and p [V]."""
        target, dice = self.model.target, LawDice()
        seq = Sequence(list(tokens), len(tokens), sampling, SeededDice(0), limit=self.nodes + 1)
        rule.bind(target)
        probed = rule.probe(tree, target.context - len(tokens))
        (rows,) = target.forward(ForwardBatch([seq], [probed], rule.needs))
        target.release(seq)
        laws = TargetProbs(rows.split(len(tree)), seq, tree, ())
        law = np.zeros(target.vocab_size)

        def walk(dice: EnumeratedDice) -> tuple[list[int], int]:
            verdict = rule.verify(tree, laws, dice)
            return verdict.nodes, verdict.token

        for (nodes, token), chance in dice.outcomes(walk):
            if nodes:
                law[tree.tokens[nodes[0]]] += chance
            elif sampling.is_greedy or dice.law is None:
                law[token] += chance
            else:
                law += chance * dice.law
        return law, laws[-1].astype(np.float64)


def row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def table(pair: Pair, names: Iterable[str], temperatures: Iterable[float], positions: int) -> None:
    columns = ["T", "rule", "accepted per pass", "tau", "rows", "right, %", "- exact", "distance"]
    print(row(*columns))
    print(row(*["---"] * len(columns)))
    for temperature in temperatures:
        rules = {name: pair.rule(name) for name in names}
        away = pair.distances(rules, temperature, positions)
        exact: Outcome | None = None
        for name, rule in rules.items():
            found = pair.run(rule, temperature)
            exact = exact or found
            print(
                row(
                    temperature,
                    name,
                    f"{found.tau - 1:.2f}",
                    f"{found.tau:.2f}",
                    f"{found.rows:.1f}",
                    found.accuracy(),
                    found.difference(exact),
                    f"{away[name]:.4f}",
                ),
                flush=True,
            )
    print()


TABLES = {
    "rules": RULES,
    "judge": (EXACT, "judge", *(f"judge:delta={delta}" for delta in DELTAS)),
    "reflective": (EXACT, *(f"reflective:weight={weight}" for weight in WEIGHTS)),
}


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--tables", nargs="+", default=["rules"], choices=[*TABLES])
    parser.add_argument("--temperatures", nargs="+", type=scripts.measure, default=[0.0, 0.6])
    parser.add_argument("--problems", type=scripts.count, default=96)
    parser.add_argument(
        "--samples", type=scripts.count, default=2, help="samples per problem above T = 0"
    )
    parser.add_argument("--nodes", type=scripts.count, default=8, help="draft length")
    parser.add_argument(
        "--positions", type=scripts.count, default=60, help="positions for the distance"
    )
    parser.add_argument(
        "--length", type=scripts.count, default=300, help="maximum new tokens per sample"
    )
    o = parser.parse_args()
    pair = Pair(o.problems, o.samples, o.nodes, o.length)
    for name in o.tables:
        table(pair, TABLES[name], o.temperatures, min(o.positions, o.problems))


if __name__ == "__main__":
    scripts.run(main)
