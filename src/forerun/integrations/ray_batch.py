"""Many engines on a Ray cluster: prompts are handed out in pieces, a dead actor's are redone.

    with Pool(setup, actors=4) as pool:
        for index, samples in pool.results(asked): ...

Each actor holds the whole model and its own drafter. A sample's randomness is that of the local
engine: its seed, the number of its prompt in the whole file, its own number.
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
from forerun.errors import CapacityError, ConfigError
from forerun.integrations.ray_worker import Asked, Setup, Worker
from forerun.state.drafter_files import Kept

if TYPE_CHECKING:
    from forerun.engine.generation import Sample

MOST_DEATHS = 3  # actors that may die over one piece of work, or while they start in a row
FILLS = 4  # a piece of work fills an actor's batch so many times: its end runs half empty
AT_ONCE = 1000  # prompts that are checked in one call
PATIENCE = 60.0  # seconds until a person is told why nothing happens
STOPPING = 30.0  # seconds that actors get to end a step
log = logging.getLogger("forerun")


class Busy(NamedTuple):
    """What an actor is at: a piece of work, or none while it loads its model."""

    actor: Any
    piece: tuple[Asked, ...] | None


def ray_module(what: str = "--engine ray") -> Any:
    """The package ray. Raises ConfigError where it is not installed."""
    try:
        import ray
    except ImportError:
        raise ConfigError(
            f"{what} needs Ray, which is not installed; install it with: pip install 'forerun[ray]'"
        ) from None
    return ray


def connect(ray: Any) -> bool:
    """Joins the cluster that is there, or starts one on this machine; whether it did the latter."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of ours tells nobody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 would starve beside other work
    try:
        ray.init(include_dashboard=False, **quiet)
    except ValueError:  # a cluster is there: its dashboard is not ours to choose
        ray.init(**quiet)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster answers ({error}); expected one at RAY_ADDRESS; start it with "
            "`ray start --head`, or unset RAY_ADDRESS to start one on this machine"
        ) from None
    return True


