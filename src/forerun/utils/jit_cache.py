"""Which Numba kernels will have to be compiled, a word when that begins, and that it ends well."""

from __future__ import annotations

import importlib
import inspect
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from forerun.utils.signals import answers, uninterrupted

log = logging.getLogger(__name__)

NOTICE = "compiling kernels, once (a minute or several); later runs find them in Numba's cache"
UNKEPT = (
    "compiled kernels cannot be kept in {}: {}; every run will compile them anew. Free some space "
    "there, or set NUMBA_CACHE_DIR to a folder that has some"
)
KERNELS = {  # what decoding enters, by module: compiling these compiles what they call
    "forerun.runner.forward_batch": ("pack", "lay_out"),
    "forerun.controllers._tree_size": ("node_beliefs", "choose"),
    "forerun.ngrams.tables.logits.kernels": ("learn", "look_up"),
    "forerun.ngrams.tables.logits.update": ("follow",),
    "forerun.ngrams.tables.logits.top_k": ("select_rows",),
    "forerun.core.acceptance_prior": ("count",),
    "forerun.growers._merge": ("copy_laws", "overlay"),
    "forerun.ngrams.tables.logits.draft_template": ("fill_places",),
    "forerun.ngrams.tables.logits.draft_dynamic": ("grow_places",),
    "forerun.ngrams.tables.adjacency.cpu": ("fill_rows", "learn_rows"),
    "forerun.ngrams.tables.suffix.kernels": ("append", "remove"),
    "forerun.ngrams.tables.suffix.draft": ("speculate",),
    "forerun.ngrams.tables.suffix.automaton_kernels": ("extend", "listen", "refresh", "look"),
    "forerun.ngrams.index.query.kernels": ("longest_of", "next_tokens", "next_tokens_many"),
    "forerun.ngrams.index.query.continuation_kernels": ("likeliest", "retrieve"),
    "forerun.ngrams.index.query.draft": ("fill_places",),
    "forerun.ngrams.tables.trigram.kernels": ("nudge",),
    "forerun.ngrams.tables.trigram.mcts": ("fill_tree",),
    "forerun.ngrams.index.counts.trie": ("descend", "shares"),
    "forerun.verifiers._gpu": ("measure", "holds", "plant"),
    "forerun.verifiers._rejection": ("judge",),
    "forerun.verifiers.k_seq": ("division_factor",),
    "forerun.verifiers.transport": ("judge",),
}


class Watch:
    """Hears of every kernel of ours that is compiled in this process; says things once."""

    def __init__(self) -> None:
        self.say: Callable[[str], object] | None = None
        self.num_compiled = 0
        self._told: set[str] = set()
        self._held = list[ExitStack]()  # Ctrl-C, of every kernel under way: one may call another

    def begins(self, cache: Any) -> None:
        """A kernel is about to be compiled, and then kept in its cache."""
        self.num_compiled += 1
        if self.say:
            self._tell(self.say, NOTICE)
        self._keep(cache)
        self._held.append(ExitStack())
        if signal.default_int_handler in answers().values():
            self._held[-1].enter_context(uninterrupted())

    def ends(self) -> None:
        """It is kept, or could not be compiled."""
        if self._held:
            self._held.pop().close()

    def _keep(self, cache: Any) -> None:
        """Makes a kernel's cache one that may fail to write: the kernel runs all the same."""
        write = type(cache).save_overload

        def save_overload(*compiled: Any) -> None:
            try:
                write(cache, *compiled)
            except OSError as error:  # a full disk, say
                said = cache.cache_path, error.strerror or error
                self._tell(self.say or log.warning, UNKEPT, *said)
            finally:
                self.ends()

        cache.save_overload = save_overload

    def _tell(self, say: Callable[[str], object], text: str, *details: object) -> None:
        if text not in self._told:
            self._told.add(text)
            say(text.format(*details))


@cache
def attend() -> Watch:
    """The one of this process; Numba tells it of compilations, not of what its cache holds.

    Ctrl-C and its kin wait until one is kept, if any of them raises KeyboardInterrupt: callbacks
    of the compiler would drop it, and leave a kernel that cannot be. Else nothing waits.
    """
    from numba.core import event

    found = Watch()

    class Listener(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            if _is_ours(event):
                found.begins(event.data["dispatcher"]._cache)

        def on_end(self, event: Any) -> None:
            is_made = tuple(event.data["args"]) in event.data["dispatcher"].overloads
            if _is_ours(event) and not is_made:  # else it is kept next
                found.ends()

    event.register("numba:compile", Listener())
    return found


def _is_ours(event: Any) -> bool:
    return bool(event.data["dispatcher"].py_func.__module__.startswith("forerun."))


def watch(say: Callable[[str], object]) -> Watch:
    """From the first call on, whoever calls first says when a kernel has to be compiled."""
    found = attend()
    found.say = found.say or say
    return found


def cold() -> list[str]:
    """The kernels of decoding, as module.name, that are not compiled and not in the cache.

    Raises ConfigError where nothing can be compiled.
    """
    importlib.import_module("forerun.utils.jit")
    return [
        f"{module.rpartition('.')[2]}.{name}"
        for module, names in KERNELS.items()
        for name in names
        if not is_ready(getattr(importlib.import_module(module), name))
    ]


def is_ready(kernel: Any) -> bool:
    """Whether a kernel is compiled in this process, or cached from its source as it is now."""
    return bool(kernel.signatures) or any(
        index.stat().st_mtime >= Path(inspect.getfile(kernel.py_func)).stat().st_mtime
        for index in indices(kernel)
    )


def indices(kernel: Any) -> list[Path]:
    """Cache index files of a kernel for this Python: module.name-LINE.pyXY.nbi."""
    if kernel.stats.cache_path is None:  # compiled anew in every process
        return []
    function = kernel.py_func
    line = function.__code__.co_firstlineno
    stem = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}-{line}"
    version = f"py{sys.version_info.major}{sys.version_info.minor}"
    return list(Path(kernel.stats.cache_path).glob(f"{stem}.{version}*.nbi"))
