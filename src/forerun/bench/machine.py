"""What a run was measured on, and how fast that is at its best: reading memory, and multiplying.

The limits are the best of several tries, so they bound what any kernel can reach here.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import forerun
from forerun.errors import CapacityError
from forerun.runner.native.memory import cache_bytes

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "transformers", "numba", "numpy")
LEAST = 256 << 20  # bytes of the buffer that is read
TIMES_CACHE = 8, 3  # how far it exceeds the caches: as a rule, and where memory is short
PIECE = 8 << 20  # numbers that are written at once
COARSE = 0.05  # seconds of processor time that its counters do not tell apart
TOLD = 1.0  # seconds from which on `taken` means anything: two ticks of 10 ms are 2 % of them
PATIENCE, LOOK, STILL = 2.0, 0.1, 2  # seconds, seconds, ticks: who took so few is idle
WIDE = (512, 1024, 2048, 4096, 8192)  # rows and columns of the products
SLOW = 0.05  # seconds of a product after which no larger one is tried


def describe(device: str = "cpu") -> dict[str, Any]:
    """CPU, cores, memory, system, versions and kernels; the GPU where the device is one."""
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": num_cores(),
        "memory": memory_bytes(),
        "cache_bytes": cache_bytes(),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    found |= {name: package_version(name) for name in PACKAGES}
    found |= {"kernels": kernels(), "device": device}
    if device.startswith("cuda"):
        import torch

        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def package_version(name: str) -> str:
    """The installed version of a package, or "missing"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def cpu_name() -> str:
    """The processor as the system names it, with its instructions that matter here."""
    info = first_values(Path("/proc/cpuinfo"))
    name = info.get("model name") or platform.processor() or platform.machine()
    flags = info.get("flags", "").split()
    known = {"avx512_bf16": "AVX-512 BF16", "amx_bf16": "AMX BF16", "avx512f": "AVX-512"}
    best = [text for flag, text in known.items() if flag in flags]
    return name + (f" ({best[0]})" if best else "")


def num_cores() -> int:
    """Cores that this process may use."""
    has = getattr(os, "sched_getaffinity", None)
    return len(has(0)) if has else os.cpu_count() or 1


def usual_threads() -> int:
    """Threads where nobody names a number: OMP_NUM_THREADS, else all cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) else num_cores()


def cpu_seconds() -> tuple[float, float]:
    """Seconds that the cores of this process were busy so far, and those of it and its children.

    (0, 0) where the system does not say.
    """
    try:
        tick, cores = os.sysconf("SC_CLK_TCK"), {f"cpu{i}" for i in os.sched_getaffinity(0)}
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except (OSError, AttributeError, ValueError):
        return 0.0, 0.0
    times = [list(map(int, words[1:])) for words in lines if words and words[0] in cores]
    busy = sum(sum(row[:3]) + sum(row[5:8]) for row in times)  # neither idle nor waiting for disks
    return busy / tick, sum(family(slice(11, 15)).values()) / tick  # ended children's, too


def settle() -> None:
    """Waits until what this process has started computes no more, PATIENCE seconds at most.

    Threads of a library spin for a moment after their last product, in case there is another.
    """
    end, before = time.perf_counter() + PATIENCE, _busy_children()
    while before and time.perf_counter() < end:
        time.sleep(LOOK)
        after = _busy_children()
        if sum(after.values()) - sum(before.get(one, 0) for one in after) <= STILL:
            return
        before = after


def _busy_children() -> dict[str, int]:
    """Ticks of processor time of each process that this one has started; empty if none is told."""
    return {one: ticks for one, ticks in family(slice(11, 13)).items() if one != str(os.getpid())}


def family(columns: slice) -> dict[str, int]:
    """The sum of some columns of /proc/PID/stat, of this process and all that it has started."""
    parents, spent = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            words = file.read_text().rpartition(")")[2].split()
            parents[file.parent.name] = words[1]
            spent[file.parent.name] = sum(map(int, words[columns]))
    own, new = set[str](), {str(os.getpid())}
    while new:
        own |= new
        new = {child for child, parent in parents.items() if parent in new}
    return {one: spent.get(one, 0) for one in own}


def taken(
    before: tuple[float, float], after: tuple[float, float], seconds: float, threads: int
) -> float:
    """Share of the cores for `threads` that was lost between two `cpu_seconds`.

    To other programs, and while we were halted: who decodes keeps a core busy.
    """
    busy, ours = (end - start for start, end in zip(before, after, strict=True))
    halted = min(max(seconds - ours, 0.0), max(seconds * num_cores() - busy, 0.0))
    cores = min(threads, num_cores())
    free = seconds * (num_cores() - cores)  # on cores that were free they may run
    lost = max(busy - ours - free, 0.0) + halted
    return min(lost / (seconds * cores), 1.0) if lost > COARSE else 0.0


class Watch:
    """Looks at the cores for `threads` from now on."""

    def __init__(self, threads: int) -> None:
        self._threads, self._before, self._start = threads, cpu_seconds(), time.perf_counter()

    def taken(self) -> float | None:
        """The share that was lost so far; None before TOLD seconds, or if the system says none."""
        spent = time.perf_counter() - self._start
        if not self._before[0] or spent < TOLD:
            return None
        return taken(self._before, cpu_seconds(), spent, self._threads)


def memory_bytes() -> int:
    """Memory of the machine; 0 where the system does not say."""
    total = first_values(Path("/proc/meminfo")).get("MemTotal", "0 kB")
    return int(total.split()[0]) * 1024


def first_values(file: Path, sign: str = ":") -> dict[str, str]:
    """First value per name of a file of "name: value" lines; empty where there is none."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(sign) for line in reversed(lines))
    return {name.strip(): value.strip() for name, _, value in pairs}


