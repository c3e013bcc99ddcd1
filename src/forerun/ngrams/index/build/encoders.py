"""From text to token ids, for indexes: any tokenizer behind one small surface.

A specification is a name that another process can open again: "bytes", "ids" (documents bring their
ids), a tokenizer.json, a sentencepiece .model, a model folder or hub id, "reasoner" for the
embedded one; or, from Python, a function from a text to ids.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import ConfigError, DataError, ModelError
from forerun.ngrams.index.build.word_cache import ShortWay, short_way
from forerun.state.array_file import reading
from forerun.utils.files import SHOWN, check_text

Spec = str | Callable[[str], Many[int]]
DEFAULT = "reasoner"


class Encoder:
    """Texts to ids and back. `kind` says how `load` opens what `save` wrote."""

    kind = "function"

    def __init__(self, name: str, vocabulary: dict[str, int] | None, eos: int | None) -> None:
        self.name, self.eos = name, eos
        self.size = max(vocabulary.values()) + 1 if vocabulary else None  # ids lie below it
        self.fingerprint = fingerprint(vocabulary) if vocabulary else ""
        self.starts: Callable[[], set[int]] = lambda: word_starts(vocabulary or {})
        self.vocabulary = lambda: vocabulary or {}  # token strings and their ids

    def encode_batch(self, texts: list[str]) -> list[Many[int]]:
        """Ids of each text, without what a model expects around a prompt.

        Raises DataError for what is no text in UTF-8.
        """
        for text in texts:
            check_text(repr(text[:SHOWN]), text)
        return self._encode(texts)

    def encode(self, text: str) -> Many[int]:
        """Ids of one text. Raises as `encode_batch` does, as all that encode."""
        return self.encode_batch([text])[0]

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text as int64 or int32 arrays, by the fastest way that gives the same."""
        return [np.asarray(ids, np.int64) for ids in self.encode_batch(texts)]

    def _encode(self, texts: list[str]) -> list[Many[int]]:
        """Ids of each text; all are UTF-8."""
        raise NotImplementedError

    def decode(self, ids: Many[int]) -> str:
        """Text of ids."""
        raise ConfigError(
            f"an index of {self.name!r} cannot turn ids into text; open it with a tokenizer"
        )

    def save(self, folder: Path) -> None:
        """Writes what `load` needs, if anything."""

    def describe(self) -> dict[str, Any]:
        """The row of the manifest."""
        return {
            "name": self.name,
            "kind": self.kind,
            "vocabulary": self.size,
            "fingerprint": self.fingerprint,
        }


