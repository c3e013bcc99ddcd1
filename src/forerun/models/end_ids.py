"""End ids of a model folder: which are declared, and which of them the model can emit."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forerun.errors import ModelError

log = logging.getLogger("forerun")

FILES = ("generation_config.json", "config.json")
OTHERS = ("bos_token_id", "pad_token_id")  # checked too; forerun does not use them


def declared_eos(folder: Path) -> list[int]:
    """End ids in generation_config.json, else in config.json. Raises ModelError if damaged."""
    for file in FILES:
        path, fields = folder / file, _fields(folder / file)
        found = fields.get("eos_token_id")
        if found is None:  # a model of text and images has a config for text
            found = _text_fields(fields).get("eos_token_id")
        if found is None:
            continue
        try:
            return as_ids(found)
        except ValueError as cause:
            raise ModelError(f"{path} cannot be used: eos_token_id must be {cause}") from None
    return []


def as_ids(value: int | list[int] | None) -> list[int]:
    """A list of ids from an id, a list, or nothing. Raises ValueError for anything else."""
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if any(type(i) is not int for i in ids):
        raise ValueError(f"an id or a list of ids, got {value!r}")
    return list(ids)


def usable_end_ids(folder: Path, ids: Iterable[int]) -> list[int]:
    """The end ids within the vocabulary in config.json; warns of others, also of bos and pad."""
    size = declared_vocab_size(folder)
    if size is None:
        return list(ids)
    for file in FILES:
        fields = _fields(folder / file)
        for part in (fields, _text_fields(fields)):
            for name in OTHERS:
                value = part.get(name)
                if type(value) is int and value >= size:
                    _warn(f"{name} in {folder / file}", [value], size)
    return within(size, ids, f"eos_token_id in {folder}")


def declared_vocab_size(folder: Path) -> int | None:
    """The number of logits in config.json; None if it is not there."""
    fields = _fields(folder / "config.json")
    found = fields.get("vocab_size", _text_fields(fields).get("vocab_size"))
    return found if type(found) is int and found > 0 else None


def unusable_pad(folder: Path) -> bool:
    """Whether config.json has a pad id outside the vocabulary, which an embedding refuses."""
    size, pad = declared_vocab_size(folder), _fields(folder / "config.json").get("pad_token_id")
    return size is not None and type(pad) is int and not -size <= pad < size


def within(size: int, ids: Iterable[int], where: str) -> list[int]:
    """The ids of a vocabulary of `size` tokens; warns of others, which cannot be emitted."""
    ids = list(dict.fromkeys(ids))
    strange = [i for i in ids if not 0 <= i < size]
    if strange:
        _warn(where, strange, size)
    return [i for i in ids if 0 <= i < size]


def _warn(where: str, ids: list[int], size: int) -> None:
    log.warning(
        "%s: %s is outside the vocabulary (ids 0 to %d); ignored",
        where,
        ", ".join(map(str, ids)),
        size - 1,
    )


def _fields(path: Path) -> dict[str, Any]:
    from forerun.models.paths import read_json

    return read_json(path) if path.is_file() else {}


def _text_fields(fields: dict[str, Any]) -> dict[str, Any]:
    found = fields.get("text_config")
    return found if isinstance(found, dict) else {}
