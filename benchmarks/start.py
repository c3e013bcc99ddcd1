"""The time from the command to the first token, in parts, for cold and warm starts.

    python benchmarks/start.py --models smollm2 qwen-coder gemma3

Runs `forerun generate` for one token in fresh processes, and prints a row per start, in seconds by
the clock and in seconds of CPU: until Python and the imports are done (import), the tokenizer
(tokenizer), the weights (weights), compiled kernels read or made (compile), the costs of passes
(measure), and until the first token (first). A cold start has an empty cache of forerun, a warm one
that of the start before. `--kernels` adds a start that also compiles the kernels. `read` is the
time in which the weight files alone can be read. Other work on the machine lengthens seconds by the
clock; CPU seconds show what a start costs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scripts

PROMPT = "The capital of France is"
STEPS = ("tokenizer", "weights", "compile", "measure", "first")
COLUMNS = ("import", *STEPS, "total")
READ_BYTES = 1 << 24

Seconds = tuple[float, float]  # by the clock, of CPU


class Steps:
    """Times of named calls in this process; a call within another counts for itself only."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._open: list[list[float]] = []

    def time(self, owner: Any, name: str, step: str) -> None:
        """Wraps a function of a module or class."""
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            start, inner = now(), [0.0, 0.0]
            self._open.append(inner)
            try:
                return call(*args, **options)
            finally:
                self._open.pop()
                found = self.seconds.setdefault(step, [0.0, 0.0])
                for i, (end, begin) in enumerate(zip(now(), start, strict=True)):
                    found[i] += end - begin - inner[i]
                    if self._open:
                        self._open[-1][i] += end - begin

        setattr(owner, name, timed)


def now() -> Seconds:
    return time.time(), time.process_time()


def child(model: str, started: float) -> None:
    """Runs the command in this process with timers, and prints the seconds as JSON."""
    from forerun.cli import generate, loading
    from forerun.cli.main import main as forerun

    steps = Steps()
    import forerun.api as api
    import forerun.models.load as load
    from forerun.controllers import budget
    from forerun.drafters import router
    from forerun.engine.generation import Run
    from forerun.models.tokenizer import Tokenizer

    steps.time(Tokenizer, "load", "tokenizer")
    steps.time(load, "load_target", "weights")
    steps.time(loading, "warm_up", "compile")
    steps.time(api.Model, "run", "compile")
    for module in (budget, router):
        steps.time(module, "cost_of", "measure")
    clock, cpu = now()
    events, done = Run.events, []

    def first(self: Run) -> Any:
        for event in events(self):
            done.append(now())
            yield event

    Run.events = first  # type: ignore[method-assign]
    steps.time(generate, "_run", "first")
    words = ["generate", "--model", model, "--prompt", PROMPT, "-t", "0", "--max-new-tokens", "1"]
    status = forerun([*words, "--json"])
    if status or not done:
        sys.exit(status or 1)
    rows = {"import": [clock - started, cpu]} | steps.seconds
    rows["total"] = [done[0][0] - started, done[0][1]]
    print(json.dumps(rows), file=sys.stderr)


def measured(model: str, cache: str, kernels: str | None) -> dict[str, Seconds]:
    """The parts of one start in a process of its own."""
    env = os.environ | {"FORERUN_CACHE": cache}
    if kernels:
        env["NUMBA_CACHE_DIR"] = kernels
    command = [sys.executable, __file__, "--child", model, "--started", str(time.time())]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.stderr.write(ended.stderr)
        raise subprocess.CalledProcessError(ended.returncode, command)
    return {name: tuple(pair) for name, pair in json.loads(ended.stderr.splitlines()[-1]).items()}


def read_seconds(folder: Path) -> tuple[int, Seconds]:
    """Bytes of the weight files, and the time of reading them once."""
    start, size, held = now(), 0, bytearray(READ_BYTES)
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while read := file.readinto(held):
                size += read
    end = now()
    return size, (end[0] - start[0], end[1] - start[1])


def row(model: str, kind: str, found: dict[str, Seconds]) -> str:
    cells = [" / ".join(f"{s:.1f}" for s in found.get(name, (0.0, 0.0))) for name in COLUMNS]
    return f"| {model} | {kind} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["reasoner"], help="names or folders")
    parser.add_argument(
        "--warm", type=scripts.count, default=2, help="warm starts; the best counts"
    )
    parser.add_argument("--kernels", action="store_true", help="add a start that compiles kernels")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.started)
        return
    from forerun.models.paths import located, model_folder

    print("Seconds by the clock / of CPU\n\n| model | start | " + " | ".join(COLUMNS) + " |")
    print("|---|---|" + "---:|" * len(COLUMNS))
    reads = []
    for model in options.models:
        folder = model_folder(located(model))  # in the user's cache; a start has one of its own
        name = folder.name
        reads.append((name, *read_seconds(folder)))
        with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as kernels:
            if options.kernels:
                found = measured(str(folder), f"{cache}/first", kernels)
                print(row(name, "no kernels", found), flush=True)
            print(row(name, "cold", measured(str(folder), cache, None)), flush=True)
            warm = [measured(str(folder), cache, None) for _ in range(options.warm)]
            best = min(warm, key=lambda found: found["total"][1])
            print(row(name, "warm", best), flush=True)
    print()
    for name, size, (seconds, cpu) in reads:
        print(f"read {name}: {size / 1e6:,.0f} MB in {seconds:.2f} / {cpu:.2f}")


if __name__ == "__main__":
    scripts.run(main)
