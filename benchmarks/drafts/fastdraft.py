"""FastDraft: acceptance after pre-training on prose, continued training with code, and alignment.

The control of the alignment trains as many steps on texts instead of the target's answers. Depths
of about equal parameters are compared after a short pre-training, with the measured cost of a step.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from scripts import Row, Store, table

from drafts.common import DOMAINS, Bench, PartSizes
from drafts.figures import cell, goal, seeds_of
from forerun.engine.cost.forward import one_row_seconds
from forerun.training.data.mixture import Mixture
from forerun.training.drafts.distillation import TEXT, Distilled
from forerun.training.drafts.phases import CODE_SHARE, THREE, Budget, Phase, Texts
from forerun.training.drafts.shapes import candidates, num_parameters, rated, step_seconds
from forerun.training.language_model import Size
from forerun.training.loop import Loop
from forerun.training.progress import silent

MICRO = 2048  # tokens per micro-batch
STAGES = {"pretrain": "prose", "continue": "code and prose", "align": "answers of the target"}
CONTROL = "control"


@dataclass(frozen=True)
class Sizes(PartSizes):
    """steps: of all phases. probe: steps of each depth. share: of the target's parameters."""

    steps: int
    probe: int
    share: float


FULL, QUICK = Sizes(3, 600, 80, 0.27), Sizes(1, 12, 2, 0.27)


def run(bench: Bench) -> None:
    """Stages by domain, and depths."""
    sizes, store = bench.part("fastdraft", FULL, QUICK)
    runs = store.by_seed("stages", sizes.seeds, partial(stages, bench, sizes))
    bench.write("fastdraft", stage_table(runs), goals(runs), depth_table(bench, sizes, store))


def stages(bench: Bench, sizes: Sizes, seed: int) -> Row:
    """Acceptance on the test answers after each stage, and of the control, by domain."""
    texts = Texts(bench.training_text("prose"), bench.training_text("code"))
    found, kept = Row(), {}
    model = bench.new_draft(seed)
    trainer = bench.trainer(f"fastdraft-{seed}", model, sizes.steps, seed, micro=MICRO)
    for phase in texts.phases(trainer.material, model):
        kept[phase.name] = {n: p.detach().clone() for n, p in model.named_parameters()}
        trainer.run(phase, silent)
        found[phase.name] = bench.acceptance(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(kept["align"][name])
    found[CONTROL] = control(bench, sizes, seed, model)
    shutil.rmtree(trainer.state)
    return found


def control(bench: Bench, sizes: Sizes, seed: int, model: Any) -> Row:
    """Acceptance after as many steps as the alignment has on the mixture of texts."""
    made = bench.trainer(f"fastdraft-control-{seed}", model, sizes.steps, seed + 100, micro=MICRO)
    texts = {name: made.material.text(bench.training_text(name)) for name in ("code", "prose")}
    sources = {"code": texts["code"], TEXT: texts["prose"]}
    mixed = Mixture(sources, {"code": CODE_SHARE, TEXT: 1 - CODE_SHARE})
    made.run(Phase("align", THREE[2], mixed, "ce"), silent)
    shutil.rmtree(made.state)
    return bench.acceptance(model)


def stage_table(runs: list[Row]) -> str:
    """Acceptance by stage and domain."""
    columns = [*DOMAINS, "all", "greedy"]
    lines = [
        [f"{name}: {text}", *(cell([run[name][c] for run in runs]) for c in columns)]
        for name, text in {**STAGES, CONTROL: "texts instead of answers"}.items()
    ]
    return (
        f"Acceptance sum min(p, q) on answers to held-out prompts after each stage; greedy: share "
        f"of equal argmax; {seeds_of(len(runs))}.\n\n" + table(["stage", *columns], lines)
    )


def goals(runs: list[Row]) -> str:
    """The directions of the paper."""

    def gain(after: str, before: str, where: str) -> list[float]:
        return [run[after][where] - run[before][where] for run in runs]

    return "\n".join(
        [
            goal("continued training, code", gain("continue", "pretrain", "code")),
            goal("alignment, all domains", gain("align", "continue", "all")),
            goal("alignment over as many steps on texts", gain("align", CONTROL, "all")),
        ]
    )


def depth_table(bench: Bench, sizes: Sizes, store: Store) -> str:
    """Cost, acceptance and modelled speed-up of depths of about equal parameters."""
    vocab = bench.teacher.config.vocab_size
    most = int(sizes.share * sum(p.numel() for p in bench.teacher.parameters()))
    lines, ups, costs = [], [], []
    for size in candidates(vocab, most):
        make = partial(depth, bench, sizes, size)
        rows = store.by_seed(f"{size.layers} layers", sizes.seeds, make)
        ups.append([row["speedup"] for row in rows])
        costs.append([row["c"] for row in rows])
        found = [cell([row[name] for row in rows]) for name in ("c", "alpha", "speedup")]
        million = num_parameters(size, vocab) / 1e6
        lines.append([str(size.layers), str(size.hidden), f"{million:.2f}M", *found])
    head = ["layers", "width", "parameters", "c", "acceptance", "speed-up"]
    best = int(np.argmax(np.mean(ups, axis=1)))
    longer = [last - first for last, first in zip(costs[-1], costs[0], strict=True)]
    return "\n\n".join(
        [
            f"Depths at about equal parameters, {sizes.probe} steps on prose; c: time of a step "
            f"over the target's; speed-up: tau / (c gamma + 1) at the best gamma; "
            f"{seeds_of(sizes.seeds)}.",
            table(head, lines),
            goal("cost of the deepest less that of the shallowest", longer)
            + f"\n- Highest modelled speed-up at depth {lines[best][0]}.",
        ]
    )


def depth(bench: Bench, sizes: Sizes, size: Size, seed: int) -> Row:
    """One depth: measured cost, acceptance after a short training, modelled speed-up."""
    model, material = bench.new_draft(seed, size), bench.material_of(seed, MICRO)
    seconds = one_row_seconds(bench.target.target)
    c = step_seconds(model, bench.target.tokenizer.inner) / seconds
    trained = Distilled(model, material.text(bench.training_text("prose")), None)
    Loop(trained, Budget(seed=seed).probe(sizes.probe), torch.device("cpu")).run()
    found = rated(size, bench.teacher.config.vocab_size, c, bench.acceptance(model)["all"])
    return {name: getattr(found, name) for name in ("c", "alpha", "gamma", "speedup")}
