"""N-gram indexes on a Ray cluster: tasks build the shards, actors search them.

    build(folder, sources, Options(shards=8, workers=4))
    with RayIndex.open(folder, actors=4) as index: index.count_many(queries)

The tasks are those of a local build, so the files are identical, byte for byte. All machines must
see the folders under the same path. Ray retries a task or actor after its process dies, on any
machine; tasks write to separate files, so a retry is safe at any point.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import CapacityError, ConfigError, DataError
from forerun.integrations.ray_batch import MAX_DEATHS, connect, ray_module
from forerun.ngrams.index.build import build as building
from forerun.ngrams.index.build import manifest as store
from forerun.ngrams.index.build.manifest import Manifest
from forerun.ngrams.index.build.shards import open_shards
from forerun.ngrams.index.build.verify import FAST, FULL, OFF
from forerun.ngrams.index.query import documents, results
from forerun.ngrams.index.query.engine import Ids, Index
from forerun.ngrams.index.query.results import Match, Next


def build(
    path: str | Path,
    sources: Many[str | Path],
    options: building.Options | None = None,
    **how: Any,
) -> Manifest:
    """`building.build` with `options.workers` concurrent tasks; `how`: its other arguments."""
    options = options or building.Options()
    path = Path(path).resolve()
    with cluster() as ray:
        call = tasks(ray, path)
        options = replace(options, threads=options.workers)  # each task may be on another machine
        return building.build(path, sources, options, call=call, **how)


@contextmanager
def cluster() -> Iterator[Any]:
    """The package ray, connected to a cluster; a cluster started here is stopped at the end."""
    ray = ray_module()
    is_ours = connect(ray)
    try:
        yield ray
    finally:
        if is_ours:
            ray.shutdown()


def tasks(ray: Any, folder: Path) -> Callable[..., Any]:
    """A caller that runs function(*arguments) as a Ray task and waits; retries if it dies."""
    remote = ray.remote(num_cpus=1, max_retries=MAX_DEATHS - 1)(_run)

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        task = remote.options(name=function.__name__)
        return get_result(ray, task.remote(folder, function, arguments))

    return call


def _run(folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one CPU
    if not folder.is_dir():
        raise DataError(
            f"{folder} does not exist on {platform.node()}; build in a folder that all machines "
            "of the cluster share under the same path"
        )
    return function(*arguments)


def get_result(ray: Any, ref: Any) -> Any:
    """The result of a task or actor call; raises its own exception, CapacityError if it died."""
    lost = ray.exceptions
    try:
        return ray.get(ref)
    except lost.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except (lost.WorkerCrashedError, lost.RayActorError, lost.OutOfMemoryError) as error:
        cause = " ".join(str(error).split())[:200]
        raise CapacityError(
            f"{MAX_DEATHS} processes in a row died on the same task; last error: {cause}; if "
            "memory ran out, use fewer --workers or a smaller --memory. Finished tasks are kept: "
            "run the same command again to resume"
        ) from None


class ShardSearcher:
    """An index of some of the shards; runs in an actor."""

    def __init__(self, path: Path, numbers: list[int], load: bool, verify: str = FAST) -> None:
        manifest = store.read_manifest(path)
        shards = open_shards(path, manifest, load=load, numbers=numbers, verify=verify)
        none = documents.Library([], [], [])  # documents are read in the caller's process
        how: dict[str, Any] = {"library": none, "threads": 1, "numbers": numbers}
        how |= {"path": path, "is_loaded": load}
        self.index = Index(shards, manifest.eos, manifest=manifest, **how)

    def call(self, method: str, *arguments: Any) -> Any:
        """The result of a method of Index."""
        own = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]  # writable copies
        return getattr(self.index, method)(*own)

    def pid(self) -> int:
        """The process id, for diagnosis."""
        return os.getpid()


class RayIndex(Index):
    """An Index with its shards searched by actors, shard i by actor i mod `actors`.

    A batch (`count_many`, `infgram_many`) and a single query both cost one call per actor.
    Documents, passages and CNF queries are read in this process, from the same folder. A `with`
    stops the actors at its end, and the cluster if it was started here.
    """

    actors: list[Any]
    numbers: list[list[int]]  # shards of each actor
    _ray: Any
    _owns_cluster: bool

    @classmethod
    def open(cls, path: str | Path, *, actors: int = 2, load: bool = False, **how: Any) -> RayIndex:
        """The index in a folder. load: read shards into memory. how: as in Index.open."""
        if actors < 1:
            raise ConfigError(f"actors must be at least 1, got {actors}; 2 search in two processes")
        ray, path = ray_module(), Path(path).resolve()
        index = super().open(path, **how)
        assert isinstance(index, RayIndex)
        verify = OFF if how.get("verify") == FULL else how.get("verify", FAST)
        index._ray, index._owns_cluster = ray, connect(ray)
        remote = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=MAX_DEATHS - 1)
        kind = remote(ShardSearcher)
        count, shards = min(actors, len(index.shards)), len(index.shards)
        index.numbers = [list(range(i, shards, count)) for i in range(count)]
        index.actors = [kind.remote(path, numbers, load, verify) for numbers in index.numbers]
        return index

    def __enter__(self) -> RayIndex:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stops the actors, and the cluster if it was started here."""
        for actor in self.actors:
            with suppress(Exception):
                self._ray.kill(actor)
        self.actors = []
        if self._owns_cluster:
            self._ray.shutdown()
            self._owns_cluster = False

    def find(self, query: Ids) -> Match:
        rows = self._batch("find_many", *self._flat([query]), 2)[:, 0].tolist()
        return Match(sum(b - a for a, b in rows), [(a, b) for a, b in rows])

    def count(self, query: Ids) -> int:
        return self.find(query).count

    def longest_suffix(self, context: Ids) -> tuple[int, Match]:
        rows = self._batch("longest_suffixes", *self._flat([context]), 3)[:, 0].tolist()
        best = max(length for length, _, _ in rows)
        intervals = [(a, b) if length == best else (0, 0) for length, a, b in rows]
        return best, Match(sum(b - a for a, b in intervals), intervals)

    def _batch(self, name: str, flat: np.ndarray, starts: np.ndarray, columns: int) -> np.ndarray:
        parts = self._all("_batch", [(name, flat, starts, columns)] * len(self.actors))
        return np.stack(self._in_order([list(part) for part in parts]))

    def _next_tokens(
        self, found: np.ndarray, units: np.ndarray
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        parts = self._all("_next_tokens", [(found[numbers], units) for numbers in self.numbers])
        return self._in_order(parts)

    def _followed(self, intervals: list[tuple[int, int]], whole: np.ndarray, length: int) -> int:
        own = [[intervals[i] for i in numbers] for numbers in self.numbers]
        return sum(self._all("_followed", [(mine, whole, length) for mine in own]))

    def _next(self, match: Match, length: int, max_support: int | None) -> Next:
        unit = results.unit_for(match.count, max_support)
        found = np.array([[(length, a, b)] for a, b in match.intervals], np.int64)
        parts = self._next_tokens(found, np.array([unit], np.int64))
        counted = [(ids, counts) for ids, counts, _ in parts]
        total = match.count
        return results.add_up(self.eos, self.separator, counted, total, length, unit > 1)

    def _all(self, method: str, arguments: Many[tuple[Any, ...]]) -> list[Any]:
        """The results of a method on every actor, run concurrently."""
        refs = [
            actor.call.remote(method, *own)
            for actor, own in zip(self.actors, arguments, strict=True)
        ]
        return [get_result(self._ray, ref) for ref in refs]

    def _in_order(self, parts: list[list[Any]]) -> list[Any]:
        """Results per shard, sorted by shard number."""
        found = {
            number: one
            for numbers, part in zip(self.numbers, parts, strict=True)
            for number, one in zip(numbers, part, strict=True)
        }
        return [found[number] for number in range(len(found))]
