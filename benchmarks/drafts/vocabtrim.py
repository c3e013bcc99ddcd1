"""VocabTrim: memory-bound speed-up by the size of the draft's head, with three calibrations.

Tokens are counted in texts of the target, of the draft, or in the prompts. The sizes are measured
on other prompts. Half of the prompts of the workbench's domains are used with each seed.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from scripts import Row, table

from drafts.common import ANSWER, Bench, PartSizes
from drafts.figures import cell, goal, seeds_of
from forerun.compression.vocab_trim import SOURCES, VocabTrim, always_kept, split
from forerun.models.draft_link import load_draft

GAMMA = 4
FIGURES = {"tau": "tau", "mbsu": "MBSU"}
LABELS = {"target": "texts of the target", "draft": "texts of the draft", "raw": "prompts"}


@dataclass(frozen=True)
class Sizes(PartSizes):
    prompts: int


FULL, QUICK = Sizes(3, 120), Sizes(1, 12)


def run(bench: Bench) -> None:
    """A sweep for each calibration and seed."""
    sizes, store = bench.part("vocabtrim", FULL, QUICK)
    found = {
        source: store.by_seed(source, sizes.seeds, partial(sweep, bench, sizes, source))
        for source in SOURCES
    }
    sizes_of_head = [point["size"] for point in found["target"][0]["points"]]
    lines = [
        [f"{size:,}", *(cell(each(found[s], i, figure)) for s in SOURCES for figure in FIGURES)]
        for i, size in enumerate(sizes_of_head)
    ]
    caption = (
        f"tau and memory-bound speed-up tau / (c gamma + 1) by tokens in the head, drafts of "
        f"{GAMMA}, temperature 1, c: bytes read per step over the target's; "
        f"{seeds_of(sizes.seeds)}."
    )
    head = ["tokens", *(f"{LABELS[s]}: {name}" for s in SOURCES for name in FIGURES.values())]
    bench.write("vocabtrim", caption, table(head, lines), goals(found, sizes_of_head))


def sweep(bench: Bench, sizes: Sizes, source: str, seed: int) -> Row:
    """tau and MBSU by size of the head, for one calibration."""
    path = prompt_file(bench, sizes, seed)
    trim = VocabTrim(
        calibrate=str(path),
        model=str(bench.folder("target")),
        source=source,
        tokens=ANSWER,
        temperature=1.0,
        gamma=GAMMA,
    )
    trim.sampling = replace(trim.sampling, seed=seed)
    target = bench.target
    draft = load_draft(str(bench.folder("draft")), "auto", "auto", 256, target.tokenizer)
    texts = [json.loads(line)["prompt"] for line in path.read_text("utf-8").splitlines()]
    prompts = [target.prompt_ids(text) for text in texts]
    fit, held_out = split(prompts)
    counts = trim.count(target, draft, fit)
    points = trim.sweep(target, draft, counts, always_kept(target), held_out)
    return {"points": [asdict(point) for point in points], "different": int((counts > 0).sum())}


def prompt_file(bench: Bench, sizes: Sizes, seed: int) -> Path:
    """A file with prompts of all domains, other ones with each seed."""
    path = bench.out / "texts" / f"vocabtrim-{seed}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    num = min(sizes.prompts, len(bench.prompts) // 2)
    picks = np.random.default_rng(seed).permutation(len(bench.prompts))[:num]
    rows = [json.dumps({"prompt": bench.prompts[i].text}) + "\n" for i in picks]
    path.write_text("".join(rows), encoding="utf-8")
    return path


def each(rows: list[Row], i: int, figure: str) -> list[float]:
    """A figure of one size with each seed."""
    return [row["points"][i][figure] for row in rows]


def goals(found: dict[str, list[Row]], sizes: list[int]) -> str:
    """The optimum lies inside the sweep; texts of the target are the best calibration."""
    means = {
        source: [float(np.mean(each(rows, i, "mbsu"))) for i in range(len(sizes))]
        for source, rows in found.items()
    }
    lines = []
    for source, each_mean in means.items():
        best = int(np.argmax(each_mean))
        gaps = [
            min(row["points"][best]["mbsu"] - row["points"][end]["mbsu"] for end in (0, -1))
            for row in found[source]
        ]
        text = f"{LABELS[source]}: MBSU of {sizes[best]:,} tokens less that of the better end"
        lines.append(goal(text, gaps))
    for other in ("draft", "raw"):
        gaps = [
            max(p["mbsu"] for p in a["points"]) - max(p["mbsu"] for p in b["points"])
            for a, b in zip(found["target"], found[other], strict=True)
        ]
        lines.append(goal(f"best MBSU with texts of the target less {LABELS[other]}", gaps))
    return "\n".join(lines)
