"""A run folder: `run.json` says what was planned and where, `records.jsonl` what was measured.

The manifest is written first and whole. A record is one prompt by one method in one round; it is
appended as one line, so a crash loses at most the prompt that was running, of all who took turns.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from forerun.bench.fields import fits, in_words, shown
from forerun.errors import CapacityError, DataError
from forerun.files import write_whole

VERSION = 1
MANIFEST, RECORDS = "run.json", "records.jsonl"
PLAN = ("model", "dtype", "threads", "seed", "sampling", "methods", "tasks", "rounds", "turns")
COUNTS = (  # of records and samples, and what else is never below 0
    *("index", "round", "order", "num_prompt_tokens", "generated", "memory", "tokens", "passes"),
    *("drafted", "accepted", "examined", "per_position", "seconds", "prefill_seconds"),
)
MOST = sys.float_info.max  # JSON may hold whole numbers above it, and Infinity
AGAIN = "delete this line, and the same `forerun bench run` measures again what it held"


@dataclass(frozen=True)
class SampleRecord:
    """One trajectory. Counts that a contestant does not tell are None."""

    tokens: int  # G, generated tokens that count as output
    passes: int | None = None  # S
    drafted: int | None = None  # D
    accepted: int | None = None  # A
    examined: int | None = None  # E
    per_position: list[int] = field(default_factory=list)  # counts: accepted at depth i, i from 1
    seconds: dict[str, float] = field(default_factory=dict)  # draft, forward, verify, other
    finish: str = ""  # "stop", "length", "cancelled"
    score: float | None = None
    text: str | None = None


@dataclass(frozen=True)
class Record:
    """One prompt by one method in one round."""

    task: str
    index: int  # of the example in its task
    id: str
    category: str  # level or category
    method: str
    round: int
    order: int  # place in the interleaved order of the run
    num_prompt_tokens: int
    seconds: float  # wall, all samples, prefill included
    generated: int  # tokens over all samples
    samples: list[SampleRecord] = field(default_factory=list)  # in the order of trajectories
    prefill_seconds: float | None = None  # of the passes that computed the prompt
    score: float | None = None  # mean over samples
    majority: float | None = None  # score of the commonest answer
    memory: dict[str, int] = field(default_factory=dict)  # bytes by part
    # beside it: read_gb_s; taken, share of cores by others; in_turns, methods that shared it
    limits: dict[str, float] | None = None
    error: str | None = None  # last lines of a contestant that failed; figures are then 0
    headroom: dict[str, float] | None = None  # positions examined, accepted, best, unknown

    @property
    def key(self) -> tuple[str, int, str, int]:
        """What this is a record of; no two records of a run share it."""
        return self.task, self.index, self.method, self.round

    @property
    def is_shared(self) -> bool:
        """Whether others took turns with it: what disturbed it disturbed them as well."""
        return bool(self.limits and self.limits.get("in_turns", 0) > 1)

    @property
    def prompt_key(self) -> tuple[str, int, int]:
        """The prompt and round that it is paired by."""
        return self.task, self.index, self.round


@dataclass(frozen=True)
class Manifest:
    """What a run is: plan, machine, versions, and what was measured once before it."""

    created: str
    forerun: str  # version
    git: str  # revision, with "+dirty" where files were changed; "" outside a checkout
    command: str
    model: dict[str, Any]  # path, name, parameters, weight_bytes, hash
    dtype: str
    threads: int
    seed: int
    sampling: dict[str, Any]
    methods: list[str]
    tasks: dict[str, dict[str, Any]]  # name -> examples, hash of the prompts
    rounds: int = 1
    turns: int = 0  # steps of one method of ours before the next goes on; 0: whole prompts
    machine: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)  # read_gb_s, gflop_s
    cost_curve: dict[str, float] = field(default_factory=dict)  # nodes -> seconds of a pass
    peers: dict[str, Any] = field(default_factory=dict)  # name -> versions, or why it was skipped
    resumed: list[dict[str, Any]] = field(default_factory=list)  # created, git, command
    version: int = VERSION


T = TypeVar("T", SampleRecord, Record, Manifest)
_TYPES: dict[type, dict[str, Any]] = {
    cls: get_type_hints(cls) for cls in (SampleRecord, Record, Manifest)
}


def from_dict(cls: type[T], value: Any, where: str) -> T:
    """The dataclass of plain values. Raises DataError naming `where` and the field."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object, got {shown(value)}")
    types = _TYPES[cls]
    for name in value:
        if name not in types:
            raise DataError(f"{where}: unknown field {name!r}; written by another version?")
    for spec in fields(cls):
        if spec.name not in value:
            if spec.default is MISSING and spec.default_factory is MISSING:
                raise DataError(f"{where}: field {spec.name!r} is missing")
        elif not fits(value[spec.name], types[spec.name]):
            raise DataError(
                f"{where}: field {spec.name!r} takes {in_words(types[spec.name])}, got "
                f"{shown(value[spec.name])}"
            )
    given = dict(value)
    if cls is Record:
        samples = enumerate(given.get("samples", []))
        given["samples"] = [from_dict(SampleRecord, s, f"{where}, sample {i}") for i, s in samples]
    return cls(**given)


