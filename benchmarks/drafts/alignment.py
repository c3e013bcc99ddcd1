"""Direct Alignment: FKL, TVD and TVD++ from one draft, each at its own learning rate.

The draft was pre-trained on prose; the answers of the target are of prose, code and questions.
The rate of a loss is the one with the highest acceptance on the answers for choices with the first
seed. Figures are of the answers for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from scripts import Row, table

from drafts.common import Bench, PartSizes
from drafts.figures import cell, goal, seeds_of, tau_of
from forerun.training.drafts.phases import Phase

LOSSES = {
    "ce": "CE on the answers",
    "fkl": "FKL",
    "tvd": "TVD",
    "tvd++": "TVD++, batch",
    "tvd++position": "TVD++, position",
}
DRAFTS = (3, 5)  # tokens of a draft
GAIN = 0.05  # of acceptance over the pre-trained draft


@dataclass(frozen=True)
class Sizes(PartSizes):
    """rates: factors of the learning rates that are tried."""

    steps: int
    rates: tuple[float, ...]


FULL, QUICK = Sizes(3, 150, (0.3, 1.0, 3.0)), Sizes(1, 2, (1.0, 3.0))


def run(bench: Bench) -> None:
    """Every loss with every rate on one seed, then its best rate on the others."""
    sizes, store = bench.part("alignment", FULL, QUICK)
    before = store.row("before", lambda: figures(bench, bench.prose_draft(), 0))
    longer = store.row("workbench", lambda: figures(bench, bench.draft(), 0))
    found, rates = dict[str, list[Row]](), dict[str, float]()

    def rows(loss: str, rate: float, seeds: int) -> list[Row]:
        make = partial(aligned, bench, sizes, loss, rate)
        return store.by_seed(f"{loss}, rate {rate}", seeds, make)

    for loss in LOSSES:
        chosen = {rate: rows(loss, rate, 1)[0]["chosen"] for rate in sizes.rates}
        rates[loss] = max(chosen, key=chosen.__getitem__)
        found[loss] = rows(loss, rates[loss], sizes.seeds)
    bench.write("alignment", loss_table(before, longer, found, rates), goals(before, found))


def aligned(bench: Bench, sizes: Sizes, loss: str, rate: float, seed: int) -> Row:
    """The pre-trained draft after alignment: acceptance at choices, and figures of tests."""
    model, key = bench.prose_draft(), f"alignment-{loss}-{rate}-{seed}"
    trainer = bench.trainer(key, model, 2 * sizes.steps, seed, rate=rate)  # a half is alignment
    phase = Phase("align", 0.5, trainer.material.alignment("target", model), loss)
    chosen = bench.distilled(key, model, phase, trainer)
    return {"chosen": chosen["all"], **figures(bench, model, seed)}


def figures(bench: Bench, model: Any, seed: int) -> Row:
    """Acceptance on the answers for tests, and tokens and passes with drafts."""
    tau = {str(gamma): bench.decoded(model, 1.0, gamma, seed) for gamma in DRAFTS}
    return {"acceptance": bench.acceptance(model), "tau": tau}


def loss_table(
    before: Row, longer: Row, found: dict[str, list[Row]], rates: dict[str, float]
) -> str:
    """Acceptance and tau by loss."""
    lines = [["pre-trained on prose", "", *cells([before])]]
    lines += [[LOSSES[loss], f"{rates[loss]:g}", *cells(rows)] for loss, rows in found.items()]
    lines.append(["draft of the workbench, for comparison", "", *cells([longer])])
    num = len(next(iter(found.values())))
    head = ["loss", "rate", "acceptance", "greedy", *(f"tau, drafts of {g}" for g in DRAFTS)]
    return (
        "Answers of the target to held-out prompts, temperature 1; rate: factor of the learning "
        f"rates, chosen on other prompts; {seeds_of(num)}.\n\n" + table(head, lines)
    )


def cells(rows: list[Row]) -> list[str]:
    """Acceptance, share of equal argmax, and tau of some seeds."""
    alphas = [cell([row["acceptance"][name] for row in rows]) for name in ("all", "greedy")]
    return alphas + [cell([tau_of([row["tau"][str(g)]]) for row in rows]) for g in DRAFTS]


def goals(before: Row, found: dict[str, list[Row]]) -> str:
    """Lines on the goals."""

    def alphas(loss: str) -> list[float]:
        return [row["acceptance"]["all"] for row in found[loss]]

    first = before["acceptance"]["all"]
    lines = [
        goal(f"{text} over pre-training by {GAIN}", [a - first for a in alphas(loss)], GAIN)
        for loss, text in LOSSES.items()
    ]
    for one, other in (("tvd++", "tvd"), ("tvd++position", "tvd"), ("tvd++", "fkl")):
        gaps = [a - b for a, b in zip(alphas(one), alphas(other), strict=True)]
        lines.append(goal(f"{LOSSES[one]} over {LOSSES[other]}", gaps))
    return "\n".join(lines)
