"""Runs many small torch jobs at a time, each on one thread.

A torch operation on several threads ends when the last of them is done, and the others spin until
then. On a machine with other work this costs more than the operation. Jobs on one thread each
never wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
PENDING_PER_WORKER = 2  # items read ahead; bounds the memory of dequantised tensors


def for_each(items: Iterable[Item], job: Callable[[Item], None], workers: int) -> None:
    """Calls `job` with every item, on `workers` threads. Raises the first error of a job.

    Items are read in the calling thread, at most PENDING_PER_WORKER per worker ahead.
    """
    with one_torch_thread():
        if workers <= 1:
            for item in items:
                job(item)
            return
        pending: deque[Future[None]] = deque()
        with ThreadPoolExecutor(workers, thread_name_prefix="load") as pool:
            try:
                for item in items:
                    pending.append(pool.submit(job, item))
                    if len(pending) > workers * PENDING_PER_WORKER:
                        pending.popleft().result()
                for future in pending:
                    future.result()
            finally:
                for future in pending:
                    future.cancel()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """A block in which torch operations run on one thread each, also in threads that it starts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
