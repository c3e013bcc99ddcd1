"""Batch generation on a Ray cluster: one engine per actor, lost work is retried.

    with ActorPool(setup, actors=4) as pool:
        for index, samples in pool.results(requests): ...

Each actor holds the whole model and its own drafter. Samples are those of a local run: random
numbers depend on the seed, the index of the prompt in the whole batch, and the sample index.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from forerun import registry
from forerun.core.mixins import Persistent
from forerun.core.records import Snapshot
from forerun.errors import CapacityError, ConfigError, install_extra
from forerun.integrations.ray_worker import Request, Setup, Worker
from forerun.state.drafter_files import MemoryFile

if TYPE_CHECKING:
    from forerun.engine.generation import Sample

MAX_DEATHS = 3  # actors lost on one piece of work, or in a row while they start
FILLS_PER_PIECE = 4  # batches per piece of work; the last batch of a piece runs half empty
MAX_CHECKED = 1000  # prompts per validation call
NOTICE_SECONDS = 60.0  # waiting for the first actor before the user gets a message
STOP_SECONDS = 30.0  # for actors to finish their step
log = logging.getLogger("forerun")


class Job(NamedTuple):
    """The current work of an actor: a piece, or None while it loads its model."""

    actor: Any
    piece: tuple[Request, ...] | None


def ray_module(what: str = "--engine ray") -> Any:
    """The package ray. Raises ConfigError if it is not installed."""
    try:
        import ray
    except ImportError:
        raise ConfigError(
            f"{what} needs Ray, which is not installed; {install_extra('ray')}"
        ) from None
    return ray


def connect(ray: Any) -> bool:
    """Joins a running cluster or starts one on this machine; returns whether it started one."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the default 15 starves under other load
    try:
        ray.init(include_dashboard=False, **quiet)
    except ValueError:  # a running cluster rejects the dashboard option
        ray.init(**quiet)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster answers at RAY_ADDRESS ({error}); start it with `ray start --head`, "
            "or unset RAY_ADDRESS to start one on this machine"
        ) from None
    return True


