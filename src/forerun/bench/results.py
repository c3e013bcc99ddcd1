"""Run folders: `run.json` holds the plan and the machine, `records.jsonl` the measurements.

A record is one prompt decoded by one method in one round. `run_writer` writes both files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from forerun.bench.json_fields import from_dict
from forerun.core.sampling import Sampling, from_json
from forerun.errors import ConfigError, DataError, UnknownName

VERSION = 1
SHORT_OF_MEMORY = "memory_stalled"  # key in a record's limits; present only under memory pressure
MANIFEST, RECORDS = "run.json", "records.jsonl"
MODEL_HASHES = ("hash", "weights_hash")  # fields of a manifest's model; old runs lack the second
MANIFEST_FIX = "restore the file, or run again with another --out"
RECORD_FIX = "delete the line; the same `forerun bench run` measures it again"


@dataclass(frozen=True)
class SampleRecord:
    """One trajectory. Counts that a contestant does not report are None."""

    tokens: int  # G, generated tokens
    passes: int | None = None  # S
    drafted: int | None = None  # D
    accepted: int | None = None  # A
    examined: int | None = None  # E
    per_position: list[int] = field(default_factory=list)  # accepted drafts at depth 1, 2, ...
    seconds: dict[str, float] = field(default_factory=dict)  # draft, forward, verify, other
    finish: str = ""  # "stop", "length", "cancelled"
    score: float | None = None
    text: str | None = None
    cut: int = 0  # C, tokens that a stop string cut off


@dataclass(frozen=True)
class Record:
    """One prompt by one method in one round."""

    task: str
    index: int  # of the example in its task
    id: str
    category: str  # level or category
    method: str
    round: int
    order: int  # position in the interleaved order of the run
    num_prompt_tokens: int
    seconds: float  # wall time of all samples, prefill included
    generated: int  # tokens of all samples
    samples: list[SampleRecord] = field(default_factory=list)  # by trajectory
    prefill_seconds: float | None = None  # of the passes that computed the prompt
    score: float | None = None  # mean over samples
    majority: float | None = None  # score of the most common answer
    memory: dict[str, int] = field(default_factory=dict)  # bytes by part
    # State of the machine: read_gb_s; taken, the share of the cores lost, if known; in_turns, the
    # number of methods that alternated; under memory pressure, the counters of memory_pressure
    limits: dict[str, float] | None = None
    error: str | None = None  # last lines of the failure; the figures are then 0
    headroom: dict[str, float] | None = None  # positions examined, accepted, best, unknown
    group: int = 0  # peers that ran at the same time; plain decoding has records in each group

    @property
    def key(self) -> tuple[str, int, str, int, int]:
        """Identity: no two records of a run share it."""
        return self.task, self.index, self.method, self.round, self.group

    @property
    def prompt_key(self) -> tuple[str, int, int]:
        """Prompt and round."""
        return self.task, self.index, self.round

    @property
    def pair_key(self) -> tuple[str, int, int, int]:
        """Prompt, round and group: records with the same key are compared in speed."""
        return self.task, self.index, self.round, self.group

    @property
    def is_short_of_memory(self) -> bool:
        """Whether the machine swapped or stalled on memory during the measurement."""
        return SHORT_OF_MEMORY in (self.limits or {})

    @property
    def in_turns(self) -> int:
        """Number of methods that alternated step by step on the prompt; 0 for none."""
        return int((self.limits or {}).get("in_turns", 0))

    @property
    def is_shared(self) -> bool:
        """Whether methods alternated: a disturbance then hit all of them alike."""
        return self.in_turns > 1


@dataclass(frozen=True)
class Manifest:
    """Plan, machine and versions of a run, and what was measured once before it."""

    created: str
    forerun: str  # version
    git: str  # revision, with "+dirty" if files were changed; "" outside a checkout
    command: str
    model: dict[str, Any]  # path, name, parameters, weight_bytes, hash, weights_hash
    dtype: str
    threads: int
    seed: int
    sampling: dict[str, Any]
    methods: list[str]
    tasks: dict[str, dict[str, Any]]  # name -> examples, hash of the prompts
    rounds: int = 1
    turns: int = 0  # steps of one local method before the next continues; 0: whole prompts
    texts: bool | None = None  # whether records keep generated texts; None: unknown
    optimum: bool | None = None  # whether every prompt is decoded again for its headroom
    suite: dict[str, Any] | None = None  # name, mode, half, seed
    target: str = ""  # built around the model
    constraint: list[str] = field(default_factory=list)  # of every local method
    machine: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)  # read_gb_s, gflop_s
    cost_curve: dict[str, float] = field(default_factory=dict)  # rows -> seconds of a pass
    peers: dict[str, Any] = field(default_factory=dict)  # name -> versions, or why it was skipped
    resumed: list[dict[str, Any]] = field(default_factory=list)  # created, git, command, again
    peer_memory: dict[str, dict[str, int]] = field(default_factory=dict)  # name -> sizes, group
    version: int = VERSION


def peer_groups(manifest: Manifest) -> dict[int, list[str]]:
    """Group number -> the peers that ran at the same time."""
    skipped = {name for name, found in manifest.peers.items() if isinstance(found, str)}
    group_of = {m: s.get("group", 0) for m, s in manifest.peer_memory.items() if m not in skipped}
    return {g: [m for m in group_of if group_of[m] == g] for g in sorted({*group_of.values()})}


def num_examples(task: Mapping[str, Any]) -> tuple[int, int]:
    """(prompts measured, prompts in the file or requested) of a task entry of the manifest."""
    taken = task.get("examples", 0)
    return taken, task.get("in_file", taken + task.get("left_out", 0))


def max_tokens_of(manifest: Manifest, task: str) -> int | None:
    """The token limit of a task's answers; None if unknown."""
    own = manifest.tasks.get(task, {}).get("max_new_tokens")
    return manifest.sampling.get("max_new_tokens") if own is None else own


