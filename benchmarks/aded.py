"""ADED on the embedded reasoner: search settings, rewards, updates and corpora compared.

    python benchmarks/aded.py [--problems 24] [--samples 2] [--nodes 16] [--corpus 4000]
    python benchmarks/aded.py --text BOOK.txt.gz ... [--tokenizer tokenizer.json]

First form: a tri-gram matrix is counted from training problems and their solutions. Every setting
starts from that matrix and solves the same held-out problems, one by one, with the same seeds.
Prints tau with a bootstrap interval over problems, drafted nodes, microseconds of drafting per step
and their share of a target pass, microseconds of learning, and accepted tokens per step by depth.
"shifted" settings start from generated stories. At temperature 0 all settings write the same texts,
so differences have less noise. On a busy machine only tau and its parts can be compared.

Second form: counts text files and times drafts of 64 nodes at random places of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scripts

import forerun
from forerun.assets import embedded
from forerun.controllers.fixed import Fixed
from forerun.core.dice import SeededDice
from forerun.core.records import Plan, Sequence, Step
from forerun.core.sampling import Sampling
from forerun.drafters.aded import Aded
from forerun.engine.stats import Stats
from forerun.models.tokenizer import Tokenizer
from forerun.ngrams.index.counts.corpus import tokenised
from forerun.ngrams.tables.trigram.table import TrigramMatrix
from forerun.tasks.reasoning import ReasoningTask
from forerun.tasks.story import StoryTask

HEAD = f"{'tau':>5} {'95 %':>10} {'nodes':>6} {'draft us':>8} {'pass':>5} {'learn':>6}   by depth"
SETTINGS: dict[str, dict[str, object]] = {  # changed options; "from" names the corpus
    "defaults (c1 32, c2 8, reward path)": {},
    "drop longest (as published)": {"drop": "longest"},
    "reward constant (what their code does)": {"reward": "constant"},
    "reward expected": {"reward": "expected"},
    "c1 0": {"c1": 0.0},
    "c1 1": {"c1": 1.0},
    "c1 1, reward constant": {"c1": 1.0, "reward": "constant"},
    "c1 1, reward expected": {"c1": 1.0, "reward": "expected"},
    "c1 8": {"c1": 8.0},
    "c1 128": {"c1": 128.0},
    "c2 1": {"c2": 1.0},
    "visit_all false": {"visit_all": False},
    "iterations 50": {"iterations": 50},
    "iterations 600": {"iterations": 600},
    "length 6": {"length": 6},
    "length 6, visit_all false": {"length": 6, "visit_all": False},
    "length 6, visit_all false, top 64": {"length": 6, "visit_all": False, "top": 64},
    "renormalised": {"renormalise": True},
    "(i) best first, no updates": {"grower": "best_first", "increment": 0.0},
    "(ii) search, no updates": {"increment": 0.0},
    "(iii) search and updates": {},
    "best first and updates": {"grower": "best_first"},
    "no corpus": {"from": ""},
    "shifted, no updates": {"from": "stories", "increment": 0.0},
    "shifted, updates": {"from": "stories"},
}


def corpora(folder: Path, problems: int) -> dict[str, list[str]]:
    """Documents by name: problems of the training split, and as many stories."""
    train, story = ReasoningTask("train"), StoryTask(size=problems)
    solved = [train.example(i) for i in range(problems)]
    return {
        "problems": [e.prompt + e.reference for e in solved],
        "stories": [story.example(i).turns[0] for i in range(problems)],
    }


def count(folder: Path, model: forerun.Model, problems: int) -> dict[str, str]:
    """Counts each corpus once; the files of their matrices by name."""
    found = {"": ""}
    for name, texts in corpora(folder, problems).items():
        lines, file = folder / f"{name}.jsonl", folder / f"{name}.counts"
        lines.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), "utf-8")
        drafter = Aded(corpus=(str(lines),), tokenizer=model.tokenizer)
        drafter.save_corpus(file)
        found[name] = str(file)
        base = drafter.base
        assert base
        print(f"corpus {name}: {len(texts)} documents, {base.learned} tri-grams, {len(base)} pairs")
    return found


class Watch:
    """Listener: seconds per call of a drafter's own learning, which the engine counts elsewhere."""

    def __init__(self, observe: Callable[[Step], None]) -> None:
        self.observe, self.seconds, self.calls = observe, 0.0, 0

    def __call__(self, step: Step) -> None:
        start = time.perf_counter()
        self.observe(step)
        self.seconds, self.calls = self.seconds + time.perf_counter() - start, self.calls + 1


def solve(
    model: forerun.Model, drafter: Aded, options: argparse.Namespace
) -> tuple[list[Stats], Watch]:
    """One Stats per held-out problem, all solved with this drafter in order."""
    task = ReasoningTask("heldout")
    drafter.observe = watch = Watch(drafter.observe)  # type: ignore[method-assign]
    results = model.generate(
        [task.example(i).prompt for i in range(options.problems)],
        n=options.samples,
        temperature=options.temperature,
        max_new_tokens=300,
        seed=1,
        drafter=drafter,
        controller=Fixed(nodes=options.nodes),
    )
    return [result.stats for result in results], watch


