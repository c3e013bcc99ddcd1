"""Named NumPy arrays in one file, with their kind, settings, origin and a checksum.

The container is safetensors, so other tools can read it. Its header holds our record (kind,
settings, origin) and a SHA-256 over that record and every array. Writes are atomic: a crash leaves
the old file or the new one. Reading verifies the checksum before anything is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np

from forerun.core.records import Snapshot
from forerun.errors import CapacityError, ConfigError, DataError
from forerun.utils.files import failed_write, write_advice
from forerun.utils.version import __version__

FORMAT = 1
RECORD, CHECKSUM = "forerun", "sha256"  # keys of the header
PRIVATE = 0o600  # mode of a new file: learned data reveal the texts they come from


@dataclass(frozen=True)
class Origin:
    """Where learned data come from: tokenizer, models and tenant."""

    tokenizer: str = ""  # hash of the vocabulary; "" is unknown
    models: tuple[tuple[str, str], ...] = ()  # (name, hash) of every model it was learned from
    tenant: str = ""  # owner of the text; "" is shared by all
    created: str = ""  # ISO 8601, UTC
    changed: str = ""
    writer: str = ""  # version of forerun that wrote the file

    @classmethod
    def joined(cls, origins: Many[Origin]) -> Origin:
        """The origin of merged data, without a tenant. Raises ConfigError for two tokenizers."""
        known = sorted({o.tokenizer for o in origins if o.tokenizer})
        if len(known) > 1:
            raise ConfigError(
                "expected data of one tokenizer, got data of "
                f"{' and '.join(name[:12] for name in known)}: their token ids mean different "
                "texts; keep one file per tokenizer"
            )
        return cls(
            tokenizer=known[0] if known else "",
            models=tuple(dict.fromkeys(model for o in origins for model in o.models)),
            created=min((o.created for o in origins if o.created), default=""),
        )


def write(path: Path | str, snapshot: Snapshot, origin: Origin) -> Origin:
    """Writes a file atomically; returns the origin with its dates and version.

    Raises DataError if the path holds another kind of file, CapacityError if it cannot be written.
    The old file then stays.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    path = Path(os.path.realpath(path))  # a link stays a link
    check_replaceable(path, snapshot.kind)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    origin = replace(origin, created=origin.created or now, changed=now, writer=__version__)
    arrays = {name: np.ascontiguousarray(array) for name, array in snapshot.arrays.items()}
    record = _record(snapshot, origin)
    header = {RECORD: record, CHECKSUM: checksum(record, arrays)}
    temporary = _temporary(path)
    try:
        save_file(arrays, temporary, metadata=header)
        _replace(temporary, path)
    except (OSError, SafetensorError) as cause:
        known = failed_write(cause) or (cause if isinstance(cause, OSError) else OSError())
        raise CapacityError(
            f"cannot write {path}: {known.strerror or cause}; {write_advice(known)}, or use "
            "another path (an existing file has not changed)"
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return origin


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turns any OSError of the block, also that of a name too long, into DataError for `path`."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"there is no file {path}; check the path") from None
    except OSError as cause:
        raise DataError(f"cannot read {path}: {cause.strerror or cause}; check the path") from None


def read(
    path: Path | str, kind: str | None = None, *, verify: bool = True
) -> tuple[Snapshot, Origin]:
    """The contents of a file that `write` made, compared with its checksum unless `verify` is off.

    kind: the only accepted kind. Raises DataError if the file is not exactly what was written, or
    of another kind.
    """
    path = Path(path)
    header, arrays = _open(path)
    record = _parse_record(path, header)
    if verify and checksum(header[RECORD], arrays) != header.get(CHECKSUM):
        raise DataError(
            f"{path} was altered or damaged: its contents do not match its checksum; restore a "
            "copy of it, or remove it to start empty"
        )
    if kind is not None and record["kind"] != kind:
        raise DataError(f"expected a file of kind {kind!r}, but {path} holds {record['kind']!r}")
    snapshot = Snapshot(record["kind"], arrays, record["settings"], record["counts"])
    return snapshot, _origin(record["origin"])


def check_place(path: Path) -> None:
    """Raises DataError if no file can be written there; called before long work."""
    path = Path(os.path.realpath(path))
    folder = path.parent
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder} to write {path.name} into; create it first")
    check_kind(path)
    temporary = _temporary(path)
    try:  # permissions do not show read-only file systems
        temporary.touch()
        temporary.unlink()
    except OSError as cause:
        raise DataError(f"cannot write {path}: {cause.strerror}; use another path") from None


