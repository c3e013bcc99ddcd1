"""Online Speculative Decoding: acceptance along a stream of four domains.

The draft is pre-trained on a fifth domain, one book. The stream has the domains in blocks (shift
test), or in turn; then one draft for all is compared with a draft for each. A frozen draft serves
the same requests as a control.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from scripts import Row, table

from drafts.common import ANSWER, PROMPT, Bench, PartSizes, questions
from drafts.figures import cell, goal, seeds_of
from forerun.training.data.texts import Texts
from forerun.training.recipes.online import RESULTS, OnlineDraft

FIFTH = "don_quixote_pg996"  # what the draft is pre-trained on
NAMES = {"tinyshakespeare": "plays", "python_code": "code", "sherlock": "stories"}
STREAM = (*NAMES.values(), "questions")
RATE = 1e-3
GAMMA = 5
GAIN = 0.1  # of acceptance within a block: the goal


@dataclass(frozen=True)
class Sizes(PartSizes):
    """requests: of each domain. intervals: requests per update."""

    requests: int
    intervals: tuple[int, ...]


FULL, QUICK = Sizes(3, 80, (2, 8)), Sizes(1, 4, (2,))


def run(bench: Bench) -> None:
    """Blocks with a frozen and learning drafts, then domains in turn."""
    sizes, store = bench.part("osd", FULL, QUICK)
    ways = {"frozen": 0, **{f"every {num} requests": num for num in sizes.intervals}}

    def rows(order: str, interval: int) -> list[Row]:
        make = partial(replay, bench, sizes, order, interval)
        return store.by_seed(f"{order}, every {interval}", sizes.seeds, make)

    blocks = {way: rows("blocks", num) for way, num in ways.items()}
    turns = {
        way: rows(order, sizes.intervals[0])
        for way, order in {"one draft": "in turn", "a draft for each": "by class"}.items()
    }
    bench.write("osd", block_table(blocks, sizes), block_goals(blocks), turn_table(turns, sizes))


def replay(bench: Bench, sizes: Sizes, order: str, interval: int, seed: int) -> Row:
    """Acceptance of each request of a stream."""
    out = bench.out / "state" / f"osd-{order}-{interval}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    OnlineDraft(
        replay=stream(bench, sizes, order, seed),
        model=str(bench.folder("target")),
        draft=str(pretrained(bench)),
        interval=interval,
        rate=RATE,
        gamma=GAMMA,
        max_tokens=ANSWER,
        seed=seed,
    ).train(out)
    rows = [json.loads(line) for line in (out / RESULTS).read_text().splitlines()]
    shutil.rmtree(out)
    return {"alpha": [row["alpha"] for row in rows], "tau": [row["tau"] for row in rows]}


def pretrained(bench: Bench) -> Path:
    """The folder of a draft that has learned the fifth domain only."""
    path = bench.out / "texts" / f"{FIFTH}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(parts(bench, FIFTH)), encoding="utf-8")
    return bench.pretrained(FIFTH, path)


def parts(bench: Bench, name: str) -> Iterator[str]:
    """The texts of one corpus that are not held out."""
    folder = bench.out / "corpora" / name
    for file in (bench.data / "corpora").glob(f"{name}.*"):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / file.name)
    yield from Texts(folder, PROMPT).trained()


def stream(bench: Bench, sizes: Sizes, order: str, seed: int) -> Path:
    """A file with the requests in one of the orders: blocks, in turn, by class."""
    path = bench.out / "texts" / f"stream-{order.replace(' ', '-')}-{seed}.jsonl"
    domains = {kind: some(bench, name, sizes.requests, seed) for name, kind in NAMES.items()}
    pairs = questions(bench.data)
    picks = np.random.default_rng(seed).permutation(len(pairs))[: sizes.requests]
    domains["questions"] = [pairs[i][0] for i in picks]
    rows = [{"prompt": prompt, "class": kind} for kind in STREAM for prompt in domains[kind]]
    if order != "blocks":
        rows = [rows[i + k * sizes.requests] for i in range(sizes.requests) for k in range(4)]
    if order != "by class":
        rows = [{"prompt": row["prompt"]} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def some(bench: Bench, name: str, num: int, seed: int) -> list[str]:
    """Beginnings of random pieces of a corpus."""
    text, tokenizer = "".join(parts(bench, name)), bench.target.tokenizer.inner
    found, length = [], 6 * PROMPT  # characters; a token has fewer
    for at in np.random.default_rng(seed).integers(0, len(text) - length, num):
        found.append(tokenizer.decode(tokenizer.encode(text[at : at + length])[1 : PROMPT + 1]))
    return found


def ends(row: Row, block: int) -> tuple[float, float]:
    """Mean acceptance in the first and the last quarter of a block."""
    num = len(row["alpha"]) // len(STREAM)
    alphas = [a for a in row["alpha"][block * num : (block + 1) * num] if a is not None]
    quarter = max(1, len(alphas) // 4)
    return float(np.mean(alphas[:quarter])), float(np.mean(alphas[-quarter:]))


def block_table(blocks: dict[str, list[Row]], sizes: Sizes) -> str:
    """Acceptance at the ends of blocks."""
    lines = []
    for way, rows in blocks.items():
        for end, name in enumerate(("first quarter", "last quarter")):
            found = [cell([ends(row, k)[end] for row in rows]) for k in range(len(STREAM))]
            lines.append([way if not end else "", name, *found])
    return (
        "Acceptance (mean over tried positions of a request, then over requests) in a stream of "
        f"four blocks of {sizes.requests} requests, temperature 1, drafts of "
        f"{GAMMA}, rate {RATE:g}; the draft was pre-trained on another book; "
        f"{seeds_of(sizes.seeds)}.\n\n" + table(["updates", "part of block", *STREAM], lines)
    )


def block_goals(blocks: dict[str, list[Row]]) -> str:
    """Gain within blocks over the frozen draft, and its behaviour at borders."""
    frozen, lines = blocks["frozen"], []
    for way, rows in blocks.items():
        if way == "frozen":
            continue
        inside, border = [], []
        for row, still in zip(rows, frozen, strict=True):
            gaps = [np.subtract(ends(row, k), ends(still, k)) for k in range(len(STREAM))]
            inside.append(float(np.mean([gap[1] for gap in gaps])))
            drops = [gaps[k][1] - gaps[k + 1][0] for k in range(len(STREAM) - 1)]
            border.append(float(np.mean(drops)))
        lines.append(goal(f"{way}: last quarter over frozen, by {GAIN}", inside, GAIN))
        lines.append(goal(f"{way}: gain lost at the border of two domains", border))
    return "\n".join(lines)


def turn_table(turns: dict[str, list[Row]], sizes: Sizes) -> str:
    """Acceptance in the second half of a stream with domains in turn, by domain."""

    def second_half(row: Row, block: int) -> float:
        alphas = [a for a in row["alpha"][block :: len(STREAM)] if a is not None]
        return float(np.mean(alphas[len(alphas) // 2 :]))

    means = {
        way: [np.mean([second_half(row, k) for k in range(len(STREAM))]) for row in rows]
        for way, rows in turns.items()
    }
    lines = [
        [way, *(cell([second_half(row, k) for row in rows]) for k in range(len(STREAM)))]
        for way, rows in turns.items()
    ]
    gaps = [float(b - a) for a, b in zip(*means.values(), strict=True)]
    return (
        f"The same requests with domains in turn, updates every {sizes.intervals[0]} requests of a "
        f"class, second half of the stream; {seeds_of(sizes.seeds)}.\n\n"
        + table(["drafts", *STREAM], lines)
        + "\n\n"
        + goal("a draft for each domain over one draft", gaps)
    )
