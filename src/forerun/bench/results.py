"""A run folder: `run.json` says what was planned and where, `records.jsonl` what was measured.

A record is one prompt by one method in one round. `run_writer` writes both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from forerun.bench import validate
from forerun.bench.fields import from_dict
from forerun.core.sampling import Sampling, from_json
from forerun.errors import ConfigError, DataError, UnknownName

VERSION = 1
SHORT_OF_MEMORY = "memory_stalled"  # in a record's limits only where memory was short
MANIFEST, RECORDS = "run.json", "records.jsonl"
MEND = "run again with another --out, or put back what it held"
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
    # beside it: read_gb_s; taken, share of cores lost, if known; in_turns, methods sharing it;
    # where memory was short, what `pressure.found` says
    limits: dict[str, float] | None = None
    error: str | None = None  # last lines of a contestant that failed; figures are then 0
    headroom: dict[str, float] | None = None  # positions examined, accepted, best, unknown
    group: int = 0  # of peers that ran at the same time; plain decoding has records in each

    @property
    def key(self) -> tuple[str, int, str, int, int]:
        """What this is a record of; no two records of a run share it."""
        return self.task, self.index, self.method, self.round, self.group

    @property
    def is_short_of_memory(self) -> bool:
        """Whether the machine swapped or waited for memory while it was measured."""
        return SHORT_OF_MEMORY in (self.limits or {})

    @property
    def sampled(self) -> int:
        """Tokens of all samples."""
        return sum(sample.tokens for sample in self.samples)

    @property
    def claimed(self) -> float:
        """Seconds that the samples' parts say they took."""
        return sum(sum(sample.seconds.values()) for sample in self.samples)

    @property
    def in_turns(self) -> int:
        """How many took turns, itself counted; 0 where nobody did."""
        return int((self.limits or {}).get("in_turns", 0))

    @property
    def is_shared(self) -> bool:
        """Whether others took turns with it: what disturbed it disturbed them as well."""
        return self.in_turns > 1

    @property
    def prompt_key(self) -> tuple[str, int, int]:
        """The prompt and round."""
        return self.task, self.index, self.round

    @property
    def pair_key(self) -> tuple[str, int, int, int]:
        """What speeds are compared by: prompt, round, and the group that ran at the same time."""
        return self.task, self.index, self.round, self.group


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
    suite: dict[str, Any] | None = None  # name, mode, half, seed, where the tasks are a suite's
    target: str = ""  # built around the model
    constraint: list[str] = field(default_factory=list)  # of every method of ours
    machine: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)  # read_gb_s, gflop_s
    cost_curve: dict[str, float] = field(default_factory=dict)  # nodes -> seconds of a pass
    peers: dict[str, Any] = field(default_factory=dict)  # name -> versions, or why it was skipped
    resumed: list[dict[str, Any]] = field(default_factory=list)  # created, git, command, again
    peer_memory: dict[str, dict[str, int]] = field(default_factory=dict)  # name -> sizes, group
    version: int = VERSION


def peer_groups(manifest: Manifest) -> dict[int, list[str]]:
    """The peers that ran at the same time, group by group; one group or none is the rule."""
    left_out = {name for name, found in manifest.peers.items() if isinstance(found, str)}
    sizes = {m: size for m, size in manifest.peer_memory.items() if m not in left_out}
    of = {name: size.get("group", 0) for name, size in sizes.items()}
    return {group: [m for m in of if of[m] == group] for group in sorted({*of.values()})}


def record_of(value: Any, where: str) -> Record:
    """The record of plain values. Raises DataError naming `where` and the field."""
    record = from_dict(Record, value, where)
    samples = enumerate(record.samples)
    made = [from_dict(SampleRecord, one, f"{where}, sample {i}") for i, one in samples]
    return replace(record, samples=made)


def examples_of(told: Mapping[str, Any]) -> tuple[int, int]:
    """How many prompts of a task take part, and of how many: those of its file, or those asked for.

    told: what the manifest says of the task.
    """
    taken = told.get("examples", 0)
    return taken, told.get("in_file", taken + told.get("left_out", 0))


def longest_of(manifest: Manifest, task: str) -> int | None:
    """The most tokens that an answer to a task may have; None where that is not known."""
    own = manifest.tasks.get(task, {}).get("max_new_tokens")
    return manifest.sampling.get("max_new_tokens") if own is None else own


def run_folder(path: str | Path) -> Path:
    """The run folder that is meant: who names a file in it means the folder."""
    path = Path(path)
    return path.parent if path.is_file() and (path.parent / MANIFEST).exists() else path


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a run folder. Raises DataError."""
    path = folder / MANIFEST
    try:
        return _manifest_of(json.loads(path.read_text(encoding="utf-8")), str(path))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{folder} is not a run folder: it has no {MANIFEST}; `forerun bench run --out` "
            "makes one"
        ) from None
    except DataError as error:
        raise DataError(f"{error}; {MEND}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}; {MEND}") from None


def _manifest_of(value: Any, where: str) -> Manifest:
    """The manifest of plain values. Raises DataError naming `where` and the field."""
    found = value.get("version") if isinstance(value, dict) else None
    if isinstance(value, dict) and found != VERSION:
        raise DataError(f"{where}: expected version {VERSION}, got {found!r}")
    manifest = from_dict(Manifest, value, where)
    if wrong := validate.broken(manifest, validate.MANIFEST):
        raise DataError(f"{where}: {wrong}")
    try:
        sampling_of(manifest)
    except ConfigError as error:
        raise DataError(f"{where}: field 'sampling': {error}") from None
    return manifest


def sampling_of(manifest: Manifest) -> Sampling:
    """The sampling of a run. Raises UnknownName, ConfigError for values that cannot be."""
    known = {spec.name for spec in fields(Sampling)}
    for name in manifest.sampling:
        if name not in known:
            raise UnknownName.of("field", name, known)
    return Sampling(**from_json(manifest.sampling))


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
        try:
            record = record_of(value, where)
        except DataError as error:
            raise DataError(f"{error}; {AGAIN}") from None
        if found := validate.impossible(record, run):
            raise DataError(f"{where}{found}; {AGAIN}")
        if record.key in seen:
            raise DataError(
                f"{where}: the same prompt, method and round as line {seen[record.key]}; delete "
                "one of the two"
            )
        seen[record.key] = number
        records.append(record)
    return records


def read_run(folder: str | Path) -> tuple[Manifest, list[Record]]:
    """Manifest and records of a run folder. Raises DataError."""
    folder = run_folder(folder)
    manifest = read_manifest(folder)
    return manifest, read_records(folder, manifest)
