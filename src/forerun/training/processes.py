"""Data-parallel training: a process per CPU core or GPU, each with a share of every step.

On a busy CPU single-threaded processes are faster than threads, which wait for each other in every
operation. The first process starts the others, or `torchrun` starts all: then the first runs the
recipe, and the others wait for their part in a process group.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from forerun.errors import ConfigError, DataError, ForerunError
from forerun.utils.signals import delayed_interrupt, ignored_by_children

T = TypeVar("T")
R = TypeVar("R")
TIMEOUT = timedelta(hours=1)  # of one exchange; the first process evaluates between exchanges
POLL_SECONDS = 0.2  # between looks for work
PEER_ENDED = ("closed by peer", "reset by peer", "Broken pipe")  # in errors of gloo


@dataclass
class Torchrun:
    """This process among those of torchrun; the first sends the others work through a store."""

    rank: int
    size: int
    local_rank: int
    local_size: int  # processes on this machine
    store: dist.Store
    num_groups: int = 0  # process groups so far

    def send(self, work: bytes) -> None:
        """Sends the other processes their work in the next group; without any they end."""
        self.store.set(f"work {self.num_groups}", work)  # type: ignore[arg-type]  # takes bytes too

    def receive(self) -> bytes:
        """Waits for the work of the next group; none if the first process has ended."""
        key = f"work {self.num_groups}"
        with suppress(dist.DistError):  # the machine of the first process is gone
            while not self.store.check([key]):
                time.sleep(POLL_SECONDS)
            return self.store.get(key)
        return b""

    def place(self) -> dict[str, Any]:
        """Where the processes meet for the next group; each group has keys of its own."""
        self.num_groups += 1
        return {"store": dist.PrefixStore(f"group {self.num_groups}", self.store)}


_torchrun: Torchrun | None = None  # set by `join_torchrun`


def join_torchrun(rank: int, size: int, local_rank: int, local_size: int) -> Torchrun:
    """Joins the processes that torchrun started; process groups consist of them from now on."""
    global _torchrun
    store = dist.PrefixStore("forerun", next(dist.rendezvous("env://"))[0])
    _torchrun = Torchrun(rank, size, local_rank, local_size, store)
    return _torchrun


def follow(torchrun: Torchrun) -> None:
    """Does what the first process sends, until it ends.

    Ctrl-C waits for the end of a group: the first process needs the others to finish a step.
    """
    while work := torchrun.receive():
        with delayed_interrupt():
            _join(torchrun.rank, torchrun.size, torchrun.place(), *pickle.loads(work))


def release(torchrun: Torchrun) -> None:
    """Ends the processes that wait for work."""
    with suppress(dist.DistError):  # torchrun has ended
        torchrun.send(b"")


def in_processes(job: Callable[[T], R], items: list[T], size: int) -> Iterator[R]:
    """Results of `job` for all items, in any order, by `size` single-threaded processes.

    With size 1 it runs in this process.
    """
    size = min(size, len(items))
    if size <= 1:
        yield from map(job, items)
        return
    context = multiprocessing.get_context("spawn")
    with ignored_by_children():
        pool = context.Pool(size, initializer=torch.set_num_threads, initargs=(1,))
    with pool:
        yield from pool.imap_unordered(job, items)


@contextmanager
def process_group(size: int, target: Callable[..., None], args: tuple) -> Iterator[None]:
    """Within the block this process is the first of `size`; the others run `target(*args)`.

    Under torchrun the others are its processes, and their number is `size`.
    """
    if size <= 1:
        yield
        return
    threads = torch.get_num_threads()
    try:
        with _called(target, args) if _torchrun else _started(size, target, args):
            yield
    except RuntimeError as error:
        if not _is_peer_ended(error):
            raise
        raise ForerunError(
            "another process of this run ended early; see its error, and check that it has the "
            "same files and enough memory"
        ) from error
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _called(target: Callable[..., None], args: tuple) -> Iterator[None]:
    """A group with the other processes of torchrun."""
    assert _torchrun is not None
    _torchrun.send(pickle.dumps((target, args)))
    with _meeting(0, _torchrun.size, _torchrun.place()):
        yield


@contextmanager
def _started(size: int, target: Callable[..., None], args: tuple) -> Iterator[None]:
    """A group with processes that this one starts, and ends."""
    with tempfile.TemporaryDirectory() as folder:
        place = {"init_method": f"file://{folder}/meeting"}
        context = multiprocessing.get_context("spawn")
        jobs = [(rank, size, place, target, args) for rank in range(1, size)]
        others = [context.Process(target=_join, args=job, daemon=True) for job in jobs]
        with ignored_by_children():
            for other in others:
                other.start()
        try:
            with _meeting(0, size, place):
                yield
        finally:
            for other in others:
                other.join(10)
                other.terminate()


@contextmanager
def _meeting(rank: int, size: int, place: dict[str, Any]) -> Iterator[None]:
    """The block in which this single-threaded process belongs to a group."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=TIMEOUT, **place)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(
    rank: int, size: int, place: dict[str, Any], target: Callable[..., None], args: tuple
) -> None:
    """The part of a process that is not the first."""
    try:
        with _meeting(rank, size, place):
            target(*args)
    except DataError:
        pass  # a loss that is not finite; the first process has it too and reports it
    except RuntimeError as error:
        if not _is_peer_ended(error):  # the first process has ended and reports the error
            raise