class Bytes(Encoder):
    """UTF-8 bytes; needs no file."""

    kind = "bytes"

    def __init__(self) -> None:
        super().__init__("bytes", {f"<{i:02X}>": i for i in range(256)}, None)
        self.starts = lambda: set(range(33))  # after a space or a control byte all may begin

    def _encode(self, texts: list[str]) -> list[Many[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Many[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class Ids(Encoder):
    """Documents that are token ids already."""

    kind = "ids"

    def __init__(self) -> None:
        super().__init__("ids", None, None)

    def _encode(self, texts: list[str]) -> list[Many[int]]:
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.replace(",", " ").split()]
        except ValueError:
            raise DataError(
                f"this index holds token ids and knows no tokenizer; expected ids such as "
                f"'5 17 3', got {text[:SHOWN]!r}; open it with a tokenizer to use text"
            ) from None


class Function(Encoder):
    """A function of the caller's."""

    def __init__(self, function: Callable[[str], Many[int]]) -> None:
        super().__init__(getattr(function, "__qualname__", type(function).__name__), None, None)
        self.function = function

    def _encode(self, texts: list[str]) -> list[Many[int]]:
        return [self.function(text) for text in texts]


class Fast(Encoder):
    """A tokenizer.json, read without transformers."""

    kind = "file"

    def __init__(self, file: Path, name: str) -> None:
        from tokenizers import Tokenizer

        try:
            self.inner = Tokenizer.from_file(str(file))
        except Exception as error:  # whatever the Rust side found wrong
            raise ModelError(f"the tokenizer {file} cannot be used: {error}") from None
        self.inner.no_truncation()
        self.inner.no_padding()
        super().__init__(name, self.inner.get_vocab(with_added_tokens=True), None)
        self.eos = end_id(file.parent, self.inner.token_to_id)

    def _encode(self, texts: list[str]) -> list[Many[int]]:
        return [e.ids for e in self.inner.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        way = self._short_way
        found = [None if way is None else way.encode(text) for text in texts]
        long = iter(
            super().encode_arrays([t for t, f in zip(texts, found, strict=True) if f is None])
        )
        return [next(long) if f is None else f for f in found]

    @cached_property
    def _short_way(self) -> ShortWay | None:
        return short_way(self.inner)

    def decode(self, ids: Many[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.inner.save(str(folder / "tokenizer.json"))
        config = {} if self.eos is None else {"eos_token_id": self.eos}
        (folder / "generation_config.json").write_text(json.dumps(config) + "\n")


class Pieces(Encoder):
    """A sentencepiece model."""

    kind = "pieces"

    def __init__(self, file: Path, name: str) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise ConfigError(
                f"{file} needs the package sentencepiece; try pip install sentencepiece"
            ) from None
        try:
            self.inner = SentencePieceProcessor(model_file=str(file))
        except Exception as error:
            raise ModelError(f"the tokenizer {file} cannot be used: {error}") from None
        vocabulary = {self.inner.id_to_piece(i): i for i in range(self.inner.vocab_size())}
        eos = self.inner.eos_id()
        super().__init__(name, vocabulary, eos if eos >= 0 else None)
        self.file = file

    def _encode(self, texts: list[str]) -> list[Many[int]]:
        return self.inner.encode(texts)

    def decode(self, ids: Many[int]) -> str:
        return self.inner.decode([int(i) for i in ids])

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.file, folder / "tokenizer.model")


class Slow(Encoder):
    """Any other tokenizer that transformers loads."""

    kind = "folder"

    def __init__(self, folder: str | Path, name: str) -> None:
        from forerun.models.tokenizer import Tokenizer

        self.inner = Tokenizer.load(folder)
        eos = next(iter(self.inner.eos_ids), None)
        super().__init__(name, self.inner.vocabulary(), eos)

    def _encode(self, texts: list[str]) -> list[Many[int]]:
        return [self.inner.encode(text, special=False) for text in texts]

    def decode(self, ids: Many[int]) -> str:
        return self.inner.decode(ids)

    def save(self, folder: Path) -> None:
        self.inner.inner.save_pretrained(str(folder))


def load(spec: Spec) -> Encoder:
    """The encoder of a specification. Raises ModelError, ConfigError, DataError."""
    if not isinstance(spec, str):
        return Function(spec)
    if spec in ("bytes", "ids"):
        return Bytes() if spec == "bytes" else Ids()
    from forerun.models.paths import located

    path = Path(located(spec))
    with reading(path):
        is_file, is_fast = path.is_file(), (path / "tokenizer.json").is_file()
    if is_file:
        return Pieces(path, spec) if path.suffix == ".model" else Fast(path, spec)
    if is_fast:
        return Fast(path / "tokenizer.json", spec)
    if list(path.glob("*")) == [path / "tokenizer.model"]:  # nothing says what model it is of
        return Pieces(path / "tokenizer.model", spec)
    return Slow(str(path), spec)


def saved(folder: Path, row: dict[str, Any]) -> Encoder:
    """The encoder that an index holds, from its row of the manifest."""
    if row["kind"] in ("bytes", "ids"):
        return load(row["kind"])
    if row["kind"] == "function":
        return Ids()
    encoder = load(str(folder / "tokenizer"))
    encoder.name = row["name"]
    return encoder


def fingerprint(vocabulary: dict[str, int]) -> str:
    """Equal for tokenizers with the same strings at the same ids."""
    text = json.dumps(sorted(vocabulary.items(), key=lambda pair: (pair[1], pair[0])))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def word_starts(vocabulary: dict[str, int]) -> set[int]:
    """Ids of tokens that begin a word: those that begin with a space or are no letters."""
    return {i for token, i in vocabulary.items() if token[:1] in "Ġ▁ " or not token[:1].isalnum()}


def end_id(folder: Path, find: Callable[[str], int | None]) -> int | None:
    """The end id that the files beside a tokenizer.json declare, or a common name for one."""
    from forerun.models.tokenizer import declared_eos

    for found in declared_eos(folder):
        return found
    names = ["<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>"]
    try:
        told = json.loads((folder / "tokenizer_config.json").read_text()).get("eos_token")
        names.insert(0, told["content"] if isinstance(told, dict) else str(told))
    except (OSError, ValueError, AttributeError, KeyError):
        pass
    return next((i for name in names if (i := find(name)) is not None), None)