def sampling_of(manifest: Manifest) -> Sampling:
    """The sampling parameters of a run. Raises UnknownName, ConfigError."""
    known = {spec.name for spec in fields(Sampling)}
    for name in manifest.sampling:
        if name not in known:
            raise UnknownName.of("field", name, known)
    return Sampling(**from_json(manifest.sampling))


def run_folder(path: str | Path) -> Path:
    """The run folder of a path, which may also name a file in it."""
    path = Path(path)
    return path.parent if path.is_file() and (path.parent / MANIFEST).exists() else path


def read_run(folder: str | Path) -> tuple[Manifest, list[Record]]:
    """Manifest and records of a run folder. Raises DataError."""
    folder = run_folder(folder)
    return read_manifest(folder), read_records(folder)


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
        raise DataError(f"{error}; {MANIFEST_FIX}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}; {MANIFEST_FIX}") from None


def _manifest_of(value: Any, where: str) -> Manifest:
    """The manifest of a JSON object. Raises DataError with `where` and the field."""
    found = value.get("version") if isinstance(value, dict) else None
    if isinstance(value, dict) and found != VERSION:
        raise DataError(f"{where}: expected version {VERSION}, got {found!r}")
    manifest = from_dict(Manifest, value, where)
    for name, task in manifest.tasks.items():
        if not task.keys() >= {"examples", "hash"}:
            raise DataError(f"{where}: task {name!r} lacks 'examples' or 'hash'")
    try:
        sampling_of(manifest)
    except ConfigError as error:
        raise DataError(f"{where}: field 'sampling': {error}") from None
    return manifest


def read_records(folder: Path) -> list[Record]:
    """All complete records of a run folder; a torn last line is ignored. Raises DataError."""
    path = folder / RECORDS
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return parse_records(data[: data.rfind(b"\n") + 1], str(path))


def parse_records(data: bytes, name: str) -> list[Record]:
    """Records of JSON lines; blank lines are ignored. Raises DataError with the line number."""
    records: list[Record] = []
    line_of: dict[tuple, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            record = record_of(json.loads(line), where)
        except DataError as error:
            raise DataError(f"{error}; {RECORD_FIX}") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not a JSON object: {error}; {RECORD_FIX}") from None
        if record.key in line_of:
            raise DataError(
                f"{where}: same prompt, method and round as line {line_of[record.key]}; delete "
                "one of the two"
            )
        line_of[record.key] = number
        records.append(record)
    return records


def record_of(value: Any, where: str) -> Record:
    """The record of a JSON object. Raises DataError with `where` and the field."""
    record = from_dict(Record, value, where)
    samples = [
        from_dict(SampleRecord, one, f"{where}, sample {i}") for i, one in enumerate(record.samples)
    ]
    return replace(record, samples=samples)
