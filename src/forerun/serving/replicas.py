"""Several engines as Ray actors: each runs its own server, and a dead one is replaced.

Ray places the actors and reports their death; requests do not pass through Ray. Ray Serve is not
used: when a replica dies it cuts streams without an error event and answers other requests with a
plain text 500, and its /metrics shows one replica at random.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from forerun.errors import CapacityError, ConfigError
from forerun.integrations.ray_batch import MAX_DEATHS, connect, ray_module, shares
from forerun.models.remote_code import is_trusted
from forerun.serving.service import Service, freeze_garbage
from forerun.serving.settings import Settings
from forerun.serving.tenants import Keys
from forerun.serving.upstream import CONNECTION_ERRORS, Upstream, fetch

CHECK_SECONDS = 1.0  # between two health checks of an engine
MAX_MISSED = 30  # health checks in a row without an answer until an engine is replaced
STOP_SECONDS = 10.0  # for an actor to stop its server
MAX_PAUSE_SECONDS = 30.0  # between two starts of an engine that keeps dying
log = logging.getLogger("forerun.serving")


@dataclass(frozen=True)
class ReplicaSetup:
    """The picklable settings of an actor's server."""

    model: str
    settings: Settings
    keys: Keys
    dtype: str = "auto"
    device: str = "auto"
    context: int | None = None
    chat_template: str | None = None
    target: str | None = None  # built around the model
    trusts_code: bool = field(default_factory=is_trusted)  # --trust-remote-code
    graphs: bool = True  # CUDA graphs on a GPU

    def service(self) -> Service:
        """Loads the model and compiles all kernels."""
        import forerun

        model = forerun.load(
            self.model,
            dtype=self.dtype,
            device=self.device,
            max_seqs=self.settings.max_seqs,
            context=self.context,
            target=self.target,
            trust_remote_code=self.trusts_code,
            graphs=self.graphs,
        )
        if self.chat_template is not None:
            model.tokenizer.inner.chat_template = self.chat_template
        service = Service(model, self.settings, self.keys)
        service.warm_up()
        return service


class Replica:
    """One server in its own process. Call `serve` first."""

    def __init__(self, setup: ReplicaSetup, threads: int) -> None:
        self.setup, self.threads = setup, threads

    def serve(self, is_alone: bool) -> tuple[str, int, dict[str, Any]]:
        """Loads, and serves in a thread; returns its URL, process id and description.

        is_alone: the cluster has one machine, so the server listens on localhost only.
        """
        import ray
        import torch

        from forerun.serving.server import Server, bind_sockets

        torch.set_num_threads(self.threads)
        service, up = self.setup.service(), threading.Event()
        freeze_garbage()
        address = "127.0.0.1" if is_alone else ray.util.get_node_ip_address()
        self.server = Server(service, bind_sockets(address, 0), lambda url: up.set())
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        if not up.wait(60):
            raise CapacityError(f"no server started at {address}; check for a free port")
        return self.server.url, os.getpid(), service.describe()

    def wait(self) -> None:
        """Returns when the server has stopped."""
        self.thread.join()

    def abort(self) -> None:
        """Ends all requests with an error."""
        self.server.service.worker.abort()

    def stop(self) -> None:
        """Stops the server after its requests are answered."""
        self.server.should_exit = True


