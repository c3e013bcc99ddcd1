"""What `index.py` and `index_peer.py` share: queries timed one by one, cold and cached.

Standard library only: the peer's interpreter may have nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any


def drop_cache(folder: Path) -> None:
    """Asks the system to forget the pages of all files of a folder."""
    for file in (path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(ask: Callable[[Any], Any], queries: list[list[int]]) -> tuple[list[float], list[Any]]:
    """Microseconds and answer of every query."""
    times, answers = [], []
    for query in queries:
        start = perf_counter()
        answer = ask(query)
        times.append(1e6 * (perf_counter() - start))
        answers.append(answer)
    return times, answers


def cold_and_warm(
    name: str, open_index: Callable[[], Callable[[Any], Any]], folder: Path, queries: dict[str, Any]
) -> dict[str, Any]:
    """Times of one kind of query on forgotten files and then on cached ones, and the answers."""
    drop_cache(folder)  # while no mapping holds the pages
    ask = open_index()
    cold, answers = timed(ask, queries[name])
    timed(ask, queries[name])
    warm, _ = timed(ask, queries[name])
    return {name: answers, f"{name} cold": cold, f"{name} warm": warm}
