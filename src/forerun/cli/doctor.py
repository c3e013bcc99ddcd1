"""`forerun doctor`: report on this machine and installation."""

from __future__ import annotations

import platform
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun import __version__
from forerun.cli._graphs import wants_graphs
from forerun.cli.options import Json
from forerun.cli.output import notice, print_json
from forerun.errors import CapacityError, ForerunError
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.runner.native import Kernels

PACKAGES = (
    "torch",
    "numpy",
    "numba",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "typer",
    "rich",
)
OPTIONAL = ("triton", "torchao")  # packages of extras
FLAGS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 BF16",
    "amx_bf16": "AMX BF16",
}
MIN_READ_SHARE = 0.75  # of the read bandwidth; below it a pass over one row is slow


def command(is_json: Json = False) -> None:
    """Report on this machine and installation."""
    found = examine()
    if is_json:
        print_json(found)
        return
    for topic, lines in found.items():
        print(topic)
        for name, value in lines.items():
            print(f"  {name:22} {value}")


def examine() -> dict[str, dict[str, Any]]:
    """Findings by topic, each a name and a short text; prints progress on standard error."""
    notice("doctor: versions, processor, number types")
    found: dict[str, dict[str, Any]] = {
        "versions": _versions(),
        "processor": _processor(),
        "gpu": _gpu(),
        "number types": _dtypes(),
        "kernels": _kernels(),
        "generated code": _generated_code(),
    }
    notice("doctor: read bandwidth of memory and weights (some seconds)")
    found["speed"] = _speed()
    notice("doctor: the embedded model")
    found["embedded model"] = _embedded()
    return found


def _versions() -> dict[str, str]:
    found = {"forerun": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing; install it with pip"
    for package in OPTIONAL:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _processor() -> dict[str, Any]:
    import torch

    from forerun.bench.machine import first_values, num_cores

    name = platform.processor() or platform.machine()
    found: dict[str, Any] = {"name": name, "cores": num_cores()}
    info = first_values(Path("/proc/cpuinfo"))
    if "flags" in info:
        flags = info["flags"].split()
        found["name"] = info.get("model name", found["name"])
        found["instructions"] = ", ".join(text for f, text in FLAGS.items() if f in flags) or "none"
    found["torch threads"] = torch.get_num_threads()
    free = first_values(Path("/proc/meminfo")).get("MemAvailable")
    if free:
        found["free memory"] = f"{int(free.split()[0]) / 2**20:.1f} GiB"
    return found


def _gpu() -> dict[str, str]:
    import torch

    from forerun.runner import gpu

    if not torch.cuda.is_available():
        built = torch.version.cuda
        return {"cuda": "none: torch sees no GPU" if built else "none: torch is built for CPUs"}
    found = {}
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        name = torch.cuda.get_device_name(i)
        found[f"cuda:{i}"] = f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        why = gpu.unavailable(torch.device("cuda", i)) if wants_graphs() else gpu.TURNED_OFF
        found[f"passes on cuda:{i}"] = f"torch: {why}" if why else "CUDA graphs"
    return found


def _dtypes() -> dict[str, str]:
    """Whether a small matrix product in each type works on the default device."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {}
    for name, dtype in {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
    }.items():
        try:
            square = torch.ones(8, 8, dtype=dtype, device=device)
            found[name] = f"works on {device}" if (square @ square)[0, 0] == 8 else "wrong results"
        except RuntimeError as error:
            found[name] = f"does not work on {device}: {str(error).splitlines()[0]}"
    return found


def _generated_code() -> dict[str, str]:
    """What limits code that the tasks humaneval and mbpp run."""
    from forerun.tasks import _sandbox

    prefix = _sandbox.isolation()
    landlock = _sandbox.has_landlock(prefix)
    return {
        "writing": "limited by Landlock" if landlock else "limited by an audit hook only",
        "network and processes": "own namespaces" if prefix else "limited by an audit hook only",
    }


def _kernels() -> dict[str, str]:
    from forerun.runner.native import kernels
    from forerun.utils import jit_cache

    cold, native = jit_cache.uncompiled_kernels(), kernels()
    return {
        "passes on the CPU": f"our own, {native.why}" if native else f"torch: {native.why}",
        "numba": f"{counted(len(cold), 'kernel')} not compiled yet; the first use takes a minute"
        if cold
        else "compiled and cached",
    }


def _speed() -> dict[str, str]:
    """Read bandwidth of memory and of bf16 matrix products, with advice."""
    import torch

    from forerun.bench.hardware_limits import read_bandwidth
    from forerun.bench.timers import seconds_of
    from forerun.models.layers import Linear
    from forerun.runner.native import kernels

    threads = torch.get_num_threads()
    try:
        limit = read_bandwidth(threads)
    except CapacityError as error:
        return {"memory reads at": f"not measured: {error}", "advice": _advice(kernels(), None)}
    size, rates = (32768, 4096), {}
    linear = Linear(torch.ones(size, dtype=torch.bfloat16))
    for rows in (16, 8, 1):
        x = torch.ones(rows, size[1], dtype=torch.bfloat16)
        best = float("inf")
        for _ in range(4):
            limit = max(limit, read_bandwidth(threads, tries=1))  # evicts the weights from caches
            with torch.inference_mode():
                best = min(best, seconds_of(partial(linear, x)))
        rates[rows] = 2 * size[0] * size[1] / best / 1e9
    return speed_lines(limit, rates) | {"advice": _advice(kernels(), rates[1] / limit)}


def speed_lines(limit: float, rates: dict[int, float]) -> dict[str, str]:
    """Measurements as text. limit: GB/s of reading; rates: rows -> GB/s of a matrix product.

    A product also reads memory, so the highest rate of all is the limit.
    """
    limit = max(limit, *rates.values())
    return {
        "memory reads at": f"{limit:.1f} GB/s; plain decoding on a CPU can be no faster{_beyond()}"
    } | {
        f"weights, {counted(rows, 'row')}": f"{rate:.1f} GB/s, {rate / limit:.0%} of that"
        for rows, rate in rates.items()
    }


def _beyond() -> str:
    """Text on models that fit into the cache, which memory does not limit."""
    from forerun.bench.machine import cache_bytes

    size = cache_bytes() / 2**20
    return f", but with models that fit into its cache of {size:.0f} MiB" if size else ""


def _advice(native: Kernels, share: float | None) -> str:
    """How to decode faster. share: of the read limit that one row reaches."""
    import torch

    if torch.cuda.is_available():
        return "models run on the GPU unless --device cpu is given"
    if not native:
        return f"forward passes run on torch, which reads weights more slowly: {native.why}"
    if share is not None and share < MIN_READ_SHARE:
        return (
            "forward passes do not reach the memory limit: close other programs, use fewer threads"
        )
    return (
        "plain decoding runs near the memory limit; drafting (on by default), several samples at "
        "once, or --weights int8, which changes the model's distribution, make it faster"
    )


def _embedded() -> dict[str, str]:
    from forerun.api import load
    from forerun.assets import embedded

    folder = embedded("reasoner")
    try:
        model = load("reasoner")
    except ForerunError as error:
        return {"folder": folder, "loads": f"no: {error}"}
    return {
        "folder": folder,
        "loads": f"yes: vocabulary {model.target.vocab_size}, context {model.target.context}",
    }
