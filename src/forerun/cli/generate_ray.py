"""`forerun generate --engine ray`: runs a file of prompts on Ray actors; can be resumed."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.assets import is_embedded
from forerun.cli.memory import memory_saved
from forerun.cli.output import (
    counted,
    logprob_lines,
    notice,
    sample_record,
    stats_lines,
)
from forerun.cli.prompts import Job, as_shown
from forerun.engine.stats import COUNTS, Stats
from forerun.errors import ConfigError, UnknownName
from forerun.integrations.ray_results import PartialResults, partial_of, seed_of
from forerun.integrations.ray_worker import Request, Setup
from forerun.utils.signals import delayed_interrupt

if TYPE_CHECKING:
    from forerun.engine.generation import Sample
    from forerun.integrations.ray_batch import ActorPool
    from forerun.models.tokenizer import Tokenizer

ENGINES = ("local", "ray")
DEFAULT_ACTORS = 2
PROGRESS_SECONDS = 30.0  # between progress lines without a terminal
# settings that may differ when a run is resumed
UNCHECKED_SETTINGS = {
    "engine",
    "actors",
    "out",
    "memory",
    "is_json",
    "verbose",
    "seed",
    "prompt",
    "prompt_file",
}

NEW_SETTINGS = {"constraint", "target", "fields"}  # missing in older partial results
Engine = Annotated[str, typer.Option("--engine", hidden=True)]  # local or ray
Actors = Annotated[int | None, typer.Option("--actors", hidden=True)]  # engines on Ray


def check(engine: str, actors: int | None) -> None:
    """Raises ConfigError for an unknown or missing engine, or a wrong number of actors."""
    if engine not in ENGINES:
        raise UnknownName.of("engine", engine, ENGINES)
    if engine == "ray":
        from forerun.integrations.ray_batch import ray_module

        ray_module()
        if actors is not None and actors < 1:
            raise ConfigError(f"--actors must be at least 1, got {actors}; 2 runs two engines")
    elif actors is not None:
        raise ConfigError("--actors belongs to --engine ray; add that, or use --batch")


def seed_for(engine: str, out: Path | None) -> int:
    """The seed of the run that is resumed, or a new one."""
    old = seed_of(out) if engine == "ray" else None
    return secrets.randbits(31) if old is None else old


@dataclass
class Show:
    """Prints samples in the order of the prompts, and progress."""

    partial: PartialResults
    asked: list[Request]
    is_json: bool
    tokenizer: Tokenizer
    num_old: int = 0
    num_shown: int = 0
    stats: Stats = field(default_factory=Stats)
    num_samples: int = 0

    def __post_init__(self) -> None:
        self.to = sys.stdout
        self.num_old, self.start, self.said = len(self.partial.held), time.monotonic(), 0.0

    def catch_up(self) -> None:
        """Prints samples up to the first prompt that is not finished."""
        while self.num_shown < len(self.asked) and self.num_shown in self.partial.held:
            for record in self.partial.samples(self.num_shown):
                self._json(record) if self.is_json else self._text(record)
            self.num_shown += 1

    def count(self, samples: Iterable[Sample]) -> None:
        """Adds finished samples to the statistics of this run."""
        for sample in samples:
            self.stats.add(sample.stats)
            self.num_samples += 1

    def progress(self) -> None:
        """Rewrites one line on a terminal; elsewhere prints a line every PROGRESS_SECONDS."""
        now, is_terminal = time.monotonic(), sys.stderr.isatty()
        is_last = len(self.partial.held) == len(self.asked)
        if not is_terminal and not is_last and now - self.said < PROGRESS_SECONDS:
            return
        self.said = now
        line = progress_line(
            len(self.partial.held), len(self.asked), self.num_old, now - self.start, self.stats
        )
        if is_terminal:
            end = "\n" if is_last else ""
            print(f"\r{line}\x1b[K", end=end, file=sys.stderr, flush=True)
        else:
            notice(line)

    def footer(self) -> None:
        """Prints statistics of this run's samples."""
        if not self.is_json and self.num_samples:
            seconds = time.monotonic() - self.start
            for line in stats_lines(self.stats, self.num_samples, seconds):
                notice(line)

    def _json(self, record: dict[str, Any]) -> None:
        print(json.dumps(record, ensure_ascii=False), file=self.to, flush=True)

    def _text(self, record: dict[str, Any]) -> None:
        if sum(one.sampling.n for one in self.asked) > 1:
            counts = Stats(**{name: record["stats"].get(name, 0) for name in COUNTS})
            print(
                f"--- prompt {record['prompt_index']}, sample {record['index']}: "
                f"{counted(len(record['tokens']), 'token')}, {record['finish']}, "
                f"tau {counts.tau:.2f}",
                file=self.to,
            )
        print(record["text"], file=self.to, flush=True)
        if "logprobs" in record:
            lines = logprob_lines(_sample(record), self.tokenizer.decode_inside)
            print(*lines, sep="\n", file=self.to, flush=True)


