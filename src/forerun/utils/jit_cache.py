"""Which Numba kernels are not compiled yet, and a notice when compilation starts."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cache
from pickle import UnpicklingError
from typing import Any

log = logging.getLogger(__name__)

NOTICE = "compiling kernels, once (a minute or several); later runs load them from Numba's cache"
CACHE_WRITE_FAILED = (
    "cannot save compiled kernels in {}: {}; every run compiles them again. Free some space "
    "there, or set NUMBA_CACHE_DIR to a folder that has some"
)
KERNELS = {  # entry points of decoding by module; compiling these compiles what they call
    "forerun.runner.forward_batch": ("pack", "lay_out"),
    "forerun.controllers._tree_size": ("node_estimates", "choose"),
    "forerun.ngrams.tables.logits.kernels": ("learn", "look_up"),
    "forerun.ngrams.tables.logits.top_k": ("select_top",),
    "forerun.core.acceptance_prior": ("count",),
    "forerun.growers._merge": ("copy_laws", "overlay"),
    "forerun.ngrams.tables.logits.draft_template": ("fill_places",),
    "forerun.ngrams.tables.logits.draft_dynamic": ("grow_places",),
    "forerun.ngrams.tables.adjacency.cpu": ("fill_rows", "learn_rows"),
    "forerun.ngrams.tables.suffix.kernels": ("append", "remove"),
    "forerun.ngrams.tables.suffix.draft": ("speculate",),
    "forerun.ngrams.tables.suffix.automaton_kernels": (
        "extend",
        "move_cursor",
        "refresh",
        "read_match",
    ),
    "forerun.ngrams.index.query.kernels": ("longest_of", "next_tokens", "next_tokens_many"),
    "forerun.ngrams.index.query.continuation_kernels": ("likeliest", "retrieve"),
    "forerun.ngrams.index.query.draft": ("fill_places",),
    "forerun.ngrams.tables.trigram.kernels": ("nudge",),
    "forerun.ngrams.tables.trigram.mcts": ("fill_tree",),
    "forerun.ngrams.index.counts.trie": ("descend", "shares"),
    "forerun.verifiers._gpu": ("tree_sizes", "has_valid_nodes", "fill_forest"),
    "forerun.verifiers._rejection": ("judge_node",),
    "forerun.verifiers.k_seq": ("division_factor",),
    "forerun.verifiers.transport": ("judge_node",),
}


class CompileWatcher:
    """Counts the kernels of forerun that this process compiles, and announces the first."""

    def __init__(self) -> None:
        self.notify: Callable[[str], object] | None = None
        self.num_compiled = 0
        self._notified: set[str] = set()

    def on_compile(self, cache: Any) -> None:
        """Called before a kernel is compiled and saved in its cache."""
        self.num_compiled += 1
        if self.notify:
            self._notify_once(self.notify, NOTICE)
        self._tolerate_write_errors(cache)

    def _tolerate_write_errors(self, cache: Any) -> None:
        """Lets a kernel run if its cache cannot be written; the user gets one message."""
        write = type(cache).save_overload

        def save_overload(*compiled: Any) -> None:
            try:
                write(cache, *compiled)
            except OSError as error:
                details = cache.cache_path, error.strerror or error
                self._notify_once(self.notify or log.warning, CACHE_WRITE_FAILED, *details)

        cache.save_overload = save_overload

    def _notify_once(self, notify: Callable[[str], object], text: str, *details: object) -> None:
        if text not in self._notified:
            self._notified.add(text)
            notify(text.format(*details))


@cache
def compile_watcher() -> CompileWatcher:
    """The watcher of this process. Numba reports compilations to it, but not cache loads."""
    from numba.core import event

    found = CompileWatcher()

    class Listener(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            if _is_ours(event):
                found.on_compile(event.data["dispatcher"]._cache)

        def on_end(self, event: Any) -> None:
            """Required by Numba; does nothing."""

    event.register("numba:compile", Listener())
    ignore_stale_indexes()
    return found


def ignore_stale_indexes() -> None:
    """Makes Numba recompile a kernel if its cache index names types that no longer exist.

    An index pickles the named tuples of its signatures. After an upgrade that renames one, Numba
    would raise the AttributeError of unpickling.
    """
    from numba.core.caching import IndexDataCacheFile

    load = IndexDataCacheFile._load_index

    def load_index(self: Any) -> dict[Any, str]:
        try:
            return load(self)
        except (AttributeError, ImportError, EOFError, UnpicklingError):
            return {}

    IndexDataCacheFile._load_index = load_index  # type: ignore[method-assign]


def _is_ours(event: Any) -> bool:
    return bool(event.data["dispatcher"].py_func.__module__.startswith("forerun."))


def watch(notify: Callable[[str], object]) -> CompileWatcher:
    """Announces compilations with `notify`; only the first caller's is used."""
    found = compile_watcher()
    found.notify = found.notify or notify
    return found


def uncompiled_kernels() -> list[str]:
    """The kernels of decoding, as module.name, that are neither compiled nor in the cache.

    Raises ConfigError if Numba's compiler is disabled.
    """
    importlib.import_module("forerun.utils.jit")
    return [
        f"{module.rpartition('.')[2]}.{name}"
        for module, names in KERNELS.items()
        for name in names
        if not is_ready(getattr(importlib.import_module(module), name))
    ]


def is_ready(kernel: Any) -> bool:
    """Whether a kernel is compiled in this process, or cached from its current sources."""
    file = getattr(kernel._cache, "_cache_file", None)
    return bool(kernel.signatures) or (file is not None and bool(file._load_index()))
