"""The Target, lock and drafters of each user model; nothing is stored in the model itself.

The registry holds models weakly, so a model can be copied, saved and deleted as if it was never
used here.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from forerun import registry
from forerun.core.roles import Drafter
from forerun.models.hf import HFTarget
from forerun.models.hf_rope import UNLIMITED
from forerun.utils.locks import FairLock

MIN_MAX_SEQS = 256  # sequences of all threads together; memory is allocated on use


@dataclass
class Entry:
    """The objects of one model."""

    lock: FairLock = field(default_factory=FairLock)  # shared by all targets of the model
    target: HFTarget | None = None
    structure: Hashable = None  # of the model for which the target was made
    drafters: dict[str, Drafter] = field(default_factory=dict)


_entries: WeakKeyDictionary[Any, Entry] = WeakKeyDictionary()
_entries_lock = Lock()


def entry_of(model: Any) -> Entry:
    """The entry of a model."""
    with _entries_lock:
        return _entries.setdefault(model, Entry())


def lock_of(model: Any) -> FairLock:
    """The lock shared by all targets of a model."""
    return entry_of(model).lock


def target_of(model: Any, num_seqs: int) -> HFTarget:
    """The model as a Target for at least `num_seqs` sequences; a new one if the model was rebuilt.

    Its context is not limited: like `generate`, it computes all positions that the model can.
    """
    entry, structure = entry_of(model), structure_of(model)
    target = entry.target
    if target is None or target.max_seqs < num_seqs or entry.structure != structure:
        target = HFTarget(
            model,
            max_seqs=max(MIN_MAX_SEQS, num_seqs),
            context=UNLIMITED,
            is_weak=True,
            watch="counters",
        )
        target.lock = entry.lock
        if entry.structure != structure:  # other sizes: what drafters learned may not fit
            entry.drafters.clear()
        entry.target, entry.structure = target, structure
    return target


def structure_of(model: Any) -> Hashable:
    """What decides how a model can be run: its config, dtype, device and attention."""
    return (
        model.config.to_json_string(use_diff=False),
        getattr(model.config, "_attn_implementation", None),
        model.dtype,
        model.device,
    )


def drafter_of(model: Any, spec: str | Drafter) -> Drafter:
    """A drafter by name, cached for the model."""
    if isinstance(spec, Drafter):
        return spec
    registry.check_spec("drafter", spec)
    known = entry_of(model).drafters
    if spec not in known:
        known[spec] = registry.make("drafter", spec)
    return known[spec]
