"""Everything to measure of forerun on a GPU, in one command of at most nine minutes.

    python benchmarks/gpu.py --out DIR --limit 540
    python benchmarks/gpu.py --out DIR --parts correctness,passes=60
    python benchmarks/gpu.py --out DIR --smoke            # no GPU: tiny sizes, to test the script

Parts, the most important first. Each runs in its own process with its own time limit:

    correctness  passes of every shape class and verdicts on the device against torch in fp32;
                 whole texts against transformers, and with drafts against without
    passes       read and copy limits; c(N) for 1 to 128 rows at 1B and 8B, with graphs and without
    decoding     plain, stand, auto at the reasoner padded to 1B, compared with transformers
    hosttime     where the time of a step goes: lines, Python functions, a trace
    training     tokens per second of the training loop
    tests        the unit tests of the GPU code

A part that fails, hangs or runs out of time is a row that says so, and the next one runs. After
every part DIR/gpu.json and the table DIR/gpu.md are written; DIR/gpu.log has the output of all
parts. Without CUDA, --smoke is the default. Nothing is downloaded. Exit status 1: a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
if find_spec("forerun") is None:  # a checkout that is not installed
    sys.path.insert(0, str(HERE.parents[1] / "src"))

import scripts  # noqa: E402
from gpu_parts.report import OutOfTime, Report, Row, read  # noqa: E402


@dataclass(frozen=True)
class Part:
    """One part: its module, its seconds, and a letter for the table."""

    letter: str
    module: str
    seconds: float
    title: str


PARTS = {
    "correctness": Part("a", "correctness", 120, "correctness"),
    "passes": Part("b", "passes", 110, "passes"),
    "decoding": Part("c", "decoding", 150, "decoding, the reasoner padded to 1B"),
    "hosttime": Part("d", "hosttime", 50, "where the time of a step goes"),
    "training": Part("e", "training", 45, "training"),
    "tests": Part("f", "unit_tests", 60, "unit tests"),
}
PREPARE = Part("", "prepare", 100, "prepared during (a)")  # seconds after which no part waits
GRACE = 5.0  # seconds between a part's own limit and its end by a signal
RESERVE = 4.0  # seconds at the end, for what is written


@dataclass
class Result:
    """What came of a part. status: "done", "out of time", "killed", "failed" or "no time left"."""

    name: str
    status: str = "no time left"
    seconds: float = 0.0
    limit: float = 0.0
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class Child:
    """A part in a process group of its own."""

    def __init__(self, name: str, options: argparse.Namespace, work: Path, seconds: float) -> None:
        self.rows = work / f"{name}.jsonl"
        command = [sys.executable, str(HERE), "--part", name, "--rows", str(self.rows)]
        command += ["--work", str(work), "--out", str(options.out), "--limit", str(seconds)]
        command += ["--smoke"] if options.smoke else []
        self._log = (options.out / "gpu.log").open("a")
        self._log.write(f"\n===== {name} =====\n")
        self._log.flush()
        self.process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment(name, options),
            start_new_session=True,
        )

    def wait(self, seconds: float) -> int | None:
        """Its exit status; None if it was killed after so many seconds."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def wait_until(self, moment: float) -> None:
        """Until it has ended, or the moment has come."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(moment - time.monotonic(), 0.0))

    def kill(self) -> None:
        """Ends the process and all that it has started."""
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, kind)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(3.0)
        self._log.close()


def environment(name: str, options: argparse.Namespace) -> dict[str, str]:
    """That of a child: it finds forerun as this process does, and goes to no network."""
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    found |= {"TOKENIZERS_PARALLELISM": "false"}
    if options.smoke:
        found |= {"TRITON_INTERPRET": "1"}
    if options.smoke or name == "prepare":
        found |= {"CUDA_VISIBLE_DEVICES": ""}
    return found


def part(options: argparse.Namespace) -> int:
    """What a child does: one part, its rows as they come."""
    from gpu_parts.setting import Setting

    report = Report(options.rows, options.limit, is_timed=not options.smoke)
    chosen = PREPARE if options.part == "prepare" else PARTS[options.part]
    setting = Setting(options.smoke, options.work, options.out)
    try:
        if chosen is not PREPARE:
            report.fact(machine=machine(options.smoke))
        import_module(f"gpu_parts.{chosen.module}").run(report, setting)
    except OutOfTime:
        report.fact(status="out of time")
    except Exception as fault:
        traceback.print_exc()
        report.fact(status="failed", error=f"{type(fault).__name__}: {fault}"[:500])
        return 1
    return 0


def machine(is_smoke: bool) -> dict[str, Any]:
    """The card, its driver, and versions."""
    import torch

    from forerun.bench.machine import describe, git_revision, package_version

    found = describe("cpu" if is_smoke else "cuda") | {"revision": git_revision()}
    found |= {"triton": package_version("triton"), "cuda": torch.version.cuda or "none"}
    if not is_smoke:
        card = torch.cuda.get_device_properties(0)
        found |= {"capability": f"{card.major}.{card.minor}", "gpu_memory": card.total_memory}
        found |= {"multiprocessors": card.multi_processor_count}
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit"]
        with suppress(OSError, subprocess.SubprocessError):
            listed = subprocess.run(
                [*query, "--format=csv,noheader"], capture_output=True, text=True, timeout=10
            )
            found["nvidia_smi"] = listed.stdout.strip()
    return found


def run_part(name: str, options: argparse.Namespace, work: Path, seconds: float) -> Result:
    """Runs a part in a child, within so many seconds."""
    found = Result(name, limit=seconds)
    print(f"({PARTS[name].letter}) {PARTS[name].title}: at most {seconds:.0f} s", flush=True)
    start = time.monotonic()
    child = Child(name, options, work, seconds)
    try:
        status = child.wait(seconds + GRACE)
    finally:
        child.kill()
    found.seconds = time.monotonic() - start
    found.rows, found.facts = read(child.rows)
    found.status = found.facts.pop("status", "done" if status == 0 else "failed")
    if status is None:
        found.status = "killed"
    error = found.facts.get("error", "")
    if found.status in ("failed", "killed"):
        why = {"killed": f"it did not end within {seconds:.0f} s"}.get(found.status, error)
        why = why or f"its process ended with status {status}: see gpu.log"
        found.rows.append(Row("FAILED", why))
    if found.status == "out of time":
        found.rows.append(Row("stopped", f"at its limit of {seconds:.0f} s"))
    print(f"({PARTS[name].letter}) {found.status} after {found.seconds:.1f} s", flush=True)
    return found


def table(results: list[Result], smoke: bool) -> str:
    """All rows as Markdown."""
    lines = ["**Not a GPU: smoke only.** No time below means anything.", ""] if smoke else []
    facts = next((r.facts["machine"] for r in results if "machine" in r.facts), {})
    if facts:
        names = ("gpu", "nvidia_smi", "cpu", "torch", "triton", "cuda", "transformers", "revision")
        lines += [", ".join(f"{name} {facts[name]}" for name in names if facts.get(name)), ""]
    lines += ["| part | what | value | goal | | note |", "|---|---|---|---|---|---|"]
    for result in results:
        letter = PARTS[result.name].letter
        lines.append(f"| {letter} | **{PARTS[result.name].title}: {result.status}** | "
                     f"{result.seconds:.0f} s | <= {result.limit:.0f} s | | |")  # fmt: skip
        for row in result.rows:
            value = row.value if isinstance(row.value, str) else f"{row.value:.4g} {row.unit}"
            cells = (letter, row.name, value.strip(), row.goal, row.verdict, row.note)
            lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def write(
    options: argparse.Namespace, results: list[Result], start: float, *, is_finished: bool = False
) -> None:
    """Both files of results, each whole or not at all."""
    facts = {
        "format": 1,
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "is_gpu": not options.smoke,
        "limit": options.limit,
        "is_finished": is_finished,
        "seconds": time.monotonic() - start,
        "parts": [asdict(result) for result in results],
    }
    texts = {"gpu.json": json.dumps(facts, indent=1), "gpu.md": table(results, options.smoke)}
    for name, text in texts.items():
        part = options.out / f".{name}"
        part.write_text(text)
        os.replace(part, options.out / name)


def main() -> int:
    options = parsed()
    if options.part:
        return part(options)
    start = time.monotonic()
    if not options.smoke:
        import torch

        options.smoke = not torch.cuda.is_available()
    if options.smoke:
        print("not a GPU: smoke only, tiny sizes by Triton's interpreter", flush=True)
    if find_spec("triton") is None:
        scripts.skip("the kernels need triton; pip install -c constraints.txt '.[cuda]'")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.log").write_text("")
    results: list[Result] = []
    write(options, results, start)  # an earlier run's figures must not pass for this one's
    with tempfile.TemporaryDirectory(prefix="forerun-gpu-") as folder:
        work = Path(folder)
        needs_model = {"decoding", "hosttime"} & set(options.parts)
        preparing = Child("prepare", options, work, options.limit) if needs_model else None
        try:
            for name, own in options.parts.items():
                if preparing is not None and name != "correctness":
                    preparing.wait_until(start + PREPARE.seconds)
                left = options.limit - (time.monotonic() - start) - GRACE - RESERVE
                seconds = min(own, left)
                if seconds < 5.0:
                    results.append(Result(name))
                else:
                    results.append(run_part(name, options, work, seconds))
                write(options, results, start)
            write(options, results, start, is_finished=True)
        finally:
            if preparing is not None:
                preparing.kill()
    print(table(results, options.smoke))
    print(f"{time.monotonic() - start:.0f} s; results in {options.out}")
    is_empty = all(result.status == "no time left" for result in results)
    return int(is_empty or any(result.status in ("failed", "killed") for result in results))


def parsed() -> argparse.Namespace:
    """The options; those that only a child is given are hidden."""
    parser = scripts.parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of results")
    parser.add_argument(
        "--limit", type=scripts.measure, default=540.0, help="time limit in seconds"
    )
    parser.add_argument(
        "--parts",
        type=limits,
        default=",".join(PARTS),
        metavar="NAME[=SECONDS],...",
        help="run only these parts, with their own limits",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, without a GPU")
    for hidden in ("--part", "--rows", "--work"):
        kind = str if hidden == "--part" else Path
        parser.add_argument(hidden, type=kind, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def limits(text: str) -> dict[str, float]:
    """Seconds by part, in their own order, of a comma-separated list of NAME or NAME=SECONDS."""
    asked = dict(piece.partition("=")[::2] for piece in text.split(","))
    unknown = [name for name in asked if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown part {unknown[0]!r}; use {', '.join(PARTS)}")
    return {
        name: scripts.measure(asked[name]) if asked[name] else one.seconds
        for name, one in PARTS.items()
        if name in asked
    }


if __name__ == "__main__":
    scripts.run(main)
