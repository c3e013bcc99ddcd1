"""Entropy Adaptive Decoding on the embedded pair: predictive power, accuracy, cost, speed.

    python benchmarks/entropy_switch.py [--tables signal speed curve] [--problems 300]

signal: how well the small model's entropy predicts, along reference solutions, that the large model
        would write another token (area under the curve): entropy of the token itself, mean of five
        tokens with it, mean of the five before it.
curve:  accuracy over thresholds, compared with random switching at the same rates and with the
        straight line between the two models. Cost is in parameters per token over the large
        model's, without and with the catch-up passes.
speed:  tokens per second over plain decoding by the large model, in turns, without and with STAND.

Thresholds are chosen on training problems; all other problems are held out.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
import scripts

import forerun
from forerun.api import Model
from forerun.bench.switching import RandomSwitch, Score, gap, score, traces
from forerun.bench.theory import pass_cost
from forerun.targets.entropy_switch import LARGE, SMALL, EntropySwitch
from forerun.tasks.reasoning import MIX, ReasoningTask
from forerun.utils.stats import auc

FIRST_SEED = 620_000  # problems of this benchmark
THRESHOLDS = (2.0, 1.0, 0.7, 0.5)
SETTINGS = ((1, 0), (5, 0), (5, 10))  # window, hold
TABLES = ["signal", "speed", "curve"]


class Pair:
    """Both models and the problems."""

    def __init__(self, problems: int, levels: tuple[int, ...]) -> None:
        pair = forerun.load(target="entropy_switch:small=draft,threshold=1", max_seqs=64)
        self.models, self.tokenizer = pair.target.models, pair.tokenizer  # type: ignore[attr-defined]
        self.task = ReasoningTask("heldout", levels, seed=FIRST_SEED)
        self.examples = [self.task.example(i) for i in range(problems)]
        costs = [pass_cost(model) for model in self.models]
        self.sizes = [cost.weight_bytes for cost in costs if cost]

    def score(self, switch: EntropySwitch) -> Score:
        return score(switch, self.tokenizer, self.task, self.examples)


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def signal_table(pair: Pair) -> None:
    found = traces(pair.models, pair.tokenizer, pair.examples[:100])
    other = np.concatenate([differs for _, differs in found]).astype(float)

    def area(of: Callable[[np.ndarray, int], float]) -> str:
        scores = [of(bits, k) for bits, _ in found for k in range(len(bits))]
        return f"{auc(np.array(scores), other):.3f}"

    row("entropy of", "area under the curve")
    row("---", "---")
    row("the token itself", area(lambda bits, k: bits[k]))
    row("five tokens, with it", area(lambda bits, k: bits[max(0, k - 4) : k + 1].mean()))
    row("five tokens, before it", area(lambda bits, k: bits[max(0, k - 5) : k].mean() if k else 0))
    print(f"\n{len(other)} tokens, the models disagree on {other.mean():.1%}\n")


def curve_table(pair: Pair) -> None:
    """Accuracy and cost over thresholds, for each setting."""
    small, large = pair.models
    ends = [pair.score(EntropySwitch(large, small=small, threshold=t)) for t in (np.inf, -1.0)]
    low, high = (end.accuracy for end in ends)
    print(f"small model {low:.3f}, large model {high:.3f}, {len(pair.examples)} problems\n")
    heads = "window, hold", "bits", "accuracy", "of large", "f", "cost", "with catch-up"
    row(*heads, "line", "random", "its f", "entropy - random")
    row(*["---"] * (len(heads) + 4))
    for window, hold in SETTINGS:
        for threshold in THRESHOLDS:
            how = {"window": window, "hold": hold}
            switch = EntropySwitch(large, small=small, threshold=threshold, **how)  # type: ignore[arg-type]
            own = pair.score(switch)
            control = pair.score(RandomSwitch(small, large, own.switches, hold=hold, seed=1))
            difference, error = gap(own, control)
            error_own = np.sqrt(own.accuracy * (1 - own.accuracy) / len(own.right))
            row(
                f"{window}, {hold}",
                threshold,
                f"{own.accuracy:.3f} ± {1.96 * error_own:.3f}",
                f"{own.accuracy / high:.0%}",
                f"{own.usage.share:.3f}",
                f"{own.usage.cost(*pair.sizes):.3f}",
                f"{own.usage.cost(*pair.sizes, catch_up=True):.3f}",
                f"{low + (high - low) * own.usage.share:.3f}",
                f"{control.accuracy:.3f}",
                f"{control.usage.share:.3f}",
                f"{difference:+.3f} ± {1.96 * error:.3f}",
            )
    print()


def speed_table(pair: Pair, problems: int, threshold: float) -> None:
    """Tokens per second in turns, four samples per problem at temperature 0.6, one at a time."""
    switch = EntropySwitch(pair.models[LARGE], small=pair.models[SMALL], threshold=threshold)
    contestants = {
        f"{name}, {drafter}": (Model(target, pair.tokenizer), drafter)
        for name, target in (
            ("large", pair.models[LARGE]),
            ("small", pair.models[SMALL]),
            (f"switched at {threshold}", switch),
        )
        for drafter in ("none", "stand")
    }
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    taus: dict[str, list[int]] = {name: [0, 0] for name in contestants}
    rng = np.random.default_rng(0)
    for i, example in enumerate(pair.examples[: problems + 1]):
        for at in rng.permutation(len(contestants)):
            name = list(contestants)[at]
            model, drafter = contestants[name]
            start = perf_counter()
            (result,) = model.generate(
                [example.prompt], drafter=drafter, n=4, temperature=0.6, max_new_tokens=300, seed=i
            )
            if i:  # the first is a warm-up
                rates[name].append(result.stats.generated / (perf_counter() - start))
                taus[name][0] += result.stats.generated
                taus[name][1] += result.stats.passes
    row("", "tau", "speed over the large model, plain", "95 % interval")
    row(*["---"] * 4)
    plain = np.log(rates["large, none"])
    for name, found in rates.items():
        logs = np.log(found) - plain
        draws = rng.choice(logs, (4000, len(logs))).mean(axis=1)
        low, high = np.exp(np.quantile(draws, [0.025, 0.975]))
        tau = taus[name][0] / taus[name][1]
        row(name, f"{tau:.2f}", f"{np.exp(logs.mean()):.2f}", f"{low:.2f} to {high:.2f}")
    print()


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--problems", type=scripts.count, default=300)
    parser.add_argument("--levels", type=scripts.number, nargs="+", default=list(MIX))
    parser.add_argument(
        "--timed", type=scripts.count, default=12, help="problems of the speed table"
    )
    parser.add_argument(
        "--threshold", type=scripts.measure, default=1.0, help="threshold of the speed table"
    )
    options = parser.parse_args()
    pair = Pair(options.problems, tuple(options.levels))
    if "signal" in options.tables:
        signal_table(pair)
    if "speed" in options.tables:
        speed_table(pair, options.timed, options.threshold)
    if "curve" in options.tables:
        curve_table(pair)


if __name__ == "__main__":
    scripts.run(main)
