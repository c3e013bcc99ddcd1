"""What `forerun generate` prints and writes of finished samples."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.cli.output import (
    Results,
    counted,
    invalid_reason,
    logprob_lines,
    notice,
    particle_lines,
    print_json,
    print_styled,
    sample_record,
    stats_lines,
)
from forerun.cli.prompts import Job

if TYPE_CHECKING:
    from forerun.constraints._report import Report
    from forerun.engine.generation import Sample


@dataclass
class Output:
    """Prints and writes finished samples, and counts them."""

    is_json: bool
    streams: bool
    num_samples: int
    results: Results
    call: str
    decode: Callable[[list[int]], str] = str  # for the tokens of --logprobs
    num_done: int = 0

    def __post_init__(self) -> None:
        from forerun.engine.stats import Stats

        self.stats = Stats()
        self.begin()

    def begin(self) -> None:
        """Starts the clock, once everything is loaded and compiled."""
        self.start = time.perf_counter()

    def piece(self, text: str) -> None:
        """Prints accepted text on a terminal."""
        if self.streams and text:
            sys.stdout.write(text)
            sys.stdout.flush()

    def sample(self, sample: Sample, job: Job, seed: int) -> None:
        """Prints a finished sample, then writes it to the file."""
        self.num_done += 1
        self.stats.add(sample.stats)
        record = sample_record(sample, job.prompt, seed, self.call)
        if job.id is not None:
            record = {"id": job.id} | record
        if self.is_json:
            print_json(record)
        elif self.streams:
            print(flush=True)
        else:
            self._text(sample)
        if not self.is_json and sample.logprobs is not None:
            print(*logprob_lines(sample, self.decode), sep="\n", flush=True)
        if not self.is_json and sample.constraint is not None:
            self._constrained(sample, sample.constraint)
        self.results.write(record)

    def footer(self) -> None:
        """Prints statistics of all finished samples."""
        if self.is_json or not self.num_done:
            return
        seconds = time.perf_counter() - self.start
        for line in stats_lines(self.stats, self.num_done, seconds):
            print_styled(line, "dim", stderr=True)

    def interrupted(self) -> str:
        """The message after Ctrl-C."""
        asked = counted(self.num_samples, "sample")
        if not self.num_done:
            return f"interrupted before the first of {asked} was finished; nothing is kept"
        where = f", kept in {self.results.path}" if self.results.path else ""
        return f"interrupted: {self.num_done} of {asked} finished{where}"

    def _constrained(self, sample: Sample, report: Report) -> None:
        """Prints the particles that a text was drawn from, and errors of the constraint."""
        for line in particle_lines(report) if report.particles else ():
            print_styled(line, "dim", stderr=True)
        if not sample.valid:
            notice(invalid_reason(sample))
        elif report.error:
            notice(f"the constraint failed on other texts, which it forbids then: {report.error}")

    def _text(self, sample: Sample) -> None:
        if self.num_samples > 1:
            head = (
                f"--- prompt {sample.prompt_index}, sample {sample.index}: "
                f"{counted(len(sample.tokens), 'token')}, {sample.finish}, "
                f"tau {sample.stats.tau:.2f}"
            )
            print_styled(head, "cyan")
        print(sample.text, flush=True)
