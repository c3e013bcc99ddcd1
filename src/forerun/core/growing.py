"""Base classes for draft trees that grow from a distribution: `Source` gives q, `Grower` draws."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from forerun.core.records import Plan, Sequence
from forerun.core.tree import Proposal, Tree

if TYPE_CHECKING:
    from forerun.core.dice import Dice

Path = tuple[int, ...]  # tokens below the root
Growth = Generator[list[Path], list[Proposal | None], Tree]


class Source(ABC):
    """The next-token distribution q of a drafter, given a path."""

    @abstractmethod
    def next(self, requests: Many[tuple[Sequence, Path]]) -> list[Proposal | None]:
        """q after seq.tokens + path for each request; None if the source has none."""


class Grower(ABC):
    """Builds a draft tree from a source. Only growers draw tokens and label nodes.

    `grow` is a generator: it yields the paths for which it needs q and is sent the proposals, so
    scalar code serves a batch. Rules: label a node when it is drawn; stop after an unlikely token,
    never remove it; prune or reorder POINT nodes only, or before drawing.
    """

    labels: frozenset[str]  # subset of {"point", "iid", "swor"}

    @abstractmethod
    def grow(self, plan: Plan, dice: Dice) -> Growth:
        """Builds one tree of at most plan.nodes nodes and plan.depth levels."""
