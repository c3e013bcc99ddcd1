"""From what was asked to what will be run: checked names, examples that fit, the manifest."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun import __version__
from forerun.bench import machine
from forerun.bench.results import Manifest
from forerun.core.sampling import MAX_SAMPLES, Sampling
from forerun.errors import ConfigError, DataError
from forerun.models.gguf import GgufFile
from forerun.models.gguf_folder import linked_file
from forerun.tasks import is_file

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.bench.suite import SuiteRun
    from forerun.tasks.base import Example, Task


EXAMPLES = 20  # of a task whose examples are generated; a file is measured whole
MOST_TURNS = 1_000_000  # steps in a turn
MOST_ROUNDS = 1 << 16  # the prompts of all rounds are listed before the first is decoded
MOST_EXAMPLES = 1 << 16  # of a task, for the same reason
MOST_THREADS = 64  # where there are fewer cores: far more of them stall each other


@dataclass(frozen=True)
class Asked:
    """What the user asked for."""

    methods: list[str]
    tasks: list[str]
    model: str = "reasoner"
    sampling: Sampling = field(default_factory=Sampling)
    examples: int | None = None  # per task; None: EXAMPLES, or all of a file
    rounds: int = 1
    threads: int = 1
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    texts: bool = False  # whether records keep what was generated
    command: str = ""
    turns: int = 0  # steps of one method of ours before the next goes on; 0: whole prompts
    retry: bool = False  # whether what has failed is tried again
    optimum: bool = False  # whether the best possible acceptance is computed, in untimed runs
    suite: SuiteRun | None = None  # where the tasks, their examples and lengths come from


@dataclass(frozen=True)
class Unit:
    """One prompt in one round: all contestants decode it, one after the other."""

    number: int  # from 0, in the order of the run
    task_name: str
    task: Task
    index: int
    example: Example
    round: int
    is_reversed: bool  # B A instead of A B
    max_new_tokens: int | None = None  # of its task; None: the run's


@dataclass(frozen=True)
class Chosen:
    """The examples of one task that take part."""

    name: str
    task: Task
    examples: list[tuple[int, Example]]
    left_out: int = 0  # prompts that the context has no room for
    max_new_tokens: int | None = None  # of a suite's task; None: the run's
    text: str = ""  # of a suite's task, as --tasks has it

    def to_dict(self) -> dict[str, Any]:
        """What the manifest says of it."""
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


def check_asked(asked: Asked) -> None:
    """Refuses counts that cannot work, before anything slow happens."""
    for name in ("examples", "rounds", "threads"):
        given = getattr(asked, name)
        if given is not None and given < 1:
            raise ConfigError(f"--{name} must be at least 1, got {given}")
    most = max(MOST_THREADS, os.cpu_count() or 1)
    if asked.threads > most:
        raise ConfigError(f"--threads must be at most {most} here, got {asked.threads}")
    if asked.sampling.n > MAX_SAMPLES:
        raise ConfigError(
            f"-n must be at most {MAX_SAMPLES} samples of a prompt, got {asked.sampling.n}: all "
            "are held until all are there; take fewer, and more --rounds"
        )
    if asked.rounds > MOST_ROUNDS:
        raise ConfigError(
            f"--rounds must be at most {MOST_ROUNDS}, got {asked.rounds}; take fewer, and more "
            "samples of a prompt (-n)"
        )
    if asked.examples is not None and asked.examples > MOST_EXAMPLES:
        raise ConfigError(
            f"--examples must be at most {MOST_EXAMPLES}, got {asked.examples}; take fewer, and "
            "more samples of a prompt (-n)"
        )
    if asked.seed < 0:
        raise ConfigError(f"--seed must be at least 0, got {asked.seed}")
    if not 0 <= asked.turns <= MOST_TURNS:
        raise ConfigError(
            f"--turns must be 0 (whole prompts) or at most {MOST_TURNS} steps, got {asked.turns}"
        )


def choose(
    name: str,
    task: Task,
    asked: Asked,
    model: Model,
    on_prompt: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Chosen:
    """The examples of a task that take part: their prompts leave room for what may be generated.

    Of a suite those that it picks, else the first ones. on_prompt is told how many are looked at,
    of how many. Raises DataError if none fits.
    """
    from forerun.tasks.base import prepare

    suite, longest = asked.suite, asked.sampling.max_new_tokens
    if suite:
        longest = suite.longest(suite.of(name))
    room = model.target.context - longest
    fitting: list[tuple[int, Example]] = []
    indices = _indices(name, task, asked)
    for done, i in enumerate(indices, start=1):
        example = prepare(task.example(i), model.tokenizer)
        if len(model.tokenizer.encode(example.prompt)) <= room:
            fitting.append((i, example))
        on_prompt(name, done, len(indices))
    if not fitting:
        raise DataError(
            f"no prompt of task {name!r} fits: the context is {model.target.context} and "
            f"{longest} tokens may be generated; lower --max-new-tokens or use another model"
        )
    left_out = len(indices) - len(fitting)
    if suite is None:
        return Chosen(name, task, fitting, left_out)
    return Chosen(name, task, fitting, left_out, longest, suite.of(name).text(suite.folder))


def _indices(name: str, task: Task, asked: Asked) -> Sequence[int]:
    """The examples that are looked at."""
    if asked.suite:
        return asked.suite.indices(name, task)
    usual = len(task) if is_file(task) else EXAMPLES
    return range(min(asked.examples or usual, len(task)))


def units(chosen: Sequence[Chosen], rounds: int) -> list[Unit]:
    """All units; the order of contestants alternates within every category and from round to
    round, so that drift of the machine cancels."""
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


def _labels(part: Chosen) -> list[str]:
    """Categories in the order in which they come."""
    return list(dict.fromkeys(example.label for _, example in part.examples))


def prompts_hash(examples: Sequence[tuple[int, Example]]) -> str:
    """A hash of ids and prompts."""
    shown = [[index, example.id, example.prompt, example.turns] for index, example in examples]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def plan_of(asked: Asked) -> dict[str, Any]:
    """The fields of a run's manifest that are known before anything is loaded."""
    return {
        "threads": asked.threads,
        "seed": asked.seed,
        "sampling": json.loads(json.dumps(asdict(asked.sampling))),
        "methods": list(asked.methods),
        "rounds": asked.rounds,
        "turns": asked.turns,
        "texts": asked.texts,
        "optimum": asked.optimum,
        "suite": asked.suite and asked.suite.to_dict(),
    }