def _is_peer_ended(error: RuntimeError) -> bool:
    """Whether another process of the group has left it."""
    return any(text in str(error) for text in PEER_ENDED)


def num_processes(device: str, threads: int) -> int:
    """Processes on a device: a core each, with "cuda" a GPU each, with "cuda:N" one."""
    if device == "cpu" or (device == "cuda" and _torchrun):  # threads: those of torchrun
        return threads
    return max(1, min(threads, torch.cuda.device_count())) if device == "cuda" else 1


def my_device(device: str) -> torch.device:
    """The device of this process; in a group of "cuda" the GPU of its rank on this machine."""
    if device == "cuda" and is_in_group():
        rank = _torchrun.local_rank if _torchrun else dist.get_rank()
        return torch.device(device, rank % max(1, torch.cuda.device_count()))
    return torch.device(device)


def check_shares(micro_batches: int, processes: int) -> None:
    """Raises ConfigError unless every process has as many micro-batches of a step."""
    if micro_batches % processes:
        fitting = [n for n in range(1, processes) if micro_batches % n == 0]
        raise ConfigError(
            f"a step of {micro_batches} micro-batches cannot be shared evenly by {processes} "
            f"processes; {'start torchrun with' if _torchrun else 'use --threads'} {max(fitting)}"
        )


def is_in_group() -> bool:
    """Whether this process trains with others."""
    return bool(dist.is_initialized())


def is_first_process() -> bool:
    """Whether this process writes files; true outside a group."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def all_threads() -> Iterator[None]:
    """A block in which this process has a thread for each of its group here; the others wait."""
    own, size = torch.get_num_threads(), 1
    if dist.is_initialized():
        size = _torchrun.local_size if _torchrun else dist.get_world_size()
    torch.set_num_threads(max(own, size))
    try:
        yield
    finally:
        torch.set_num_threads(own)


def my_share(items: list[T]) -> list[T]:
    """The items of this process: every size-th from its rank on; all outside a group."""
    if not dist.is_initialized():
        return items
    return items[dist.get_rank() :: dist.get_world_size()]


def agree(value: float) -> float:
    """Broadcasts the value of the first process."""
    if not dist.is_initialized():
        return value
    shared = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(shared, src=0)
    return float(shared)


def sum_gradients(total: torch.Tensor, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sums `total` [1] and all gradients over the processes of the group, in place."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([total] + [g.flatten().cpu() for g in grads])
    dist.all_reduce(flat)
    total.copy_(flat[:1])
    for g, part in zip(grads, flat[1:].split([g.numel() for g in grads]), strict=True):
        g.copy_(part.view_as(g))
