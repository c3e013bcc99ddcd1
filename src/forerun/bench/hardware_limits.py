"""Upper limits of a machine: reading speed of memory and speed of matrix products.

A limit is the best of several tries, so it bounds what any kernel can reach here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.errors import CapacityError
from forerun.runner.native.memory import cache_bytes

if TYPE_CHECKING:
    import torch

MIN_BUFFER_BYTES = 256 << 20
BUFFER_OVER_CACHE = 8, 3  # buffer size over that of the caches: preferred, with little memory
FILL_CHUNK = 8 << 20  # numbers written at once
PRODUCT_SIZES = (512, 1024, 2048, 4096, 8192)  # rows and columns
MAX_PRODUCT_SECONDS = 0.05  # a product that takes longer is the largest one tried


def limits(threads: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, float]:
    """read_gb_s, and gflop_s of a large product in this number type."""
    return {
        "read_gb_s": read_bandwidth(threads, device=device),
        "gflop_s": product_rate(dtype, device=device),
    }


def read_bandwidth(threads: int, *, tries: int = 8, device: str = "cpu") -> float:
    """GB/s of a streaming read; each thread reads its part in one stream and in four."""
    if device.startswith("cuda"):
        return _read_cuda(device, tries)
    from forerun.runner import native

    if native.kernels():
        words = _buffer()
        ways = (partial(native.read, words, threads, streams) for streams in (1, 4))
        return words.nbytes / min(best_seconds(way, tries) for way in ways) / 1e9
    return _read_with_numba(threads, tries)


def _read_with_numba(threads: int, tries: int) -> float:
    from forerun.bench import _read_kernels

    parts = np.array_split(_buffer(), threads)
    kernels = _read_kernels.sum_in_one_stream, _read_kernels.sum_in_four_streams
    for kernel in kernels:
        kernel(parts[0][:8])  # compiles
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for kernel in kernels * max(tries // 2, 1):
            start = time.perf_counter()
            list(pool.map(kernel, parts))
            best = min(best, time.perf_counter() - start)
    return sum(part.nbytes for part in parts) / best / 1e9


@cache
def _buffer() -> np.ndarray:
    """An int64 array that no cache can hold; kept, so later tries touch no new page.

    Raises CapacityError if it would take more than half of the free memory.
    """
    import torch

    from forerun.runner.kv_cache import available_bytes

    sizes = [max(MIN_BUFFER_BYTES, times * cache_bytes()) for times in BUFFER_OVER_CACHE]
    free = available_bytes(torch.device("cpu"))
    size = next((size for size in sizes if size <= free // 2), None)
    if size is None:
        raise CapacityError(
            f"measuring memory needs {2 * sizes[-1] >> 20} MiB free, and {free >> 20} MiB are; "
            "end other programs, or raise the limit of the container"
        )
    words = np.empty(size // 8, dtype=np.int64)
    for start in range(0, len(words), FILL_CHUNK):  # Ctrl-C works between chunks
        words[start : start + FILL_CHUNK] = 1
    return words


def _read_cuda(device: str, tries: int) -> float:
    """GB/s of a GPU's memory: the faster of a sum and of a copy, which reads and writes."""
    import torch

    from forerun.runner.free_memory import available_bytes

    size = min(1 << 32, available_bytes(torch.device(device)) // 8)
    x = torch.ones(size // 4, dtype=torch.float32, device=device)
    read = x.nbytes / best_seconds(x.sum, tries, device)
    y = torch.empty_like(x)
    return max(read, 2 * x.nbytes / best_seconds(lambda: y.copy_(x), tries, device)) / 1e9


def product_rate(dtype: torch.dtype, *, tries: int = 5, device: str = "cpu") -> float:
    """GFLOP/s of the fastest square product of PRODUCT_SIZES."""
    import torch

    best = 0.0
    for size in PRODUCT_SIZES:
        a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        seconds = best_seconds(partial(torch.matmul, a, b), tries, device)
        best = max(best, 2 * size**3 / seconds / 1e9)
        if seconds > MAX_PRODUCT_SECONDS:
            break
    return best


def best_seconds(work: Callable[[], Any], tries: int, device: str = "cpu") -> float:
    """The shortest of several calls, after one that is not timed."""
    import torch

    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    best = float("inf")
    for i in range(tries + 1):
        wait()
        start = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - start) if i else best
    return best