def impossible(record: Record) -> Iterator[str]:
    """What no run can have counted, each as ": field 'x' ..." or ", sample 0: field 'x' ...".

    Laws, of what is told (not None): COUNTS are finite and not below 0; in a sample A <= D, A <= E,
    and the counts by position, if there are any, add up to A; G is the sum of the samples' tokens,
    if there are samples and no error.
    """
    samples = [(f", sample {i}", sample) for i, sample in enumerate(record.samples)]
    for where, part in [("", record), *samples]:
        for name in COUNTS:
            value = getattr(part, name, None)
            many: Iterable = value.values() if isinstance(value, dict) else [value]
            many = value if isinstance(value, list) else many
            if not all(one is None or 0 <= one <= MOST for one in many):
                said = "takes finite numbers not below 0"
                yield f"{where}: field {name!r} {said}, got {shown(value)}"
    for where, s in samples:
        for name in ("drafted", "examined"):
            most = getattr(s, name)
            if None not in (s.accepted, most) and s.accepted > most:
                yield f"{where}: field 'accepted' takes at most {name!r}, {most}, got {s.accepted}"
        if s.per_position and s.accepted not in (None, sum(s.per_position)):
            said = f"adds up to 'accepted', {s.accepted}"
            yield f"{where}: field 'per_position' {said}, got {shown(s.per_position)}"
    total = sum(s.tokens for s in record.samples)
    if record.samples and record.error is None and record.generated != total:
        yield f": field 'generated' takes the sum of its samples, {total}, got {record.generated}"


def run_folder(path: Path) -> Path:
    """The run folder that is meant: who names a file in it means the folder."""
    return path.parent if path.is_file() else path


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a run folder. Raises DataError."""
    path = folder / MANIFEST
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{folder} is not a run folder: it has no {MANIFEST}; `forerun bench run --out` "
            "makes one"
        ) from None
    except (ValueError, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    found = value.get("version") if isinstance(value, dict) else None
    if isinstance(value, dict) and found != VERSION:
        raise DataError(f"{path}: expected version {VERSION}, got {found!r}")
    return from_dict(Manifest, value, str(path))


def read_records(folder: Path) -> list[Record]:
    """All whole records of a run folder; a torn last line is left out. Raises DataError."""
    path = folder / RECORDS
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return parse_records(data[: data.rfind(b"\n") + 1], str(path))


def parse_records(data: bytes, name: str) -> list[Record]:
    """Records of JSON lines. Raises DataError with the line number."""
    records: list[Record] = []
    seen: dict[tuple, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        where = f"{name}, line {number}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{where}: expected one JSON object per line: {error}; {AGAIN}"
            ) from None
        record = from_dict(Record, value, where)
        if found := next(impossible(record), None):
            raise DataError(f"{where}{found}; {AGAIN}")
        if record.key in seen:
            raise DataError(
                f"{where}: the same prompt, method and round as line {seen[record.key]}; delete "
                "one of the two"
            )
        seen[record.key] = number
        records.append(record)
    return records


def read_run(folder: Path) -> tuple[Manifest, list[Record]]:
    """Manifest and records of a run folder. Raises DataError."""
    folder = run_folder(folder)
    return read_manifest(folder), read_records(folder)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `run.json` whole or not at all. Raises CapacityError."""
    text = json.dumps(asdict(manifest), ensure_ascii=False, indent=1) + "\n"
    write_whole(folder / MANIFEST, text)


