"""Loads a model for a command: notices while it takes long, kernels, and what to expect of it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun import registry
from forerun.cli import options
from forerun.cli._graphs import wants_graphs
from forerun.cli._signals import exit_at_once
from forerun.cli.output import notice

if TYPE_CHECKING:
    from forerun.models.tokenizer import Tokenizer

EARLY_INTERRUPT = "interrupted before anything was begun"
SMALL_BYTES = 16 << 20  # of weights: they stay in the processor's cache, and passes cost little
SLOW_SECONDS = 1.0  # until a notice is printed on a terminal


def load(
    name: str,
    *,
    dtype: str,
    device: str,
    batch: int,
    weights: str = "auto",
    target: str | None = None,
    check: Callable[[Tokenizer], None] | None = None,
) -> Any:
    """The model, with KV cache for at least `batch` sequences. Raises ConfigError, ModelError."""
    options.check_model(name, dtype, device, batch, weights)
    import forerun

    # imports may swallow KeyboardInterrupt
    with notice_if_slow(f"loading {name} ..."), exit_at_once(EARLY_INTERRUPT):
        room = max(batch, registry.DEFAULT_BATCH)
        how: dict[str, Any] = {"dtype": dtype, "device": device, "weights": weights}
        how["graphs"] = wants_graphs()
        loaded = forerun.load(name, max_seqs=room, target=target, check=check, **how)
    from forerun.utils import jit_cache

    jit_cache.watch(notice)
    return loaded


def hint_small(model: Any, drafter: str) -> None:
    """Prints that a very small model gains nothing from drafts, and which command shows a gain."""
    weights = model.target.memory_report().get("weights", SMALL_BYTES)
    if registry.parse(drafter)[0] != "none" and weights < SMALL_BYTES:
        notice(
            f"{Path(model.name).name or 'this model'} is too small to gain from drafts "
            f"({weights / 1e6:.0f} MB of weights), so they may be left out; --controller fixed "
            "always drafts; to see a gain, run: forerun demo"
        )


@contextmanager
def notice_if_slow(text: str) -> Iterator[None]:
    """Prints a text on a terminal if the block takes longer than SLOW_SECONDS."""
    timer = threading.Timer(SLOW_SECONDS, notice, [text])
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def warm_up(model: Any = None, **specs: str) -> None:
    """Compiles the kernels of the parts in use before timing starts."""
    works = [registry.make("verifier", specs.get("verifier", "speculative")).warm_up]
    if model is not None:
        drafter = model.drafter(specs.get("drafter", registry.DEFAULT_DRAFTER))
        works += [model.target.warm_up, partial(drafter.bind, model.target)]
    with compiling():
        for work in works:
            work()


@contextmanager
def compiling(interrupted: str = EARLY_INTERRUPT) -> Iterator[None]:
    """A block that compiles or loads kernels; prints the seconds if any were compiled.

    interrupted: the message of Ctrl-C, which ends the process at once.
    """
    from forerun.utils import jit_cache

    watch, start = jit_cache.watch(notice), time.perf_counter()
    before = watch.num_compiled
    with exit_at_once(interrupted):
        yield
    if watch.num_compiled > before:
        notice(f"compiled in {time.perf_counter() - start:.0f} s")
