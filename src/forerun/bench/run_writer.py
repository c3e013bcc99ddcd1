"""Writes a run folder, or goes on with one that plans the same.

The manifest is written first and whole. A record is appended as one line, so a crash loses at most
the prompt that was running, of all who took turns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from forerun.bench.results import MANIFEST, RECORDS, Manifest, Record, read_manifest, read_records
from forerun.errors import CapacityError, DataError
from forerun.utils.files import write_whole

PLAN = (
    *("suite", "dtype", "model", "threads", "seed", "sampling", "methods", "tasks", "rounds"),
    *("turns", "texts", "optimum"),
)
NOT_COMPARED = {"model": ("path", "name"), "tasks": ("in_file", "size", "task")}  # same prompts


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `run.json` whole or not at all. Raises CapacityError."""
    text = json.dumps(asdict(manifest), ensure_ascii=False, indent=1) + "\n"
    write_whole(folder / MANIFEST, text)


def check_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Refuses a folder in which no run with these fields of its manifest may begin, or go on.

    To be called before anything slow. Raises DataError for files that cannot be read or written,
    another plan, and a folder that another process writes.
    """
    if not _has_manifest(folder):
        return
    before = read_manifest(folder)
    _check_same(folder, before, plan)
    read_records(folder, replace(before, rounds=plan.get("rounds", before.rounds)))
    if (folder / RECORDS).exists():
        os.close(_held(folder))


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
        if found.startswith("tasks.") and ".hash: " in found:
            task = found.removeprefix("tasks.").partition(".hash: ")[0]
            raise DataError(
                f"{folder} holds a run with other prompts of task {task!r}, though as many; give "
                "--out another folder"
            )
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
    a, b = here.get("model"), there.get("model")
    if a and b and (found := _difference("model.hash", a.get("hash"), b.get("hash"))):
        return _difference("model", a.get("name"), b.get("name")) or found  # sizes follow from it
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
        told = NOT_COMPARED.get(name.partition(".")[0], ())
        if name == "tasks" and a.keys() != b.keys():
            return f"{name}: {list(a)} against {list(b)}"
        keys = [key for key in (*a, *b) if key not in told]
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
        self._file: int = _held(folder, os.O_CREAT)
        try:
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
        if self._resumed is not None:
            self._resumed["again"] = len(self.done) - len(kept)
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


def _held(folder: Path, more: int = 0) -> int:
    """The records of a folder, opened to write and locked. Raises DataError."""
    try:
        file = os.open(folder / RECORDS, os.O_RDWR | os.O_APPEND | more, 0o666)
    except OSError as error:
        raise DataError(
            f"cannot write {folder / RECORDS}: {error.strerror}; give --out another place"
        ) from None
    try:
        _lock(file, folder)
    except BaseException:
        os.close(file)
        raise
    return file


def _lock(file: int, folder: Path) -> None:
    """Holds the file for this process, where the system can. Raises DataError."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(
            f"another process is writing to {folder}; wait, or use another --out"
        ) from None
    except OSError as error:
        raise DataError(
            f"cannot lock {folder / RECORDS}: {error.strerror}; give --out another place"
        ) from None
