"""Data-parallel training: a process per CPU core or GPU, each with a share of every step.

On a busy CPU single-threaded processes are faster than threads, which wait for each other in every
operation. The first process starts the others, so `torchrun` is not needed.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from forerun.errors import ConfigError, DataError
from forerun.utils.signals import ignored_by_children

T = TypeVar("T")
R = TypeVar("R")
TIMEOUT = timedelta(hours=1)  # of one exchange; the first process evaluates between exchanges


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
    """Within the block this process is the first of `size`; the others run `target(*args)`."""
    if size <= 1:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/meeting"
        context = multiprocessing.get_context("spawn")
        jobs = [(rank, size, url, target, args) for rank in range(1, size)]
        others = [context.Process(target=_join, args=job, daemon=True) for job in jobs]
        with ignored_by_children():
            for other in others:
                other.start()
        threads = torch.get_num_threads()
        try:
            _meet(0, size, url)
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            torch.set_num_threads(threads)
            for other in others:
                other.join(10)
                other.terminate()


def _meet(rank: int, size: int, url: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size, timeout=TIMEOUT)


def _join(rank: int, size: int, url: str, target: Callable[..., None], args: tuple) -> None:
    _meet(rank, size, url)
    try:
        target(*args)
    except DataError:
        pass  # a loss that is not finite; the first process has it too and reports it
    except RuntimeError as error:
        if "closed by peer" not in str(error):  # the first process has ended and reports the error
            raise
    dist.destroy_process_group()


def num_processes(device: str, threads: int) -> int:
    """Processes on a device: a core each, with "cuda" a GPU each, with "cuda:N" one."""
    if device == "cpu":
        return threads
    return max(1, min(threads, torch.cuda.device_count())) if device == "cuda" else 1


def my_device(device: str) -> torch.device:
    """The device of this process; in a group of "cuda" the GPU of its rank."""
    if device == "cuda" and is_in_group():
        return torch.device(device, dist.get_rank())
    return torch.device(device)


def check_shares(micro_batches: int, processes: int) -> None:
    """Raises ConfigError unless every process has as many micro-batches of a step."""
    if micro_batches % processes:
        fitting = [n for n in range(1, processes) if micro_batches % n == 0]
        raise ConfigError(
            f"a step of {micro_batches} micro-batches cannot be shared evenly by {processes} "
            f"processes; use --threads {max(fitting)}"
        )


def is_in_group() -> bool:
    """Whether this process trains with others."""
    return bool(dist.is_initialized())


def is_first_process() -> bool:
    """Whether this process writes files; true outside a group."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def all_threads() -> Iterator[None]:
    """A block in which this process has a thread for each process of its group; the others wait."""
    own = torch.get_num_threads()
    torch.set_num_threads(max(own, dist.get_world_size() if dist.is_initialized() else 1))
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
