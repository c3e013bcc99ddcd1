"""The drafters of a model by spec: each is made once and learns from run to run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from threading import Lock
from typing import Any

from forerun import registry
from forerun.core.roles import Drafter


class DrafterCache:
    """Drafters by spec, such as "stand:context=4". Thread-safe."""

    def __init__(self) -> None:
        self._drafters: dict[str, Drafter] = {}
        self._pinned: set[str] = set()
        self._making = Lock()  # each drafter is made once

    def get(self, spec: str, offers: Mapping[str, Any]) -> Drafter:
        """The drafter of a spec, always the same object. offers: arguments of constructors."""
        found = self._drafters.get(spec)
        if found is None:
            with self._making:
                found = self._drafters.get(spec)
                if found is None:
                    found = self._drafters[spec] = registry.make("drafter", spec, **offers)
        return found

    def pin(self, spec: str) -> None:
        """Keeps the drafter of a spec when the others are dropped."""
        self._pinned.add(spec)

    def drop_learned(self) -> None:
        """Drops all drafters that are not pinned, with what they learned."""
        with self._making:
            kept = {spec: one for spec, one in self._drafters.items() if spec in self._pinned}
            self._drafters = kept

    def memory_report(self) -> dict[str, int]:
        """Bytes by spec and part. Memory shared by several drafters is reported for the first."""
        report: dict[str, int] = {}
        seen: set[Hashable] = set()
        for spec, drafter in list(self._drafters.items()):
            for part, size in drafter.memory_report().items():
                key = getattr(size, "key", (spec, part))
                if key not in seen:
                    report[f"{spec}: {part}"] = size
                seen.add(key)
        return report
