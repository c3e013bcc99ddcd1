"""Single-threaded processes that train one model together: on a busy CPU, faster than threads."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from forerun.utils.signals import deaf_children

T = TypeVar("T")
R = TypeVar("R")
PATIENCE = timedelta(minutes=10)


def in_processes(job: Callable[[T], R], items: list[T], size: int) -> Iterator[R]:
    """`job` of every item, in any order, by `size` single-threaded processes (1: this one)."""
    size = min(size, len(items))
    if size <= 1:
        yield from map(job, items)
        return
    context = multiprocessing.get_context("spawn")
    with deaf_children():
        pool = context.Pool(size, initializer=torch.set_num_threads, initargs=(1,))
    with pool:
        yield from pool.imap_unordered(job, items)


@contextmanager
def process_group(size: int, target: Callable[..., None], args: tuple) -> Iterator[None]:
    """Inside, this process is the first of `size`; the others run `target(*args)` beside it."""
    if size <= 1:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/meeting"
        context = multiprocessing.get_context("spawn")
        jobs = [(rank, size, url, target, args) for rank in range(1, size)]
        others = [context.Process(target=_join, args=job, daemon=True) for job in jobs]
        with deaf_children():
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
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size, timeout=PATIENCE)


def _join(rank: int, size: int, url: str, target: Callable[..., None], args: tuple) -> None:
    _meet(rank, size, url)
    try:
        target(*args)
    except RuntimeError as error:
        if "closed by peer" not in str(error):  # else the first process has ended, and says why
            raise
    dist.destroy_process_group()
