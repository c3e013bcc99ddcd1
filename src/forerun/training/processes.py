"""Data-parallel training: a process per CPU core or GPU, each with a share of every step.

On a busy CPU single-threaded processes are faster than threads, which wait for each other in every
operation. The first process starts the others. Under torchrun, which starts all of them, rank 0
runs the recipe; the other ranks wait and join each process group.
"""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from forerun.errors import ConfigError, Diverged, ForerunError
from forerun.utils.signals import delayed_interrupt, ignored_by_children

from . import torchrun

T = TypeVar("T")
R = TypeVar("R")
TIMEOUT = timedelta(hours=1)  # of one exchange; the first process evaluates between exchanges
PEER_ENDED = ("closed by peer", "reset by peer", "Broken pipe")  # in errors of gloo


def follow(others: torchrun.Torchrun) -> None:
    """Runs the work that rank 0 sends, until rank 0 sends none.

    Ctrl-C waits for the end of a group: rank 0 needs the others to finish a step.
    """
    while work := others.receive():
        with delayed_interrupt():
            _join_group(others.rank, others.size, others.rendezvous(), *pickle.loads(work))


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
        is_torchrun = torchrun.current() is not None
        with _torchrun_group(target, args) if is_torchrun else _spawned_group(size, target, args):
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
def _torchrun_group(target: Callable[..., None], args: tuple) -> Iterator[None]:
    """A group with the other processes of torchrun."""
    others = torchrun.current()
    assert others is not None
    others.send(pickle.dumps((target, args)))
    with _gloo_group(0, others.size, others.rendezvous()):
        yield


@contextmanager
def _spawned_group(size: int, target: Callable[..., None], args: tuple) -> Iterator[None]:
    """A group with processes that this one starts, and ends."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = {"init_method": f"file://{folder}/rendezvous"}
        context = multiprocessing.get_context("spawn")
        jobs = [(rank, size, rendezvous, target, args) for rank in range(1, size)]
        others = [context.Process(target=_run_spawned, args=job, daemon=True) for job in jobs]
        with ignored_by_children():
            for other in others:
                other.start()
        try:
            with _gloo_group(0, size, rendezvous):
                yield
        finally:
            for other in others:
                other.join(10)
                other.terminate()


@contextmanager
def _gloo_group(rank: int, size: int, rendezvous: dict[str, Any]) -> Iterator[None]:
    """The block in which this single-threaded process belongs to a group."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=TIMEOUT, **rendezvous)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _run_spawned(*job: Any) -> None:
    """A spawned process: its error is one line."""
    try:
        _join_group(*job)
    except ForerunError as error:
        sys.exit(f"error: {error}")


def _join_group(
    rank: int, size: int, rendezvous: dict[str, Any], target: Callable[..., None], args: tuple
) -> None:
    """The part of a process that is not the first."""
    try:
        with _gloo_group(rank, size, rendezvous):
            target(*args)
    except Diverged:
        pass  # the first process has the same loss, and reports it
    except RuntimeError as error:
        if not _is_peer_ended(error):  # the first process has ended, and reports the error
            raise


def _is_peer_ended(error: RuntimeError) -> bool:
    """Whether another process of the group has left it."""
    return any(text in str(error) for text in PEER_ENDED)


def num_processes(device: str, threads: int) -> int:
    """Processes on a device: a core each, with "cuda" a GPU each, with "cuda:N" one."""
    if device == "cpu" or (device == "cuda" and torchrun.current()):  # threads: those of torchrun
        return threads
    return max(1, min(threads, torch.cuda.device_count())) if device == "cuda" else 1


def my_device(device: str) -> torch.device:
    """The device of this process; in a group of "cuda" the GPU of its rank on this machine."""
    if device == "cuda" and is_in_group():
        others = torchrun.current()
        rank = others.local_rank if others else dist.get_rank()
        return torch.device(device, rank % max(1, torch.cuda.device_count()))
    return torch.device(device)


def check_shares(micro_batches: int, processes: int) -> None:
    """Raises ConfigError unless every process has as many micro-batches of a step."""
    if micro_batches % processes:
        fitting = [n for n in range(1, processes) if micro_batches % n == 0]
        raise ConfigError(
            f"a step of {micro_batches} micro-batches cannot be shared evenly by {processes} "
            f"processes; use {max(fitting)}, or --micro-batches {processes}"
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
        others = torchrun.current()
        size = others.local_size if others else dist.get_world_size()
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
