"""OmniDraft on the workbench models: what a draft with another tokenizer has accepted, by arm.

The target continues the first words of held-out texts. A stream of such prompts comes first: arm
`cache` collects n-grams along it, arm `distilled` learns from it too. Then all arms continue the
same evaluation prompts, which the stream does not hold. Counts, no seconds.

    direct     one-to-one tokens only
    cache      and n-grams
    distilled  and the hybrid loss along the stream
    tli, slem  the siblings, with the first draft

acceptance: accepted share of proposed target tokens. tau: target tokens per target pass.
characters: per target pass, the figure to compare across tokenizers. Intervals: 95 %, bootstrap
over evaluation prompts and seeds.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scripts import Row, table
from transformers import PreTrainedTokenizerFast

import forerun
from drafts.common import HELD_OUT, Bench, PartSizes
from drafts.figures import goal, seeds_of
from forerun.api import Model
from forerun.controllers.fixed import Fixed
from forerun.drafters.cross_vocab import CrossVocab
from forerun.drafters.online import ONE_CLASS, Online
from forerun.training.data.texts import Texts
from forerun.training.export import save
from forerun.training.online.learner import OnlineLearner, OnlineOptions, draft_module
from forerun.training.online.replay import Labels, Replay, ReplaySettings, Request
from forerun.training.online.translated import objective_for

ARMS = "direct", "cache", "distilled", "tli", "slem"
PIECE, PROMPT = 256, 32  # tokens
TOKENS = 64  # of an answer
GAMMA = 5
FIELDS = "proposed", "accepted", "tokens", "passes", "characters"
METRICS = {
    "acceptance": ("accepted", "proposed"),
    "tau": ("tokens", "passes"),
    "characters_per_pass": ("characters", "passes"),
}
BOOTSTRAP = 1000
RATES = {0.0: 2e-4, 0.4: 1e-3}  # learning rate by noise of the first draft, in standard deviations
INTERVAL = 2  # requests per update


@dataclass(frozen=True)
class Sizes(PartSizes):
    """stream, texts: prompts per seed."""

    stream: int
    texts: int


FULL, QUICK = Sizes(3, 200, 40), Sizes(1, 4, 2)


def run(bench: Bench) -> None:
    """All arms, from the draft as it was trained and from one that fits badly."""
    sizes, store = bench.part("omnidraft", FULL, QUICK, ("target", "other"))
    lines, goals = [], []
    for noise in RATES:
        make = partial(counts, bench, sizes, noise)
        found = store.by_seed(f"noise {noise}", sizes.seeds, make)
        first = f"noise {noise}" if noise else "as trained"
        lines += [[first, *cells(summary(arm, joined(found, arm)))] for arm in ARMS]
        goals += goals_of(first, found)
    caption = (
        f"Draft with 1,024 tokens for a target with 4,096, temperature 1, drafts of {GAMMA}; "
        f"{sizes.stream} requests of the stream, {sizes.texts} other texts, "
        f"{seeds_of(sizes.seeds)}; brackets: 95 % intervals over texts."
    )
    head = ["first draft", "arm", "accepted of proposed", "tau", "characters per target pass"]
    bench.write("omnidraft", caption, table(head, lines), "\n".join(goals))


def goals_of(first: str, found: list[Row]) -> list[str]:
    """N-grams beat direct mapping and TLI, and distillation beats n-grams alone."""
    each = {
        arm: [summary(arm, np.array(row[arm]))["characters_per_pass"] for row in found]
        for arm in ARMS
    }
    return [
        goal(
            f"{first}, characters per pass, {one} less {other}", np.subtract(each[one], each[other])
        )
        for one, other in (("cache", "direct"), ("cache", "tli"), ("distilled", "cache"))
    ]


def counts(bench: Bench, sizes: Sizes, noise: float, seed: int) -> Row:
    """FIELDS of each evaluation text, by arm; the first draft is disturbed by noise."""
    folder = bench.out / "state" / f"omnidraft-{noise}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    draft = bench.folder("other")
    if noise:
        draft = disturbed(draft, folder / "first", noise, seed)
    prompts = prompts_of(bench, sizes.stream + sizes.texts, seed)
    stream, texts = prompts[: -sizes.texts], prompts[-sizes.texts :]  # or a shorter stream
    model = forerun.load(str(bench.folder("target")), max_seqs=1)
    options = OnlineOptions(rate=RATES[noise], interval=INTERVAL)
    still = ReplaySettings(GAMMA, 1.0, TOKENS, seed, learns=False)
    cached, _ = replayed(model, draft, stream, folder / "cache.pt", still, OnlineOptions())
    learns = replace(still, learns=True)
    learned, learner = replayed(model, draft, stream, folder / "online.pt", learns, options)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(draft)
    save(learner.learner(ONE_CLASS).model, folder / "draft", tokenizer=tokenizer)
    arms = arms_of(model, draft, folder / "draft", cached, learned)
    found = {arm: counted(model, drafter, texts, still) for arm, drafter in arms.items()}
    shutil.rmtree(folder)
    return {arm: rows.tolist() for arm, rows in found.items()}


def joined(found: list[Row], arm: str) -> np.ndarray:
    """FIELDS of the texts of all seeds."""
    return np.concatenate([np.array(row[arm]) for row in found])


def cells(row: Row) -> list[str]:
    """A row of the table."""
    ends = [(row[name], *row[f"{name}_interval"]) for name in METRICS]
    return [row["arm"], *(f"{value:.3f} ({low:.3f} to {high:.3f})" for value, low, high in ends)]


class WithoutNgrams(CrossVocab):
    """Direct mapping only."""

    def _learn(self, seq: Any, tokens: Any) -> None:
        """Nothing is learned."""


def prompts_of(bench: Bench, num: int, seed: int) -> list[str]:
    """First words of held-out texts, the corpora in turn, in an order of the seed's."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(bench.folder("target"))
    by_corpus = []
    for documents in Texts(bench.data / "corpora", PIECE, HELD_OUT).pieces(tokenizer)[1].values():
        starts = [documents.document(i)[:PROMPT] for i in range(len(documents))]
        texts = [str(tokenizer.decode(ids)) for ids in starts if len(ids) == PROMPT]
        order = np.random.default_rng(seed).permutation(len(texts))
        by_corpus.append([texts[i] for i in order])
    in_turn = [text for texts in zip_longest(*by_corpus) for text in texts if text is not None]
    return in_turn[:num]