def manifest(asked: Asked, model: Model, path: Path | None, chosen: Sequence[Chosen]) -> Manifest:
    """The manifest of a run that has not begun: limits and cost curve are measured later."""
    from forerun.lossless.greedy import dtype_of

    device = str(getattr(getattr(model.target, "model", None), "device", "cpu"))
    return Manifest(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        forerun=__version__,
        git=machine.git_revision(),
        command=asked.command,
        model=describe_model(model, path),
        dtype=str(dtype_of(model)).removeprefix("torch."),
        tasks={part.name: part.to_dict() for part in chosen},
        machine=machine.describe(device),
        **plan_of(asked),
    )


def describe_model(model: Model, path: Path | None) -> dict[str, Any]:
    """Path, name, size and hash of a model, and what one pass of it reads and computes."""
    from forerun.bench.inflate import MARK, inflated_from
    from forerun.bench.theory import pass_cost

    headers = tensor_headers(path) if path else []
    report = model.memory_report()
    found = {
        "path": str(path or ""),
        "name": Path(model.name).name or model.name,
        "parameters": sum(map(num_parameters, headers)),
        "weight_bytes": report.get("weights", 0),
        "context": model.target.context,
        "hash": model_hash(path, headers) if path else "",
    }
    cost = pass_cost(model.target)
    source = inflated_from(path) if path else None
    return found | (cost.to_dict() if cost else {}) | ({MARK: source} if source else {})


def tensor_headers(folder: Path) -> list[bytes]:
    """The JSON headers of all safetensors files of a folder; of a GGUF file the same of its own."""
    if linked := linked_file(folder):
        return [json.dumps({t.name: vars(t) for t in GgufFile(linked).tensors.values()}).encode()]
    headers = []
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            headers.append(file.read(length))
    return headers


def num_parameters(header: bytes) -> int:
    """Numbers in the tensors that a header names."""
    entries = json.loads(header)
    return sum(math.prod(e["shape"]) for name, e in entries.items() if name != "__metadata__")


def model_hash(folder: Path, headers: Sequence[bytes]) -> str:
    """A hash of the configuration and the tensors' names, types, shapes and places."""
    config = folder / "config.json"
    digest = hashlib.sha256(config.read_bytes() if config.exists() else b"")
    for header in headers:
        digest.update(header)
    return digest.hexdigest()[:16]