def line(stats: list[Stats], watch: Watch) -> str:
    """tau, its interval, the depths, the costs."""
    generated, passes = (np.array([getattr(s, n) for s in stats]) for n in ("generated", "passes"))
    picks = np.random.default_rng(0).integers(0, len(stats), (2000, len(stats)))
    low, high = np.quantile(generated[picks].sum(1) / passes[picks].sum(1), (0.025, 0.975))
    total = Stats()
    for one in stats:
        total.add(one)
    depths = " ".join(f"{rate:.2f}" for rate in total.per_position[:6])
    draft = 1e6 * total.seconds["draft"] / total.passes
    learn = 1e6 * watch.seconds / max(1, watch.calls)
    share = total.seconds["draft"] / total.seconds["forward"]
    nodes = total.drafted / total.passes
    rates = f"{total.tau:5.2f} {low:5.2f}-{high:4.2f} {nodes:6.1f}"
    return f"{rates} {draft:8.0f} {share:5.0%} {learn:6.0f}   {depths}"


def costs(files: list[str], tokenizer: Tokenizer) -> None:
    """Times of counting, of learning and of 64-node drafts in real text."""
    documents = list(tokenised(files, tokenizer))
    text = np.concatenate(documents)
    base = TrigramMatrix(budget=1 << 30)
    start = time.perf_counter()
    base.count(documents)
    print(
        f"{len(text)} tokens, {len(base)} pairs, {base.nbytes / 2**20:.0f} MiB, counted in "
        f"{time.perf_counter() - start:.1f} s, tokenising not included"
    )
    print(f"{'microseconds':<42}{'draft':>6} {'p90':>5} {'learn':>6} {'nodes':>6}")
    for name, given in SETTINGS.items():
        if "from" not in given and "increment" not in given and "grower" not in given:
            drafter = Aded(**(given | {"top": 64}))
            drafter.base = base
            times, learning, nodes = timed(drafter, text)
            middle, high = np.quantile(times, (0.5, 0.9))
            print(f"{name:<42}{middle:6.0f} {high:5.0f} {np.median(learning):6.0f} {nodes:6.1f}")


def timed(drafter: Aded, text: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Microseconds of drafting and of learning at 2000 random places, and mean nodes."""
    rng, plan = np.random.default_rng(0), Plan(nodes=64)
    seq = Sequence([0, 1], 2, Sampling(), SeededDice(0), limit=10**9)
    marks, nodes = [], 0
    for at in rng.integers(20, len(text), 2000):
        seq.tokens = text[at - 20 : at].tolist()
        start = time.perf_counter()
        drafter.start(seq)
        learned = time.perf_counter()
        nodes += len(drafter.propose([seq], [plan], [seq.dice])[0])
        marks.append((start, learned, time.perf_counter()))
    learn, draft = 1e6 * np.diff(marks, axis=1).T
    return draft, learn, nodes / len(marks)


def tokenizer_of(file: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json, or the reasoner's."""
    if not file:
        return Tokenizer.load(embedded("reasoner"))
    from transformers import PreTrainedTokenizerFast

    return Tokenizer(PreTrainedTokenizerFast(tokenizer_file=file))


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--problems", type=scripts.count, default=24)
    parser.add_argument("--samples", type=scripts.count, default=2)
    parser.add_argument("--nodes", type=scripts.count, default=16)
    parser.add_argument(
        "--corpus", type=scripts.count, default=4000, help="training problems to count"
    )
    parser.add_argument("--temperature", type=scripts.measure, default=0.6)
    parser.add_argument(
        "--only",
        type=scripts.pattern,
        default="",
        help="only settings that match this regular expression",
    )
    parser.add_argument("--text", nargs="+", default=[], help="time drafts in these files")
    parser.add_argument(
        "--tokenizer", default="", help="tokenizer.json for --text; default: the reasoner's"
    )
    options = parser.parse_args()
    if options.text:
        costs(options.text, tokenizer_of(options.tokenizer))
        return
    model = forerun.load()
    print(f"machine: {platform.processor() or platform.machine()}; {options}")
    with tempfile.TemporaryDirectory() as folder:
        files = count(Path(folder), model, options.corpus)
        print(f"{'setting':<42}{HEAD}")
        for name, given in SETTINGS.items():
            if options.only.search(name):
                given = dict(given)
                file = files[str(given.pop("from", "problems"))]
                drafter = Aded(matrix=file or None, tokenizer=model.tokenizer, **given)
                print(f"{name:<42}{line(*solve(model, drafter, options))}", flush=True)


if __name__ == "__main__":
    scripts.run(main)
