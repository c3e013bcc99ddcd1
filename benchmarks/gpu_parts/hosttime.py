"""(d) Where the time of a step goes: the lines of our profile, Python's functions, and a trace."""

from __future__ import annotations

import cProfile
import gzip
import io
import pstats
import time
from pathlib import Path
from typing import Any

import torch

from forerun.api import Model
from forerun.bench import local_runner
from forerun.bench.profile import profile
from forerun.core.records import Step
from forerun.core.sampling import Sampling
from forerun.tasks.reasoning import ReasoningTask

from .decoding import TEMPERATURE, loaded
from .prepare import wait_for_model
from .report import Report
from .setting import Setting

METHODS = ("plain", "stand")
SHOWN = 12  # functions
WAITS = ("Synchronize", "Memcpy DtoH", "_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")


def run(report: Report, setting: Setting) -> None:
    """All three views of plain decoding and of STAND."""
    wait_for_model(setting, max(report.left - 20.0, 1.0))
    model, prompt = loaded(setting), ReasoningTask("heldout").example(7).prompt
    tokens = 4 if setting.is_smoke else 120
    for name in METHODS:
        parts = local_runner.parts_of(name)
        options: dict[str, Any] = {"drafter": parts.drafter, "temperature": TEMPERATURE}
        options |= {"max_new_tokens": tokens, "seed": 3, "batch": 1}
        model.generate([prompt], **options)  # compiles, records
        report.check()
        lines(report, name, model, prompt, tokens, parts)
        report.check()
        functions(report, name, model, prompt, options)
        report.check()
        trace(report, name, model, prompt, options, setting)


def lines(
    report: Report, name: str, model: Model, prompt: str, tokens: int, parts: local_runner.Parts
) -> None:
    """The budget of a step: its lines above 1 %."""
    sampling = Sampling(temperature=TEMPERATURE, max_new_tokens=tokens, seed=3)
    found = profile(model, prompt, sampling, parts, rounds=1)
    report.add(f"{name}: a step without timers", found.bare_microseconds, "us")
    report.add(f"{name}: share outside the pass", found.outside_share, "",
               note="; ".join(found.notes))  # fmt: skip
    for line in found.lines:
        if line.share >= 0.01:
            report.add(f"{name}: {line.name}", line.microseconds, "us", note=f"{line.share:.0%}")
    report.fact(**{f"budget of {name}": found.to_dict()})


def functions(
    report: Report, name: str, model: Model, prompt: str, options: dict[str, Any]
) -> None:
    """Python's functions by their own time; a fact, since a profiler slows small ones most."""
    watch = cProfile.Profile()
    start = time.perf_counter()
    watch.enable()
    model.generate([prompt], **options)
    watch.disable()
    text = io.StringIO()
    pstats.Stats(watch, stream=text).sort_stats("tottime").print_stats(SHOWN)
    print(f"\n{name}: functions by their own time\n{text.getvalue()}", flush=True)
    report.add(f"{name}: under cProfile", time.perf_counter() - start, "s", note="lines in the log")


def trace(
    report: Report,
    name: str,
    model: Model,
    prompt: str,
    options: dict[str, Any],
    setting: Setting,
) -> None:
    """One trace of some steps: what the host calls, and how long the device is busy."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU]
    kinds += [] if setting.is_smoke else [ProfilerActivity.CUDA]
    few = options | {"max_new_tokens": min(options["max_new_tokens"], 30)}
    steps: list[Step] = []
    with profile(activities=kinds) as watch:
        start = time.perf_counter()
        model.generate([prompt], on_step=steps.append, **few)
        if not setting.is_smoke:
            torch.cuda.synchronize()
        wall = time.perf_counter() - start
    busy = sum(getattr(row, "self_device_time_total", 0.0) for row in watch.key_averages())
    rows = sorted(watch.key_averages(), key=lambda row: -row.self_cpu_time_total)
    calls = ", ".join(f"{row.key} {row.count}" for row in rows[:8])
    if not setting.is_smoke:
        report.add(f"{name}: device busy in a traced run", busy / 1e6 / wall, "of the wall time",
                   note="of 30 tokens, prompt and tracing included")  # fmt: skip
    waits = {row.key: row.count for row in rows if any(word in row.key for word in WAITS)}
    listed = ", ".join(f"{key} {count}" for key, count in waits.items()) or "none"
    report.add(
        f"{name}: calls that may wait for the device",
        sum(waits.values()) / max(len(steps), 1),
        "per step",
        note=f"{listed}; most host time: {calls}"[:300],
    )
    plain = setting.work / f"trace-{name}.json"
    watch.export_chrome_trace(str(plain))
    packed(plain, setting.out / f"trace-{name}.json.gz")


def packed(source: Path, target: Path) -> None:
    """Compresses a file."""
    target.write_bytes(gzip.compress(source.read_bytes(), 6))