def share(held: Many[float], actors: int) -> float:
    """The largest equal share per actor of the nodes' units: whole units, else 1/2, 1/3, ..."""
    for units in range(int(max(held, default=0)), 0, -1):
        if sum(size // units for size in held) >= actors:
            return float(units)
    total = sum(int(size) for size in held)
    return 1.0 / math.ceil(actors / total) if total else 0.0


def shares(ray: Any, actors: int, device: str) -> tuple[float, float]:
    """CPUs and GPUs per actor."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = share([node.get("CPU", 0) for node in nodes], actors)
    gpus = share([node.get("GPU", 0) for node in nodes], actors)
    return cpus, 0.0 if device == "cpu" else min(gpus, 1.0)


def pieces(requests: Many[Request], *, batch: int, actors: int) -> list[tuple[Request, ...]]:
    """Splits prompts in order, so that a piece fills a batch and every actor gets a piece."""
    if not requests:
        return []
    mean = sum(one.sampling.n for one in requests) / len(requests)
    wanted = 1 if batch == 1 else math.ceil(FILLS_PER_PIECE * batch / mean)
    size = max(1, min(wanted, len(requests) // actors))
    return [tuple(requests[i : i + size]) for i in range(0, len(requests), size)]


class ActorPool:
    """Ray actors with one engine each. Use in a `with`, which stops all that it started.

    Uses a running cluster by Ray's rules (RAY_ADDRESS, then the latest one started on this
    machine), else starts one here. on_note: receives messages for the user.
    """

    def __init__(
        self, setup: Setup, *, actors: int, on_note: Callable[[str], None] = log.warning
    ) -> None:
        if actors < 1:
            raise ConfigError(f"--actors must be at least 1, got {actors}; 2 runs two engines")
        self.setup, self.actors, self.note = setup, actors, on_note
        self.ray = ray_module()
        self.pids: dict[Any, int] = {}  # process ids of ready actors
        self._busy: dict[Any, Job] = {}  # by the reference of the result
        self._idle: deque[Any] = deque()
        self._deaths: Counter[Any] = Counter()  # by the first prompt of a piece; None: at start
        self._memory: PooledDrafter | None = None
        self._owns_cluster = False

    def __enter__(self) -> ActorPool:
        """Starts one actor and waits for it, so that the others find compiled kernels."""
        self._connect()
        try:
            while not self._idle:
                if not self._busy:  # the first one died
                    self._start()
                self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def check(self, requests: Many[Request]) -> None:
        """Validates all prompts; raises what the engine raises for the first invalid one."""
        for i in range(0, len(requests), MAX_CHECKED):
            self._get(self._idle[0].check.remote(requests[i : i + MAX_CHECKED]))

    def results(self, requests: Many[Request]) -> Iterator[tuple[int, list[Sample]]]:
        """Pairs of prompt index and samples, in the order of finishing."""
        queue = deque(pieces(requests, batch=self.setup.batch, actors=self.actors))
        while queue or self._working:
            wanted = min(self.actors, len(queue) + self._working)
            while len(self._idle) + len(self._busy) < wanted:
                self._start()
            while queue and self._idle:
                actor, piece = self._idle.popleft(), queue.popleft()
                self._busy[actor.work.remote(piece)] = Job(actor, piece)
            found, lost = self._wait()
            queue.extendleft(reversed(lost))
            yield from found

    def stop(self) -> list[tuple[int, list[Sample]]]:
        """Stops all work after the current step; returns the prompts that are finished."""
        jobs, self._busy = self._busy, {}
        for actor in self.pids:  # another thread of the actor handles it during work
            actor.stop.options(concurrency_group="control").remote()
        refs = [ref for ref, job in jobs.items() if job.piece]
        done = self.ray.wait(refs, num_returns=len(refs), timeout=STOP_SECONDS)[0] if refs else []
        found: list[tuple[int, list[Sample]]] = []
        for ref in done:
            with suppress(Exception):  # the run is stopping anyway
                found += self._get(ref)
        return found

    def memory(self, path: Path | str, *, drafter: str, tenant: str = "") -> MemoryFile:
        """The memory of all actors as one file: loaded into each, merged and saved at the end."""
        self._memory = PooledDrafter(self, drafter)
        return MemoryFile(path, self._memory, self.origin)

    def gather(self, call: Callable[[Any], Any]) -> list[Any]:
        """The results of a call to every live actor, in the order of their start."""
        answers = []
        for actor, ref in [(actor, call(actor)) for actor in self.pids]:
            try:
                answers.append(self._get(ref, timeout=2 * STOP_SECONDS))
            except (*self._lost, self.ray.exceptions.GetTimeoutError):
                log.warning("lost actor %d and what it learned", self.pids[actor])
        return answers

    def close(self) -> None:
        """Stops the actors, and the cluster if this pool started it."""
        for actor in [*self.pids, *(job.actor for job in self._busy.values())]:
            with suppress(Exception):
                self.ray.kill(actor)
        self.pids.clear()
        self._busy.clear()
        self._idle.clear()
        if self._owns_cluster:
            self.ray.shutdown()
            self._owns_cluster = False

    @property
    def _lost(self) -> tuple[type[Exception], ...]:
        found = self.ray.exceptions
        return found.RayActorError, found.WorkerCrashedError, found.OutOfMemoryError

    @property
    def _working(self) -> int:
        """The number of actors with a piece of work."""
        return sum(job.piece is not None for job in self._busy.values())

    def _connect(self) -> None:
        self._owns_cluster = connect(self.ray)
        cpus, gpus = shares(self.ray, self.actors, self.setup.device)
        kind = self.ray.remote(concurrency_groups={"control": 1})(Worker)
        self._kind = kind.options(num_cpus=cpus, num_gpus=gpus)
        self.threads = max(1, int(cpus))

    def _start(self) -> None:
        actor = self._kind.remote(self.setup, self.threads)
        self._busy[actor.ready.remote()] = Job(actor, None)

    def _wait(self) -> tuple[list[tuple[int, list[Sample]]], list[tuple[Request, ...]]]:
        """Waits for one actor; returns its samples, or the piece to retry if it died."""
        refs = list(self._busy)
        timeout = None if self.pids else NOTICE_SECONDS
        done, _ = self.ray.wait(refs, num_returns=1, timeout=timeout)
        if not done:
            self.note(
                f"no actor is ready after {NOTICE_SECONDS:.0f} s: loading, or the cluster is full"
            )
            done, _ = self.ray.wait(refs, num_returns=1)
        ref = done[0]
        actor, piece = self._busy.pop(ref)
        try:
            answer = self._get(ref)
            if piece is None and self._memory is not None:
                self._memory.load_into(actor)
        except self._lost as error:
            self._handle_death(actor, piece, error)
            return [], [piece] if piece else []
        self._idle.append(actor)
        if piece is not None:
            return answer, []
        self.pids[actor], self.origin = answer
        self._deaths[None] = 0
        return [], []

    def _handle_death(
        self, actor: Any, piece: tuple[Request, ...] | None, error: Exception
    ) -> None:
        """Drops a dead actor; raises CapacityError if MAX_DEATHS died on the same work."""
        pid = self.pids.pop(actor, None)
        with suppress(Exception):  # it may be unreachable but alive
            self.ray.kill(actor)
        what = f"prompts {piece[0].index} to {piece[-1].index}" if piece else "loading the model"
        key = piece[0].index if piece else None
        self._deaths[key] += 1
        if self._deaths[key] >= MAX_DEATHS:
            cause = " ".join(str(error).split())[:200]
            raise CapacityError(
                f"{MAX_DEATHS} actors in a row died during {what}; last error: {cause}; if memory "
                "ran out, use fewer --actors or a smaller --batch"
            )
        name = "an actor" if pid is None else f"actor {pid}"
        self.note(f"{name} died during {what}; another actor retries")

    def _get(self, ref: Any, timeout: float | None = None) -> Any:
        """The result of an actor call; raises the actor's own exception."""
        try:
            return self.ray.get(ref, timeout=timeout)
        except self.ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None


class PooledDrafter(Persistent):
    """The drafters of all actors as one persistent drafter."""

    def __init__(self, pool: ActorPool, spec: str) -> None:
        kind: type[Persistent] = registry.resolve("drafter", spec)[0]
        self.pool, self.kind = pool, kind
        self.before: Snapshot | None = None

    def load_into(self, actor: Any) -> None:
        """Loads the file's snapshot into an actor. Raises what the actor raises."""
        self.pool._get(actor.keep.remote(self.before))

    def keep(self, tenant: str = "") -> None:
        self._load_into_all()

    def restore(self, snapshot: Snapshot, tenant: str = "") -> None:
        self.before = snapshot
        self._load_into_all()

    def snapshot(self, tenant: str = "") -> Snapshot:
        """The loaded snapshot, once, merged with what each actor has learned since."""
        learned = self.pool.gather(lambda actor: actor.snapshot.remote())
        found: Iterable[Snapshot | None] = [self.before, *learned]
        held = [snapshot for snapshot in found if snapshot is not None]
        if not held:
            raise CapacityError(
                "no memory to save: no actor with learned data is alive; results are kept, run "
                "the same command again to resume"
            )
        return self.kind.merge(held)

    def _load_into_all(self) -> None:
        for actor in self.pool.pids:
            self.load_into(actor)
