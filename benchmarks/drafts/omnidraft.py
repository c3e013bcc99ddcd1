"""OmniDraft on the workbench models: what a draft with another tokenizer has accepted, by arm.

    python benchmarks/drafts/omnidraft.py --workbench runs/workbench --data TEXTS --out OUT

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

import argparse
import json
import sys
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

import forerun
from forerun.api import Model
from forerun.controllers.fixed import Fixed
from forerun.drafters.cross_vocab import CrossVocab
from forerun.drafters.online import ONE_CLASS, Online
from forerun.training.export import save
from forerun.training.online import OnlineLearner, OnlineOptions, draft_module
from forerun.training.replay import Labels, Replay, ReplaySettings, Request
from forerun.training.texts import Texts
from forerun.training.translated import objective_for

if TYPE_CHECKING:
    from drafts.common import Bench

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
OPTIONS: dict[str, Any] = {"interval": 2, "rate": 2e-4}  # of the learner


@dataclass(frozen=True)
class Sizes:
    """stream: prompts to learn from. texts: evaluation prompts per seed."""

    seeds: int
    stream: int
    texts: int


FULL, QUICK = Sizes(3, 200, 40), Sizes(1, 6, 3)


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
        parts = np.array_split(rows, 5)
        shown = ", ".join(
            f"{sum(r['overlap'] for r in p) / max(1, sum(r['tried'] for r in p)):.3f}"
            for p in parts
        )
        print(f"seed {seed}, acceptance along the stream, {name}: {shown}", file=sys.stderr)
    arms = arms_of(model, draft, trained, cached, learned)
    return {arm: counted(model, drafter, texts, still) for arm, drafter in arms.items()}


def run(bench: Bench) -> None:
    """The part of `run.py`: all arms with each seed."""
    from drafts.common import goal, seeds_of

    sizes = QUICK if bench.quick else FULL
    store = bench.store("omnidraft", sizes, ("target", "other"))
    data, out = bench.data / "corpora", bench.out / "state" / "omnidraft"

    def counts(seed: int) -> dict[str, Any]:
        how = (seed, sizes.stream, sizes.texts)
        found = counts_of_seed(bench.workbench, data, out, *how, **OPTIONS)
        return {arm: each.tolist() for arm, each in found.items()}

    seeds = [store.row(f"seed {n}", lambda n=n: counts(n)) for n in range(sizes.seeds)]
    rows = [summary(arm, np.concatenate([one[arm] for one in seeds])) for arm in ARMS]
    caption = (
        f"Other texts after a stream of {sizes.stream} requests, temperature 1, drafts of {GAMMA}; "
        f"{sizes.texts} texts per seed, {seeds_of(sizes.seeds).split(',')[0]}, 95 % bootstrap over "
        "texts."
    )
    each = {
        arm: [summary(arm, np.array(one[arm]))["characters_per_pass"] for one in seeds]
        for arm in ARMS
    }
    lines = [
        goal(f"characters per pass, {one} less {other}", np.subtract(each[one], each[other]))
        for one, other in (("cache", "direct"), ("cache", "tli"), ("distilled", "cache"))
    ]
    bench.write("omnidraft", caption, table(rows), "\n".join(lines))


def measured(
    workbench: Path,
    data: Path,
    out: Path,
    *,
    seed: int = 0,
    seeds: int = 1,
    num_stream: int = 480,
    num_texts: int = 80,
    **options: Any,
) -> list[dict[str, Any]]:
    """Rows of all arms; also written to `out`.

    options: temperature, domain, noise (see `disturbed`), and those of `OnlineOptions`.
    """
    options = OPTIONS | options
    found = [
        counts_of_seed(workbench, data, out, seed + i, num_stream, num_texts, **options)
        for i in range(seeds)
    ]
    rows = [summary(arm, np.concatenate([counts[arm] for counts in found])) for arm in ARMS]
    settings = {
        "seed": seed,
        "seeds": seeds,
        "num_stream": num_stream,
        "num_texts": num_texts,
        **options,
    }
    lines = "".join(json.dumps({**row, **settings}) + "\n" for row in rows)
    (out / "omnidraft.jsonl").write_text(lines)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    heads = [name.replace("_", " ") for name in METRICS]
    lines = ["| arm | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * len(METRICS)]
    for row in rows:
        ends = [(row[name], *row[f"{name}_interval"]) for name in METRICS]
        cells = [f"{value:.3f} ({low:.3f} to {high:.3f})" for value, low, high in ends]
        lines.append(f"| {row['arm']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workbench", type=Path, required=True, help="folder of the models")
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--stream", type=int, default=480, help="prompts of the stream")
    parser.add_argument("--texts", type=int, default=80, help="evaluation prompts per seed")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--interval", type=int, default=2, help="requests per update")
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate")
    parser.add_argument("--domain", help="name of a text file; default: all in turn")
    parser.add_argument("--noise", type=float, default=0.0, help="of the first draft's matrices")
    parser.add_argument("--ngram-weight", type=float, default=0.2, help="lambda")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    how = {"temperature": a.temperature, "interval": a.interval, "rate": a.rate}
    how |= {"ngram_weight": a.ngram_weight, "domain": a.domain, "noise": a.noise}
    sizes = {"seed": a.seed, "seeds": a.seeds, "num_stream": a.stream, "num_texts": a.texts}
    print(table(measured(a.workbench, a.data, a.out, **sizes, **how)))


if __name__ == "__main__":
    main()