def progress_line(done: int, total: int, old: int, seconds: float, stats: Stats) -> str:
    """Progress of a run; the time left follows from the prompts finished in this run."""
    here = done - old
    line = f"{done} of {counted(total, 'prompt')}"
    if here and seconds > 0:
        line += f", {stats.generated / seconds:.0f} tokens/s, tau {stats.tau:.2f}"
        line += f", about {_clock((total - done) * seconds / here)} left" if done < total else ""
    return line


def run(
    given: dict[str, Any], jobs: list[Job], setup: Setup, call: str, seed: int, is_json: bool
) -> None:
    """Runs all prompts on the actors; finished prompts are kept whatever ends it."""
    from forerun.integrations.ray_batch import ActorPool
    from forerun.models.generation_config import warn_of_defaults
    from forerun.models.paths import located
    from forerun.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(located(setup.model))
    asked = [
        Request(i, _shown(tokenizer, setup.model, job.prompt, given["chat"]), job.sampling)
        for i, job in enumerate(jobs)
    ]
    settings = {
        name: value
        for name, value in given.items()
        if name not in UNCHECKED_SETTINGS and (value or name not in NEW_SETTINGS)
    }
    with PartialResults(given["out"], seed, settings, asked) as partial:
        show = Show(partial, asked, is_json, tokenizer)
        left = [one for one in asked if one.index not in partial.held]
        if show.num_old:
            notice(f"{show.num_old} of {counted(len(asked), 'prompt')} were finished before")
        show.catch_up()
        if left:
            warn_of_defaults(located(setup.model))  # logs of actors are not shown
            actors = min(given["actors"] or DEFAULT_ACTORS, len(left))
            with (  # Ray prints on standard output
                redirect_stdout(sys.stderr),
                ActorPool(setup, actors=actors, on_note=notice) as pool,
            ):
                pool.check(left)
                with memory_saved(
                    pool,  # type: ignore[arg-type]
                    given["memory"],
                    setup.drafter,
                    setup.tenant,
                    is_quiet=is_json,
                ):
                    _work(pool, left, jobs, show, call)
        partial.finish()


def _work(pool: ActorPool, left: list[Request], jobs: list[Job], show: Show, call: str) -> None:
    def keep(index: int, samples: list[Sample]) -> None:
        with delayed_interrupt():
            show.partial.add(index, _records(samples, show.asked[index], jobs[index], call))
            show.count(samples)
        show.catch_up()

    try:
        for index, samples in pool.results(left):
            keep(index, samples)
            show.progress()
    except BaseException as error:
        for index, samples in pool.stop():
            keep(index, samples)
        show.footer()
        if not isinstance(error, KeyboardInterrupt):
            raise
        _say_interrupted(show)
        raise typer.Exit(130) from None
    show.footer()


def _say_interrupted(show: Show) -> None:
    done = f"{len(show.partial.held)} of {counted(len(show.asked), 'prompt')} finished"
    out = show.partial.out
    where = f", kept in {partial_of(out)}; the same command resumes the run" if out else ""
    notice(f"interrupted: {done}{where}")


def _records(samples: list[Sample], one: Request, job: Job, call: str) -> list[dict[str, Any]]:
    seed = one.sampling.seed
    assert seed is not None
    named = {} if job.id is None else {"id": job.id}
    return [named | sample_record(sample, one.prompt, seed, call) for sample in samples]


def _shown(
    tokenizer: Tokenizer, model: str, prompt: str | list[int], chat: bool
) -> str | list[int]:
    """The prompt after the chat template or the form of an embedded model."""
    if isinstance(prompt, str) and chat and not is_embedded(model):
        if not tokenizer.has_chat_template:
            from forerun.models.chat_template import TemplateError

            raise TemplateError(f"{model} has no chat template; leave out --chat")
        return tokenizer.chat(prompt)
    return as_shown(model, prompt)


def _sample(record: dict[str, Any]) -> Sample:
    """A sample with its log-probabilities, from its record."""
    from forerun.engine.generation import Sample

    fields = {name: record[name] for name in ("prompt_index", "index", "text", "tokens", "finish")}
    tops = [{int(token): value for token, value in top.items()} for top in record["logprobs"]]
    return replace(Sample(**fields, stats=Stats()), logprobs=tops)


def _clock(seconds: float) -> str:
    """3661 -> "1:01:01"."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"
