"""Finished prompts of a long run, kept in a file beside --out until all are there.

`results.jsonl.partial` begins with what the run is (seed, settings, a hash of its prompts); each
further line is a prompt with all its samples, in the order of finishing. The same command goes on
from it; at the end its samples are written to `results.jsonl` in the order of the prompts.
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
from forerun.integrations.ray_worker import Asked
from forerun.utils.files import write_atomically

KIND = "forerun batch"  # what marks our header
Record = dict[str, Any]


def partial_of(out: Path) -> Path:
    """Where unfinished results of --out are kept."""
    return out.with_name(out.name + ".partial")


def seed_of(out: Path | None) -> int | None:
    """The seed of a run that waits to be finished; None if there is none."""
    if out is None or not partial_of(out).is_file():
        return None
    with partial_of(out).open("rb") as file:
        return _header(partial_of(out), file.readline())["seed"]


class Partial:
    """The file, in a `with`; without --out one that goes away at the end.

    settings: what must be equal for results to belong together, by option name. Raises DataError
    if --out exists or the file is another's, ConfigError if it was made with other settings.
    """

    def __init__(self, out: Path | None, seed: int, settings: Record, asked: Many[Asked]) -> None:
        self.out = out
        told = {name: str(value) for name, value in settings.items()}
        code = hashlib.sha256(repr(list(map(tuple, asked))).encode()).hexdigest()
        self.header: dict[str, Any] = {
            "kind": KIND,
            "seed": seed,
            "settings": told,
            "prompts": code,
        }
        self.held: dict[int, tuple[int, int]] = {}  # prompt -> offset and size of its line
        self._file = _opened(out)
        try:
            self._resume()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, *_: Any) -> None:
        """A file that holds no prompt goes."""
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
        """Keeps the samples of one prompt, whole or not at all."""
        self.held[index] = self._append({"prompt_index": index, "samples": records})

    def samples(self, index: int) -> list[Record]:
        """The samples of a prompt that is there."""
        offset, size = self.held[index]
        return json.loads(os.pread(self._file.fileno(), size, offset))["samples"]

    def finish(self) -> None:
        """Writes --out in the order of the prompts, whole or not at all; the partial file goes."""
        if self.out is None:
            return
        try:
            write_atomically(self.out, self._write_sorted)
        except OSError as error:
            raise CapacityError(
                f"cannot write {self.out}: {error.strerror}; all results are in "
                f"{partial_of(self.out)}; free some space and give the same command again"
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
                f"cannot write {self._file.name}: {error.strerror}; what was written before is "
                "kept; free some space and give the same command again"
            ) from None
        return start, len(line)

    def _resume(self) -> None:
        """Reads what is there; a last line that was cut off is dropped."""
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
        """Raises ConfigError where the run that began the file was another one."""
        mine = self.header["settings"] | {"seed": self.header["seed"]}
        theirs = found["settings"] | {"seed": found["seed"]}
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                raise ConfigError(
                    f"{self._file.name} holds results made with {name} {theirs.get(name)!r}, this "
                    f"run has {mine.get(name)!r}; give the same options, remove the file, or "
                    "give --out another name"
                )
        if found["prompts"] != self.header["prompts"]:
            raise ConfigError(
                f"{self._file.name} holds results of other prompts or sampling parameters; give "
                "the same ones, remove the file, or give --out another name"
            )


def _opened(out: Path | None) -> BinaryIO:
    """The partial file, locked, or one without a name."""
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
    """Raises OSError if another process holds the lock, ConfigError where there are no locks."""
    try:
        import fcntl
    except ImportError:
        file.close()
        raise ConfigError(
            "--engine ray writes its results under a file lock, which this system does not offer; "
            "run it on Linux or macOS, or use --engine local"
        ) from None
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _header(path: Any, line: bytes) -> Record:
    """Raises DataError if the first line of a file is not what we write there."""
    with suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict) and found.get("kind") == KIND:
            return found
    raise DataError(
        f"{path} is no file of unfinished results; move it away, or give --out another name"
    )


def _index(path: Any, number: int, line: bytes) -> int:
    with suppress(ValueError, KeyError, TypeError):
        return int(json.loads(line)["prompt_index"])
    raise DataError(f"{path} line {number} is damaged; remove that line, and its prompt is redone")
