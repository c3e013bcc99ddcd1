"""Maps token ids of one vocabulary to those of another: by bytes, by role, or to a subset.

Ordinary tokens map if their bytes within a text are equal, special tokens if they have the same
name or the same role (bos, eos, unk, pad). Ids of padding have no token and map to nothing. The map
is one-to-one: of several tokens with the same bytes, the one that is no single-byte fallback
counts, then the lowest id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forerun.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from forerun.models.tokenizer import Tokenizer

NONE = -1  # in place of an id
ROLES = ("bos", "eos", "unk", "pad")
FALLBACK = re.compile("<0x[0-9A-F]{2}>")  # a token string for one byte


@dataclass(frozen=True)
class Vocab:
    """The tokens of a vocabulary of `size` ids.

    pieces: bytes of each ordinary token within a text; None for special tokens and padding.
    specials: special tokens by id. roles: role -> id of a special token. fallbacks: ids of tokens
    that stand for one byte, with a string such as <0x41>.
    """

    pieces: tuple[bytes | None, ...]
    specials: dict[int, str]
    roles: dict[str, int]
    fallbacks: frozenset[int] = frozenset()

    @property
    def size(self) -> int:
        """Number of ids, with padding."""
        return len(self.pieces)

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int | None = None) -> Vocab:
        """The vocabulary of a tokenizer; `size` ids if the model has rows of padding.

        Raises ConfigError if the bytes of a token depend on other tokens.
        """
        size = tokenizer.vocab_size if size is None else size
        known = tokenizer.vocabulary()
        pieces = [piece or None for piece in tokenizer.token_bytes(size)]  # "" is no token
        inner = tokenizer.inner
        roles = {role: getattr(inner, f"{role}_token_id", None) for role in ROLES}
        return cls(
            tuple(pieces),
            {i: name for i, name in tokenizer.specials.items() if i < size},
            {role: i for role, i in roles.items() if i is not None and i < size},
            frozenset(i for name, i in known.items() if FALLBACK.fullmatch(name)),
        )

    def by_bytes(self) -> dict[bytes, int]:
        """The id of every byte string."""
        found: dict[bytes, int] = {}
        for ids in (self._ordinary(False), self._ordinary(True)):
            for i in ids:
                found.setdefault(self.pieces[i], i)  # type: ignore[arg-type]
        return found

    def _ordinary(self, is_fallback: bool) -> Iterable[int]:
        return (
            i
            for i, piece in enumerate(self.pieces)
            if piece is not None and (i in self.fallbacks) == is_fallback
        )


class VocabMap:
    """A partial one-to-one map from source ids to goal ids.

    forward int64 [source size], back int64 [goal size]; NONE where an id maps to nothing.
    """

    def __init__(self, forward: np.ndarray, goal_size: int) -> None:
        forward = np.asarray(forward, np.int64)
        used = np.flatnonzero(forward != NONE)
        goals = forward[used]
        if len(goals) and not (goals.min() >= 0 and goals.max() < goal_size):
            raise ConfigError(
                f"the map names id {goals.max() if goals.min() >= 0 else goals.min()}, and the "
                f"vocabulary has {goal_size} ids; is it the map of this model?"
            )
        if len(np.unique(goals)) != len(goals):
            raise ConfigError("two ids map to the same id; a vocabulary map must be one-to-one")
        self.forward = forward
        self.back = np.full(goal_size, NONE, np.int64)
        self.back[goals] = used

    @classmethod
    def between(cls, source: Vocab, goal: Vocab) -> VocabMap:
        """Equal bytes, and special tokens of equal name or role."""
        forward = np.full(source.size, NONE, np.int64)
        theirs = goal.by_bytes()
        for piece, i in source.by_bytes().items():
            forward[i] = theirs.get(piece, NONE)
        named = {name: i for i, name in goal.specials.items()}
        for i, name in source.specials.items():
            forward[i] = named.get(name, NONE)
        taken = set(forward.tolist())
        for role, i in source.roles.items():
            other = goal.roles.get(role, NONE)
            if i in source.specials and forward[i] == NONE and other not in taken:
                forward[i] = other
                taken.add(other)
        return cls(forward, goal.size)

    @classmethod
    def padded(cls, source_size: int, goal_size: int) -> VocabMap:
        """Equal ids: two paddings of one vocabulary."""
        forward = np.arange(source_size)
        return cls(np.where(forward < goal_size, forward, NONE), goal_size)

    @classmethod
    def subset(cls, ids: Many[int] | np.ndarray, size: int) -> VocabMap:
        """Row j of a reduced head stands for ids[j], of a vocabulary of `size` ids."""
        return cls(np.asarray(ids, np.int64), size)

    @classmethod
    def from_offsets(cls, d2t: np.ndarray, size: int) -> VocabMap:
        """Reads `d2t` of a reduced head as vLLM and speculators store it: id - row of each row."""
        d2t = np.asarray(d2t, np.int64)
        return cls(d2t + np.arange(len(d2t)), size)

    @property
    def d2t(self) -> np.ndarray:
        """The map as offsets, int64 [source size]: goal id - source id. Needs a total map."""
        assert self.is_total, "an id without a goal has no offset"
        return self.forward - np.arange(len(self.forward))

    @property
    def t2d(self) -> np.ndarray:
        """Which goal ids have a source, bool [goal size], as vLLM and speculators store it."""
        return self.back != NONE

    @property
    def is_total(self) -> bool:
        """Whether every source id has a goal."""
        return bool((self.forward != NONE).all())

    @property
    def is_identity(self) -> bool:
        """Whether every id maps to itself and nothing else exists."""
        size = len(self.forward)
        return size == len(self.back) and bool((self.forward == np.arange(size)).all())

    @property
    def shared(self) -> np.ndarray:
        """Source ids that have a goal, int64, ascending."""
        return np.flatnonzero(self.forward != NONE)

    def to(self, source: int) -> int:
        """The goal of an id, or NONE."""
        return int(self.forward[source]) if 0 <= source < len(self.forward) else NONE

    def source_of(self, goal: int) -> int:
        """The source of an id, or NONE."""
        return int(self.back[goal]) if 0 <= goal < len(self.back) else NONE

    def widened(self, rows: torch.Tensor, fill: float = float("-inf")) -> torch.Tensor:
        """Rows [n, source size] as rows [n, goal size]; ids without a source get `fill`."""
        import torch

        shared = torch.from_numpy(self.shared).to(rows.device)
        goals = torch.from_numpy(self.forward[self.shared]).to(rows.device)
        out = rows.new_full((len(rows), len(self.back)), fill)
        return out.index_copy_(1, goals, rows.index_select(1, shared))
