"""What a drafter holds: the sizes of all its collections, its parts' and its memories'."""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakSet

from forerun.core.roles import Drafter

COLLECTIONS = dict, set, WeakKeyDictionary, WeakSet


def held(drafter: Drafter) -> dict[str, int]:
    """How much is in each that is not empty."""
    found = {}
    for i, part in enumerate(drafter.within()):
        memories = [v for v in vars(part).values() if type(v).__module__.startswith("forerun.n")]
        for owner in (part, *memories):
            for name, value in vars(owner).items():
                if isinstance(value, COLLECTIONS) and len(value):
                    found[f"part {i}: {type(owner).__name__}.{name}"] = len(value)
    return found
