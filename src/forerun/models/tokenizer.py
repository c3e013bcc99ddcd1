"""Tokenizers: text to ids and back, stop ids, chat templates.

A thin wrapper over the tokenizers of transformers, which is imported only when it is needed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from collections.abc import Sequence as Many
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, ModelError, in_a_line
from forerun.models.chat_template import TemplateError, rendered
from forerun.models.downloads import repair
from forerun.models.end_ids import as_ids, declared_eos, usable_end_ids, within
from forerun.models.remote_code import check_code, is_trusted
from forerun.models.text_stream import TextStream, TokenPieces
from forerun.models.token_bytes import ByteRule
from forerun.utils.files import SHOWN, check_text
from forerun.utils.version import MADE_BY

__all__ = ["TextStream", "Tokenizer", "as_ids", "declared_eos"]

log = logging.getLogger("forerun")

FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
)


class Tokenizer:
    """A model's tokenizer. `eos_ids`: the ids that end a sequence."""

    def __init__(self, inner: Any, eos_ids: Many[int] | None = None) -> None:
        self.inner = inner
        own = as_ids(getattr(inner, "eos_token_id", None))
        self.eos_ids = tuple(dict.fromkeys(own if eos_ids is None else eos_ids))
        self._has_warned_of_bos = False
        self._token_bytes: dict[int, list[bytes | None]] = {}  # by vocabulary size
        self._backend: Any = getattr(inner, "backend_tokenizer", None)  # the Rust object

    @classmethod
    def load(cls, model: Any) -> Tokenizer:
        """The tokenizer of a folder, a hub id or a loaded transformers model.

        Raises ModelError if it is missing or cannot be read.
        """
        name = model if isinstance(model, str | Path) else _origin(model)
        from forerun.models.paths import TOKENIZER, model_folder, read_config

        folder = model_folder(name, TOKENIZER)
        if not any((folder / file).exists() for file in FILES):
            if not (folder / "config.json").exists():
                read_config(folder)  # raises: no model
            advice = repair(folder, "copy it from the original model")
            raise ModelError(
                f"there is no tokenizer in {folder} (none of {', '.join(FILES[:4])}); {advice}"
            )
        try:
            inner = _inner(folder)
        except Exception as cause:  # bad JSON, missing files or packages
            check_code(folder, cause)
            if (folder / "config.json").exists():
                read_config(folder)  # raises if the config is at fault
            is_missing = isinstance(cause, ImportError)
            advice = "install the missing package" if is_missing else repair(folder)
            raise ModelError(
                f"the tokenizer in {folder} cannot be used: {in_a_line(cause)}; {advice}"
            ) from cause
        ids = [*as_ids(inner.eos_token_id), *declared_eos(folder)]
        return cls(inner, usable_end_ids(folder, ids))

    def drop_end_ids(self, vocab_size: int) -> None:
        """Drops end ids that the model cannot emit, with a warning."""
        self.eos_ids = tuple(within(vocab_size, self.eos_ids, "the tokenizer's end ids"))

    @property
    def vocab_size(self) -> int:
        """Number of ids, including added tokens."""
        return len(self.inner)

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.inner, "chat_template", None))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text. special: adds special tokens such as bos.

        Raises DataError for text that is not valid UTF-8.
        """
        check_text(repr(text[:SHOWN]), text)
        ids = list(self.inner.encode(text, add_special_tokens=special))
        bos = getattr(self.inner, "bos_token_id", None)
        if special and not self._has_warned_of_bos and bos is not None and ids[:2] == [bos, bos]:
            self._has_warned_of_bos = True
            log.warning(
                "the prompt begins with %r, and the tokenizer adds another one; leave it out of "
                "the text, or pass token ids (logged once)",
                self.inner.bos_token,
            )
        return ids

    def encode_inside(self, text: str) -> list[int]:
        """Ids of a text that follows other text: without special tokens and a prefix space."""
        before = "\n"
        first, ids = self.encode(before, special=False), self.encode(before + text, special=False)
        is_split = ids[: len(first)] == first
        return ids[len(first) :] if is_split else self.encode(text, special=False)

    def decode(self, ids: Many[int], context: Many[int] = ()) -> str:
        """Text of ids that follow `context`, without special tokens."""
        stream = TextStream(self, context)
        return stream.extend(ids) + stream.flush()

    def decode_inside(self, ids: Many[int]) -> str:
        """Text of ids within a text: a leading space stays."""
        stream = TextStream(self)
        stream.begin_inside()
        return stream.extend(ids) + stream.flush()

    def decode_plain(self, ids: list[int]) -> str:
        """The text by the tokenizer's own decoder; it may change if more ids follow."""
        decode = getattr(self._backend, "decode", None) or self.inner.decode
        return decode(ids, skip_special_tokens=True)

    @cached_property
    def pieces(self) -> TokenPieces | None:
        """The bytes of every token; None if they depend on other tokens."""
        if not hasattr(self._backend, "id_to_token"):
            return None
        rule = ByteRule.of(self._backend.decoder)
        return None if rule is None else TokenPieces(self._backend, rule)

    def token_bytes(self, vocab_size: int) -> list[bytes | None]:
        """The bytes of each token within a text; None for special tokens and ids without a token.

        Raises ConfigError if the bytes of a token depend on other tokens.
        """
        if self.pieces is None:
            raise ConfigError(
                "the text of this tokenizer's tokens depends on other tokens, so constraints on "
                "the text cannot be applied"
            )
        if vocab_size not in self._token_bytes:
            self._token_bytes[vocab_size] = [
                None if token in self.specials else self.pieces(token)
                for token in range(vocab_size)
            ]
        return self._token_bytes[vocab_size]

    @cached_property
    def specials(self) -> Mapping[int, str]:
        """Special tokens by id; they have no text."""
        added = getattr(self._backend, "get_added_tokens_decoder", None)
        if added is not None:
            return {i: token.content for i, token in added().items() if token.special}
        ids = getattr(self.inner, "all_special_ids", ())
        return dict(zip(ids, getattr(self.inner, "all_special_tokens", ()), strict=False))

    def chat(self, messages: str | list[dict[str, str]]) -> list[int]:
        """Ids of a conversation or one user message in the model's chat template.

        Raises TemplateError if the model has none, or it fails on these messages.
        """
        return self.encode(self.chat_text(messages), special=False)

    def chat_text(
        self, messages: str | list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> str:
        """The text of a conversation in the chat template, with tools. Raises as `chat`."""
        if not self.has_chat_template:
            raise TemplateError(
                "this tokenizer has no chat template; give the prompt as plain text"
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        more = {"tools": tools} if tools else {}
        return rendered(self.inner, messages, add_generation_prompt=True, **more)

    def vocabulary(self) -> dict[str, int]:
        """Token strings and their ids."""
        return self.inner.get_vocab()


def _origin(model: Any) -> str:
    """The name or path of a loaded transformers model. Raises ModelError for another object."""
    config = getattr(model, "config", None)
    if config is None:
        raise ModelError(
            f"expected a folder, a hub id or a transformers model, got {model!r}; omit it for the "
            "embedded reasoner"
        )
    return str(config._name_or_path)


def _inner(folder: Path) -> Any:
    """The tokenizer object: of transformers, or one that gives the same without importing it."""

    def load() -> Any:
        return _class_for(folder).from_pretrained(folder, trust_remote_code=is_trusted())

    if is_trusted() or not (folder / "tokenizer.json").is_file():
        return load()
    from forerun.models.light_tokenizer import light_tokenizer, write_record

    found = light_tokenizer(folder, load)
    if found is not None:
        return found
    inner = load()
    write_record(folder, inner)
    return inner


def _class_for(folder: Path) -> Any:
    """The class with the `from_pretrained` for a tokenizer folder.

    For a llama with the general tokenizer class, AutoTokenizer returns the same class but imports
    the model code first, which takes seconds. A folder that we wrote is complete in tokenizer.json;
    a model-specific class would change it.
    """
    with suppress(Exception):  # transformers reports the error below
        config = json.loads((folder / "tokenizer_config.json").read_text())
        is_general = (
            config["tokenizer_class"] == "PreTrainedTokenizerFast" and "auto_map" not in config
        )
        is_llama = json.loads((folder / "config.json").read_text())["model_type"] == "llama"
        is_ours = config.get("made_by") == MADE_BY
        if is_general and (is_llama or is_ours) and (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer
