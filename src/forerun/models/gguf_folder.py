"""A GGUF file as a model folder in the cache: config, tokenizer and a link to the file.

Code that reads model folders then also reads GGUF files. The weights stay in the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import CapacityError, ModelError, in_a_line
from forerun.utils.files import failed_write, write_advice
from forerun.utils.paths import cache_folder
from forerun.utils.version import __version__

if TYPE_CHECKING:
    from forerun.models.gguf import GgufFile

LINK = "forerun-gguf.json"  # names the GGUF file
FORM = 1  # version of these folders


def gguf_folder(path: Path) -> Path:
    """The folder of a GGUF file, created if missing.

    Raises ModelError for a bad file, CapacityError if the cache cannot be written.
    """
    link = _link(path)
    folder = cache_folder() / "gguf" / f"{path.stem}-{_digest(link)}"
    if _is_whole(folder, link):
        return folder
    from forerun.models.gguf import GgufFile

    file = GgufFile(path)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=folder.parent) as made:
            part = Path(made) / "folder"
            part.mkdir()
            describe(file, part)
            (part / LINK).write_text(json.dumps(link, indent=2), encoding="utf-8")
            _place(part, folder, link)
    except Exception as error:
        cause = failed_write(error) or error
        if not isinstance(cause, OSError):
            raise
        raise CapacityError(
            f"cannot write into the cache folder {folder.parent}: {cause.strerror or cause}; "
            f"{write_advice(cause)}, or set FORERUN_CACHE to another folder"
        ) from error
    return folder


def linked_file(folder: Path) -> Path | None:
    """The GGUF file that holds the weights of a folder; None for an ordinary folder.

    Raises ModelError if the file is gone or has changed.
    """
    if not (folder / LINK).is_file():
        return None
    link = _object(folder / LINK)
    if not isinstance(link.get("file"), str):
        raise ModelError(f"{folder / LINK} is damaged; load the GGUF file by its own path")
    path = Path(link["file"])
    if not path.is_file() or _link(path) != link:
        raise ModelError(f"{path} was moved or changed while it was in use; load it again")
    return path


def describe(file: GgufFile, folder: Path) -> None:
    """Writes config.json, generation_config.json and the tokenizer. Raises ModelError."""
    from transformers import AutoConfig

    from forerun.models.gguf_config import hf_config
    from forerun.models.gguf_tokenizer import end_ids, save_tokenizer

    config = hf_config(file)
    kind = config.pop("model_type")
    try:
        AutoConfig.for_model(kind, **config).save_pretrained(folder)  # adds its defaults
    except OSError:
        raise
    except Exception as cause:  # an invalid value
        raise ModelError(f"the config in {file.path} cannot be used: {in_a_line(cause)}") from cause
    _write_generation(folder, end_ids(file), config)
    save_tokenizer(file, folder)


def _write_generation(folder: Path, ends: list[int], config: dict[str, Any]) -> None:
    names = ("bos_token_id", "pad_token_id")
    fields = {name: config[name] for name in names if config[name] is not None}
    if ends:
        fields["eos_token_id"] = ends if ends[1:] else ends[0]
    text = json.dumps({"_from_model_config": True, **fields}, indent=2)
    (folder / "generation_config.json").write_text(text, encoding="utf-8")


def _link(path: Path) -> dict[str, Any]:
    """Path, size and modification time of a file, which identify its content."""
    where = path.resolve()
    found = where.stat()
    return {"file": str(where), "bytes": found.st_size, "time": found.st_mtime_ns}


def _digest(link: dict[str, Any]) -> str:
    text = json.dumps({**link, "form": FORM, "forerun": __version__})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_whole(folder: Path, link: dict[str, Any]) -> bool:
    """Whether a folder of this GGUF file is there and not damaged, as by a full disk."""
    return _object(folder / LINK) == link and bool(_object(folder / "config.json"))


def _place(part: Path, folder: Path, link: dict[str, Any]) -> None:
    """Renames `part` to `folder`, unless another process has created it."""
    try:
        os.replace(part, folder)
    except OSError:
        if not _is_whole(folder, link):
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(part, folder)
