"""Which Numba kernels will have to be compiled, a word when that begins, and that it ends well."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

NOTICE = "compiling kernels, once (a minute or several); later runs find them in Numba's cache"
UNKEPT = (
    "compiled kernels cannot be kept in {}: {}; every run compiles them again. Free some space "
    "there, or set NUMBA_CACHE_DIR to a folder that has some"
)
KERNELS = {  # what decoding enters, by module: compiling these compiles what they call
    "forerun.runner.forward_batch": ("pack", "lay_out"),
    "forerun.controllers._tree_size": ("node_estimates", "choose"),
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
    """Counts our kernels that are compiled in this process, and says so once."""

    def __init__(self) -> None:
        self.say: Callable[[str], object] | None = None
        self.num_compiled = 0
        self._said: set[str] = set()

    def begins(self, cache: Any) -> None:
        """A kernel is about to be compiled, and then kept in its cache."""
        self.num_compiled += 1
        if self.say:
            self._say_once(self.say, NOTICE)
        self._keep(cache)

    def _keep(self, cache: Any) -> None:
        """Makes a kernel's cache one that may fail to write: the kernel runs all the same."""
        write = type(cache).save_overload

        def save_overload(*compiled: Any) -> None:
            try:
                write(cache, *compiled)
            except OSError as error:  # a full disk, say
                said = cache.cache_path, error.strerror or error
                self._say_once(self.say or log.warning, UNKEPT, *said)

        cache.save_overload = save_overload

    def _say_once(self, say: Callable[[str], object], text: str, *details: object) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text.format(*details))


@cache
def attend() -> Watch:
    """The watch of this process. Numba reports compilations to it, not kernels from its cache."""
    from numba.core import event

    found = Watch()

    class Listener(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            if _is_ours(event):
                found.begins(event.data["dispatcher"]._cache)

        def on_end(self, event: Any) -> None:
            """Nothing to do; Numba asks for it."""

    event.register("numba:compile", Listener())
    return found


def _is_ours(event: Any) -> bool:
    return bool(event.data["dispatcher"].py_func.__module__.startswith("forerun."))


def watch(say: Callable[[str], object]) -> Watch:
    """From now on the first caller's `say` announces that kernels are compiled."""
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
