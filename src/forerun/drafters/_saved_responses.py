"""Saving and loading, for drafters with a store of responses."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from forerun.core.mixins import Persistent
from forerun.core.records import Snapshot
from forerun.ngrams.tables.suffix import response_store
from forerun.ngrams.tables.suffix.response_store import Responses


class SavedResponses(Persistent):
    """A drafter with state that is `_responses`, a store of responses."""

    _responses: Responses[Any, Any]

    def keep(self, tenant: str = "") -> None:
        self._responses.check_can_keep(tenant)

    def snapshot(self, tenant: str = "") -> Snapshot:
        return self._responses.snapshot(tenant)

    def restore(self, snapshot: Snapshot, tenant: str = "") -> None:
        self._responses.restore(snapshot, tenant)

    @classmethod
    def merge(cls, snapshots: Many[Snapshot], max_bytes: int | None = None) -> Snapshot:
        return response_store.merge(snapshots, max_bytes)
