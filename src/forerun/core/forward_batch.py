"""The input of one forward pass: `Target.forward(ForwardBatch) -> list[Rows]`."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from forerun.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from forerun.core.records import Sequence
    from forerun.core.tree import Tree

NO_NEEDS: frozenset[str] = frozenset()
FIELDS = frozenset(  # names allowed in `ForwardBatch.needs`; taps are written "taps:2,5,8"
    {"logits", "hidden", "probes", "taps", "attention", "embeddings", "prompt_logits"}
)
# everything that `Target.gives` may name, see `ForwardBatch.kinds`
EVERYTHING = FIELDS | {"layers", "resume", "prompt_rows", "positions", "dropped_cells"}


class Fields(NamedTuple):
    """The fields of `Rows` that a set of needs names."""

    hidden: bool = False
    taps: tuple[int, ...] = ()  # layers, ascending
    attention: bool = False
    embeddings: bool = False
    prompt_logits: bool = False
    kinds: frozenset[str] = NO_NEEDS  # the names without their numbers


@lru_cache(maxsize=256)
def fields(needs: frozenset[str]) -> Fields:
    """Parses needs. Raises ConfigError for an unknown name or a bad layer number."""
    taps: set[int] = set()
    kinds: set[str] = set()
    for need in needs:
        kind, _, numbers = need.partition(":")
        if kind not in FIELDS or (numbers and kind != "taps"):
            raise ConfigError(
                f"unknown need {need!r}; use one of {', '.join(sorted(FIELDS))} (taps:2,5)"
            )
        kinds.add(kind)
        if kind == "taps":
            taps |= _layer_numbers(need, numbers)
    return Fields(
        hidden="hidden" in kinds,
        taps=tuple(sorted(taps)),
        attention="attention" in kinds,
        embeddings="embeddings" in kinds,
        prompt_logits="prompt_logits" in kinds,
        kinds=frozenset(kinds - {"logits"}),
    )


def _layer_numbers(need: str, numbers: str) -> set[int]:
    parts = numbers.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"bad layer numbers in need {need!r}; write taps:2 or taps:2,5,8")
    return set(map(int, parts))


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """One forward pass over B sequences, each with its draft tree.

    All lists have B entries. Row 0 of a sequence is its root (the last token), row i + 1 is node i.
    Indices count the tokens of a sequence first, then its nodes: node j has index len(tokens) + j.
    """

    seqs: Many[Sequence]
    trees: Many[Tree]
    needs: frozenset[str] = NO_NEEDS  # fields of `Rows` in addition to logits, see FIELDS
    layers: range | tuple[int, ...] | None = None  # run only these, then final norm and head
    # first index of `Rows.prompt`; None: no prompt rows for this sequence
    prompt_rows: Many[int | None] | None = None
    # int64 [len(tokens)], position ids other than 0, 1, 2, ...; kept until the sequence is
    # released, and continued by one per token
    positions: Many[np.ndarray | None] | None = None
    attention_queries: Many[Many[int]] | None = None  # indices; default: the root

    @property
    def kinds(self) -> frozenset[str]:
        """What a target must support to serve this batch, in the names of `Target.gives`."""
        found = fields(self.needs).kinds
        extra = {
            "layers": self.layers is not None,
            "prompt_rows": self.prompt_rows is not None and set(self.prompt_rows) != {None},
            "positions": self.positions is not None,
            "resume": any(tree.resume is not None for tree in self.trees),
        }
        if not any(extra.values()):
            return found
        return found | {name for name, is_used in extra.items() if is_used}


def missing(needs: frozenset[str], gives: frozenset[str]) -> list[str]:
    """The needs that `gives` does not cover."""
    return sorted(need for need in needs if not fields(frozenset({need})).kinds <= gives)
