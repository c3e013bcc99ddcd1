"""A tokenizer that needs no transformers, for folders that transformers has loaded once.

Importing transformers takes seconds, and most of its tokenizers only pass calls on to the
`tokenizers` library. After the first load of such a folder a record in the cache keeps the few
fields that transformers adds. Later starts read the record and tokenizer.json. Whatever the record
does not cover loads the transformers tokenizer after all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from forerun.models.render_template import has_known_tags, is_simple, render
from forerun.utils.files import write_atomically
from forerun.utils.paths import cache_folder

FORMAT_VERSION = 1
BACKEND = ".tokenizer.json"  # suffix of a copy of the backend, if it differs from the folder's
FILES = (  # that decide what transformers loads
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
)
MORE_TEMPLATES = "additional_chat_templates/*.jinja"
NAMES = tuple(f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
OWN_METHODS = ("encode", "decode", "_encode_plus", "_decode", "apply_chat_template", "get_vocab")


class LightTokenizer:
    """The part of a transformers tokenizer that forerun uses, read from a record.

    load: loads the transformers tokenizer, for everything else.
    """

    def __init__(
        self, folder: Path, backend: Backend, record: dict[str, Any], load: Callable[[], Any]
    ) -> None:
        self.name_or_path = str(folder)
        self.backend_tokenizer, self._record, self._load = backend, record, load
        self.special_tokens_map: dict[str, str] = record["special_tokens_map"]
        self.all_special_tokens: list[str] = record["all_special_tokens"]
        self.chat_template: Any = record["chat_template"]
        self._full: Any = None

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_record" not in self.__dict__:  # copied, not yet filled
            raise AttributeError(name)
        if name in NAMES:
            return self.special_tokens_map.get(name)
        if name.removesuffix("_id") in NAMES:
            token = self.special_tokens_map.get(name.removesuffix("_id"))
            return None if token is None else self.backend_tokenizer.token_to_id(token)
        return getattr(self.full(), name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.full()(*args, **options)

    def full(self) -> Any:
        """The transformers tokenizer, with the chat template of this one."""
        if self._full is None:
            self._full = self._load()
        self._full.chat_template = self.chat_template
        return self._full

    @property
    def all_special_ids(self) -> list[int]:
        find = self.backend_tokenizer.token_to_id
        return [i for token in self.all_special_tokens if (i := find(token)) is not None]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def get_vocab(self) -> dict[str, int]:
        """Token strings and their ids."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def can_render(self, messages: Any, **options: Any) -> bool:
        """Whether `apply_chat_template` needs no transformers."""
        is_own = self.chat_template == self._record["chat_template"]
        is_known = options.keys() <= {"add_generation_prompt", "tokenize"}
        return is_own and is_known and is_simple(messages) and has_known_tags(self.chat_template)

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """The text of a conversation, as by the transformers tokenizer."""
        if options.get("tokenize", True) or not self.can_render(messages, **options):
            return self.full().apply_chat_template(messages, **options)
        prompted = options.get("add_generation_prompt", False)
        return render(self.chat_template, messages, self.special_tokens_map, prompted)


def light_tokenizer(folder: Path, load: Callable[[], Any]) -> LightTokenizer | None:
    """The tokenizer of a folder from its record; None without one."""
    with suppress(Exception):  # a damaged record: transformers loads the folder
        path = _path(folder)
        record = json.loads(path.read_text(encoding="utf-8"))
        file = path.with_suffix(BACKEND) if record["has_backend"] else folder / "tokenizer.json"
        backend = Backend.from_file(str(file))
        backend.no_truncation()  # as every call of transformers does
        backend.no_padding()
        return LightTokenizer(folder, backend, record, load)
    return None


def write_record(folder: Path, inner: Any) -> None:
    """Writes the record of a folder that transformers has loaded, if that suffices."""
    with suppress(Exception):  # the record only saves time
        record, path = _record(inner), _path(folder)
        if record is None or path.exists():
            return
        backend = inner.backend_tokenizer.to_str(pretty=True)
        stored = (folder / "tokenizer.json").read_text(encoding="utf-8")
        record["has_backend"] = backend != stored  # some classes replace parts of the file
        if record["has_backend"]:
            _write(path.with_suffix(BACKEND), backend)
        _write(path, json.dumps(record))


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))


def _record(inner: Any) -> dict[str, Any] | None:
    """What transformers adds to its backend; None if it also changes how texts are encoded."""
    from transformers import PreTrainedTokenizerFast as General

    kind = type(inner)
    if any(getattr(kind, name, 0) is not getattr(General, name) for name in OWN_METHODS):
        return None
    if inner.split_special_tokens or isinstance(inner.chat_template, dict):
        return None
    return {
        "special_tokens_map": dict(inner.special_tokens_map),
        "all_special_tokens": list(inner.all_special_tokens),
        "chat_template": inner.chat_template,
    }


def _path(folder: Path) -> Path:
    """The record of a folder, named by the contents of its files and the libraries."""
    key = hashlib.blake2b(digest_size=12)
    key.update(repr((FORMAT_VERSION, version("transformers"), version("tokenizers"))).encode())
    paths = [folder / name for name in FILES] + sorted(folder.glob(MORE_TEMPLATES))
    for path in paths:
        content = path.read_bytes() if path.is_file() else b""
        key.update(f"{path.name} {len(content)} ".encode() + content)
    return cache_folder() / "tokenizers" / f"{key.hexdigest()}.json"
