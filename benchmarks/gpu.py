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

A part that fails, hangs or runs out of time has a row with the reason, and the next one runs.
After every part, and after Ctrl-C, DIR/gpu.json and the table DIR/gpu.md are written; DIR/gpu.log
has the output of all parts. Without CUDA, --smoke is the default. Nothing is downloaded.
Exit status 1: a part failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
if find_spec("forerun") is None:  # a checkout that is not installed
    sys.path.insert(0, str(HERE.parents[1] / "src"))

import scripts  # noqa: E402
from gpu_parts.report import OutOfTime, Report, read  # noqa: E402
from gpu_parts.results import PARTS, PREPARE, Result, ending, table, write  # noqa: E402

from forerun.cli._signals import as_interrupts, interrupted  # noqa: E402
from forerun.cli._stdio import end  # noqa: E402
from forerun.errors import ConfigError  # noqa: E402

GRACE = 5.0  # seconds between a part's own limit and its end by a signal
KILL = 3.0  # seconds that each of two signals is given
RESERVE = 2 * KILL + 2.0  # seconds at the end: signals, and writing results
MIN_SECONDS = 5.0  # a part with less is not started
NEED_PREPARED = {"correctness", "decoding", "hosttime"}  # parts that use what `prepare` makes


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
        """Waits until it has ended, or until `moment`."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(moment - time.monotonic(), 0.0))

    def kill(self) -> None:
        """Ends the process and all that it has started."""
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, kind)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(KILL)
        self._log.close()


def environment(name: str, options: argparse.Namespace) -> dict[str, str]:
    """The variables of a child: forerun is found as in this process; the network is not used."""
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    found |= {"TOKENIZERS_PARALLELISM": "false"}
    if options.smoke:
        found |= {"TRITON_INTERPRET": "1"}
    if options.smoke or name == "prepare":
        found |= {"CUDA_VISIBLE_DEVICES": ""}
    return found


def part(options: argparse.Namespace) -> int:
    """Runs one part in a child; rows are written as they come."""
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
        how = "killed" if status is None else "done" if status == 0 else "failed"
    except KeyboardInterrupt:
        status, how = None, "interrupted"
    finally:
        child.kill()
    found.seconds = time.monotonic() - start
    found.rows, found.facts = read(child.rows)
    own = found.facts.pop("status", how)
    found.status = how if status is None else own
    found.rows += ending(found, status)
    print(f"({PARTS[name].letter}) {found.status} after {found.seconds:.1f} s", flush=True)
    return found


def main() -> int:
    options = parsed()
    if options.part:
        return part(options)
    start, results = time.monotonic(), list[Result]()
    if find_spec("triton") is None:
        scripts.skip("the kernels need triton; pip install -c constraints.txt '.[cuda]'")
    prepare_folder(options)
    if not options.smoke:
        import torch

        options.smoke = not torch.cuda.is_available()
    if options.smoke:
        print("not a GPU: smoke only, tiny sizes by Triton's interpreter", flush=True)
    write(options, results, start)  # replaces the figures of an earlier run
    try:
        with as_interrupts(), tempfile.TemporaryDirectory(prefix="forerun-gpu-") as folder:
            run_parts(options, Path(folder), start, results)
    except KeyboardInterrupt:
        return end(f"interrupted; results so far in {options.out}", interrupted())
    print(table(results, options.smoke))
    print(f"{time.monotonic() - start:.0f} s; results in {options.out}")
    is_empty = all(result.status == "no time left" for result in results)
    return int(is_empty or any(result.status in ("failed", "killed") for result in results))


def prepare_folder(options: argparse.Namespace) -> None:
    """Makes the folder of results, with an empty log. Raises ConfigError."""
    options.out = options.out.resolve()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpu.log").write_text("")
    except OSError as cause:
        raise ConfigError(
            f"cannot write results to {options.out}: {cause.strerror}; give --out another folder"
        ) from cause


def run_parts(options: argparse.Namespace, work: Path, start: float, results: list[Result]) -> None:
    """Runs all chosen parts, and writes the results after each. Raises KeyboardInterrupt."""
    last = start + options.limit - GRACE - RESERVE  # no part may end later by itself
    ready = min(start + PREPARE.seconds, last - MIN_SECONDS)
    preparing = None
    if NEED_PREPARED & options.parts.keys():
        preparing = Child("prepare", options, work, options.limit)
    try:
        for name, own in options.parts.items():
            if preparing is not None and name != "correctness":
                preparing.wait_until(ready)
            seconds = min(own, last - time.monotonic())
            found = Result(name)
            if seconds >= MIN_SECONDS:
                found = run_part(name, options, work, seconds)
            results.append(found)
            write(options, results, start)
            if found.status == "interrupted":
                raise KeyboardInterrupt
        write(options, results, start, is_finished=True)
    finally:
        if preparing is not None:
            preparing.kill()


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
    found = {
        name: scripts.measure(asked[name]) if asked[name] else one.seconds
        for name, one in PARTS.items()
        if name in asked
    }
    for name, seconds in found.items():
        if seconds < MIN_SECONDS:
            raise argparse.ArgumentTypeError(
                f"{name}={seconds:g} is too short; a part needs at least {MIN_SECONDS:g} seconds"
            )
    return found


if __name__ == "__main__":
    scripts.run(main)
