"""(b) Memory bandwidth, and the time of a pass by its number of rows, on graphs and on torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from forerun.bench.hardware_limits import best_seconds, read_bandwidth
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Sequence
from forerun.core.roles import Target
from forerun.core.tree import EMPTY
from forerun.errors import CapacityError, in_a_line
from forerun.runner.gpu.graphs import GraphDecoder
from forerun.runner.model_runner import ModelRunner

from .models import SIZES, fill, on_graphs, on_torch, random_decoder, text, tree, wait
from .report import OutOfTime, Report
from .setting import Setting

SHARE, AT_16, AT_64 = 0.75, 1.15, 1.4  # goals: of a read, of the time of one row
TIMED = 30  # passes of a kind
SAMPLE = 4 << 30  # bytes that are read and copied


def run(report: Report, setting: Setting) -> None:
    """Limits, then both sizes; a size that does not fit in memory is a row."""
    limit = limits(report, setting)
    sizes = ("tiny",) if setting.is_smoke else ("1B", "8B")
    for size in sizes:
        report.check(5.0 if not setting.is_smoke else 0.0)
        try:
            measure(report, size, limit, setting)
        except (torch.OutOfMemoryError, CapacityError) as fault:
            report.add(f"{size}: not all measured", f"not enough memory: {in_a_line(fault, 150)}")


def limits(report: Report, setting: Setting) -> float:
    """Writes the bandwidth of a read and of a copy; returns the best read, bytes per second."""
    if setting.is_smoke:
        x = torch.ones(1 << 20)
        read = x.nbytes / best_seconds(x.sum, 3)
        report.add("read (CPU)", read / 1e9, "GB/s")
        return read
    device = setting.device
    free = torch.cuda.mem_get_info(device)[0]
    x = torch.ones(min(SAMPLE, free // 4) // 4, device=device)
    y = torch.empty_like(x)
    read = x.nbytes / best_seconds(x.sum, 8, "cuda")
    copy = 2 * x.nbytes / best_seconds(lambda: y.copy_(x), 8, "cuda")
    report.add("read, a sum in torch", read / 1e12, "TB/s")
    report.add("copy, read and written", copy / 1e12, "TB/s")
    x = y = torch.empty(0)
    torch.cuda.empty_cache()
    best = read_bandwidth(1, device="cuda") * 1e9
    report.add("read limit", best / 1e12, "TB/s")
    return best


def measure(report: Report, size: str, limit: float, setting: Setting) -> None:
    """c(N) of one size on graphs and on torch."""
    c, device = SIZES[size], setting.device
    dtype = torch.float16 if setting.is_smoke else torch.bfloat16  # no bf16 by interpreter
    start = time.perf_counter()
    model = random_decoder(c, dtype, device)
    wait(device)
    weights = sum(linear.nbytes for linear in model.linears())
    report.add(f"{size}: weights read by a pass", weights / 1e9, "GB",
               note=f"made in {time.perf_counter() - start:.1f} s")  # fmt: skip
    context, timed = (24, 1) if setting.is_smoke else (300, TIMED)
    rows = (1, 4) if setting.is_smoke else (1, 2, 4, 8, 16, 32, 64, 128)
    ours, plain = on_graphs(model, context=4608), on_torch(model, context=4608)
    seq = text(context, c.vocab_size)
    for runner in (ours, plain):
        fill(runner, seq)
    found = curve(report, ours, seq, rows, timed)
    without = curve(report, plain, seq, rows, max(timed // 3, 1))
    least = (weights + kv_bytes(ours, context)) / limit
    assert isinstance(ours.decode, GraphDecoder)
    trusted = ours.decode.is_trusted
    report.add(f"{size}: graphs agree with torch", int(trusted), least=1,
               note="" if trusted else "all passes below are torch's")  # fmt: skip
    report.add(f"{size}: one row", 1e6 * found[1], "us", note=f"torch {1e6 * without[1]:.0f} us")
    share = SHARE if size == "1B" else None
    report.speed(f"{size}: share of the read limit at one row", least / found[1], least=share,
                 note=f"the limit is {1e6 * least:.0f} us")  # fmt: skip
    goals = {16: AT_16, 64: AT_64} if size == "1B" else {}
    for num in rows[1:]:
        note = f"{1e6 * found[num]:.0f} us; torch {1e6 * without[num]:.0f} us"
        ratio = found[num] / found[1]
        report.speed(f"{size}: c({num})", ratio, "x one row", most=goals.get(num), note=note)
    replayed(report, size, ours, least)
    longer(report, size, ours, setting)
    verified(report, size, ours, seq, setting)
    report.fact(**{f"curve_{size}": {"rows": list(rows), "graphs": list(found.values()),
                                     "torch": list(without.values())}})  # fmt: skip


def curve(
    report: Report, runner: ModelRunner, seq: Sequence, rows: tuple[int, ...], timed: int
) -> dict[int, float]:
    """Median seconds of a pass by its rows, host work included."""
    found = {}
    for num in rows:
        report.check()
        grown = tree(num - 1, runner.vocab_size) if num > 1 else EMPTY

        def one(grown=grown) -> None:  # type: ignore[no-untyped-def]
            runner.forward(ForwardBatch([seq], [grown]))
            wait(runner.model.device)

        found[num] = median_seconds(one, timed)
    return found


def median_seconds(work: Callable[[], object], times: int) -> float:
    """The median of some calls, after warm-up calls that compile and record."""
    seconds, warm = [], min(times, 3)
    for i in range(times + warm):
        start = time.perf_counter()
        work()
        if i >= warm:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def kv_bytes(runner: ModelRunner, context: int) -> int:
    """Bytes of the keys and values of so many tokens."""
    layers, _, _, *cell = runner.cache.data.shape
    return layers * context * int(np.prod(cell)) * runner.cache.data.itemsize


def replayed(report: Report, size: str, runner: ModelRunner, least: float) -> None:
    """The device's time of recorded passes alone, by events around many replays."""
    assert isinstance(runner.decode, GraphDecoder)
    for shape, one in runner.decode._graphs[runner.cache].shapes.items():
        if one.graph is None or shape.rows not in (1, 16, 64):
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        one.graph.replay()
        start.record()
        for _ in range(50):
            one.graph.replay()
        end.record()
        end.synchronize()
        seconds = start.elapsed_time(end) / 50 / 1e3
        note = f"{least / seconds:.2f} of the read limit" if shape.rows == 1 else ""
        report.add(f"{size}: kernels alone, {shape.rows} rows", 1e6 * seconds, "us", note=note)


