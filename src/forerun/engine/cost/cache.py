"""Measured seconds on disk, by model, dtype, device and number of threads."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Sequence as Many
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.core.roles import Target
from forerun.utils.files import write_atomically
from forerun.utils.paths import cache_folder

FORMAT_VERSION = 12


def path_of(target: Target, name: str) -> Path | None:
    """The file of a measurement; None for a target without a shape."""
    return cache_folder() / "costs" / f"{key_of(target)}{name}.json" if target.shape else None


def key_of(target: Target) -> str:
    """Equal for targets that take the same seconds."""
    import torch

    from forerun.runner.native import kernels

    threads = torch.get_num_threads()
    machine = platform.machine(), _processor(), kernels().level, *_gpus(target.shape)
    key = repr((FORMAT_VERSION, target.shape, threads, machine, torch.__version__))
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def read(path: Path | None, kinds: Many[Any]) -> list[float] | None:
    """The cached seconds of these kinds; None if the file is missing, damaged or of other kinds."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if path is not None:
            found = json.loads(path.read_text())
            seconds = [math.inf if s is None else float(s) for s in found["seconds"]]
            is_same = found["kinds"] == json.loads(json.dumps(kinds))  # tuples become lists
            if is_same and len(seconds) == len(kinds) and min(seconds) > 0:
                return seconds
    return None


def write(path: Path | None, kinds: Many[Any], seconds: Many[float]) -> None:
    """Writes seconds that `read` returns; infinite ones are not measured yet."""
    if path is None:
        return
    with suppress(OSError):  # the cache is optional
        reached = [s if math.isfinite(s) else None for s in seconds]
        text = json.dumps({"kinds": kinds, "seconds": reached})
        write_atomically(path, lambda part: part.write_text(text))


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        return next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
    return ""


def _gpus(shape: str) -> list[str]:
    """Names of the GPUs if the target runs on one."""
    import torch

    if "cuda" not in shape:
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
