"""A constraint in Python: any test of a text's beginning.

Such a test sees one text at a time, so masking tests every token of the vocabulary. Sampling by
AWRS (`constraints/awrs.py`) tests only the tokens that it draws.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from forerun.constraints.base import Constraint
from forerun.core.records import Sequence
from forerun.errors import ConfigError, DataError, in_a_line
from forerun.registry import File

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

Test = Callable[[bytes], bool]


class Prefix(NamedTuple):
    """The bytes generated so far. errors: of the predicate, shared by the states of a sequence."""

    text: bytes
    errors: list[str]
    has_ended: bool = False


class Predicate(Constraint):
    """Allows texts by two functions of their bytes in UTF-8.

    prefix(text) must be true unless no allowed text begins so; it may see part of a character.
    complete(text): whether the text may end here; default `prefix`. file: a Python file that
    defines `prefix`, and `complete` if it differs. An exception of either counts as False; the
    first one of a text is reported. Raises ConfigError for a function that does not take one text.
    """

    has_cheap_mask = False

    def __init__(
        self,
        prefix: Test | None = None,
        complete: Test | None = None,
        *,
        file: File | None = None,
    ) -> None:
        if (prefix is None) == (file is None):
            raise ConfigError("a predicate needs a function `prefix` or a file, one of the two")
        if file is not None:
            prefix, complete = _functions_of(Path(file))
        assert prefix is not None
        self.prefix, self.complete = prefix, prefix if complete is None else complete
        where = f" of {file}" if file is not None else ""
        for name in ("prefix", "complete"):
            _check_test(f"{name}{where}", getattr(self, name))
        self._pieces: list[bytes | None] = []

    def bind(self, tokenizer: Tokenizer, vocab_size: int) -> Self:
        bound = super().bind(tokenizer, vocab_size)
        bound._pieces = tokenizer.token_bytes(vocab_size)
        return bound

    def start(self, seq: Sequence) -> Prefix:
        state = Prefix(b"", [])
        for token in seq.generated:
            state = self.advance(state, token)
        return state

    def advance(self, state: Prefix, token: int) -> Prefix:
        if state.has_ended or token in self.eos_ids:
            return state._replace(has_ended=True)
        return state._replace(text=state.text + (self._pieces[token] or b""))

    def allowed(self, state: Prefix) -> np.ndarray:
        return np.array([self.allows(state, token) for token in range(len(self._pieces))])

    def allows(self, state: Prefix, token: int) -> bool:
        if token in self.eos_ids:
            return self.is_complete(state)
        piece = self._pieces[token]
        if not piece or state.has_ended:
            return False
        return self._holds(self.prefix, state.text + piece, state.errors)

    def error(self, state: Prefix) -> str:
        return state.errors[0] if state.errors else ""

    def begin(self, text: bytes) -> Prefix | None:
        errors: list[str] = []
        can_begin = not text or self._holds(self.prefix, text, errors)
        return Prefix(text, errors) if can_begin else None

    def is_complete(self, state: Prefix) -> bool:
        return self._holds(self.complete, state.text, state.errors)

    def _holds(self, test: Test, text: bytes, errors: list[str]) -> bool:
        try:
            return bool(test(text))
        except Exception as error:
            if not errors:
                errors.append(f"{type(error).__name__}: {in_a_line(error)}")
            return False


def _check_test(name: str, test: Any) -> None:
    """Raises ConfigError unless `test` can be called with a text."""
    fix = f"write {name.partition(' ')[0]}(text: bytes) -> bool"
    if not callable(test):
        raise ConfigError(f"{name} must be a function of the text's bytes, got {test!r:.80}; {fix}")
    if inspect.iscoroutinefunction(test):
        raise ConfigError(f"{name} is an async function, which returns no bool; {fix}")
    try:
        signature = inspect.signature(test)
    except (TypeError, ValueError):  # some functions in C have none
        return
    try:
        signature.bind(b"")
    except TypeError as error:
        raise ConfigError(
            f"{name} is called with the text's bytes alone, but takes {signature}: {error}; {fix}"
        ) from None


def _functions_of(file: Path) -> tuple[Test, Test | None]:
    """`prefix` and `complete` of a Python file. Raises DataError."""
    try:
        spec = importlib.util.spec_from_file_location("forerun_predicate", file)
        assert spec is not None and spec.loader is not None, "it is no .py file"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.prefix, getattr(module, "complete", None)
    except Exception as error:
        raise DataError(
            f"{file} gives no predicate ({type(error).__name__}: {in_a_line(error)}); define "
            "prefix(text: bytes) -> bool in it"
        ) from None
