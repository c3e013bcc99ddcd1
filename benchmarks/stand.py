"""STAND on held-out problems: ablations, the paper's table, accuracy. Can be resumed.

    python benchmarks/stand.py [--problems 20] [--out stand.jsonl]  # ablations, tau only
    python benchmarks/stand.py --mode table --size 0.3B --out table.jsonl
    python benchmarks/stand.py --mode table --model FOLDER --task story:characters=200 --out t.jsonl
    python benchmarks/stand.py --accuracy 200 --out accuracy.jsonl

Methods take turns on every problem, in reversed order on every second one, each from an empty
cache. One run is one JSON line of --out. The same command continues an interrupted run and prints
Markdown.

ablation: 8 trajectories, trees of --nodes nodes; tau with the ratio to the first row and its 95 %
          interval (bootstrap over problems)
table:    tokens per second over plain decoding in the same way, tau in brackets; trajectories 4 and
          8 are the first ones of 16. DVTS: steps are lines, scored by an arithmetic checker, or
          sentences scored by likelihood where texts state no answer
accuracy: plain decoding and STAND, single samples and majority of 16

Memories that outlive a prompt (scope tenant) start empty when a run is resumed.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scripts
import torch

import forerun
from forerun import registry
from forerun.bench.inflate import inflate
from forerun.bench.padding import SIZES
from forerun.core.sampling import Sampling
from forerun.core.tree_template import DEFAULT
from forerun.lossless.greedy import empty_cache
from forerun.search import Likelihood, arithmetic
from forerun.search.dvts import dvts
from forerun.tasks import get_task
from forerun.utils.stats import majority

ABLATIONS = {  # what is shown -> drafter; the first is the one that the others are measured by
    "as it is": "stand",
    "contexts of 4, 3, 2": "stand:context=4+3+2",
    "contexts of 3, 2, 1": "stand:context=3",
    "contexts of 2, 1": "stand:context=2",
    "contexts of 1": "stand:context=1",
    "contexts of 6 to 1": "stand:context=6",
    "5 entries": "stand:entries=5",
    "20 entries": "stand:entries=20",
    "latest law instead of the mean": "stand:latest",
    "tree: template, unfitted": "stand:template=unfitted",
    "tree: template, fitted": "stand:tree=template",
    "scope request": "stand:scope=request",
    "scope tenant": "stand:scope=tenant",
    "best tokens": "stand:choice=top",
    "learns from the prompt": "stand:seed_from_prompt=true",
}
TABLE = {
    "plain": "none",
    "prompt lookup": "prompt_lookup",
    "deterministic STAND": "stand:choice=top",
    "STAND": "stand",
    "token recycling": "token_recycling",
}
TRAJECTORIES = 4, 8, 16
WAYS = {"sequential": 1, "batch of 4": 4, "DVTS": 1}  # -> sequences at once
LASTING = {"stand:scope=tenant"}  # what they learn outlives a problem
WIDTH = 4  # continuations per step of DVTS
SENTENCES = {"scorer": Likelihood(), "step_end": ".", "select": "score"}  # DVTS on open text
DRAWS = 2000  # of the bootstrap


@dataclass(frozen=True)
class Unit:
    """One problem, one method, one way: what a line of the file is about."""

    problem: int
    method: str
    way: str
    n: int


@dataclass(frozen=True)
class Contest:
    """What all units of a run have in common; files of other contests are not gone on with."""

    mode: str
    model: str
    task: str
    size: str
    dtype: str
    threads: int
    temperature: float
    tokens: int
    nodes: int  # 0: the controller's own choice
    seed: int
    first: int  # number of the first held-out problem

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature, max_new_tokens=self.tokens, seed=self.seed, n=1
        )

    @property
    def controller(self) -> dict[str, str]:
        return {"controller": f"fixed:nodes={self.nodes}"} if self.nodes else {}


def units(mode: str, methods: list[str], problems: int) -> Iterator[Unit]:
    """Problem by problem, way by way; methods in turn, forwards and backwards."""
    ways = [("sequential", 8 if mode == "ablation" else max(TRAJECTORIES))]
    if mode == "table":
        ways += [(way, n) for way in ("batch of 4", "DVTS") for n in TRAJECTORIES]
    for problem in range(problems):
        for way, n in ways:
            for method in methods[::-1] if problem % 2 else methods:
                yield Unit(problem, method, way, n)


class Runner:
    """Runs units on one model."""

    def __init__(self, contest: Contest, methods: dict[str, str]) -> None:
        self.contest, self.methods = contest, methods
        self.task = get_task(contest.task)
        self.model = load(contest)
        self.shared: dict[str, Any] = {}  # drafters that are made once: those that outlive prompts
        warm = Contest(**asdict(contest) | {"tokens": 64})
        for method in methods:
            self.whole(Unit(0, method, "sequential", 4), warm)
        self.shared.clear()

    def run(self, unit: Unit) -> dict[str, Any]:
        """What one unit came to."""
        empty_cache(self.model)
        return self.search(unit) if unit.way == "DVTS" else self.whole(unit, self.contest)

    def whole(self, unit: Unit, contest: Contest) -> dict[str, Any]:
        """Trajectories of one prompt."""
        example = self.task.example(contest.first + unit.problem)
        sampling = Sampling(**asdict(contest.sampling) | {"n": unit.n})
        drafter = self.drafter(unit.method)
        start = time.perf_counter()
        found = self.model.run(
            [example.prompt],
            sampling,
            drafter=drafter,
            batch=WAYS[unit.way],
            **contest.controller,
        )
        samples = sorted(found, key=lambda sample: sample.index)
        seconds = time.perf_counter() - start
        answers = [self.task.read(sample.text) for sample in samples]
        return {
            "seconds": seconds,
            "generated": [s.stats.generated for s in samples],
            "passes": [s.stats.passes for s in samples],
            "spent": [round(sum(s.stats.seconds.values()), 5) for s in samples],
            "right": [answer == example.answer for answer in answers],
            "majority": majority(answers) == example.answer,
        }

    def search(self, unit: Unit) -> dict[str, Any]:
        """A tree search over steps; its scorer sees no answer key."""
        example, contest = self.task.example(self.contest.first + unit.problem), self.contest
        how = {"scorer": arithmetic} if example.answer else SENTENCES
        start = time.perf_counter()
        found = dvts(
            self.model,
            example.prompt,
            n=unit.n,
            width=WIDTH,
            batch=WAYS["DVTS"],
            sampling=contest.sampling,
            drafter=self.drafter(unit.method),
            **how,
            **contest.controller,
        )
        return {
            "seconds": time.perf_counter() - start,
            "generated": [found.stats.generated],
            "passes": [found.stats.passes],
            "majority": self.task.read(found.text) == example.answer,
        }

    def drafter(self, method: str) -> Any:
        """A drafter by text; those that share more than a group are made once."""
        text = self.methods[method]
        if text == "stand:latest":
            return self.shared.setdefault(text, latest(self.model.tokenizer))
        if text == "stand:template=unfitted":
            return self.shared.setdefault(text, registry.make("drafter", "stand", template=DEFAULT))
        if text in LASTING:
            made = registry.make("drafter", text, tokenizer=self.model.tokenizer)
            return self.shared.setdefault(text, made)
        return text


def latest(tokenizer: Any) -> Any:
    """A STAND that overwrites: every law counts as the first one of its contexts."""
    from forerun.drafters.stand import Stand

    class Latest(Stand):
        def observe(self, step: Any) -> None:
            for seq in step.seqs:
                self.memory(seq).table.counts[:] = 0
            super().observe(step)

    Latest.__module__ = Stand.__module__  # known by the same name
    return Latest(tokenizer=tokenizer)


def load(contest: Contest) -> forerun.Model:
    """The model, padded to a size unless that is "own"."""
    batch = max(WAYS.values())
    if contest.size == "own":
        return forerun.load(contest.model, dtype=contest.dtype, max_seqs=batch)
    with tempfile.TemporaryDirectory() as folder:
        made = inflate(
            contest.model, Path(folder) / contest.size, contest.size, dtype=contest.dtype
        )
        return forerun.load(str(made.folder), dtype=contest.dtype, max_seqs=batch)


def measure(
    contest: Contest, methods: dict[str, str], problems: int, out: Path | None
) -> list[dict[str, Any]]:
    """All records of a contest; those that are missing are made and added to the file."""
    key = asdict(contest)
    done = {}
    if out is not None and out.exists():
        lines = [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]
        done = {Unit(**line["unit"]): line for line in lines if line["contest"] == key}
    todo = [unit for unit in units(contest.mode, [*methods], problems) if unit not in done]
    if todo:
        runner, started = Runner(contest, methods), time.perf_counter()
        with (out or Path(os.devnull)).open("a") as file:
            for number, unit in enumerate(todo, start=1):
                line = {"contest": key, "unit": asdict(unit)} | runner.run(unit)
                file.write(json.dumps(line) + "\n")
                file.flush()
                done[unit] = line
                if number % len(methods) == 0:
                    spent = time.perf_counter() - started
                    print(f"# {number} of {len(todo)} runs, {spent:.0f} s", flush=True)
    wanted = set(units(contest.mode, [*methods], problems))
    return [line for unit, line in done.items() if unit in wanted]


def of(
    records: list[dict[str, Any]], method: str, way: str = "sequential", n: int = 0
) -> dict[int, dict]:
    """Records of one method in one way, and of n trajectories, by problem."""
    found = [r for r in records if r["unit"]["method"] == method and r["unit"]["way"] == way]
    return {r["unit"]["problem"]: r for r in found if n in (0, r["unit"]["n"])}


def interval(pairs: list[tuple], statistic: Callable[[list[tuple]], float], digits: int) -> str:
    """95 % of bootstrapped values in brackets, problems drawn with replacement; "" of one."""
    if len(pairs) < 2:
        return ""
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(pairs), (DRAWS, len(pairs)))
    values = [statistic([pairs[i] for i in row]) for row in picks.tolist()]
    low, high = np.quantile(values, (0.025, 0.975))
    return f" ({low:.{digits}f} to {high:.{digits}f})"


def tau(records: list[dict[str, Any]], part: slice = slice(None)) -> float:
    """Tokens per pass of some trajectories."""
    passes = sum(sum(r["passes"][part]) for r in records)
    return sum(sum(r["generated"][part]) for r in records) / max(passes, 1)


def show_ablations(records: list[dict[str, Any]], methods: dict[str, str]) -> None:
    print("| | tau | first | 2 to 4 | 5 to 8 | over the first row (95 %) |")
    print("|---|---|---|---|---|---|")
    base = of(records, next(iter(methods)))
    for method in methods:
        mine = of(records, method)
        pairs = [(mine[i], base[i]) for i in base]
        rows = [*mine.values()]
        parts = [tau(rows, slice(*at)) for at in ((None,), (0, 1), (1, 4), (4, 8))]
        cells = [method, *(f"{value:.2f}" for value in parts)]
        ratio = f"{_tau_ratio(pairs):.3f}{interval(pairs, _tau_ratio, 3)}"
        print(f"| {' | '.join(cells)} | {ratio} |")


def _tau_ratio(pairs: list[tuple]) -> float:
    return tau([a for a, _ in pairs]) / tau([b for _, b in pairs])


def show_table(records: list[dict[str, Any]], methods: dict[str, str]) -> None:
    """Tokens per second over plain decoding in the same way, geometric mean over problems.

    Plain decoding itself is shown over its own sequential way.
    """
    print("| | " + " | ".join(f"{way}, {n}" for way in WAYS for n in TRAJECTORIES) + " |")
    print("|---" * (1 + len(WAYS) * len(TRAJECTORIES)) + "|")
    for method in methods:
        cells = [method]
        for way in WAYS:
            for n in TRAJECTORIES:
                part = slice(n) if way == "sequential" else slice(None)
                asked = max(TRAJECTORIES) if way == "sequential" else n
                mine, base = of(records, method, way, asked), of(records, "plain", way, asked)
                if method == "plain":
                    base = of(records, "plain", "sequential", max(TRAJECTORIES))
                speeds = [_speed(mine[i], part) / _speed(base[i], part) for i in mine]
                gain = float(np.exp(np.mean(np.log(speeds))))
                cells.append(f"{gain:.2f} ({tau([*mine.values()], part):.2f})")
        print(f"| {' | '.join(cells)} |")


def _speed(record: dict[str, Any], part: slice = slice(None)) -> float:
    whole = part.stop is None or part.stop >= len(record["generated"])
    seconds = record["seconds"] if whole else sum(record["spent"][part])
    return sum(record["generated"][part]) / seconds


def show_accuracy(records: list[dict[str, Any]], methods: dict[str, str]) -> None:
    print("| | one sample (95 %) | majority of 16 (95 %) | tau | problems |")
    print("|---|---|---|---|---|")
    found = {method: of(records, method) for method in methods}
    for method, mine in found.items():
        rows = [_right(r) for r in mine.values()]
        shown = f"{_percent(rows, 0)} | {_percent(rows, 1)} | {tau([*mine.values()]):.2f}"
        print(f"| {method} | {shown} | {len(rows)} |")
    plain, stand = (found[method] for method in methods)
    pairs = [tuple(np.subtract(_right(stand[i]), _right(plain[i]))) for i in plain]
    print(f"| difference | {_percent(pairs, 0)} | {_percent(pairs, 1)} | | {len(pairs)} |")


def _right(record: dict[str, Any]) -> tuple[float, float]:
    """Share of right samples, and whether the majority is right."""
    return float(np.mean(record["right"])), float(record["majority"])


def _percent(rows: list[tuple], at: int) -> str:
    def mean(picked: list[tuple]) -> float:
        return 100 * float(np.mean([row[at] for row in picked]))

    return f"{mean(rows):.1f} %{interval(rows, mean, 1)}"


METHODS = {
    "ablation": ABLATIONS,
    "table": TABLE,
    "accuracy": {"plain": "none", "STAND": "stand"},
}
COMPARED = {"ablation": (), "table": ("plain",), "accuracy": ("plain", "STAND")}
SHOW = {"ablation": show_ablations, "table": show_table, "accuracy": show_accuracy}


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--mode", choices=["ablation", "table"], default="ablation")
    parser.add_argument(
        "--accuracy",
        type=scripts.count,
        metavar="PROBLEMS",
        help="measure accuracy on this many problems",
    )
    parser.add_argument("--problems", type=scripts.count, default=20)
    parser.add_argument(
        "--first", type=scripts.number, default=0, help="index of the first problem"
    )
    parser.add_argument("--methods", help="only these rows, joined by ;")
    parser.add_argument("--model", default="reasoner")
    parser.add_argument("--task", default="reasoning")
    parser.add_argument("--size", default="own", help=f"own, or padded: {', '.join(SIZES)}")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=scripts.count, default=torch.get_num_threads())
    parser.add_argument("--temperature", type=scripts.measure, default=0.6)
    parser.add_argument(
        "--tokens", type=scripts.count, default=512, help="maximum tokens of a trajectory"
    )
    parser.add_argument(
        "--nodes", type=scripts.number, help="nodes per draft; 0: the controller decides"
    )
    parser.add_argument("--seed", type=scripts.number, default=0)
    parser.add_argument("--out", type=Path, help="file of the runs; default: none")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    mode = "accuracy" if given.accuracy else given.mode
    methods = METHODS[mode]
    if given.methods:
        names = given.methods.split(";")
        if unknown := [name for name in names if name not in methods]:
            parser.error(f"{mode} has no row {unknown[0]!r}; it has {'; '.join(methods)}")
        if missing := [name for name in COMPARED[mode] if name not in names]:
            parser.error(f"{mode} compares with {missing[0]!r}; add it to --methods")
        methods = {name: methods[name] for name in names}
    nodes = given.nodes if given.nodes is not None else 16 if mode == "ablation" else 0
    fields = (given.size, given.dtype, given.threads, given.temperature, given.tokens)
    contest = Contest(mode, given.model, given.task, *fields, nodes, given.seed, given.first)
    records = measure(contest, methods, given.accuracy or given.problems, given.out)
    SHOW[mode](records, methods)


if __name__ == "__main__":
    scripts.run(main)
