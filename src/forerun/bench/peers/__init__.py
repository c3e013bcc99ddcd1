"""Peers: other libraries on the same checkpoint, each in its own environment and process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.bench.peers.catalog import check_sampling, methods, names, parse

if TYPE_CHECKING:
    from forerun.bench.contestants import Contestant, Setup

__all__ = ["check_sampling", "make", "methods", "names", "parse"]


def make(name: str, setup: Setup) -> Contestant:
    """The contestant of a peer's method name. Raises UnknownName, ConfigError."""
    from forerun.bench.peers.peer import PeerContestant

    return PeerContestant(parse(name), name, setup)
