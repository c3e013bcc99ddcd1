"""Scopes of learned state: which sequences share a table, and the key of that table."""

from __future__ import annotations

from collections.abc import Hashable

from forerun.core.records import Sequence
from forerun.errors import ConfigError

SCOPES = ("request", "group", "tenant", "global")
LASTING_SCOPES = ("tenant", "global")  # scopes with tables that outlive sequences


def check_scope(scope: str) -> None:
    """Raises ConfigError for an unknown scope."""
    if scope not in SCOPES:
        raise ConfigError(f"scope must be one of {SCOPES}, got {scope!r}")


def key_of(scope: str, seq: Sequence) -> Hashable:
    """The key of the table that a sequence uses."""
    return kept_key(scope, seq.tenant) if scope in LASTING_SCOPES else _own(scope, seq)


def keys_of(scope: str, seq: Sequence) -> tuple[Hashable, ...]:
    """The keys of all tables that a sequence updates; wide scopes add one for its group."""
    own = _own(scope, seq)
    if scope not in LASTING_SCOPES:
        return (own,)
    return kept_key(scope, seq.tenant), ("near", seq.tenant, own)


def kept_key(scope: str, tenant: str) -> Hashable:
    """The key of a table that outlives sequences."""
    return ("tenant", tenant) if scope == "tenant" else "global"


def near_group(key: Hashable) -> Hashable:
    """The group of a ("near", tenant, group) key as a 1-tuple, else ()."""
    return key[2:] if isinstance(key, tuple) and key[:1] == ("near",) else ()


def _own(scope: str, seq: Sequence) -> Hashable:
    """The group, or the sequence itself."""
    return seq if scope == "request" or seq.group is None else seq.group
