"""What a drafter holds: the sizes of all its collections, its parts' and its memories'."""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakSet

from forerun.core.mixins import parts_of
from forerun.core.roles import Drafter

COLLECTIONS = dict, set, WeakKeyDictionary, WeakSet


def held(drafter: Drafter) -> dict[str, int]:
    """How much is in each that is not empty."""
    found = {}
    for i, part in enumerate(parts_of(drafter)):
        memories = [v for v in vars(part).values() if _is_memory(v)]
        inner = [v for memory in memories for v in vars(memory).values() if _is_memory(v)]
        for owner in (part, *memories, *inner):
            for name, value in vars(owner).items():
                if isinstance(value, COLLECTIONS) and len(value):
                    found[f"part {i}: {type(owner).__name__}.{name}"] = len(value)
    return found


def _is_memory(value: object) -> bool:
    home = type(value).__module__
    return hasattr(value, "__dict__") and home.startswith(("forerun.n", "forerun.drafters._"))
