"""Tokenizers of indexes, with one interface.

A specification is a name that another process can open again: "bytes", "ids" (documents are token
ids), a tokenizer.json, a sentencepiece .model, a model folder or hub id, "reasoner" for the
embedded one. From Python it may also be a function from a text to ids.
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
from forerun.ngrams.index.build.verify import check_tokenizer_files
from forerun.ngrams.index.build.word_cache import WordCacheEncoder, word_cache_encoder
from forerun.state.array_file import reading
from forerun.utils.files import SHOWN, check_text

Spec = str | Callable[[str], Many[int]]
DEFAULT = "reasoner"


class Encoder:
    """Encodes and decodes texts. `kind`: the format of `save`, stored in the manifest."""

    kind = "function"

    def __init__(self, name: str, vocabulary: dict[str, int] | None, eos: int | None) -> None:
        self.name, self.eos = name, eos
        self.size = max(vocabulary.values()) + 1 if vocabulary else None  # largest id + 1
        self.fingerprint = fingerprint(vocabulary) if vocabulary else ""
        self.starts: Callable[[], set[int]] = lambda: word_starts(vocabulary or {})
        self.vocabulary = lambda: vocabulary or {}  # token string -> id

    def encode_batch(self, texts: list[str]) -> list[Many[int]]:
        """Ids of each text, without special tokens. Raises DataError for text that is not UTF-8."""
        for text in texts:
            check_text(repr(text[:SHOWN]), text)
        return self._encode(texts)

    def encode(self, text: str) -> Many[int]:
        """Ids of one text. Raises DataError."""
        return self.encode_batch([text])[0]

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text as int64 or int32 arrays."""
        return [np.asarray(ids, np.int64) for ids in self.encode_batch(texts)]

    def _encode(self, texts: list[str]) -> list[Many[int]]:
        """Ids of each text; the texts are valid UTF-8."""
        raise NotImplementedError

    def decode(self, ids: Many[int]) -> str:
        """Text of ids."""
        raise ConfigError(f"tokenizer {self.name!r} cannot decode ids; open it with a tokenizer")

    def save(self, folder: Path) -> None:
        """Writes the files for `load`, if there are any."""

    def describe(self) -> dict[str, Any]:
        """The manifest entry."""
        return {
            "name": self.name,
            "kind": self.kind,
            "vocabulary": self.size,
            "fingerprint": self.fingerprint,
        }


class Bytes(Encoder):
    """UTF-8 bytes as tokens."""

    kind = "bytes"

    def __init__(self) -> None:
        super().__init__("bytes", {f"<{i:02X}>": i for i in range(256)}, None)
        self.starts = lambda: set(range(33))  # control bytes and the space

    def _encode(self, texts: list[str]) -> list[Many[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Many[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class Ids(Encoder):
    """Texts that are lists of token ids."""

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
                f"this index has token ids and knows no tokenizer; expected ids such as "
                f"'5 17 3', got {text[:SHOWN]!r}; open it with a tokenizer to use text"
            ) from None


class Function(Encoder):
    """A function of the caller, from a text to ids."""

    def __init__(self, function: Callable[[str], Many[int]]) -> None:
        super().__init__(getattr(function, "__qualname__", type(function).__name__), None, None)
        self.function = function

    def _encode(self, texts: list[str]) -> list[Many[int]]:
        return [self.function(text) for text in texts]


class TokenizerFile(Encoder):
    """A tokenizer.json, read by the package tokenizers."""

    kind = "file"

    def __init__(self, file: Path, name: str) -> None:
        from tokenizers import Tokenizer

        try:
            self.inner = Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust code raises plain Exception
            raise ModelError(f"cannot load the tokenizer {file}: {error}; restore it") from None
        self.inner.no_truncation()
        self.inner.no_padding()
        super().__init__(name, self.inner.get_vocab(with_added_tokens=True), None)
        self.eos = end_id(file.parent, self.inner.token_to_id)

    def _encode(self, texts: list[str]) -> list[Many[int]]:
        return [e.ids for e in self.inner.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        cache = self._word_cache
        found = [None if cache is None else cache.encode(text) for text in texts]
        others = iter(
            super().encode_arrays([t for t, f in zip(texts, found, strict=True) if f is None])
        )
        return [next(others) if f is None else f for f in found]

    @cached_property
    def _word_cache(self) -> WordCacheEncoder | None:
        return word_cache_encoder(self.inner)

    def decode(self, ids: Many[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.inner.save(str(folder / "tokenizer.json"))
        config = {} if self.eos is None else {"eos_token_id": self.eos}
        (folder / "generation_config.json").write_text(json.dumps(config) + "\n")


class SentencePiece(Encoder):
    """A sentencepiece model."""

    kind = "pieces"

    def __init__(self, file: Path, name: str) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise ConfigError(
                f"{file} needs the package sentencepiece; run pip install sentencepiece"
            ) from None
        try:
            self.inner = SentencePieceProcessor(model_file=str(file))
        except Exception as error:
            raise ModelError(f"cannot load the tokenizer {file}: {error}; restore it") from None
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


class TransformersTokenizer(Encoder):
    """A tokenizer loaded by transformers."""

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
        return SentencePiece(path, spec) if path.suffix == ".model" else TokenizerFile(path, spec)
    if is_fast:
        return TokenizerFile(path / "tokenizer.json", spec)
    if list(path.glob("*")) == [path / "tokenizer.model"]:  # no config: transformers cannot load it
        return SentencePiece(path / "tokenizer.model", spec)
    return TransformersTokenizer(str(path), spec)


def load_saved(folder: Path, row: dict[str, Any]) -> Encoder:
    """The encoder saved in an index, from its manifest entry. Raises DataError for damage."""
    if row["kind"] in ("bytes", "ids"):
        return load(row["kind"])
    if row["kind"] == "function":
        return Ids()
    check_tokenizer_files(folder, row)
    try:
        encoder = load(str(folder / "tokenizer"))
    except ModelError as error:
        raise DataError(f"the index has a damaged tokenizer: {error}") from None
    if row["kind"] == "file" and encoder.fingerprint != row["fingerprint"]:
        raise DataError(
            f"the tokenizer in {folder} is damaged: its vocabulary is not that of the index; "
            "restore it from a copy, or open the index with another tokenizer"
        )
    encoder.name = row["name"]
    return encoder


def fingerprint(vocabulary: dict[str, int]) -> str:
    """A hash of a vocabulary, equal for the same strings at the same ids."""
    text = json.dumps(sorted(vocabulary.items(), key=lambda pair: (pair[1], pair[0])))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def word_starts(vocabulary: dict[str, int]) -> set[int]:
    """Ids of tokens that begin a word: with a leading space, or not alphanumeric."""
    return {i for token, i in vocabulary.items() if token[:1] in "Ġ▁ " or not token[:1].isalnum()}


def end_id(folder: Path, find: Callable[[str], int | None]) -> int | None:
    """The eos id declared in the folder of a tokenizer.json, or that of a common eos name."""
    from forerun.models.end_ids import declared_eos, usable_end_ids

    for found in usable_end_ids(folder, declared_eos(folder)):
        return found
    names = ["<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>"]
    try:
        declared = json.loads((folder / "tokenizer_config.json").read_text()).get("eos_token")
        names.insert(0, declared["content"] if isinstance(declared, dict) else str(declared))
    except (OSError, ValueError, AttributeError, KeyError):
        pass
    return next((i for name in names if (i := find(name)) is not None), None)