def difference(here: Manifest, there: Manifest) -> str | None:
    """The first thing in which two plans differ, as "field: this against that"; None if equal."""
    for name in PLAN:
        if found := _difference(name, getattr(here, name), getattr(there, name)):
            return found
    same = ("cpu", "kernels")  # timings of different ones do not belong together
    machines = [{key: one.machine.get(key) for key in same} for one in (here, there)]
    return _difference("machine", *machines)


def _difference(name: str, a: Any, b: Any) -> str | None:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = [key for key in (*a, *b) if name != "model" or key not in ("path", "name")]
        found = (_difference(f"{name}.{key}", a.get(key), b.get(key)) for key in keys)
        return next(filter(None, found), None)
    return None if a == b else f"{name}: {a!r} against {b!r}"


def _write_records(file: int, records: Iterable[Record]) -> None:
    """A line for each, seen to the disk."""
    lines = [json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records]
    left = "".join(lines).encode()
    while left:
        left = left[os.write(file, left) :]
    os.fsync(file)


class RunWriter:
    """Appends records to a run folder, each whole or not at all.

    Raises DataError for a folder that holds another plan or is being written, CapacityError when
    the disk is full.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._resumed: dict[str, Any] | None = None  # what the manifest is to say of this process
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"cannot make the run folder {folder}: {error.strerror}; give --out another place"
            ) from None
        self.manifest = self._planned(manifest)
        try:
            self._file: int = os.open(folder / RECORDS, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise DataError(
                f"cannot write {folder / RECORDS}: {error.strerror}; give --out another place"
            ) from None
        try:
            _lock(self._file, folder)
            self._drop_torn_line()
            self.done: list[Record] = read_records(folder)
            if self._resumed is None:
                write_manifest(folder, self.manifest)
        except BaseException:
            self.close()
            raise

    def append(self, *records: Record) -> None:
        """Adds a line for each and sees them to the disk: all of them, or none.

        Only where the process is killed at this very moment some may be there, whole ones.
        """
        if self._resumed is not None:
            before, self._resumed = [*self.manifest.resumed, self._resumed], None
            self.update(replace(self.manifest, resumed=before))
        start = os.lseek(self._file, 0, os.SEEK_END)
        try:
            _write_records(self._file, records)
        except BaseException as error:
            os.ftruncate(self._file, start)
            if not isinstance(error, OSError):
                raise
            raise CapacityError(
                f"cannot write {self.folder / RECORDS}: {error.strerror}; the {len(self.done)} "
                "records written before are kept, and the same command goes on from there"
            ) from None
        self.done += records

    def drop(self, records: Iterable[Record]) -> None:
        """Takes records out, to be measured again; the file is replaced whole or not at all."""
        keys = {record.key for record in records}
        kept = [record for record in self.done if record.key not in keys]
        path, beside = self.folder / RECORDS, self.folder / (RECORDS + ".new")
        try:
            file = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
            try:
                _lock(file, self.folder)
                _write_records(file, kept)
                os.replace(beside, path)
            except BaseException:
                os.close(file)
                beside.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise CapacityError(f"cannot write {path}: {error.strerror}; it is as it was") from None
        os.close(self._file)
        self._file, self.done = file, kept

    def update(self, manifest: Manifest) -> None:
        """Replaces the manifest, as when a peer turns out to be missing."""
        self.manifest = manifest
        write_manifest(self.folder, manifest)

    def close(self) -> None:
        """Ends the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _planned(self, manifest: Manifest) -> Manifest:
        """The manifest to go on with: the one that is there, if it plans the same."""
        if not (self.folder / MANIFEST).exists():
            records = self.folder / RECORDS
            if records.exists() and records.stat().st_size:
                raise DataError(f"{self.folder} has {RECORDS} but no {MANIFEST}; use another --out")
            return manifest
        before = read_manifest(self.folder)
        if manifest.rounds > before.rounds:  # more of the same: what is missing is measured
            before = replace(before, rounds=manifest.rounds)
        if found := difference(before, manifest):
            raise DataError(
                f"{self.folder} holds a run of another plan, {found}; give --out another folder"
                + (" (a run may get more rounds, not fewer)" if found.startswith("rounds") else "")
            )
        self._resumed = {name: getattr(manifest, name) for name in ("created", "git", "command")}
        return before

    def _drop_torn_line(self) -> None:
        data = (self.folder / RECORDS).read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._file, whole)


def _lock(file: int, folder: Path) -> None:
    """Holds the file for this process, where the system can. Raises DataError."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise DataError(
            f"another process is writing to {folder}; wait, or use another --out"
        ) from None
