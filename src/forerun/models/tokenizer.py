"""Tokenizers: text to ids and back, stop ids, chat templates, incremental detokenization.

A thin wrapper over the tokenizers of transformers, which is imported only when one is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.errors import ModelError, in_a_line
from forerun.models.remote_code import check_code, is_trusted
from forerun.utils.files import SHOWN, check_text
from forerun.utils.version import MADE_BY

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
BROKEN = "\ufffd"  # decoded from an incomplete UTF-8 sequence


class Tokenizer:
    """A model's tokenizer. `eos_ids`: the ids that end a sequence."""

    def __init__(self, inner: Any, eos_ids: Many[int] | None = None) -> None:
        self.inner = inner
        own = as_ids(getattr(inner, "eos_token_id", None))
        self.eos_ids = tuple(dict.fromkeys(own if eos_ids is None else eos_ids))
        backend = getattr(inner, "backend_tokenizer", None)  # the Rust object
        self._decode = getattr(backend, "decode", None) or inner.decode

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
            raise ModelError(
                f"there is no tokenizer in {folder} (none of {', '.join(FILES[:4])}); copy it from "
                "the original model"
            )
        try:
            inner = _class_for(folder).from_pretrained(folder, trust_remote_code=is_trusted())
        except Exception as cause:  # bad JSON, missing files or packages
            check_code(folder, cause)
            if (folder / "config.json").exists():
                read_config(folder)  # raises if the config is at fault
            raise ModelError(
                f"the tokenizer in {folder} cannot be used: {in_a_line(cause)}"
            ) from cause
        return cls(inner, [*as_ids(inner.eos_token_id), *declared_eos(folder)])

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
        return list(self.inner.encode(text, add_special_tokens=special))

    def decode(self, ids: Many[int]) -> str:
        """Text of ids, without special tokens."""
        return self._decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: str | list[dict[str, str]]) -> list[int]:
        """Ids of a conversation or one user message in the model's chat template.

        Raises ModelError if the model has none.
        """
        return self.encode(self.chat_text(messages), special=False)

    def chat_text(self, messages: str | list[dict[str, str]]) -> str:
        """The text of a conversation in the chat template. Raises as `chat`."""
        if not self.has_chat_template:
            raise ModelError("this tokenizer has no chat template; give the prompt as plain text")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return str(
            self.inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )

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


class TextStream:
    """An incremental detokenizer: its joined outputs equal `decode` of all tokens.

    Only a window of the last tokens is decoded again, because a token's text may depend on the
    token before it (leading spaces, bytes of one character).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the window
        self._known = 0  # number of ids of the window with text already returned
        self._text = ""  # the text of these ids

    def push(self, token: int) -> str:
        """The text completed by this token; empty while a character is incomplete."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(BROKEN):
            return ""
        return self._advance(text)

    def extend(self, tokens: Many[int]) -> str:
        """The joined results of `push` for each token."""
        text = self._tokenizer.decode([*self._ids, *tokens])
        if text.endswith(BROKEN):
            return "".join(map(self.push, tokens))
        self._ids += tokens
        return self._advance(text)

    def flush(self) -> str:
        """The remaining text, with incomplete characters as decoded."""
        is_whole = self._known == len(self._ids)
        return "" if is_whole else self._advance(self._tokenizer.decode(self._ids))

    def _advance(self, text: str) -> str:
        piece, start = text[len(self._text) :], self._ids[self._known :]
        tail = self._tokenizer.decode(start) if self._known else text
        if tail:  # else the ids have no text, and the window keeps earlier ids
            self._ids, text = start, tail
        self._known, self._text = len(self._ids), text
        return piece


def declared_eos(folder: Path) -> list[int]:
    """End ids in generation_config.json, else in config.json. Raises ModelError if damaged."""
    from forerun.models.paths import read_json

    for path in (folder / "generation_config.json", folder / "config.json"):
        found = read_json(path).get("eos_token_id") if path.is_file() else None
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
