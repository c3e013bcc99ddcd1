"""Which Numba kernels will have to be compiled, and a word when that begins."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

NOTICE = "compiling kernels, once (up to a minute); later runs find them in Numba's cache"
KERNELS = {  # what decoding enters, by module: compiling these compiles what they call
    "forerun.engine.work": ("pack", "lay_out"),
    "forerun.choosing": ("believe", "choose"),
    "forerun.ngrams.kernels": ("teach", "learn", "look_up"),
    "forerun.ngrams.selecting": ("select_rows",),
    "forerun.chances": ("count",),
    "forerun.overlay": ("copy_laws", "overlay"),
    "forerun.ngrams.drafting": ("fill_places",),
    "forerun.ngrams.growing": ("grow_places",),
    "forerun.ngrams.adjacency": ("fill_rows", "learn_rows"),
    "forerun.ngrams.suffix_kernels": ("append", "remove"),
    "forerun.ngrams.suffix_drafting": ("speculate",),
    "forerun.ngrams.automaton_kernels": ("extend", "listen", "refresh", "look"),
    "forerun.ngrams.searching": ("longest_of", "next_tokens", "next_tokens_many"),
    "forerun.ngrams.retrieval_kernels": ("likeliest", "retrieve"),
    "forerun.ngrams.infini_drafting": ("fill_places",),
    "forerun.ngrams.trigram_kernels": ("nudge",),
    "forerun.ngrams.tree_search": ("fill_tree",),
    "forerun.ngrams.ngram_model": ("descend", "shares"),
    "forerun.tensor_walk": ("measure", "holds", "plant"),
    "forerun.verifiers.speculative": ("judge",),
    "forerun.verifiers.k_seq": ("division_factor",),
    "forerun.verifiers.transport": ("judge",),
}


class Watch:
    """Hears of every kernel of ours that is compiled in this process; says so of the first."""

    say: Callable[[str], object] | None = None
    num_compiled = 0

    def begins(self) -> None:
        """A kernel is about to be compiled."""
        self.num_compiled += 1
        if self.num_compiled == 1 and self.say:
            self.say(NOTICE)


@cache
def _watch() -> Watch:
    """The one of this process; Numba tells it of compilations, not of what its cache holds."""
    from numba.core import event

    found = Watch()

    class Listener(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            if event.data["dispatcher"].py_func.__module__.startswith("forerun."):
                found.begins()

        def on_end(self, event: Any) -> None:
            pass

    event.register("numba:compile", Listener())
    return found


def watch(say: Callable[[str], object]) -> Watch:
    """From the first call on, whoever calls first says when a kernel has to be compiled."""
    found = _watch()
    found.say = found.say or say
    return found


def cold() -> list[str]:
    """The kernels of decoding, as module.name, that are not compiled and not in the cache.

    Raises ConfigError where nothing can be compiled.
    """
    importlib.import_module("forerun.jit")
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
