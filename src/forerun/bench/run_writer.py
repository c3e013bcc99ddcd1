"""Writes a run folder, or resumes one with the same plan.

The manifest is written first and atomically. A record is appended as one line, so a crash loses at
most the prompt that was running.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from forerun.bench.results import (
    MANIFEST,
    MODEL_HASHES,
    RECORDS,
    Manifest,
    Record,
    read_manifest,
    read_records,
)
from forerun.errors import CapacityError, DataError
from forerun.utils.files import write_whole

PLAN = (
    *("suite", "dtype", "model", "threads", "seed", "sampling", "methods", "tasks", "rounds"),
    *("turns", "texts", "optimum", "target", "constraint"),
)
NOT_COMPARED = {
    "model": ("path", "name", *MODEL_HASHES),
    "tasks": ("in_file", "size", "task"),
}  # may differ for the same prompts
MACHINE = ("cpu", "kernels", "device", "gpu")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `run.json` atomically. Raises CapacityError."""
    text = json.dumps(asdict(manifest), ensure_ascii=False, indent=1) + "\n"
    write_whole(folder / MANIFEST, text)


def check_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Checks early that a run with these manifest fields can start or resume in a folder.

    Raises DataError for unreadable files, another plan, and a folder in use by another process.
    """
    if not _has_manifest(folder):
        return
    before = read_manifest(folder)
    _check_same(folder, before, plan)
    read_records(folder)
    if (folder / RECORDS).exists():
        os.close(_open_locked(folder))


def _has_manifest(folder: Path) -> bool:
    """Whether a folder holds a run. Raises DataError for records without a manifest."""
    if (folder / MANIFEST).exists():
        return True
    records = folder / RECORDS
    if records.exists() and records.stat().st_size:
        raise DataError(f"{folder} has {RECORDS} but no {MANIFEST}; use another --out")
    return False


def _check_same(folder: Path, before: Manifest, plan: Mapping[str, Any]) -> None:
    """Raises DataError for another plan; more rounds count as the same plan."""
    more = max(before.rounds, plan.get("rounds", 0))
    if found := difference(vars(replace(before, rounds=more)), plan):
        if found.startswith("tasks.") and ".hash: " in found:
            task = found.removeprefix("tasks.").partition(".hash: ")[0]
            found = f"other prompts of task {task!r}"
        hint = " (rounds can be added, not removed)" if found.startswith("rounds:") else ""
        raise DataError(
            f"{folder} holds a run with another plan, {found}; give --out another folder{hint}"
        )


def difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    """The first difference of two plans, as "field: a against b"; None if they are equal.

    Fields that are missing or None on one side are not compared.
    """
    a, b = here.get("model") or {}, there.get("model") or {}
    for name in MODEL_HASHES:
        hashes = a.get(name), b.get(name)
        if None not in hashes and (found := _difference(f"model.{name}", *hashes)):
            return _difference("model", a.get("name"), b.get("name")) or found  # sizes follow
    for name in PLAN:
        pair = here.get(name), there.get(name)
        if None not in pair and (found := _difference(name, *pair)):
            return found
    machines = [one.get("machine") or {} for one in (here, there)]
    if not all(machines):
        return None
    machines = [{"device": "cpu"} | one for one in machines]  # older runs have no device
    known = [name for name in MACHINE if all(name in one for one in machines)]
    return _difference("machine", *({name: one[name] for name in known} for one in machines))


def _difference(name: str, a: Any, b: Any) -> str | None:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        ignored = NOT_COMPARED.get(name.partition(".")[0], ())
        if name == "tasks" and a.keys() != b.keys():
            return f"{name}: {list(a)} against {list(b)}"
        keys = [key for key in (*a, *b) if key not in ignored]
        found = (_difference(f"{name}.{key}", a.get(key), b.get(key)) for key in keys)
        return next(filter(None, found), None)
    return None if a == b else f"{name}: {a!r} against {b!r}"


def _write_records(file: int, records: Iterable[Record]) -> None:
    """Writes one line per record and syncs."""
    lines = [json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records]
    rest = "".join(lines).encode()
    while rest:
        rest = rest[os.write(file, rest) :]
    os.fsync(file)


class RunWriter:
    """Appends records to a run folder, each completely or not at all.

    Raises DataError for a folder with another plan or in use, CapacityError when the disk is full.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._resumed: dict[str, Any] | None = None  # entry for this process
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"cannot create the run folder {folder}: {error.strerror}; use another --out"
            ) from None
        self.manifest = self._planned(manifest)
        self._file: int = _open_locked(folder, os.O_CREAT)
        try:
            self._drop_torn_line()
            self.done: list[Record] = read_records(folder)
            if self._resumed is None:
                write_manifest(folder, self.manifest)
        except BaseException:
            self.close()
            raise

    def append(self, *records: Record) -> None:
        """Appends and syncs one line per record; after an error none of them is kept."""
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
                "records written before are kept, and the same command resumes the run"
            ) from None
        self.done += records

    def drop(self, records: Iterable[Record]) -> None:
        """Removes records, to be measured again; the file is replaced atomically."""
        keys = {record.key for record in records}
        kept = [record for record in self.done if record.key not in keys]
        path, new = self.folder / RECORDS, self.folder / (RECORDS + ".new")
        try:
            file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
            try:
                _lock(file, self.folder)
                _write_records(file, kept)
                os.replace(new, path)
            except BaseException:
                os.close(file)
                new.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise CapacityError(f"cannot write {path}: {error.strerror}; it is unchanged") from None
        os.close(self._file)
        if self._resumed is not None:
            self._resumed["again"] = len(self.done) - len(kept)
        self._file, self.done = file, kept

    def update(self, manifest: Manifest) -> None:
        """Replaces the manifest."""
        self.manifest = manifest
        write_manifest(self.folder, manifest)

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _planned(self, manifest: Manifest) -> Manifest:
        """The manifest to continue with: the existing one, if its plan is the same."""
        if not _has_manifest(self.folder):
            return manifest
        before = read_manifest(self.folder)
        _check_same(self.folder, before, vars(manifest))
        self._resumed = {name: getattr(manifest, name) for name in ("created", "git", "command")}
        return replace(before, rounds=manifest.rounds)

    def _drop_torn_line(self) -> None:
        data = (self.folder / RECORDS).read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._file, whole)


def _open_locked(folder: Path, more: int = 0) -> int:
    """Opens and locks the records file of a folder. Raises DataError."""
    try:
        file = os.open(folder / RECORDS, os.O_RDWR | os.O_APPEND | more, 0o666)
    except OSError as error:
        raise DataError(
            f"cannot write {folder / RECORDS}: {error.strerror}; use another --out"
        ) from None
    try:
        _lock(file, folder)
    except BaseException:
        os.close(file)
        raise
    return file


def _lock(file: int, folder: Path) -> None:
    """Locks the file for this process, if the system supports it. Raises DataError."""
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
            f"cannot lock {folder / RECORDS}: {error.strerror}; use another --out"
        ) from None
