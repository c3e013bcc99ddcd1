"""A run folder: `run.json` says what was planned and where, `records.jsonl` what was measured.

The manifest is written first and whole. A record is one prompt by one method in one round; it is
appended as one line, so a crash loses at most the prompt that was running, of all who took turns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from forerun.bench import possible
from forerun.bench.fields import from_dict
from forerun.errors import CapacityError, ConfigError, DataError
from forerun.files import write_whole
from forerun.sampling import Sampling

VERSION = 1
MANIFEST, RECORDS = "run.json", "records.jsonl"
PLAN = (
    *("model", "dtype", "threads", "seed", "sampling", "methods", "tasks", "rounds", "turns"),
    *("texts", "optimum"),
)
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
    def sampled(self) -> int:
        """Tokens of all samples."""
        return sum(sample.tokens for sample in self.samples)

    @property
    def claimed(self) -> float:
        """Seconds that the samples' parts say they took."""
        return sum(sum(sample.seconds.values()) for sample in self.samples)

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
    texts: bool | None = None  # whether records keep what was generated; None: not told
    optimum: bool | None = None  # whether every prompt is decoded again for its headroom
    machine: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)  # read_gb_s, gflop_s
    cost_curve: dict[str, float] = field(default_factory=dict)  # nodes -> seconds of a pass
    peers: dict[str, Any] = field(default_factory=dict)  # name -> versions, or why it was skipped
    resumed: list[dict[str, Any]] = field(default_factory=list)  # created, git, command
    version: int = VERSION


def record_of(value: Any, where: str) -> Record:
    """The record of plain values. Raises DataError naming `where` and the field."""
    record = from_dict(Record, value, where)
    samples = enumerate(record.samples)
    made = [from_dict(SampleRecord, one, f"{where}, sample {i}") for i, one in samples]
    return replace(record, samples=made)


def impossible(record: Record, run: Manifest | None = None) -> Iterator[str]:
    """What no run, or not this one, can have counted, each as ": field 'x' takes ..." or
    ", sample 0: field 'x' takes ...": see `possible`."""
    of_record, of_sample = possible.of_run(run) if run else ((), ())
    laws = possible.RECORD + of_record
    laws += possible.TIMED if record.seconds else ()
    laws += possible.FINISHED if record.error is None else ()
    for i, sample in enumerate(record.samples):
        for found in possible.broken(sample, possible.SAMPLE + of_sample):
            yield f", sample {i}: {found}"
    for found in possible.broken(record, laws):
        yield f": {found}"


def run_folder(path: Path) -> Path:
    """The run folder that is meant: who names a file in it means the folder."""
    return path.parent if path.is_file() and (path.parent / MANIFEST).exists() else path


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a run folder. Raises DataError."""
    path = folder / MANIFEST
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{folder} is not a run folder: it has no {MANIFEST}; `forerun bench run --out` "
            "makes one"
        ) from None
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    found = value.get("version") if isinstance(value, dict) else None
    if isinstance(value, dict) and found != VERSION:
        raise DataError(f"{path}: expected version {VERSION}, got {found!r}")
    manifest = from_dict(Manifest, value, str(path))
    for wrong in possible.broken(manifest, possible.MANIFEST):
        raise DataError(f"{path}: {wrong}; use another --out, or mend it")
    try:
        sampling_of(manifest)
    except (ConfigError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path}: field 'sampling': {error}") from None
    return manifest


def sampling_of(manifest: Manifest) -> Sampling:
    """The sampling of a run. Raises ConfigError for values that cannot be, TypeError for others."""
    given = dict(manifest.sampling)
    if bias := given.get("logit_bias"):  # JSON has texts as names
        given["logit_bias"] = {int(token): value for token, value in bias.items()}
    return Sampling(**given)


def read_records(folder: Path, run: Manifest | None = None) -> list[Record]:
    """All whole records of a run folder; a torn last line is left out. Raises DataError.

    run: whose records they have to be.
    """
    path = folder / RECORDS
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return parse_records(data[: data.rfind(b"\n") + 1], str(path), run)


def parse_records(data: bytes, name: str, run: Manifest | None = None) -> list[Record]:
    """Records of JSON lines; blank ones say nothing. Raises DataError with the line number."""
    records: list[Record] = []
    seen: dict[tuple, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: expected one JSON object per line: {error}; {AGAIN}"
            ) from None
        record = record_of(value, where)
        if found := next(impossible(record, run), None):
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
    manifest = read_manifest(folder)
    return manifest, read_records(folder, manifest)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `run.json` whole or not at all. Raises CapacityError."""
    text = json.dumps(asdict(manifest), ensure_ascii=False, indent=1) + "\n"
    write_whole(folder / MANIFEST, text)


def check_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Whether a run with these fields of its manifest may begin, or go on, in a folder.

    To be asked before anything slow. Raises DataError for files that cannot be read, another plan,
    and a folder that another process writes.
    """
    if not _has_manifest(folder):
        return
    before = read_manifest(folder)
    _check_same(folder, before, plan)
    read_records(folder, replace(before, rounds=plan.get("rounds", before.rounds)))
    with suppress(FileNotFoundError):
        file = os.open(folder / RECORDS, os.O_RDONLY)
        try:
            _lock(file, folder)
        finally:
            os.close(file)


def _has_manifest(folder: Path) -> bool:
    """Whether a run has begun in a folder. Raises DataError for records without a plan."""
    if (folder / MANIFEST).exists():
        return True
    records = folder / RECORDS
    if records.exists() and records.stat().st_size:
        raise DataError(f"{folder} has {RECORDS} but no {MANIFEST}; use another --out")
    return False


def _check_same(folder: Path, before: Manifest, plan: Mapping[str, Any]) -> None:
    """Raises DataError for another plan; more rounds are the same."""
    more = max(before.rounds, plan.get("rounds", 0))
    if found := difference(vars(replace(before, rounds=more)), plan):
        name = found.partition(":")[0]
        why = {"rounds": " (a run may get more rounds, not fewer)"}
        why |= dict.fromkeys(("texts", "optimum"), f" (--{name} is of a whole run)")
        raise DataError(
            f"{folder} holds a run of another plan, {found}; give --out another folder"
            + why.get(name, "")
        )


def difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    """The first thing in which two plans differ, as "field: this against that"; None if equal.

    Fields that one of them does not have, or has as None, are not compared.
    """
    for name in PLAN:
        pair = here.get(name), there.get(name)
        if None not in pair and (found := _difference(name, *pair)):
            return found
    if "machine" not in there:
        return None
    same = ("cpu", "kernels")  # timings of different ones do not belong together
    machines = [{key: one["machine"].get(key) for key in same} for one in (here, there)]
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
            self.done: list[Record] = read_records(folder, self.manifest)
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
        if not _has_manifest(self.folder):
            return manifest
        before = read_manifest(self.folder)
        _check_same(self.folder, before, vars(manifest))
        self._resumed = {name: getattr(manifest, name) for name in ("created", "git", "command")}
        return replace(before, rounds=manifest.rounds)  # more of the same: what is missing

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
