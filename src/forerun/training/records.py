"""Training records on disk: texts that a target generated, with optional rows per token.

A folder has `plan.json` (target and generation settings) and safetensors files: `prompt-*` with the
records of one prompt, written when it finishes, and `shard-*` with those of many. Files are written
atomically, so an interrupted run continues with the prompts that have no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.errors import ConfigError, DataError
from forerun.models.identity import model_hash, model_name, tokenizer_hash
from forerun.utils.files import reports_no_room, write_atomically

from . import plans
from .data.documents import FIELDS, Documents, Stacked, joined

if TYPE_CHECKING:
    from forerun.api import Model

NAME = re.compile(r"(prompt|shard)-(\d+)\.safetensors")
TYPES = {
    "top_ids": np.int32,
    "top_logp": np.float16,
    "tail_logp": np.float16,
    "features": np.float16,
}


@dataclass(frozen=True)
class Record:
    """One text of a target. Row i of the optional fields is computed after token i."""

    prompt: int  # number of its prompt
    ids: np.ndarray  # int32 [n], prompt and generated text
    mask: np.ndarray  # bool [n]: tokens to learn, by default the generated ones
    setting: int = 0  # number of its sampling parameters in the grid of plan.json
    top_ids: np.ndarray | None = None  # int32 [n, k]: the most likely next tokens
    top_logp: np.ndarray | None = None  # float16 [n, k]: their log-probabilities, temperature 1
    tail_logp: np.ndarray | None = None  # float16 [n]: log of the mass of all other tokens
    features: np.ndarray | None = None  # float16 [n, d]: hidden row after the last norm


def identity(model: Model) -> dict[str, str]:
    """The target of records: name, hash of weights and configuration, hash of the vocabulary."""
    return {
        "target": model_name(model.name),
        "target_hash": model_hash(model.name, model.target),
        "tokenizer_hash": tokenizer_hash(model.tokenizer),
    }


def check_target(folder: Path, model: Model) -> None:
    """Raises ConfigError if a folder's records were made by another target."""
    before, now = plans.read_plan(folder), identity(model)
    for name in ("target_hash", "tokenizer_hash"):
        if before.get(name) and now[name] and before[name] != now[name]:
            raise ConfigError(
                f"the records in {folder} were made by {before.get('target')!r} ({name} "
                f"{before[name][:12]}), but this run uses {now['target']!r} ({now[name][:12]}); "
                "use that model, or generate records in another folder"
            )


def read_records(folder: Path, model: Model | None = None) -> Documents:
    """All records of a folder, in the order of their prompts; rows per token are read on demand.

    model: the target of the run. Raises ConfigError if another one made the records, DataError if
    there are none.
    """
    if model is not None:
        check_target(folder, model)
    parts = []
    for path in files(folder):
        parts.append(_documents(path))
    if not parts:
        raise DataError(f"there are no records in {folder}; generate them first")
    return joined(parts)


def files(folder: Path) -> list[Path]:
    """The files with a folder's records: shards, and prompt files that are not in a shard."""
    shards, prompts = (_named(folder, kind) for kind in ("shard", "prompt"))
    packed = {number for path in shards.values() for number in prompts_in(path)}
    singles = {n: path for n, path in prompts.items() if n not in packed}
    return [path for _, path in sorted([*shards.items(), *singles.items()])]


def finished(folder: Path) -> set[int]:
    """Numbers of the prompts that have records in a folder."""
    return {number for path in files(folder) for number in prompts_in(path)}


def prompts_in(path: Path) -> list[int]:
    """Numbers of the prompts in a file; reads only that array."""
    with _opened(path) as file:
        return sorted(set(file.get_tensor("numbers").tolist()))


def write_records(path: Path, records: list[Record]) -> None:
    """Writes records as one file. Raises CapacityError if the disk has no room."""
    from safetensors.numpy import save_file

    arrays: dict[str, np.ndarray] = {
        "tokens": np.concatenate([record.ids for record in records]).astype(np.int32),
        "mask": np.concatenate([record.mask for record in records]).astype(np.uint8),
        "starts": np.cumsum([0, *(len(record.ids) for record in records)], dtype=np.int64),
        "numbers": np.array([record.prompt for record in records], np.int64),
        "settings": np.array([record.setting for record in records], np.int64),
    }
    for name in FIELDS:
        parts = [getattr(record, name) for record in records]
        if parts[0] is not None:
            arrays[name] = np.concatenate(parts).astype(TYPES[name])
    with reports_no_room(path):
        write_atomically(path, lambda part: save_file(arrays, part))


def read_file(path: Path) -> Iterator[Record]:
    """The records of one file."""
    with _opened(path) as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    starts = arrays["starts"]
    for i, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        rows = {name: arrays[name][start:stop] for name in FIELDS if name in arrays}
        ids, mask = arrays["tokens"][start:stop], arrays["mask"][start:stop].astype(bool)
        setting = int(arrays["settings"][i]) if "settings" in arrays else 0
        yield Record(int(arrays["numbers"][i]), ids, mask, setting, **rows)


def pack(folder: Path, size: int) -> None:
    """Joins complete runs of `size` prompt files, from number 0 on, into shards."""
    prompts = _named(folder, "prompt")
    for first in range(0, max(prompts, default=-1) + 1, size):
        numbers = range(first, first + size)
        if all(number in prompts for number in numbers):
            records = [one for number in numbers for one in read_file(prompts[number])]
            write_records(folder / f"shard-{first:07d}.safetensors", records)
            for number in numbers:
                prompts[number].unlink()


def prompt_file(folder: Path, number: int) -> Path:
    """The file of one prompt's records."""
    return folder / f"prompt-{number:07d}.safetensors"


def _named(folder: Path, kind: str) -> dict[int, Path]:
    """Files of one kind by the number in their name."""
    matches = ((NAME.fullmatch(path.name), path) for path in sorted(folder.glob(f"{kind}-*")))
    return {int(match[2]): path for match, path in matches if match}


def _documents(path: Path) -> Documents:
    file = _opened(path).__enter__()  # stays mapped as long as slices of it are in use
    names = set(file.keys())
    tokens, mask, starts = (file.get_tensor(name) for name in ("tokens", "mask", "starts"))
    is_learned = mask.astype(bool)
    prompts = [_first(is_learned[a:b]) for a, b in zip(starts[:-1], starts[1:], strict=True)]
    rows = {name: Stacked([file.get_slice(name)]) for name in FIELDS if name in names}
    return Documents(
        tokens, starts, np.array(prompts, np.int64), is_learned, rows, file.get_tensor("numbers")
    )


def _first(is_learned: np.ndarray) -> int:
    """Index of the first token to learn; the length if there is none."""
    return int(np.argmax(is_learned)) if is_learned.any() else len(is_learned)


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path} is not a readable file of records ({error}); delete it to generate it again"
        ) from error
