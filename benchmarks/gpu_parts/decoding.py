"""(c) Whole runs of our methods and of transformers on the padded reasoner, prompt by prompt."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import forerun
from forerun.api import Model
from forerun.bench.local_runner import LocalMethod
from forerun.bench.metrics import totals
from forerun.bench.results import SampleRecord
from forerun.core.cost import Cost
from forerun.core.sampling import Sampling
from forerun.runner.attention import TorchDecoder
from forerun.tasks.base import Example
from forerun.tasks.reasoning import ReasoningTask

from .models import wait
from .prepare import wait_for_model
from .report import Report
from .setting import Setting

TEMPERATURE, FIRST = 0.6, 500  # of all contestants; the first problem
TOKENS, ROUNDS = 200, 12  # most tokens of an answer; most prompts
GAIN, FLOOR, PEER, OUTSIDE = 2.5, 0.98, 3.0, 0.08  # goals


@dataclass
class Timings:
    """Seconds, tokens and samples of one contestant so far."""

    seconds: list[float] = field(default_factory=list)  # of each prompt
    tokens: list[int] = field(default_factory=list)
    samples: list[SampleRecord] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each prompt."""
        return [num / seconds for num, seconds in zip(self.tokens, self.seconds, strict=True)]


Contestant = Callable[[Example, int], tuple[float, int, list[SampleRecord]]]


def run(report: Report, setting: Setting) -> None:
    """Rounds of all contestants until the time is used up; rows are written after each round."""
    wait_for_model(setting, max(report.left - 60.0, 1.0))
    start = time.perf_counter()
    model = loaded(setting)
    report.add("our model loaded", time.perf_counter() - start, "s")
    contestants = ours(model, setting) | peers(report, setting)
    taken: dict[str, Timings] = defaultdict(Timings)
    task = ReasoningTask("heldout")
    warm_up(report, contestants, task.example(FIRST - 1))
    for number in range(1 if setting.is_smoke else ROUNDS):
        if report.left < sum(one.seconds[-1] for one in taken.values()):
            break
        names = list(contestants) if number % 2 == 0 else list(contestants)[::-1]
        for name in names:
            report.check()
            seconds, tokens, samples = contestants[name](task.example(FIRST + number), number)
            taken[name].seconds.append(seconds)
            taken[name].tokens.append(tokens)
            taken[name].samples += samples
        show(report, taken, number + 1)
        on_graphs = getattr(model.target.decode, "is_trusted", False)  # type: ignore[attr-defined]
        report.add("passes run on graphs", int(on_graphs), least=1)


def loaded(setting: Setting) -> Model:
    """Loads the padded reasoner with graphs."""
    return load_on_graphs(setting.model, setting, "fp16" if setting.is_smoke else "bf16")


def load_on_graphs(folder: Path, setting: Setting, dtype: str) -> Model:
    """Loads a model with graphs; in a smoke run Triton's interpreter runs the kernels."""
    if not setting.is_smoke:
        return forerun.load(str(folder), device="cuda", dtype=dtype, max_seqs=16)
    from forerun.models import layers
    from forerun.runner.gpu.graphs import GraphDecoder

    layers.can_pack, layers.HAS_BLOCKED = lambda _: False, False  # weights as a GPU holds them
    model = forerun.load(str(folder), device="cpu", dtype=dtype, max_seqs=4)
    model.target.decode = GraphDecoder(model.target.model)  # type: ignore[attr-defined]
    model.target.cost = Cost((1, 65), (0.01, 0.02))  # measuring takes minutes
    return model


def ours(model: Model, setting: Setting) -> dict[str, Contestant]:
    """Our methods by name; "plain, torch" has no graphs."""
    many = 2 if setting.is_smoke else 16
    methods = {name: (name, model) for name in ("plain", "stand", "auto")}
    methods |= {f"{name} x{many}": (f"{name}:batch={many}", model) for name in methods}
    bare = model.twin()
    bare.target.decode = TorchDecoder(model.target.model)  # type: ignore[attr-defined]
    bare.target.shape += " on torch"  # by which measured costs are kept
    methods["plain, torch"] = ("plain", bare)
    return {name: own(*chosen, setting) for name, chosen in methods.items()}


def own(method: str, model: Model, setting: Setting) -> Contestant:
    """One of our methods: as many samples as run at once, four one at a time."""
    contestant = LocalMethod(method, lambda: model)
    batch = contestant.parts.batch
    n = batch if batch > 1 else 1 if setting.is_smoke else 4

    def decode(example: Example, seed: int) -> tuple[float, int, list[SampleRecord]]:
        outcome = contestant.run(example, sampling(setting, n, seed))
        tokens = sum(sample.tokens for sample in outcome.samples)
        return outcome.seconds, tokens, outcome.samples

    contestant.start()
    return decode


