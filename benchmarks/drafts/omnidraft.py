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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scripts import Row
from transformers import PreTrainedTokenizerFast

import forerun
from drafts.common import Bench, goal, seeds_of, table
from forerun.api import Model
from forerun.controllers.fixed import Fixed
from forerun.drafters.cross_vocab import CrossVocab
from forerun.drafters.online import ONE_CLASS, Online
from forerun.training.export import save
from forerun.training.online import OnlineLearner, OnlineOptions, draft_module
from forerun.training.replay import Labels, Replay, ReplaySettings, Request
from forerun.training.texts import Texts
from forerun.training.translated import objective_for

ARMS = "direct", "cache", "distilled", "tli", "slem"
PIECE, PROMPT = 256, 32  # tokens
HELD_OUT = 0.05  # as in the workbench
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
class Sizes:
    """stream, texts: prompts per seed."""

    seeds: int
    stream: int
    texts: int


FULL, QUICK = Sizes(3, 200, 40), Sizes(1, 4, 2)


def run(bench: Bench) -> None:
    """All arms, from the draft as it was trained and from one that fits badly."""
    sizes = QUICK if bench.quick else FULL
    store, lines, goals = bench.store("omnidraft", sizes, ("target", "other")), [], []
    for noise in RATES:
        found = [
            store.row(
                f"noise {noise}, seed {seed}", lambda n=noise, s=seed: counts(bench, n, s, sizes)
            )
            for seed in range(sizes.seeds)
        ]
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


def counts(bench: Bench, noise: float, seed: int, sizes: Sizes) -> Row:
    """FIELDS of each evaluation text, by arm."""
    folder = bench.out / "state" / f"omnidraft-{noise}-{seed}"
    found = counts_of_seed(
        bench.folder("other").parent,
        bench.data / "corpora",
        folder,
        seed,
        sizes.stream,
        sizes.texts,
        noise=noise,
        rate=RATES[noise],
        interval=INTERVAL,
    )
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


def prompts_of(
    workbench: Path, data: Path, num: int, seed: int, domain: str | None = None
) -> list[str]:
    """First words of held-out texts, the domains in turn, in an order of the seed's."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(workbench / "target")
    by_domain = []
    for name, documents in Texts(data, PIECE, HELD_OUT).pieces(tokenizer)[1].items():
        if domain not in (None, name):
            continue
        starts = [documents.document(i)[:PROMPT] for i in range(len(documents))]
        texts = [str(tokenizer.decode(ids)) for ids in starts if len(ids) == PROMPT]
        order = np.random.default_rng(seed).permutation(len(texts))
        by_domain.append([texts[i] for i in order])
    in_turn = [
        texts[i] for i in range(max(map(len, by_domain))) for texts in by_domain if i < len(texts)
    ]
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
    **options: Any,
) -> tuple[Online, OnlineLearner, list[dict[str, Any]]]:
    """The drafter and learner after the stream, and a row per request."""
    drafter = Online(model=str(draft), tokenizer=model.tokenizer, target=model.target)
    drafter.router = Labels([ONE_CLASS])
    drafter.bind(model.target)
    chosen = OnlineOptions(**options)
    learner = OnlineLearner(
        draft_module(str(draft)), chosen, drafter.class_of, objective=objective_for(drafter, chosen)
    )
    requests = [Request(text, ONE_CLASS) for text in stream]
    replay = Replay(model, drafter, learner, requests, settings)
    replay.run(checkpoint)
    return drafter, learner, replay.rows


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


def counts_of_seed(
    workbench: Path,
    data: Path,
    out: Path,
    seed: int,
    num_stream: int,
    num_texts: int,
    **options: Any,
) -> dict[str, np.ndarray]:
    """FIELDS of each evaluation text, by arm."""
    draft = workbench / "other"
    temperature, domain = options.pop("temperature", 1.0), options.pop("domain", None)
    noise = options.pop("noise", 0.0)
    settings = {"gamma": GAMMA, "temperature": temperature, "max_tokens": 64, "seed": seed}
    prompts = prompts_of(workbench, data, num_stream + num_texts, seed, domain)
    stream, texts = prompts[:-num_texts], prompts[-num_texts:]  # fewer if there are fewer texts
    draft = disturbed(draft, out / f"seed-{seed}" / "first", noise, seed) if noise else draft
    model = forerun.load(str(workbench / "target"), max_seqs=1)
    folder = out / f"seed-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    still = ReplaySettings(**settings, learns=False)
    cached, _, before = replayed(model, draft, stream, folder / "cache.pt", still)
    learns = ReplaySettings(**settings)
    learned, learner, after = replayed(
        model, draft, stream, folder / "online.pt", learns, **options
    )
    trained = folder / "draft"
    save(
        learner.learner(ONE_CLASS).model,
        trained,
        tokenizer=PreTrainedTokenizerFast.from_pretrained(draft),
    )
    for name, rows in (("cache", before), ("distilled", after)):
        parts = np.array_split(rows, min(5, len(rows)))
        shown = ", ".join(
            f"{sum(r['overlap'] for r in p) / max(1, sum(r['tried'] for r in p)):.3f}"
            for p in parts
        )
        print(f"seed {seed}, acceptance along the stream, {name}: {shown}", file=sys.stderr)
    arms = arms_of(model, draft, trained, cached, learned)
    return {arm: counted(model, drafter, texts, still) for arm, drafter in arms.items()}
