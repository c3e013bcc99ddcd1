"""forerun's drafters inside vLLM on a CPU, compared with vLLM's own: best of n in turns.

    make peers
    python benchmarks/vllm_plugin.py [--size 0.1B] [--problems 3] [--n 8] [--ways sequential batch]

Runs in forerun's environment; vLLM runs in that of the peers (--peers). Every mode is a vLLM engine
with its defaults (--eager: without its compiler). All modes take turns on every problem, every
second time in reversed order, each from an empty cache. A mode is NAME[:plain][=K]: `plain` learns
from tokens only, K (default 5) is the longest draft.

Prints Markdown: tokens per second; the ratio to vLLM without drafts (geometric mean over problems)
by wall time and by processor time of the engine, which other work on the machine distorts less;
tau, the tokens per pass of a sequence; accepted drafts. --out keeps all runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import scripts

from forerun.assets import embedded
from forerun.bench.inflate import inflate
from forerun.bench.peers.client import WorkerProcess
from forerun.bench.peers.install import DEFAULT_FOLDER, env_of, problem, python_of
from forerun.models.tokenizer import Tokenizer
from forerun.tasks.reasoning import ReasoningTask

SOURCE = Path(__file__).parents[1] / "src"
MODES = ("plain", "ngram", "arctic=24", "stand", "stand=8", "stand:plain", "recycling", "suffix=24")
PATIENCE = 1800.0  # seconds for one answer
CONTEXT = 640


def process_of(folder: Path, threads: int) -> WorkerProcess:
    """A worker in vLLM's environment; the caller closes it."""
    env = env_of(folder, "vllm") | {"PYTHONPATH": str(SOURCE)}
    worker = Path(__file__).with_name("vllm_worker.py")
    return WorkerProcess(python_of(folder, "vllm"), worker, threads=threads, env=env)


@contextmanager
def engines(options: argparse.Namespace, model: Path) -> Iterator[dict[str, WorkerProcess]]:
    """Loaded engines by mode, each in a process of its own."""
    with ExitStack() as stack:
        found = {mode: process_of(options.peers, options.threads) for mode in options.modes}
        for process in found.values():
            stack.callback(process.close)

        def load(mode: str) -> None:
            name, _, num_tokens = mode.partition("=")
            asked = {"tokens": int(num_tokens or 5), "eager": int(options.eager)}
            fields = {"model": str(model), "dtype": "bfloat16", "context": CONTEXT}
            found[mode].request("load", PATIENCE, mode=name, options=asked, **fields)
            print(f"loaded {mode}", flush=True)

        with ThreadPoolExecutor() as pool:
            list(pool.map(load, options.modes))
        yield found


def runs(options: argparse.Namespace, model: Path) -> Iterator[dict[str, Any]]:
    """Every mode at every problem, after a short run that is not counted."""
    tokenizer, task = Tokenizer.load(str(model)), ReasoningTask("heldout")
    law = {"temperature": options.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    law |= {"max_new_tokens": options.longest, "ends": list(tokenizer.eos_ids)}
    with engines(options, model) as found:
        for number, way in itertools.product(range(-1, options.problems), options.ways):
            prompt = tokenizer.encode(task.example(options.first + max(number, 0)).prompt)
            n = 2 if number < 0 else options.n
            seeds = [1000 * (number + 2) + i for i in range(n)]
            fields = {"prompt": prompt, "sampling": law | {"seeds": seeds}, "batch": way == "batch"}
            for mode in options.modes if number % 2 == 0 else options.modes[::-1]:
                name = mode.partition("=")[0]
                answer = found[mode].request("run", PATIENCE, mode=name, **fields)
                if number >= 0:
                    tokens = sum(len(sample["tokens"]) for sample in answer["samples"])
                    what = {"way": way, "mode": mode, "problem": options.first + number}
                    measured = {"seconds": answer["seconds"], "tokens": tokens}
                    yield what | measured | answer["counts"]


def table(records: list[dict[str, Any]]) -> str:
    """The summary as Markdown."""
    plain = {r["problem"]: r for r in records if r["mode"] == "plain"}
    lines = [
        "",
        "| mode | tokens/s | x plain | x plain, CPU time | tau | accepted |",
        "|---" * 6 + "|",
    ]
    for mode in dict.fromkeys(r["mode"] for r in records):
        own = [r for r in records if r["mode"] == mode]
        tokens, passes = sum(r["tokens"] for r in own), sum(r["passes"] for r in own)
        rate = tokens / sum(r["seconds"] for r in own)
        wall, cpu = (over(own, plain, clock) for clock in ("seconds", "cpu_seconds"))
        share = sum(r["accepted"] for r in own) / max(1, sum(r["drafted"] for r in own))
        lines.append(
            f"| {mode} | {rate:.0f} | {wall} | {cpu} | {tokens / passes:.2f} | {share:.0%} |"
        )
    return "\n".join(lines)


def over(own: list[dict[str, Any]], plain: dict[int, dict[str, Any]], clock: str) -> str:
    """Geometric mean over problems of the rate by one clock, over that without drafts."""
    pairs = [(r, plain[r["problem"]]) for r in own if r["problem"] in plain]
    logs = [np.log(a["tokens"] / a[clock]) - np.log(b["tokens"] / b[clock]) for a, b in pairs]
    return f"{np.exp(np.mean(logs)):.2f}" if logs else ""


def main() -> None:
    """The command line."""
    parser = scripts.parser(__doc__)
    parser.add_argument("--model", type=Path, default=Path(embedded("reasoner")))
    parser.add_argument(
        "--size", default="", help="use the reasoner padded to this size, e.g. 0.1B"
    )
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--modes", nargs="+", default=[*MODES])
    parser.add_argument("--problems", type=scripts.count, default=3)
    parser.add_argument(
        "--first", type=scripts.number, default=0, help="index of the first problem"
    )
    parser.add_argument("--n", type=scripts.count, default=8)
    ways = ("sequential", "batch")
    parser.add_argument("--ways", nargs="+", choices=ways, default=[*ways])
    parser.add_argument(
        "--longest", type=scripts.count, default=300, help="maximum tokens of a sample"
    )
    parser.add_argument("--temperature", type=scripts.measure, default=0.6)
    parser.add_argument("--threads", type=scripts.count, default=2)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out", type=Path, help="file to append the runs to")
    options = parser.parse_args()
    extra = "arctic-inference" if any("arctic" in mode for mode in options.modes) else ""
    if lacks := problem(options.peers, "vllm", extra):
        scripts.skip(f"vLLM, {lacks}")
    with tempfile.TemporaryDirectory() as temporary:
        model = options.model
        if options.size:
            model = inflate("reasoner", Path(temporary) / "model", options.size).folder
        records = []
        for record in runs(options, model):
            records.append(record)
            print(json.dumps(record), flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
    for way in options.ways:
        print(f"\n{way}\n{table([record for record in records if record['way'] == way])}")


if __name__ == "__main__":
    scripts.run(main)