def disturbed(draft: Path, out: Path, noise: float, seed: int) -> Path:
    """The draft with Gaussian noise on every matrix, in standard deviations of the matrix."""
    model = draft_module(str(draft))
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.add_(noise * p.std() * torch.randn_like(p))
    save(model, out, tokenizer=PreTrainedTokenizerFast.from_pretrained(draft))
    return out


def replayed(
    model: Model,
    draft: Path,
    stream: Many[str],
    checkpoint: Path,
    settings: ReplaySettings,
    options: OnlineOptions,
) -> tuple[Online, OnlineLearner]:
    """The drafter and the learner after the stream; prints the acceptance along it."""
    drafter = Online(model=str(draft), tokenizer=model.tokenizer, target=model.target)
    drafter.router = Labels([ONE_CLASS])
    drafter.bind(model.target)
    objective = objective_for(drafter, options)
    module = draft_module(str(draft))
    learner = OnlineLearner(module, options, drafter.class_of, objective=objective)
    requests = [Request(text, ONE_CLASS) for text in stream]
    replay = Replay(model, drafter, learner, requests, settings)
    replay.run(checkpoint)
    rates = [
        sum(row["overlap"] for row in part) / max(1, sum(row["tried"] for row in part))
        for part in np.array_split(np.array(replay.rows), min(5, len(replay.rows)))
    ]
    shown = ", ".join(f"{rate:.3f}" for rate in rates)
    print(f"{checkpoint.stem}, seed {settings.seed}, along the stream: {shown}", file=sys.stderr)
    return drafter, learner


def arms_of(
    model: Model, first: Path, trained: Path, cached: Online, learned: Online
) -> dict[str, CrossVocab]:
    """The drafter of each arm."""
    how: dict[str, Any] = {"tokenizer": model.tokenizer, "target": model.target}
    made = {
        "direct": WithoutNgrams(model=str(first), **how),
        "cache": CrossVocab(model=str(first), **how),
        "distilled": CrossVocab(model=str(trained), **how),
        "tli": CrossVocab(model=str(first), method="tli", **how),
        "slem": CrossVocab(model=str(first), method="slem", **how),
    }
    made["cache"].translation = cached.translation
    made["distilled"].translation = learned.translation
    return made


def counted(
    model: Model, drafter: CrossVocab, texts: Many[str], settings: ReplaySettings
) -> np.ndarray:
    """FIELDS of each text, [n, 5]."""
    rows = []
    for number, text in enumerate(texts):
        (found,) = model.generate(
            [text],
            drafter=drafter,
            controller=Fixed(nodes=settings.gamma, depth=settings.gamma),
            temperature=settings.temperature,
            max_new_tokens=settings.max_tokens,
            seed=settings.seed + number,
        )
        s = found.stats
        rows.append((s.drafted, s.accepted, s.generated, s.passes, len(found.text)))
    return np.array(rows, float)


def summary(arm: str, counts: np.ndarray) -> dict[str, Any]:
    """Ratios of sums over texts [n, 5], with bootstrap intervals."""
    row: dict[str, Any] = {"arm": arm, "texts": len(counts)}
    picks = np.random.default_rng(0).integers(0, len(counts), (BOOTSTRAP, len(counts)))
    for name, (above, below) in METRICS.items():
        a, b = counts[:, FIELDS.index(above)], counts[:, FIELDS.index(below)]
        draws = a[picks].sum(1) / np.maximum(b[picks].sum(1), 1)
        row[name] = float(a.sum() / max(b.sum(), 1))
        row[f"{name}_interval"] = [float(x) for x in np.quantile(draws, (0.025, 0.975))]
    return row