def check_kind(path: Path) -> None:
    """Raises DataError for a folder, a pipe, a device or a socket; a missing file is fine."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as cause:
        raise DataError(f"cannot use {path}: {cause.strerror or cause}; check the path") from None
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
        kind = kinds.get(stat.S_IFMT(mode), "device")
        raise DataError(f"expected a file, but {path} is a {kind}; give the name of a file")


def check_replaceable(path: Path, kind: str) -> None:
    """Raises DataError if the path holds anything but a file of this kind."""
    if path.exists():
        held = _parse_record(path, _open(path, with_arrays=False)[0])["kind"]
        if held != kind:
            raise DataError(
                f"{path} holds {held!r}; {kind!r} does not overwrite it; use another name"
            )


def read_origin(path: Path) -> Origin:
    """The origin in a file's header; the checksum is not verified. Raises DataError."""
    return _origin(_parse_record(path, _open(path, with_arrays=False)[0])["origin"])


def checksum(record: str, arrays: dict[str, np.ndarray]) -> str:
    """SHA-256 over the record and every array with its name, type and shape; hexadecimal."""
    total = hashlib.sha256(record.encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total.update(f"\0{name} {array.dtype.str} {array.shape}\0".encode())
        total.update(array.reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def _record(snapshot: Snapshot, origin: Origin) -> str:
    parts = {"kind": snapshot.kind, "settings": snapshot.settings, "counts": snapshot.counts}
    return json.dumps(parts | {"format": FORMAT, "origin": asdict(origin)}, allow_nan=False)


def _open(path: Path, *, with_arrays: bool = True) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Header and arrays of a safetensors file. Raises DataError."""
    from safetensors import SafetensorError, safe_open

    try:
        with reading(path):
            check_kind(path)
            with safe_open(path, framework="numpy") as file:
                header = dict(file.metadata() or {})
                names = list(file.keys()) if with_arrays and RECORD in header else []
                return header, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, ValueError, TypeError) as cause:
        raise DataError(
            f"{path} was cut off, altered, or not written by forerun ({cause}); restore a copy "
            "of it, or use another name to start empty"
        ) from None


def _parse_record(path: Path, header: dict[str, str]) -> dict[str, Any]:
    """Our record in a header. Raises DataError if it is missing or of a newer format."""
    try:
        record = json.loads(header[RECORD])
        found = record["format"]
        if {"kind", "settings", "counts", "origin"} <= record.keys() and found == FORMAT:
            return record
    except (KeyError, ValueError, TypeError, AttributeError):
        raise DataError(
            f"{path} is a safetensors file, but not a data file of forerun; give the name of one"
        ) from None
    raise DataError(
        f"{path} has format {found!r}, but this forerun ({__version__}) reads {FORMAT}; use the "
        "version that wrote it"
    )


def _origin(record: dict[str, Any]) -> Origin:
    known = {f.name for f in fields(Origin)} & record.keys()
    given = {name: record[name] for name in known}
    given["models"] = tuple((str(name), str(code)) for name, code in given.get("models", ()))
    return Origin(**given)


def _temporary(path: Path) -> Path:
    """The name of a file while it is being written."""
    return path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}.tmp")


def _replace(temporary: Path, path: Path) -> None:
    """Renames a finished file to `path`, after its contents are on disk."""
    temporary.chmod(path.stat().st_mode & 0o777 if path.exists() else PRIVATE)
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
