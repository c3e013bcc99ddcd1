"""The plan of a run: checked counts, chosen examples, interleaved units, the manifest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun import __version__
from forerun.bench import machine
from forerun.bench.model_info import describe_model
from forerun.bench.results import Manifest
from forerun.core.sampling import MAX_SAMPLES, Sampling
from forerun.errors import ConfigError, DataError
from forerun.tasks import is_file

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.bench.suite import SuiteRun
    from forerun.tasks.base import Example, Task


DEFAULT_EXAMPLES = 20  # of a generated task; a file is measured completely
MAX_TURN_STEPS = 1_000_000
MAX_ROUNDS = MAX_EXAMPLES = 1 << 16  # all units are listed before the first is decoded
MAX_THREADS = 64  # on machines with fewer cores


@dataclass(frozen=True)
class RunRequest:
    """The options of `forerun bench run`."""

    methods: list[str]
    tasks: list[str]
    model: str = "reasoner"
    sampling: Sampling = field(default_factory=Sampling)
    examples: int | None = None  # per task; None: DEFAULT_EXAMPLES, or all of a file
    rounds: int = 1
    threads: int = 1
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    texts: bool = False  # whether records keep generated texts
    command: str = ""
    turns: int = 0  # steps of a local method before the next continues; 0: whole prompts
    retry: bool = False  # whether failures are measured again
    optimum: bool = False  # whether the optimal acceptance is computed, in untimed runs
    target: str = ""  # built around the model
    constraint: tuple[str, ...] = ()  # of every local method
    suite: SuiteRun | None = None  # source of the tasks, their examples and lengths


@dataclass(frozen=True)
class Unit:
    """One prompt in one round, decoded by all contestants."""

    number: int  # from 0, in the order of the run
    task_name: str
    task: Task
    index: int
    example: Example
    round: int
    is_reversed: bool  # B A instead of A B
    max_new_tokens: int | None = None  # of its task; None: the run's


@dataclass(frozen=True)
class ChosenExamples:
    """The examples of one task that are measured."""

    name: str
    task: Task
    examples: list[tuple[int, Example]]
    left_out: int = 0  # prompts too long for the context
    max_new_tokens: int | None = None  # of a suite's task; None: the run's
    text: str = ""  # of a suite's task, in the form of --tasks

    def to_dict(self) -> dict[str, Any]:
        """Its entry in the manifest."""
        found: dict[str, Any] = {"examples": len(self.examples)}
        found["hash"] = prompts_hash(self.examples)
        if self.left_out:
            found["left_out"] = self.left_out
        if self.max_new_tokens is not None:
            made = {"task": self.text, "size": len(self.task)}
            return found | made | {"max_new_tokens": self.max_new_tokens}
        if is_file(self.task) and len(self.task) > len(self.examples):
            found["in_file"] = len(self.task)
        return found


def check_request(request: RunRequest) -> None:
    """Checks counts before anything slow starts. Raises ConfigError."""
    limits = {
        "examples": (request.examples, 1, MAX_EXAMPLES),
        "rounds": (request.rounds, 1, MAX_ROUNDS),
        "threads": (request.threads, 1, max(MAX_THREADS, os.cpu_count() or 1)),
        "turns": (request.turns, 0, MAX_TURN_STEPS),
    }
    for name, (given, least, most) in limits.items():
        if given is not None and not least <= given <= most:
            raise ConfigError(f"--{name} must be from {least} to {most}, got {given}")
    if request.sampling.n > MAX_SAMPLES:
        raise ConfigError(
            f"-n must be at most {MAX_SAMPLES}, got {request.sampling.n}; use more --rounds"
        )
    if request.seed < 0:
        raise ConfigError(f"--seed must be at least 0, got {request.seed}")


def choose(
    name: str,
    task: Task,
    request: RunRequest,
    model: Model,
    on_prompt: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> ChosenExamples:
    """The examples of a task with prompts and answers that fit into the context.

    From those that a suite picks, or else the first ones. on_prompt receives name, number of
    prompts read, and total. Raises DataError if none fits.
    """
    from forerun.tasks.base import prepare

    suite, longest = request.suite, request.sampling.max_new_tokens
    if suite:
        longest = suite.longest(suite.of(name))
    room = model.target.context - longest
    fitting: list[tuple[int, Example]] = []
    indices = _indices(name, task, request)
    for done, i in enumerate(indices, start=1):
        example = prepare(task.example(i), model.tokenizer)
        if len(model.tokenizer.encode(example.prompt)) <= room:
            fitting.append((i, example))
        on_prompt(name, done, len(indices))
    if not fitting:
        raise DataError(
            f"no prompt of task {name!r} fits: the context is {model.target.context} and "
            f"--max-new-tokens {longest}; lower --max-new-tokens or use another model"
        )
    left_out = len(indices) - len(fitting)
    if suite is None:
        return ChosenExamples(name, task, fitting, left_out)
    return ChosenExamples(name, task, fitting, left_out, longest, suite.of(name).text(suite.folder))


def _indices(name: str, task: Task, request: RunRequest) -> Sequence[int]:
    """The indices of the candidates."""
    if request.suite:
        return request.suite.indices(name, task)
    default = len(task) if is_file(task) else DEFAULT_EXAMPLES
    return range(min(request.examples or default, len(task)))


def units(chosen: Sequence[ChosenExamples], rounds: int) -> list[Unit]:
    """All units; the order of contestants alternates within a category and between rounds, so that
    drift of the machine cancels."""
    found: list[Unit] = []
    for number in range(rounds):
        for part in chosen:
            seen: dict[str, int] = {}
            kinds = {label: k for k, label in enumerate(_labels(part))}
            for index, example in part.examples:
                label = example.label
                turn = seen.get(label, 0) + kinds[label] + number
                seen[label] = seen.get(label, 0) + 1
                at = len(found)
                is_back = turn % 2 == 1
                what = part.name, part.task, index, example
                found.append(Unit(at, *what, number, is_back, part.max_new_tokens))
    return found


def _labels(part: ChosenExamples) -> list[str]:
    """Categories in order of appearance."""
    return list(dict.fromkeys(example.label for _, example in part.examples))


def prompts_hash(examples: Sequence[tuple[int, Example]]) -> str:
    """A hash of ids and prompts."""
    shown = [[index, example.id, example.prompt, example.turns] for index, example in examples]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def plan_of(request: RunRequest) -> dict[str, Any]:
    """The manifest fields that are known before the model is loaded."""
    return {
        "threads": request.threads,
        "seed": request.seed,
        "sampling": json.loads(json.dumps(asdict(request.sampling))),
        "methods": list(request.methods),
        "rounds": request.rounds,
        "turns": request.turns,
        "texts": request.texts,
        "optimum": request.optimum,
        "target": request.target,
        "constraint": list(request.constraint),
        "suite": request.suite and request.suite.to_dict(),
    }


def manifest(
    request: RunRequest, model: Model, path: Path | None, chosen: Sequence[ChosenExamples]
) -> Manifest:
    """The manifest of a new run; limits and cost curve are measured later."""
    from forerun.lossless.greedy import dtype_of

    device = str(getattr(getattr(model.target, "model", None), "device", "cpu"))
    return Manifest(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        forerun=__version__,
        git=machine.git_revision(),
        command=request.command,
        model=describe_model(model, path),
        dtype=str(dtype_of(model)).removeprefix("torch."),
        tasks={part.name: part.to_dict() for part in chosen},
        machine=machine.describe(device),
        **plan_of(request),
    )