def sampling(setting: Setting, n: int, seed: int) -> Sampling:
    """The sampling parameters of all contestants."""
    most = 3 if setting.is_smoke else TOKENS
    return Sampling(temperature=TEMPERATURE, n=n, seed=seed, max_new_tokens=most)


def peers(report: Report, setting: Setting) -> dict[str, Contestant]:
    """transformers, plain and with prompt lookup; one sample at a time, and plain in a batch."""
    from forerun.bench.peers.workers.transformers import Worker

    many = 2 if setting.is_smoke else 16
    worker = Worker()
    fields: dict[str, Any] = {"model": str(setting.model), "draft": ""}
    fields |= {"dtype": "float16" if setting.is_smoke else "bfloat16"}
    fields |= {"device": setting.device.type, "threads": 1 if setting.is_smoke else 8}
    try:
        start = time.perf_counter()
        worker.load("plain", **fields)
        report.add("transformers' model loaded", time.perf_counter() - start, "s")
    except Exception as fault:
        report.add("transformers", f"{type(fault).__name__}: {fault}"[:200])
        return {}
    tokenizer = forerun.models.tokenizer.Tokenizer.load(setting.model)
    options = {"tokens": 10, "ngram": 3}

    def peer(mode: str, n: int) -> Contestant:
        def decode(example: Example, seed: int) -> tuple[float, int, list[SampleRecord]]:
            chosen = sampling(setting, n, seed)
            law = {name: getattr(chosen, name) for name in ("temperature", "top_k", "top_p")}
            law |= {"min_p": 0.0, "max_new_tokens": chosen.max_new_tokens}
            law |= {"ends": list(tokenizer.eos_ids), "seeds": [seed + k for k in range(n)]}
            ids = tokenizer.encode(example.prompt)
            wait(setting.device)
            start = time.perf_counter()
            found = worker.run(mode, ids, law, n > 1, options)
            wait(setting.device)
            seconds = time.perf_counter() - start
            return seconds, sum(len(one["tokens"]) for one in found["samples"]), []

        return decode

    return {
        "transformers": peer("plain", 1),
        "transformers, lookup": peer("lookup", 1),
        f"transformers x{many}": peer("plain", many),
    }


def warm_up(report: Report, contestants: dict[str, Contestant], example: Example) -> None:
    """One prompt that is not counted; a contestant that fails is left out."""
    for name in list(contestants):
        report.check()
        start = time.perf_counter()
        try:
            contestants[name](example, 99)
        except Exception as fault:
            report.add(name, f"{type(fault).__name__}: {fault}"[:200])
            del contestants[name]
        else:
            report.fact(**{f"warm-up of {name}": time.perf_counter() - start})


def show(report: Report, taken: dict[str, Timings], rounds: int) -> None:
    """A row for each contestant, then the ratios that have goals."""
    rates = {name: median(one.rates) for name, one in taken.items()}
    for name, one in taken.items():
        report.add(f"{name}: tokens per second", rates[name], "1/s", note=timing_note(one))
    for name in ("stand", "auto", *(n for n in rates if n.startswith(("stand x", "auto x")))):
        _, _, many = name.partition(" ")
        compare(report, taken, name, f"plain {many}".strip())
    for name in [n for n in rates if n.startswith("transformers")]:
        _, _, many = name.partition(" ")
        compare(report, taken, f"plain {many}".strip() if many.startswith("x") else "plain", name)
    for name, one in taken.items():
        if name == "plain" and (outside := share_outside(one)) is not None:
            report.speed("plain: share of time outside the pass", outside, most=OUTSIDE)
    report.add("rounds", rounds, note="medians over prompts of tokens per second")
    report.fact(decoding={name: one.rates for name, one in taken.items()})


def compare(report: Report, taken: dict[str, Timings], one: str, other: str) -> None:
    """The median over prompts of a ratio of two rates, with its goal."""
    if one not in taken or other not in taken:
        return
    pairs = zip(taken[one].rates, taken[other].rates, strict=True)
    value = median(a / b for a, b in pairs)
    goals = {("auto", "plain"): GAIN, ("plain", "transformers"): PEER}
    least = goals.get((one, other), FLOOR if one.startswith("auto") else None)
    report.speed(f"{one} over {other}", value, "x", least=least)


def timing_note(one: Timings) -> str:
    """tau and the time of a step by part, of a method of ours."""
    found = totals(one.samples)
    split = split_of(one)
    if not split or not found.passes:
        return ""
    whole = sum(one.seconds)
    shares = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in split.items())
    return f"tau {found.tau:.2f}; {shares}"


def split_of(one: Timings) -> dict[str, float]:
    """Seconds by part, added up over samples."""
    split: dict[str, float] = {}
    for sample in one.samples:
        for name, seconds in sample.seconds.items():
            split[name] = split.get(name, 0.0) + seconds
    return split


def share_outside(one: Timings) -> float | None:
    """Share of the wall time that is not within passes."""
    split = split_of(one)
    if "forward" not in split:
        return None
    return 1.0 - split["forward"] / sum(one.seconds)
