"""Description of the machine: processor, cores, memory, versions, kernels, revision."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import forerun
from forerun.runner.native.memory import cache_bytes

PACKAGES = ("torch", "transformers", "numba", "numpy")
GIT_TIMEOUT_S = 20


def describe(device: str = "cpu") -> dict[str, Any]:
    """CPU, cores, memory, system, versions and kernels; the GPU for a CUDA device."""
    found: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": num_cores(),
        "memory": memory_bytes(),
        "cache_bytes": cache_bytes(),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    found |= {name: package_version(name) for name in PACKAGES}
    found |= {"kernels": kernel_name(), "device": device}
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
    """The processor and its widest relevant instruction set."""
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


def default_threads() -> int:
    """OMP_NUM_THREADS, or else all cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) else num_cores()


def memory_bytes() -> int:
    """Memory of the machine; 0 if unknown."""
    total = first_values(Path("/proc/meminfo")).get("MemTotal", "0 kB")
    return int(total.split()[0]) * 1024


def first_values(file: Path, separator: str = ":") -> dict[str, str]:
    """First value per name in a file of "name: value" lines; empty without the file."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(separator) for line in reversed(lines))
    return {name.strip(): value.strip() for name, _, value in pairs}


def kernel_name() -> str:
    """The kernels of our own CPU passes."""
    from forerun.models import layers
    from forerun.runner.native import LEVELS
    from forerun.runner.native import kernels as native

    found = native()
    if found:
        return f"native {LEVELS[found.level]}"
    return "oneDNN blocked" if layers.HAS_BLOCKED else "torch"


def git_revision() -> str:
    """Revision of the running checkout, "+dirty" if files differ; "" for an installed package."""
    package = Path(forerun.__file__).resolve().parent
    try:
        top = Path(_git(package, "rev-parse", "--show-toplevel"))
        if top / "src" / "forerun" != package:  # installed into another repository
            return ""
        dirty = _git(top, "status", "--porcelain", "--", "src")
        return _git(package, "rev-parse", "--short", "HEAD") + ("+dirty" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *words: str) -> str:
    call = ["git", "-C", str(folder), *words]
    return subprocess.run(
        call, capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_S
    ).stdout.strip()
