"""Whether Python code that comes with a checkpoint may run; the default is no."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from forerun.errors import ModelError

_is_trusted: ContextVar[bool] = ContextVar("trust_remote_code", default=False)
_is_default = False  # of this process: --trust-remote-code


def trust_all() -> None:
    """Lets the code of every checkpoint run that this process loads."""
    global _is_default
    _is_default = True


def is_trusted() -> bool:
    """The value of `trust_remote_code` for transformers."""
    return _is_default or _is_trusted.get()


@contextmanager
def trusting(is_allowed: bool) -> Iterator[None]:
    """Lets the code of checkpoints run that are loaded in the block, if allowed."""
    token = _is_trusted.set(is_allowed or _is_trusted.get())
    try:
        yield
    finally:
        _is_trusted.reset(token)


def check_code(folder: Path | str | None, cause: Exception) -> None:
    """Raises ModelError if loading failed because code of the checkpoint was not run."""
    if not is_trusted() and "trust_remote_code" in str(cause):
        raise ModelError(
            f"{folder} needs Python code of its own, which is not run; read its .py files, and if "
            "you trust them use --trust-remote-code, or trust_remote_code=True in forerun.load"
        ) from None
