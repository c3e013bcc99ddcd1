"""S2D: one sorted draft for three targets against separate drafts at equal total training.

The targets share a tokenizer: that of the workbench, and two smaller ones that are trained here.
The separate drafts have the depths of the sub-models, and share the steps of the sorted one. The
sorted draft also drafts with an exit for each token, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scripts import Row, Store, table

import forerun
from drafts.common import ANSWER, CORPORA, TEST, Bench, PartSizes
from drafts.figures import cell, goal, seeds_of, tau_of
from forerun.api import Model
from forerun.controllers.fixed import Fixed
from forerun.core.modelled_speedup import best_gamma
from forerun.drafters._sub_model import rated_exits, sub_runners
from forerun.drafters._token_exits import ExitSource
from forerun.drafters.draft_model import DraftModel
from forerun.models.draft_link import load_draft
from forerun.training.data.documents import Batches
from forerun.training.drafts.acceptance import held_out_acceptance
from forerun.training.drafts.data import MAX_TEXT_TOKENS, running_text
from forerun.training.drafts.measure import frozen
from forerun.training.drafts.sorted import cut
from forerun.training.export import save
from forerun.training.language_model import Size, build_model, loop_of
from forerun.training.loop import LoopOptions
from forerun.training.recipes.sorted import Sorted

TARGETS = {"small": Size(128, 4, 4, 2, 320), "medium": Size(192, 5, 6, 3, 512)}
EXITS, HIDDEN = (1, 2, 4), 64
PIECES = 96  # held-out pieces of text
CONFIDENCE, GAMMA = 0.5, 4  # of exits per token; drafted tokens


@dataclass(frozen=True)
class Sizes(PartSizes):
    """target_steps: of the further targets. steps: of the sorted draft. characters: of a text."""

    target_steps: int
    steps: int
    characters: int


FULL, QUICK = Sizes(3, 300, 600, 10_000_000), Sizes(1, 2, 6, 100_000)


def run(bench: Bench) -> None:
    """Acceptance and modelled speed-up of every depth for every target."""
    sizes, store = bench.part("s2d", FULL, QUICK)
    found: dict[str, list[Row]] = {"sorted": [], "separate": []}
    for seed in range(sizes.seeds):
        for kind, rows in found.items():
            rows.append(made(bench, store, sizes, kind, seed))
    caption = (
        f"Sub-models of 1, 2 and 4 layers of one sorted draft, and separate drafts that share its "
        f"steps; acceptance on held-out text, c measured, speed-up: tau / (c gamma + 1) at the "
        f"best gamma; {seeds_of(sizes.seeds)}."
    )
    names = [*TARGETS, "target"]
    lines = [
        [name if depth == EXITS[0] else "", str(depth), *cells(found, name, depth)]
        for name in names
        for depth in EXITS
    ]
    head = ["target", "layers", "sorted: acceptance", "speed-up", "separate: acceptance"]
    goals = "\n".join(lines_of(found, names))
    tables = caption, table([*head, "speed-up"], lines), goals
    bench.write("s2d", *tables, *exits_of(bench, store, sizes, names))


def made(bench: Bench, store: Store, sizes: Sizes, kind: str, seed: int) -> Row:
    """A row of one kind: of every depth, the figures for every target."""

    def make() -> Row:
        groups = [EXITS] if kind == "sorted" else [(depth,) for depth in EXITS]
        found = Row()
        for exits in groups:
            steps = sizes.steps // len(groups)
            found |= measured(bench, sizes, trained(bench, sizes, kind, exits, steps, seed))
        return found

    return store.row(f"{kind}, seed {seed}", make)


def exits_of(bench: Bench, store: Store, sizes: Sizes, names: list[str]) -> list[str]:
    """Blocks on exits per token: tau of fixed depths and of exits, and where tokens leave."""
    rows = [decoded_all(bench, store, sizes, seed) for seed in range(sizes.seeds)]
    forms = [*map(str, EXITS), "exits"]
    lines = []
    for name in names:
        taus = [cell([tau_of([row[f"{name}, {form}"]]) for row in rows]) for form in forms]
        counts = np.array([row[f"{name}, exits"]["exits"] for row in rows], float)
        shares = (counts / counts.sum(1, keepdims=True)).mean(0)
        lines.append([name, *taus, " / ".join(f"{share:.2f}" for share in shares)])
    caption = (
        f"The same sorted draft, tau in decoding at temperature 1 with drafts of {GAMMA}: fixed "
        f"depths, and the first sub-model with a largest probability above {CONFIDENCE:g}; "
        f"shares of tokens that leave at 1, 2 and 4 layers; {seeds_of(sizes.seeds)}."
    )
    head = ["target", *(f"{depth} layer{'s' * (depth > 1)}" for depth in EXITS)]
    return [caption, table([*head, "exit per token", "shares"], lines)]


def decoded_all(bench: Bench, store: Store, sizes: Sizes, seed: int) -> Row:
    """Tokens and passes for every target, of each depth and of exits per token."""

    def make() -> Row:
        folder, found = trained(bench, sizes, "sorted", EXITS, sizes.steps, seed), Row()
        for name in (*TARGETS, "target"):
            model = target(bench, sizes, name)[0]
            for depth in EXITS:
                found[f"{name}, {depth}"] = decoded(bench, model, folder, seed, layers=depth)
            how = {"confidence": CONFIDENCE}
            found[f"{name}, exits"] = decoded(bench, model, folder, seed, **how)
        return found

    return store.row(f"exits, seed {seed}", make)


def decoded(bench: Bench, model: Model, folder: Path, seed: int, **how: Any) -> Row:
    """Tokens and passes of each prompt for tests; of exits per token also their histogram."""
    drafter = DraftModel(model=str(folder), tokenizer=model.tokenizer, target=model.target, **how)
    results = model.generate(
        bench.material.ids[TEST::10],
        drafter=drafter,
        controller=Fixed(nodes=GAMMA, depth=GAMMA),
        temperature=1.0,
        max_new_tokens=ANSWER,
        seed=seed,
        batch=16,
    )
    stats, source = [result.stats for result in results], drafter.source
    exits = source.counts.tolist() if isinstance(source, ExitSource) else []
    return {
        "tokens": [s.generated for s in stats],
        "passes": [s.passes for s in stats],
        "exits": exits,
    }


def corpus(bench: Bench, sizes: Sizes) -> Path:
    """A folder with prose and code."""
    folder = bench.out / "s2d" / "texts"
    folder.mkdir(parents=True, exist_ok=True)
    for path in map(bench.training_text, CORPORA):
        text = path.read_text("utf-8")[: sizes.characters]
        (folder / path.name).write_text(text, encoding="utf-8")
    return folder


def trained(
    bench: Bench, sizes: Sizes, kind: str, exits: tuple[int, ...], steps: int, seed: int
) -> Path:
    """The folder of a draft with these exits."""
    out = bench.out / "s2d" / f"{kind}-{exits[-1]}-{seed}"
    recipe = Sorted(
        corpus=corpus(bench, sizes),
        model=str(bench.folder("target")),
        exits=exits,
        hidden=HIDDEN,
        micro_tokens=1024,
        max_steps=steps,
        minutes=None,
        seed=seed,
    )
    recipe.train(out, resume=(out / "plan.json").exists())
    return out


def measured(bench: Bench, sizes: Sizes, folder: Path) -> Row:
    """Acceptance, c and modelled speed-up of each depth, for each target."""
    draft = load_draft(str(folder), "auto", "auto", 1, bench.target.tokenizer)
    assert draft.exits is not None
    parts, module, found = sub_runners(draft, draft.exits), frozen(str(folder)), Row()
    for name in (*TARGETS, "target"):
        model, teacher = target(bench, sizes, name)
        for one in rated_exits(parts, draft.exits.text, model.target):
            with cut(module, one.layers):
                alpha = acceptance(bench, module, teacher)
            up = best_gamma(alpha, one.c)[1]
            found[f"{name}, {one.layers}"] = {"alpha": alpha, "c": one.c, "speedup": up}
    return found


def acceptance(bench: Bench, draft: Any, teacher: Any) -> float:
    """Acceptance at all positions of held-out text."""
    documents = bench.held_out
    only = np.linspace(0, len(documents) - 1, min(PIECES, len(documents))).astype(int)
    return held_out_acceptance(draft, teacher, documents, np.unique(only))["all"]


def target(bench: Bench, sizes: Sizes, name: str) -> tuple[Model, Any]:
    """A target, and its module; small ones are trained and kept in `out`."""
    if name == "target":
        return bench.target, bench.teacher
    folder, tokenizer = bench.out / "s2d" / name, bench.target.tokenizer.inner
    if not (folder / "config.json").exists():
        model = build_model(TARGETS[name], tokenizer, 0)
        rows = running_text(bench.target.tokenizer, corpus(bench, sizes), 256, MAX_TEXT_TOKENS)
        batches = Batches(rows, budget=2048, prompt_weight=1.0)
        folder.mkdir(parents=True, exist_ok=True)
        options = LoopOptions(max_steps=sizes.target_steps)
        loop_of(model, batches, options, "cpu", folder / "checkpoint.pt").run()
        save(model, folder, tokenizer=tokenizer)
    return forerun.load(str(folder), max_seqs=16), frozen(str(folder))


def cells(found: dict[str, list[Row]], name: str, depth: int) -> list[str]:
    """Acceptance and speed-up of a depth, sorted and separate."""
    return [
        cell([row[f"{name}, {depth}"][figure] for row in rows])
        for rows in found.values()
        for figure in ("alpha", "speedup")
    ]


def lines_of(found: dict[str, list[Row]], names: list[str]) -> list[str]:
    """The best depth of the sorted draft against that of the separate ones, for each target."""
    lines = []
    for name in names:
        ups = {
            kind: [max(row[f"{name}, {depth}"]["speedup"] for depth in EXITS) for row in rows]
            for kind, rows in found.items()
        }
        gaps = [a - b for a, b in zip(ups["sorted"], ups["separate"], strict=True)]
        lines.append(goal(f"{name}: best speed-up of the sorted draft less separate drafts", gaps))
    return lines