def longer(report: Report, size: str, runner: ModelRunner, setting: Setting) -> None:
    """One row and a tree after many tokens."""
    if setting.is_smoke:
        return
    seq = text(4096, runner.vocab_size, 1)
    fill(runner, seq, 1)
    times = curve(report, runner, seq, (1, 64), TIMED)
    for num, seconds in times.items():
        report.add(f"{size}: {num} rows after 4096 tokens", 1e6 * seconds, "us")
    runner.release(seq)


def verified(
    report: Report, size: str, runner: ModelRunner, seq: Sequence, setting: Setting
) -> None:
    """Forward and verdict of a batch at a temperature: logits of this size stay on the device."""
    from forerun.controllers.fixed import Fixed
    from forerun.drafters.stand import Stand
    from forerun.engine.engine import Engine
    from forerun.verifiers.speculative import Speculative

    target: Target = runner
    num, most = (2, 4) if setting.is_smoke else (16, 40)
    seconds: dict[str, float] = {"draft": 0.0, "forward": 0.0, "verify": 0.0}
    steps = 0

    def add_times(step) -> None:  # type: ignore[no-untyped-def]
        nonlocal steps
        steps += 1
        for name in seconds:
            seconds[name] += step.times[name]

    engine = Engine(
        target, Stand(), Speculative(), Fixed(nodes=7), listeners=[add_times], max_seqs=num
    )
    for part in (engine.verifier, engine.target):
        part.warm_up()
    for i in range(num):
        other = text(len(seq.tokens), runner.vocab_size, 10 + i)
        other.limit = most
        engine.submit(other)
    for _ in range(3):
        engine.step()
    for name in seconds:
        seconds[name] = 0.0
    steps, start = 0, time.perf_counter()
    while not engine.scheduler.is_idle:
        try:
            report.check()
        except OutOfTime:
            for one in engine.scheduler.running:
                engine.cancel(one)
        engine.step()
    wall = time.perf_counter() - start
    inside = sum(seconds.values())
    split = ", ".join(f"{name} {1e3 * s / max(steps, 1):.2f}" for name, s in seconds.items())
    report.add(f"{size}: a step of {num} texts with trees of 7", 1e3 * wall / max(steps, 1), "ms",
               note=f"ms: {split}, other {1e3 * (wall - inside) / max(steps, 1):.2f}")  # fmt: skip
