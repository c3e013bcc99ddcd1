"""How much memory a device has left, within the limits of a container."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

UNLIMITED = 1 << 62
V1 = "memory.limit_in_bytes", "memory.usage_in_bytes"
V2 = "memory.max", "memory.current"


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device, within the limits of a container."""
    if device.type == "cuda":
        # blocks that torch holds and does not use are free for it
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    free = container_bytes()
    with suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                free = min(free, int(line.split()[1]) * 1024)
    return free  # nothing known: let the allocator say no


def container_bytes(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """What the memory limits of our control groups (v1 or v2) leave; file cache counts as free."""
    free = UNLIMITED
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            base = root / "memory" if kinds else root
            folder = base / path.lstrip("/")
            groups = [g for g in (folder, *folder.parents) if g.is_relative_to(base)]
            names = V1 if kinds else V2
            free = min([free, *(_group_bytes(group, *names) for group in groups)])
    return free


def _group_bytes(group: Path, limit: str, usage: str) -> int:
    """What the limit of one group leaves."""
    try:
        most, used = int((group / limit).read_text()), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such files, or the limit is "max"
        return UNLIMITED
    cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    return max(most - used + cached, 0)