def kernels() -> str:
    """Which kernels our own passes run on, on a CPU."""
    from forerun.models import layers
    from forerun.runner.native import LEVELS
    from forerun.runner.native import kernels as native

    found = native()
    if found:
        return f"native {LEVELS[found.level]}"
    return "oneDNN blocked" if layers.HAS_BLOCKED else "torch"


def git_revision() -> str:
    """Revision of the checkout that runs, "+dirty" if files differ; else that which was installed.

    "" where neither is known.
    """
    package = Path(forerun.__file__).resolve().parent
    try:
        top = Path(_git(package, "rev-parse", "--show-toplevel"))
        if top / "src" / "forerun" != package:  # installed into somebody else's repository
            return _installed_revision()
        dirty = _git(top, "status", "--porcelain", "--", "src")
        return _git(package, "rev-parse", "--short", "HEAD") + ("+dirty" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return _installed_revision()


def _installed_revision() -> str:
    """The commit that pip took the package from, or the local part of its version: 0.1+REVISION."""
    try:
        found = distribution("forerun")
        told = json.loads(found.read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return forerun.__version__.partition("+")[2]
    commit = told.get("vcs_info", {}).get("commit_id", "")
    return commit[:7] or found.version.partition("+")[2]


def _git(folder: Path, *words: str) -> str:
    call = ["git", "-C", str(folder), *words]
    return subprocess.run(
        call, capture_output=True, text=True, check=True, timeout=20
    ).stdout.strip()


def limits(threads: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, float]:
    """read_gb_s, and gflop_s of a large product in this number type."""
    return {
        "read_gb_s": read_bandwidth(threads, device=device),
        "gflop_s": product_rate(dtype, device=device),
    }


def read_bandwidth(threads: int, *, tries: int = 8, device: str = "cpu") -> float:
    """GB/s of a streaming read: each thread reads its part in one stream and in four."""
    if device.startswith("cuda"):
        return _read_cuda(device, tries)
    from forerun.runner import native

    if native.kernels():
        words = _buffer()
        ways = (partial(native.read, words, threads, streams) for streams in (1, 4))
        return words.nbytes / min(best_seconds(way, tries) for way in ways) / 1e9
    from forerun.bench import streams

    parts = np.array_split(_buffer(), threads)
    size = sum(part.nbytes for part in parts)
    for read in (streams.one, streams.four):
        read(parts[0][:8])  # compiled
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for read in (streams.one, streams.four) * max(tries // 2, 1):
            start = time.perf_counter()
            list(pool.map(read, parts))
            best = min(best, time.perf_counter() - start)
    return size / best / 1e9


@cache
def _buffer() -> np.ndarray:
    """Numbers, int64, that no cache can hold; kept, so that a later try touches no new page.

    Raises CapacityError before it takes more than half of the memory that is free: the system
    would grant it, and end a process once it is written.
    """
    import torch

    from forerun.runner.kv_cache import available_bytes

    sizes = [max(LEAST, times * cache_bytes()) for times in TIMES_CACHE]
    free = available_bytes(torch.device("cpu"))
    size = next((size for size in sizes if size <= free // 2), None)
    if size is None:
        raise CapacityError(
            f"measuring the memory takes {sizes[-1] >> 20} MiB and leaves as much free, but "
            f"{free >> 20} MiB are; end other programs, or raise the limit of the container"
        )
    words = np.empty(size // 8, dtype=np.int64)
    for start in range(0, len(words), PIECE):  # Ctrl-C is heard in between
        words[start : start + PIECE] = 1
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
    """GFLOP/s of a square product: the best of the sizes WIDE, as far as they take little time."""
    import torch

    best = 0.0
    for wide in WIDE:
        a, b = (torch.ones(wide, wide, dtype=dtype, device=device) for _ in range(2))
        seconds = best_seconds(partial(torch.matmul, a, b), tries, device)
        best = max(best, 2 * wide**3 / seconds / 1e9)
        if seconds > SLOW:
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
