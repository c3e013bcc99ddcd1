"""Jobs on one torch thread each: all are done, errors pass, the number of threads comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from forerun.models.one_thread import PENDING_PER_WORKER, for_each


@pytest.mark.parametrize("workers", [1, 3])
def test_every_item_is_done_on_one_thread(workers: int) -> None:
    before, done, lock = torch.get_num_threads(), [], threading.Lock()

    def job(item: int) -> None:
        with lock:
            done.append((item, torch.get_num_threads()))

    for_each(range(20), job, workers)
    assert sorted(done) == [(i, 1) for i in range(20)]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_error_passes_and_ends_the_reading(workers: int) -> None:
    before, read = torch.get_num_threads(), []

    def items() -> Iterator[int]:
        for i in range(1000):
            read.append(i)
            yield i

    def job(item: int) -> None:
        if item == 5:
            raise ValueError("five")

    with pytest.raises(ValueError, match="five"):
        for_each(items(), job, workers)
    assert len(read) <= 6 + workers * (PENDING_PER_WORKER + 1)
    assert torch.get_num_threads() == before