class Replicas:
    """A fixed number of engines, restarted when they die.

    Call `open` first, then `start` and `stop` on an event loop. on_note: receives messages for the
    user.
    """

    def __init__(
        self, setup: ReplicaSetup, count: int, on_note: Callable[[str], None] = log.warning
    ) -> None:
        if count < 1:
            raise ConfigError(f"--replicas must be at least 1, got {count}; 2 runs two engines")
        self.setup, self.count, self.note = setup, count, on_note
        self.ray = ray_module("--replicas")
        self.up: dict[int, Upstream] = {}
        self.pids: dict[int, int] = {}
        self._actors: dict[int, Any] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = self._owns_cluster = False

    def open(self) -> dict[str, Any]:
        """Joins or starts a cluster, and starts the first engine; returns its description.

        The other engines then find compiled kernels. Raises what the engine raises.
        """
        self._owns_cluster = connect(self.ray)
        cpus, gpus = shares(self.ray, self.count, self.setup.device)
        kind = self.ray.remote(max_concurrency=4)(Replica)
        self._kind = kind.options(num_cpus=cpus, num_gpus=gpus, max_restarts=0)
        self._threads = max(1, int(cpus))
        try:
            return self._register(0, self._get(self._launch(0)))
        except BaseException:
            self.close()
            raise

    async def start(self) -> None:
        """Starts the other engines and supervises all."""
        self._tasks = [asyncio.create_task(self._supervise(i)) for i in range(self.count)]

    def abort(self) -> None:
        """Makes the engines end all requests with an error."""
        for actor in list(self._actors.values()):
            actor.abort.remote()

    async def stop(self) -> None:
        """Stops all engines, after their requests are answered."""
        self._is_stopping = True
        refs = [actor.stop.remote() for actor in self._actors.values()]
        if self._tasks and refs:
            await asyncio.wait(self._tasks, timeout=STOP_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Stops the actors, and the cluster if it was started here."""
        for actor in self._actors.values():
            self._kill(actor)
        self._actors.clear()
        self.up.clear()
        if self._owns_cluster:
            self.ray.shutdown()
            self._owns_cluster = False

    def _launch(self, number: int) -> Any:
        """Starts an actor; returns the reference of its `serve` call."""
        settings = replace(self.setup.settings, engine=number)
        actor = self._kind.remote(replace(self.setup, settings=settings), self._threads)
        self._actors[number] = actor
        is_alone = sum(node["Alive"] for node in self.ray.nodes()) == 1
        return actor.serve.remote(is_alone)

    def _register(self, number: int, answer: tuple[str, int, dict[str, Any]]) -> dict[str, Any]:
        """Adds a started engine; returns its description."""
        url, self.pids[number], description = answer
        self.up[number] = Upstream(number, url)
        return description

    async def _supervise(self, number: int) -> None:
        """Restarts one engine whenever it dies."""
        deaths = 0
        while not self._is_stopping:
            started: float | None = None
            try:
                if number not in self.up:
                    self._register(number, await self._launch(number))
                started = monotonic()
                await self._watch(number)
                if not self._is_stopping:
                    raise CapacityError("its server has stopped")
            except asyncio.CancelledError:
                raise
            except Exception as error:
                is_young = started is None or monotonic() - started < MAX_PAUSE_SECONDS
                deaths = deaths + 1 if is_young else 1
                self._handle_death(number, error)
            if not self._is_stopping and deaths:
                await asyncio.sleep(min(MAX_PAUSE_SECONDS, 2.0 ** (deaths - MAX_DEATHS)))

    async def _watch(self, number: int) -> None:
        """Returns when an engine's server has stopped. Raises if the engine died."""
        ended = asyncio.ensure_future(_awaited(self._actors[number].wait.remote()))
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=CHECK_SECONDS)
                if not ended.done() and not self._is_stopping:
                    await self._check_health(self.up[number])
            ended.result()
        finally:
            ended.cancel()

    async def _check_health(self, upstream: Upstream) -> None:
        """Updates `is_lost`. Raises CapacityError if the engine failed or does not answer."""
        try:
            _, page = await fetch(upstream, "/health", 2 * CHECK_SECONDS)
        except CONNECTION_ERRORS:
            upstream.is_lost, upstream.num_missed = True, upstream.num_missed + 1
            if upstream.num_missed >= MAX_MISSED:
                raise CapacityError(f"no answer to {MAX_MISSED} health checks in a row") from None
            return
        upstream.is_lost, upstream.num_missed = False, 0
        if b'"stopped"' in page or b'"failing"' in page:
            raise CapacityError("repeated internal errors of its engine")

    def _handle_death(self, number: int, error: Exception) -> None:
        """Removes a dead engine."""
        self.up.pop(number, None)
        pid = self.pids.pop(number, None)
        self._kill(self._actors.pop(number, None))
        if not self._is_stopping:
            name = f"engine {number}" + (f" (process {pid})" if pid else "")
            cause = " ".join(str(error).split())[:120]
            self.note(f"{name} is lost and restarts: {type(error).__name__}: {cause}")

    def _kill(self, actor: Any) -> None:
        with suppress(Exception):
            self.ray.kill(actor)

    def _get(self, ref: Any) -> Any:
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None


async def _awaited(ref: Any) -> Any:
    return await ref
