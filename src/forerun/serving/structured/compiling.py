"""Compiles the constraints of requests, so that none delays others or ends the server.

Some grammars take a compiler minutes, or overflow its stack. So a constraint is compiled in a
worker process first, with a time limit, and in this process only if that succeeded.
"""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from forerun.api import Model
from forerun.constraints._compiled import EMPTY, cache_owner, vocabulary_of
from forerun.constraints._request import prepared
from forerun.constraints.asap import AsapMemory
from forerun.constraints.base import Constraint
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, DataError, ForerunError, in_a_line
from forerun.serving.errors import ApiError, bad
from forerun.serving.structured.fields import Wanted
from forerun.serving.text_workers import COMPILE, TextWorkers

MAX_TRIED = 1024  # constraints that are known to compile
TRIAL_STACK_BYTES = 1 << 20  # less than any thread of the server has
RELATED = "constraint_start", "constraint_sampling"  # fields that an error may name

Compile = Callable[[Constraint], None]


def compiler(model: Model) -> Compile:
    """A function that tries whether a constraint compiles, for a worker process.

    It raises DataError or ConfigError if not. Call this before workers are forked: it prepares the
    vocabulary, which they then share.
    """
    tokenizer, vocab_size = model.tokenizer, model.target.vocab_size
    if tokenizer.eos_ids:
        with suppress(ConfigError):  # requests with a grammar get it
            vocabulary_of(tokenizer, vocab_size)

    def attempt(constraint: Constraint) -> None:
        bound = constraint.bind(tokenizer, vocab_size)
        if (state := bound.begin(b"")) is None:
            return
        can_begin = bound.allowed(state).any()
        if error := bound.error(state):
            raise DataError(error)
        if not can_begin:
            raise DataError(EMPTY)

    return lambda constraint: _on_small_stack(lambda: attempt(constraint))


def _on_small_stack(work: Callable[[], None]) -> None:
    """Runs `work` in a thread with less stack than the server's. Raises DataError, ConfigError."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # panics of llguidance are no Exception
            errors.append(error)

    before = threading.stack_size(TRIAL_STACK_BYTES)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    for error in errors:
        raise error if isinstance(error, ForerunError) else DataError(in_a_line(error))


class Compiler:
    """Makes the sampling parameters of requests with constraints."""

    def __init__(self, model: Model, texts: TextWorkers, seconds: float) -> None:
        self._model, self._texts, self._seconds = model, texts, seconds
        self._tried: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(
        self,
        sampling: Sampling,
        own: Wanted | None,
        parts: list[Wanted],
        hard: list[Constraint],
        tenant: str,
        memory: AsapMemory | None = None,
        law: str = "",
    ) -> Sampling:
        """The parameters with the constraint `own` and those of the operator, compiled.

        parts: constraints that `own` consists of, to name the one with a mistake. memory, law: see
        `prepared`. Raises ApiError.
        """
        if own is not None:
            with self._texts.deadline(self._seconds):
                self._check(own, parts, tenant)
            sampling = replace(sampling, constraint=own.constraint)
        token = cache_owner.set(tenant)
        try:
            vocab_size = self._model.target.vocab_size
            return prepared(sampling, hard, self._model.tokenizer, vocab_size, memory, law)
        except (ConfigError, DataError) as error:
            param = next((name for name in RELATED if name in str(error)), own and own.param)
            raise bad(str(error), param) from None
        finally:
            cache_owner.reset(token)

    def _check(self, own: Wanted, parts: list[Wanted], tenant: str) -> None:
        """Compiles a constraint in a worker. Raises ApiError 400 with the field at fault."""
        try:
            self._attempt(own, tenant)
        except ApiError:
            for part in parts:
                self._attempt(part, tenant)
            raise

    def _attempt(self, wanted: Wanted, tenant: str) -> None:
        key = hashlib.sha256(tenant.encode() + b"\0" + pickle.dumps(wanted.constraint)).digest()
        with self._lock:
            if key in self._tried:
                self._tried.move_to_end(key)
                return
        param = wanted.param
        try:
            self._texts.call(COMPILE, wanted.constraint)
        except (ConfigError, DataError) as error:
            raise bad(f"{param}: {error}", param) from None
        except ApiError as error:
            if error.status == 400:
                raise bad(f"{param}: {error.message}", param, error.code) from None
            raise
        with self._lock:
            self._tried[key] = None
            if len(self._tried) > MAX_TRIED:
                self._tried.popitem(last=False)
