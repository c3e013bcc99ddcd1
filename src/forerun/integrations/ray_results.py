"""Partial results of a batch run, stored next to --out so that the run can resume.

The first line of `results.jsonl.partial` describes the run: seed, settings, hash of its prompts.
Every other line holds one prompt with all its samples, in the order of finishing. The same command
resumes from it. At the end the samples are written to `results.jsonl` in the order of the prompts.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence as Many
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from forerun.errors import CapacityError, ConfigError, DataError
from forerun.integrations.ray_worker import Request
from forerun.utils.files import write_advice, write_atomically

KIND = "forerun batch"  # identifies our header
Record = dict[str, Any]


def partial_of(out: Path) -> Path:
    """The path of the partial results of --out."""
    return out.with_name(out.name + ".partial")


def seed_of(out: Path | None) -> int | None:
    """The seed of an unfinished run; None if there is none."""
    if out is None or not partial_of(out).is_file():
        return None
    with partial_of(out).open("rb") as file:
        return _header(partial_of(out), file.readline())["seed"]


class PartialResults:
    """The file of partial results, for a `with`; a temporary file without --out.

    settings: options that must be equal to resume, by name. Raises DataError if --out exists or the
    partial file is not ours, ConfigError if it was made with other settings.
    """

    def __init__(
        self, out: Path | None, seed: int, settings: Record, requests: Many[Request]
    ) -> None:
        self.out = out
        code = hashlib.sha256(repr(list(map(tuple, requests))).encode()).hexdigest()
        self.header: dict[str, Any] = {
            "kind": KIND,
            "seed": seed,
            "settings": {name: str(value) for name, value in settings.items()},
            "prompts": code,
        }
        self.held: dict[int, tuple[int, int]] = {}  # prompt -> offset and size of its line
        self._file = _open(out)
        try:
            self._resume()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> PartialResults:
        return self

    def __exit__(self, *_: Any) -> None:
        """Closes the file; removes it if it holds no prompt."""
        if self.out is not None and not self.held and not self._file.closed:
            with suppress(OSError):
                partial_of(self.out).unlink()
        self._file.close()

    def _write_sorted(self, path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            for index in sorted(self.held):
                for record in self.samples(index):
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def add(self, index: int, records: list[Record]) -> None:
        """Appends the samples of one prompt; a failed write is undone."""
        self.held[index] = self._append({"prompt_index": index, "samples": records})

    def samples(self, index: int) -> list[Record]:
        """The samples of a finished prompt."""
        offset, size = self.held[index]
        return json.loads(os.pread(self._file.fileno(), size, offset))["samples"]

    def finish(self) -> None:
        """Writes --out atomically in the order of the prompts; removes the partial file."""
        if self.out is None:
            return
        try:
            write_atomically(self.out, self._write_sorted)
        except OSError as error:
            raise CapacityError(
                f"cannot write {self.out}: {error.strerror}; all results are in "
                f"{partial_of(self.out)}; {write_advice(error)} and run the same command again"
            ) from None
        partial_of(self.out).unlink()
        self._file.close()

    def _append(self, record: Record) -> tuple[int, int]:
        start = os.lseek(self._file.fileno(), 0, os.SEEK_END)
        line = left = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        try:
            while left:
                left = left[os.write(self._file.fileno(), left) :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), start)
            raise CapacityError(
                f"cannot write {self._file.name}: {error.strerror}; earlier results are kept; "
                f"{write_advice(error)} and run the same command again"
            ) from None
        return start, len(line)

    def _resume(self) -> None:
        """Reads the existing lines; drops an incomplete last line."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file):
            if not line.endswith(b"\n"):
                break
            if number == 0:
                self._compare(_header(self._file.name, line))
            else:
                self.held[_index(self._file.name, number + 1, line)] = end, len(line)
            end += len(line)
        os.ftruncate(self._file.fileno(), end)
        if not end:
            self._append(self.header)

    def _compare(self, found: Record) -> None:
        """Raises ConfigError if the file belongs to another run."""
        new = self.header["settings"] | {"seed": self.header["seed"]}
        old = found["settings"] | {"seed": found["seed"]}
        for name in sorted(new.keys() | old.keys()):
            if new.get(name) != old.get(name):
                raise ConfigError(
                    f"{self._file.name} holds results made with {name} {old.get(name)!r}, this "
                    f"run has {new.get(name)!r}; use the same options, remove the file, or "
                    "give --out another name"
                )
        if found["prompts"] != self.header["prompts"]:
            raise ConfigError(
                f"{self._file.name} holds results of other prompts or sampling parameters; use "
                "the same ones, remove the file, or give --out another name"
            )


def _open(out: Path | None) -> BinaryIO:
    """The partial file, locked; a temporary file without --out."""
    if out is None:
        return tempfile.TemporaryFile("w+b", buffering=0)  # type: ignore[return-value]
    if out.exists() and (not out.is_file() or out.stat().st_size):
        raise DataError(f"{out} exists and is not empty; give --out another name")
    path = partial_of(out)
    try:
        file = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666), "r+b")  # noqa: SIM115
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from None
    try:
        _lock(file)
    except OSError:
        file.close()
        raise DataError(
            f"another run is writing {path}; wait for it, or give --out another name"
        ) from None
    return file


def _lock(file: BinaryIO) -> None:
    """Raises OSError if another process holds the lock, ConfigError if the system has no locks."""
    try:
        import fcntl
    except ImportError:
        file.close()
        raise ConfigError(
            "--engine ray needs file locks, which this system does not have; run it on Linux or "
            "macOS, or use --engine local"
        ) from None
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _header(path: Any, line: bytes) -> Record:
    """The header in the first line of a file. Raises DataError if it is not ours."""
    with suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict) and found.get("kind") == KIND:
            return found
    raise DataError(f"{path} is not a file of partial results; move it, or give --out another name")


def _index(path: Any, number: int, line: bytes) -> int:
    with suppress(ValueError, KeyError, TypeError):
        return int(json.loads(line)["prompt_index"])
    raise DataError(f"{path} line {number} is damaged; remove that line to redo its prompt")
