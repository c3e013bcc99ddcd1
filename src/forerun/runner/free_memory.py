"""Free memory of a device, within the limits of a container."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from forerun.errors import CapacityError

log = logging.getLogger("forerun")
UNLIMITED = 1 << 62
TIGHT_SHARE = 0.9  # of the free memory: a warning if weights take more
V1 = "memory.limit_in_bytes", "memory.usage_in_bytes"
V2 = "memory.max", "memory.current"


def available_bytes(device: torch.device) -> int:
    """Free bytes of a device, within the limits of a container."""
    if device.type == "cuda":
        # memory that torch has reserved and does not use is free
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    free = container_bytes()
    with suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) * 1024)
    return free  # unknown: the allocator may refuse


def check_weights(size: int, device: torch.device, how: str) -> None:
    """Raises CapacityError if weights do not fit into free memory; warns above TIGHT_SHARE.

    how: text on the size, e.g. "at 2 bytes each".
    """
    free = available_bytes(device)
    summary = f"the weights take {size / 2**30:.1f} GiB {how}, and {free / 2**30:.1f} GiB are free"
    fix = "use dtype 'bf16', weights 'int8', a smaller model, or another device"
    if size > free:
        raise CapacityError(f"{summary}; {fix}")
    if size > TIGHT_SHARE * free:
        log.warning("%s: the machine may swap and become very slow; %s", summary, fix)


def container_bytes(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """Bytes left by the memory limits of control groups (v1, v2); file cache counts as free."""
    with suppress(OSError):
        groups = _groups(root, own.read_text())
        return min([UNLIMITED, *(_group_bytes(*group) for group in groups)])
    return UNLIMITED


@cache
def _groups(root: Path, memberships: str) -> list[tuple[str, str, str]]:
    """Folder, limit and usage of the process's control groups and their parents."""
    found = []
    for line in memberships.splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        base = root / "memory" if kinds else root
        folder = base / path.lstrip("/")
        groups = [g for g in (folder, *folder.parents) if g.is_relative_to(base)]
        found += [(str(group), *(V1 if kinds else V2)) for group in groups]
    return found


def _group_bytes(group: str, limit: str, usage: str) -> int:
    """Bytes left by the limit of one group."""
    try:
        most = int(_text(group, limit))
        if most >= UNLIMITED:  # version 1: no limit
            return UNLIMITED
        used = int(_text(group, usage))
        stat = dict(line.split() for line in _text(group, "memory.stat").splitlines())
    except (OSError, ValueError):  # missing files, or the limit is "max"
        return UNLIMITED
    cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    return max(most - used + cached, 0)


def _text(group: str, name: str) -> str:
    with open(f"{group}/{name}") as file:
        return file.read()
