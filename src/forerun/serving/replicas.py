"""Engines behind one port as Ray actors: each runs a server of its own, a dead one is replaced.

Ray places the actors and tells when one dies; requests do not pass through Ray. Its own HTTP layer
(Ray Serve) was tried first: when a replica died it cut streams without an event, answered
others with 500 in plain text, and gave /metrics of one replica, another one each time.
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
from forerun.integrations.ray_batch import MOST_DEATHS, connect, ray_module, shares
from forerun.runner import gpu
from forerun.serving.service import Service, settle
from forerun.serving.settings import Settings
from forerun.serving.tenants import Keys
from forerun.serving.upstream import LOST, Upstream, fetch

BEAT = 1.0  # seconds between two looks at an engine
MOST_MISSED = 30  # looks in a row that an engine may leave without an answer
STOPPING = 10.0  # seconds that an actor gets to end its server
LONGEST_PAUSE = 30.0  # seconds between two starts of an engine that dies at once
log = logging.getLogger("forerun.serving")


@dataclass(frozen=True)
class ReplicaSetup:
    """What an actor needs to make its server; it travels between processes."""

    model: str
    settings: Settings
    keys: Keys
    dtype: str = "auto"
    device: str = "auto"
    context: int | None = None
    chat_template: str | None = None
    target: str | None = None  # built around the model
    graphs: bool = field(default_factory=gpu.uses_graphs)  # as in the process that asks

    def service(self) -> Service:
        """The model and all around it, compiled."""
        import forerun

        gpu.use_graphs(self.graphs)
        model = forerun.load(
            self.model,
            dtype=self.dtype,
            device=self.device,
            max_seqs=self.settings.max_seqs,
            context=self.context,
            target=self.target,
        )
        if self.chat_template is not None:
            model.tokenizer.inner.chat_template = self.chat_template
        service = Service(model, self.settings, self.keys)
        service.warm_up()
        return service


class Replica:
    """One server in a process of its own. `serve` comes first."""

    def __init__(self, setup: ReplicaSetup, threads: int) -> None:
        self.setup, self.threads = setup, threads

    def serve(self, is_alone: bool) -> tuple[str, int, dict[str, Any]]:
        """Loads, and serves in a thread; its URL, its process, what it offers.

        is_alone: one machine is all there is, and nobody else is to reach the server.
        """
        import ray
        import torch

        from forerun.serving.server import Server, bound

        torch.set_num_threads(self.threads)
        service, up = self.setup.service(), threading.Event()
        settle()
        address = "127.0.0.1" if is_alone else ray.util.get_node_ip_address()
        self.server = Server(service, bound(address, 0), lambda url: up.set())
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        if not up.wait(60):
            raise CapacityError(f"no server came up at {address}; is a port free there?")
        return self.server.url, os.getpid(), service.describe()

    def wait(self) -> None:
        """Returns when the server has ended."""
        self.thread.join()

    def end(self) -> None:
        """Ends with an error what is under way."""
        self.server.service.worker.end()

    def stop(self) -> None:
        """Ends the server when its requests are answered."""
        self.server.should_exit = True


class Replicas:
    """So many engines, kept alive. `open` first, then `start` and `stop` on an event loop.

    on_note: told what a person should know.
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
        """Joins or starts a cluster and the first engine; what it offers.

        The others need not compile and measure again. Raises what the engine raises.
        """
        self._owns_cluster = connect(self.ray)
        cpus, gpus = shares(self.ray, self.count, self.setup.device)
        kind = self.ray.remote(max_concurrency=4)(Replica)
        self._kind = kind.options(num_cpus=cpus, num_gpus=gpus, max_restarts=0)
        self._threads = max(1, int(cpus))
        try:
            return self._took(0, self._got(self._launch(0)))
        except BaseException:
            self.close()
            raise

    async def start(self) -> None:
        """Starts all engines but the first, and watches over them."""
        self._tasks = [asyncio.create_task(self._keep(i)) for i in range(self.count)]

    def end(self) -> None:
        """Makes the engines end what they are at with an error."""
        for actor in list(self._actors.values()):
            actor.end.remote()

    async def stop(self) -> None:
        """Ends all engines; what they are at has been answered."""
        self._is_stopping = True
        refs = [actor.stop.remote() for actor in self._actors.values()]
        if self._tasks and refs:
            await asyncio.wait(self._tasks, timeout=STOPPING)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Ends the actors, and the cluster if it was started here."""
        for actor in self._actors.values():
            self._kill(actor)
        self._actors.clear()
        self.up.clear()
        if self._owns_cluster:
            self.ray.shutdown()
            self._owns_cluster = False

    def _launch(self, number: int) -> Any:
        """Starts an actor; what will come of its `serve`."""
        settings = replace(self.setup.settings, engine=number)
        actor = self._kind.remote(replace(self.setup, settings=settings), self._threads)
        self._actors[number] = actor
        is_alone = sum(node["Alive"] for node in self.ray.nodes()) == 1
        return actor.serve.remote(is_alone)

    def _took(self, number: int, answer: tuple[str, int, dict[str, Any]]) -> dict[str, Any]:
        url, self.pids[number], offer = answer
        self.up[number] = Upstream(number, url)
        return offer

    async def _keep(self, number: int) -> None:
        """One engine, started again whenever it dies."""
        deaths = 0
        while not self._is_stopping:
            started: float | None = None
            try:
                if number not in self.up:
                    self._took(number, await self._launch(number))
                started = monotonic()
                await self._watch(number)
                if not self._is_stopping:
                    raise CapacityError("its server has ended")
            except asyncio.CancelledError:
                raise
            except Exception as error:
                is_young = started is None or monotonic() - started < LONGEST_PAUSE
                deaths = deaths + 1 if is_young else 1
                self._bury(number, error)
            if not self._is_stopping and deaths:
                await asyncio.sleep(min(LONGEST_PAUSE, 2.0 ** (deaths - MOST_DEATHS)))

    async def _watch(self, number: int) -> None:
        """Returns when an engine has ended as it was told to. Raises when it is gone."""
        ended = asyncio.ensure_future(_awaited(self._actors[number].wait.remote()))
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=BEAT)
                if not ended.done() and not self._is_stopping:
                    await self._look(self.up[number])
            ended.result()
        finally:
            ended.cancel()

    async def _look(self, upstream: Upstream) -> None:
        """One that was given up may be there again. Raises where it has died, or says nothing."""
        try:
            _, page = await fetch(upstream, "/health", 2 * BEAT)
        except LOST:
            upstream.is_lost, upstream.num_missed = True, upstream.num_missed + 1
            if upstream.num_missed >= MOST_MISSED:
                raise CapacityError(f"it did not answer {MOST_MISSED} times in a row") from None
            return
        upstream.is_lost, upstream.num_missed = False, 0
        if b'"stopped"' in page or b'"failing"' in page:
            raise CapacityError("its engine has met internal errors again and again")

    def _bury(self, number: int, error: Exception) -> None:
        self.up.pop(number, None)
        pid = self.pids.pop(number, None)
        self._kill(self._actors.pop(number, None))
        if not self._is_stopping:
            name = f"engine {number}" + (f" (process {pid})" if pid else "")
            cause = " ".join(str(error).split())[:120]
            self.note(f"{name} is gone and is started again: {type(error).__name__}: {cause}")

    def _kill(self, actor: Any) -> None:
        with suppress(Exception):
            self.ray.kill(actor)

    def _got(self, ref: Any) -> Any:
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None


async def _awaited(ref: Any) -> Any:
    return await ref