def share(held: Many[float], actors: int) -> float:
    """The largest equal share of what each node holds: whole units, else 1/2, 1/3, ... of one."""
    for units in range(int(max(held, default=0)), 0, -1):
        if sum(size // units for size in held) >= actors:
            return float(units)
    total = sum(int(size) for size in held)
    return 1.0 / math.ceil(actors / total) if total else 0.0


def shares(ray: Any, actors: int, device: str) -> tuple[float, float]:
    """Processors and GPUs that each of so many actors may have."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = share([node.get("CPU", 0) for node in nodes], actors)
    gpus = share([node.get("GPU", 0) for node in nodes], actors)
    return cpus, 0.0 if device == "cpu" else min(gpus, 1.0)


def pieces(asked: Many[Asked], *, batch: int, actors: int) -> list[tuple[Asked, ...]]:
    """Prompts in their order, cut so that a piece fills a batch and every actor gets some."""
    if not asked:
        return []
    mean = sum(one.sampling.n for one in asked) / len(asked)
    wanted = 1 if batch == 1 else math.ceil(FILLS * batch / mean)
    size = max(1, min(wanted, len(asked) // actors))
    return [tuple(asked[i : i + size]) for i in range(0, len(asked), size)]


class Pool:
    """Actors with an engine each. In a `with`: what it started is ended with the block.

    A cluster that is there is used (Ray's own rules: RAY_ADDRESS, then the latest one started
    here); otherwise one is started on this machine. on_note: told what a person should know.
    """

    def __init__(
        self, setup: Setup, *, actors: int, on_note: Callable[[str], None] = log.warning
    ) -> None:
        if actors < 1:
            raise ConfigError(f"--actors must be at least 1, got {actors}; 2 runs two engines")
        self.setup, self.actors, self.note = setup, actors, on_note
        self.ray = ray_module()
        self.pids: dict[Any, int] = {}  # processes of the actors that are ready
        self._busy: dict[Any, Busy] = {}  # by the reference of what will come
        self._idle: deque[Any] = deque()
        self._deaths: Counter[Any] = Counter()  # by the first prompt of a piece; None: at the start
        self._memory: Pooled | None = None
        self._owns_cluster = False

    def __enter__(self) -> Pool:
        """Starts one actor and waits for it: it compiles and measures, the others then need not."""
        self._connect()
        try:
            while not self._idle:
                if not self._busy:  # the first one has died: another one tries
                    self._start()
                self._await()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def check(self, asked: Many[Asked]) -> None:
        """Raises what the engine would raise for one of the prompts, before any is run."""
        for i in range(0, len(asked), AT_ONCE):
            self._got(self._idle[0].check.remote(asked[i : i + AT_ONCE]))

    def results(self, asked: Many[Asked]) -> Iterator[tuple[int, list[Sample]]]:
        """The number of a prompt with its samples, as they come."""
        queue = deque(pieces(asked, batch=self.setup.batch, actors=self.actors))
        while queue or self._working:
            wanted = min(self.actors, len(queue) + self._working)
            while len(self._idle) + len(self._busy) < wanted:
                self._start()
            while queue and self._idle:
                actor, piece = self._idle.popleft(), queue.popleft()
                self._busy[actor.work.remote(piece)] = Busy(actor, piece)
            found, lost = self._await()
            queue.extendleft(reversed(lost))
            yield from found

    def stop(self) -> list[tuple[int, list[Sample]]]:
        """Ends all work after the step under way; what was finished until then."""
        jobs, self._busy = self._busy, {}
        for actor in self.pids:  # on a thread of its own: heard while work is under way
            actor.stop.options(concurrency_group="control").remote()
        refs = [ref for ref, job in jobs.items() if job.piece]
        done = self.ray.wait(refs, num_returns=len(refs), timeout=STOPPING)[0] if refs else []
        found: list[tuple[int, list[Sample]]] = []
        for ref in done:
            with suppress(Exception):  # the run is over: only what is whole counts
                found += self._got(ref)
        return found

    def memory(self, path: Path | str, *, drafter: str, tenant: str = "") -> Kept:
        """What all actors learn, as one file: loaded into each, merged and saved at the end."""
        self._memory = Pooled(self, drafter)
        return Kept(path, self._memory, self.origin)

    def gather(self, asks: Callable[[Any], Any]) -> list[Any]:
        """The answers of all actors that are alive, in the order of their start."""
        answers = []
        for actor, ref in [(actor, asks(actor)) for actor in self.pids]:
            try:
                answers.append(self._got(ref, timeout=2 * STOPPING))
            except (*self._lost, self.ray.exceptions.GetTimeoutError):
                log.warning("actor %d is gone, and what it learned with it", self.pids[actor])
        return answers

    def close(self) -> None:
        """Ends the actors, and the cluster if it was started here."""
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
        """How many actors are at a piece of work."""
        return sum(job.piece is not None for job in self._busy.values())

    def _connect(self) -> None:
        self._owns_cluster = connect(self.ray)
        cpus, gpus = shares(self.ray, self.actors, self.setup.device)
        kind = self.ray.remote(concurrency_groups={"control": 1})(Worker)
        self._kind = kind.options(num_cpus=cpus, num_gpus=gpus)
        self.threads = max(1, int(cpus))

    def _start(self) -> None:
        actor = self._kind.remote(self.setup, self.threads)
        self._busy[actor.ready.remote()] = Busy(actor, None)

    def _await(self) -> tuple[list[tuple[int, list[Sample]]], list[tuple[Asked, ...]]]:
        """Waits for an actor; samples that it has made, or the piece that it died over."""
        refs = list(self._busy)
        done, _ = self.ray.wait(refs, num_returns=1, timeout=None if self.pids else PATIENCE)
        if not done:
            self.note(f"no actor is ready after {PATIENCE:.0f} s: loading, or the cluster is full")
            done, _ = self.ray.wait(refs, num_returns=1)
        ref = done[0]
        actor, piece = self._busy.pop(ref)
        try:
            answer = self._got(ref)
            if piece is None and self._memory is not None:
                self._memory.teach(actor)
        except self._lost as error:
            self._bury(actor, piece, error)
            return [], [piece] if piece else []
        self._idle.append(actor)
        if piece is not None:
            return answer, []
        self.pids[actor], self.origin = answer
        self._deaths[None] = 0
        return [], []

    def _bury(self, actor: Any, piece: tuple[Asked, ...] | None, error: Exception) -> None:
        pid = self.pids.pop(actor, None)
        with suppress(Exception):  # it may only be out of reach
            self.ray.kill(actor)
        what = f"prompts {piece[0].index} to {piece[-1].index}" if piece else "loading the model"
        key = piece[0].index if piece else None
        self._deaths[key] += 1
        if self._deaths[key] >= MOST_DEATHS:
            cause = " ".join(str(error).split())[:200]
            raise CapacityError(
                f"{MOST_DEATHS} actors died one after another over {what}; the last: {cause}; if "
                "memory ran out, try fewer --actors or a smaller --batch"
            )
        name = "an actor" if pid is None else f"actor {pid}"
        self.note(f"{name} died over {what}; another one does it again")

    def _got(self, ref: Any, timeout: float | None = None) -> Any:
        """What an actor returned; what it raised is raised as if it had happened here."""
        try:
            return self.ray.get(ref, timeout=timeout)
        except self.ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None


class Pooled(Persistent):
    """The drafters of all actors as one that can be saved."""

    def __init__(self, pool: Pool, spec: str) -> None:
        kind: type[Persistent] = registry.resolve("drafter", spec)[0]
        self.pool, self.kind = pool, kind
        self.before: Snapshot | None = None

    def teach(self, actor: Any) -> None:
        """Gives an actor what the file held. Raises what the actor raises."""
        self.pool._got(actor.keep.remote(self.before))

    def keep(self, tenant: str = "") -> None:
        self._teach_all()

    def restore(self, snapshot: Snapshot, tenant: str = "") -> None:
        self.before = snapshot
        self._teach_all()

    def snapshot(self, tenant: str = "") -> Snapshot:
        """What was there before, once, and what each actor has learned since."""
        learned = self.pool.gather(lambda actor: actor.snapshot.remote())
        found: Iterable[Snapshot | None] = [self.before, *learned]
        held = [snapshot for snapshot in found if snapshot is not None]
        if not held:
            raise CapacityError(
                "expected something learned to save, but no actor is left that has learned any; "
                "results are kept, and the same command goes on from them"
            )
        return self.kind.merge(held)

    def _teach_all(self) -> None:
        for actor in self.pool.pids:
            self.teach(actor)
