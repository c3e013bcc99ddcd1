"""Matrix products of many rows: forerun's kernels by instruction set, compared with torch.

    python benchmarks/many_rows.py --shapes 2816x1024 --rows 64 256 1024

Prints for each shape and number of rows, in one interleaved run: milliseconds of torch's linear
with a plain weight, of forerun's product, and of unpacking followed by torch's linear (what
`layers.Linear` does where `Packed.wins` says no). Then the number of rows from which unpacking is
always faster. ONEDNN_MAX_CPU_ISA (AVX2, AVX512_CORE, AVX512_CORE_BF16) limits torch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import scripts
import torch
import torch.nn.functional as F

from forerun.models.load import DTYPES
from forerun.runner.native import LEVELS, kernels
from forerun.runner.native.packing import Packed

Times = dict[tuple[str, int], list[float]]


def packed_by_level(weight: torch.Tensor, levels: list[str]) -> dict[str, Packed]:
    """The weight in the order of every instruction set; a packed weight keeps its kernels."""
    found, before = {}, os.environ.get("FORERUN_NATIVE")
    for level in levels:
        os.environ["FORERUN_NATIVE"] = level
        kernels.cache_clear()
        found[level] = Packed(weight)
    if before is None:
        del os.environ["FORERUN_NATIVE"]
    else:
        os.environ["FORERUN_NATIVE"] = before
    kernels.cache_clear()
    return found


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(weight: torch.Tensor, options: argparse.Namespace) -> Times:
    """Seconds by (contestant, rows) of every round; every round times every contestant once."""
    packed, times = packed_by_level(weight, options.levels), Times()
    for turn in range(options.rounds + 1):
        for rows in options.rows:
            x = torch.randn(rows, weight.shape[1]).to(weight.dtype)
            calls: dict[str, Callable[[], object]] = {"torch": lambda x=x: F.linear(x, weight)}
            for level, held in packed.items():
                calls[level] = lambda x=x, held=held: held.product(x)
                calls[f"{level} unpacked"] = lambda x=x, held=held: F.linear(x, held.unpack())
            for name, work in calls.items():
                found = seconds(work)
                if turn:  # the first round warms up
                    times.setdefault((name, rows), []).append(found)
    return times


def switch(times: dict[tuple[str, int], float], level: str, rows: list[int]) -> int | None:
    """The fewest rows from which unpacking wins for all that follow; None: never."""
    found = None
    for num in sorted(rows, reverse=True):
        if times[f"{level} unpacked", num] >= times[level, num]:
            break
        found = num
    return found


def shape(text: str) -> tuple[int, int]:
    """Rows and columns of a weight, as 2816x1024."""
    n, _, k = text.partition("x")
    return scripts.count(n), scripts.count(k)


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument(
        "--shapes", type=shape, nargs="+", default=[(2816, 1024), (4096, 4096)], help="NxK"
    )
    rows = [32, 64, 128, 256, 512, 1024]
    parser.add_argument("--rows", type=scripts.count, nargs="+", default=rows)
    parser.add_argument("--levels", nargs="+", choices=LEVELS[1:], default=None)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--threads", type=scripts.count, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=scripts.count, default=5)
    options = parser.parse_args()
    options.levels = options.levels or list(LEVELS[1 : kernels().level + 1])
    torch.set_num_threads(options.threads)
    for n, k in options.shapes:
        weight = (torch.randn(n, k) / k**0.5).to(DTYPES[options.dtype])
        with torch.inference_mode():
            times = {key: statistics.median(t) for key, t in measure(weight, options).items()}
        names = [
            "torch",
            *(f"{level}{how}" for level in options.levels for how in ("", " unpacked")),
        ]
        print(f"{n}x{k} {options.dtype}, {options.threads} threads, ms: rows, {', '.join(names)}")
        for num in options.rows:
            print(f"{num:6}  " + "  ".join(f"{1e3 * times[name, num]:8.2f}" for name in names))
        for level in options.levels:
            print(f"{level}: unpacking wins from {switch(times, level, options.rows)} rows on")


if __name__ == "__main__":
    scripts.run(main)
