"""Suites: fixed tasks, examples and sampling modes, read from a TOML file.

A suite names prompt files of the user; none are shipped. `real` is built in. A run uses one mode of
a suite and one half of its examples: tune on one half, report on the other.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forerun.bench.json_fields import from_dict
from forerun.bench.suite_examples import HALVES, HELD_OUT, picked
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, DataError, UnknownName
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.tasks.base import Task

BUILT_IN = Path(__file__).with_name("suites")
SHAPE = "[modes.NAME] tables with a temperature, and [[tasks]] with task, examples, max_new_tokens"

T = TypeVar("T")


@dataclass(frozen=True)
class Mode:
    """Sampling parameters of a suite."""

    temperature: float
    samples: int = 1  # of each prompt
    batch: int = 1  # samples decoded concurrently
    top_k: int = 0
    top_p: float = 1.0

    def sampling(self, max_new_tokens: int) -> Sampling:
        """The sampling parameters. Raises ConfigError."""
        given = self.top_k, self.top_p
        return Sampling(self.temperature, *given, max_new_tokens=max_new_tokens, n=self.samples)


@dataclass(frozen=True)
class SuiteTask:
    """One task of a suite."""

    task: str  # as --tasks has it, without its file
    examples: dict[str, int]  # by mode; a question with two turns counts once
    max_new_tokens: int
    file: str = ""  # relative to the data folder
    part: str = ""  # after the path, as a category of Spec-Bench
    name: str = ""  # in reports; default: the task

    @property
    def label(self) -> str:
        """Its name in reports."""
        return self.name or self.task

    def text(self, folder: Path) -> str:
        """The task as `get_task` takes it."""
        path = str(folder / self.file) if self.file else ""
        return ":".join(filter(None, (self.task, path, self.part)))


@dataclass(frozen=True)
class Suite:
    """The contents of a suite file."""

    modes: dict[str, Mode]
    tasks: list[SuiteTask]
    seed: int = 0  # picks the examples
    name: str = ""
    folder: Path | None = None  # of the suite file; None for a built-in suite


@dataclass(frozen=True)
class SuiteRun:
    """One mode and one half of a suite."""

    suite: Suite
    mode: str
    half: str
    tasks: tuple[SuiteTask, ...]
    folder: Path
    limits: Mapping[str, int] = field(default_factory=dict)  # --examples, --max-new-tokens

    @property
    def max_new_tokens(self) -> int:
        """The longest text of any task."""
        return max(map(self.longest, self.tasks))

    def longest(self, task: SuiteTask) -> int:
        """The longest text of a task."""
        return min(task.max_new_tokens, self.limits.get("max_new_tokens", task.max_new_tokens))

    def to_dict(self) -> dict[str, Any]:
        """Its entry in the manifest."""
        made = {"name": self.suite.name, "mode": self.mode, "half": self.half}
        return made | {"seed": self.suite.seed}

    def of(self, label: str) -> SuiteTask:
        """The task with a label."""
        return next(task for task in self.tasks if task.label == label)

    def indices(self, label: str, task: Task) -> list[int]:
        """The examples of a task that are measured. Raises DataError if there are none."""
        count = self.of(label).examples[self.mode]
        count = min(count, self.limits.get("examples", count))
        # a key per task, as files may share problems
        found = picked(task, count, self.half, f"{self.suite.seed}/{label}")
        if not found:
            raise DataError(
                f"task {label!r} of suite {self.suite.name!r} has no example in half "
                f"{self.half!r}; use a larger file"
            )
        return found

    def methods(self, names: Sequence[str]) -> list[str]:
        """The methods of a run: in a batched mode, local methods get the batch size.

        Plain decoding with batch size 1 stays as the baseline.
        """
        from forerun.bench.method_names import is_local
        from forerun.bench.metrics import PLAIN

        size = self.suite.modes[self.mode].batch
        if size == 1:
            return list(names)
        found: list[str] = []
        for name in names:
            if name == PLAIN:
                found.append(name)
            can_join = is_local(name) and "batch=" not in name
            join = "," if ":" in name else ":"
            found.append(f"{name}{join}batch={size}" if can_join else name)
        return list(dict.fromkeys(found))


def suite_names() -> list[str]:
    """The built-in suites."""
    return sorted(path.stem for path in BUILT_IN.glob("*.toml"))


def find_suite(text: str) -> Suite:
    """A built-in suite by name, or one from a file. Raises UnknownName, DataError."""
    if text in suite_names():
        return read_suite(BUILT_IN / f"{text}.toml", is_built_in=True)
    path = Path(text).expanduser()
    if path.suffix != ".toml" and not path.is_file():
        raise UnknownName.of("suite", text, suite_names(), "or the path of a .toml file")
    return read_suite(path)


def read_suite(path: Path, *, is_built_in: bool = False) -> Suite:
    """The suite of a TOML file. Raises UnknownName for fields, ConfigError, DataError."""
    table = _table(path)
    raw = _made(_Raw, table, str(path))
    modes = {
        name: _made(Mode, value, f"{path}, mode {name!r}") for name, value in raw.modes.items()
    }
    tasks = [_made(SuiteTask, value, _where(path, i, value)) for i, value in enumerate(raw.tasks)]
    _check(path, modes, tasks)
    return Suite(modes, tasks, raw.seed, path.stem, None if is_built_in else path.parent)


def run_of(
    suite: Suite,
    *,
    mode: str | None = None,
    half: str = HELD_OUT,
    data_dir: Path | None = None,
    only: Sequence[str] = (),
    limits: Mapping[str, int] | None = None,
) -> SuiteRun:
    """One mode and half of a suite; by default its first mode, with all tasks of that mode.

    Raises UnknownName, ConfigError without a data folder, DataError for missing files.
    """
    mode = mode or next(iter(suite.modes))
    if mode not in suite.modes:
        raise UnknownName.of(f"mode of suite {suite.name!r}:", mode, suite.modes)
    if half not in HALVES:
        raise UnknownName.of("half of a suite's examples:", half, HALVES)
    tasks = [task for task in suite.tasks if mode in task.examples]
    labels = [task.label for task in tasks]
    for name in only:
        if name not in labels:
            raise UnknownName.of(f"task of suite {suite.name!r} in mode {mode!r}:", name, labels)
    tasks = [task for task in tasks if not only or task.label in only]
    if not tasks:
        raise ConfigError(f"mode {mode!r} of suite {suite.name!r} has no task; name another mode")
    folder = data_dir or suite.folder
    if folder is None:
        raise ConfigError(
            f"suite {suite.name!r} needs prompt files that are not part of forerun; give their "
            "folder with --data-dir (docs/tasks.md lists the files)"
        )
    _check_files(suite, tasks, folder.expanduser())
    return SuiteRun(suite, mode, half, tuple(tasks), folder.expanduser(), limits or {})


@dataclass(frozen=True)
class _Raw:
    """The top level of a suite file."""

    modes: dict[str, Any]
    tasks: list[Any]
    seed: int = 0


def _table(path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read the suite {path}: {error.strerror}; check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "; save it as UTF-8 text" if isinstance(error, UnicodeDecodeError) else ""
        raise DataError(f"{path} is not TOML: {error}{hint}") from None
    if not found:
        raise DataError(f"{path} is empty; a suite has {SHAPE}")
    return found


def _where(path: Path, i: int, value: Any) -> str:
    name = value.get("name") or value.get("task") if isinstance(value, dict) else None
    return f"{path}, task {i + 1}" + (f" ({name})" if isinstance(name, str) else "")


def _made(cls: type[T], value: Any, where: str) -> T:
    """The dataclass of a table. Raises UnknownName, DataError naming the field."""
    known = [spec.name for spec in fields(cls)]  # type: ignore[arg-type]
    for name in value if isinstance(value, dict) else ():
        if name not in known:
            raise UnknownName.of(f"field in {where}:", name, known)
    return from_dict(cls, value, where)


def _check(path: Path, modes: Mapping[str, Mode], tasks: Sequence[SuiteTask]) -> None:
    """Checks values and names of modes. Raises DataError, UnknownName."""
    if not modes or not tasks:
        raise DataError(f"{path} has no {'tasks' if modes else 'modes'}; a suite has {SHAPE}")
    for name, mode in modes.items():
        try:
            mode.sampling(1)
        except ConfigError as error:
            raise DataError(f"{path}, mode {name!r}: {error}") from None
        if mode.batch < 1:
            raise DataError(f"{path}, mode {name!r}: batch must be at least 1, got {mode.batch}")
    labels = [task.label for task in tasks]
    for i, task in enumerate(tasks):
        where = f"{path}, task {i + 1} ({task.label})"
        if task.label in labels[:i]:
            raise DataError(f"{where}: duplicate name; rename one of them")
        if not task.examples:
            raise DataError(f"{where}: examples names no mode; write examples = {{ MODE = 10 }}")
        for mode_name, count in task.examples.items():
            if mode_name not in modes:
                raise UnknownName.of(f"mode in {where}:", mode_name, modes)
            if count < 1:
                raise DataError(f"{where}: examples must be at least 1, got {count}")
        if task.max_new_tokens < 1:
            raise DataError(f"{where}: max_new_tokens must be at least 1")


def _check_files(suite: Suite, tasks: Sequence[SuiteTask], folder: Path) -> None:
    """Raises DataError with all missing files."""
    missing = [task for task in tasks if task.file and not (folder / task.file).is_file()]
    if missing:
        listed = ", ".join(f"{task.file} ({task.label})" for task in missing)
        raise DataError(
            f"{folder} lacks {counted(len(missing), 'file')} of suite {suite.name!r}: {listed}; "
            "use another --data-dir, or select other tasks with --tasks"
        )
