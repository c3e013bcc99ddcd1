"""Prompt lookup: copies what followed an earlier occurrence of the last tokens.

Apoorv Saxena, "Prompt Lookup Decoding", 2023. The last `ngram` tokens of prompt and output are
searched in the same text, then the last `ngram` - 1 and so on. The tokens after the match become a
chain. No model, no memory beyond the text.

Exact: POINT nodes. Needs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from weakref import WeakSet

from forerun.core.dice import Dice
from forerun.core.records import Plan, Sequence, Step
from forerun.core.tree import EMPTY, Tree, chain
from forerun.drafters.base import PerSequence
from forerun.errors import ConfigError


class PromptLookup(PerSequence):
    """Copies up to `tokens` tokens that followed an earlier occurrence of the last `ngram` ones.

    match: the "last" occurrence or the "first". allow_short: also use an occurrence followed by
    fewer than `tokens` tokens. The original does not, so it never copies from the latest text.
    """

    labels = frozenset({"point"})
    can_observe_late = True

    def __init__(
        self, *, ngram: int = 3, tokens: int = 10, match: str = "last", allow_short: bool = True
    ) -> None:
        if ngram < 1 or tokens < 1:
            raise ConfigError(f"ngram and tokens must be at least 1, got {ngram} and {tokens}")
        if match not in ("last", "first"):
            raise ConfigError(f"match must be 'last' or 'first', got {match!r}")
        self.ngram, self.tokens, self.match = ngram, tokens, match
        self.follow = 1 if allow_short else tokens  # tokens that must follow an occurrence
        self._seqs: WeakSet[Sequence] = WeakSet()  # sequences with an index

    def read(self, seqs: Many[Sequence]) -> None:
        for seq in seqs:
            self._index(seq)

    def draft(self, seq: Sequence, plan: Plan, dice: Dice) -> Tree:
        start = self._index(seq).find(seq.tokens)
        if start is None:
            return EMPTY
        return chain(seq.tokens[start : start + min(self.tokens, plan.nodes, plan.depth)])

    def observe(self, step: Step) -> None:
        for seq in step.seqs:
            index = seq.scratch.get(self)
            if index is not None and index.fits(seq.tokens):
                index.extend(seq.tokens)

    def finish(self, seq: Sequence) -> None:
        seq.scratch.pop(self, None)
        self._seqs.discard(seq)

    def memory_report(self) -> dict[str, int]:
        entries = sum(len(seq.scratch[self].ends) for seq in self._seqs)
        # bytes of a tuple and a dict slot
        return {"prompt lookup index": entries * (120 + 8 * self.ngram)}

    def _index(self, seq: Sequence) -> Index:
        """The index of a sequence, extended to its last token."""
        index = seq.scratch.get(self)
        if index is None or not index.fits(seq.tokens):
            index = seq.scratch[self] = Index(self.ngram, self.follow, self.match == "last")
            self._seqs.add(seq)
        index.extend(seq.tokens)
        return index


class Index:
    """End position of each n-gram of a growing text; constant work per new token."""

    TAIL = 16  # tokens compared to detect a changed text

    def __init__(self, ngram: int, follow: int, keeps_last: bool) -> None:
        self.ngram, self.follow, self.keeps_last = ngram, follow, keeps_last
        self.ends: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after it
        self.length = 0  # tokens indexed
        self.tail: list[int] = []  # the last of them

    def fits(self, tokens: list[int]) -> bool:
        """Whether `tokens` continues the indexed text."""
        start = self.length - len(self.tail)
        return tokens[start : self.length] == self.tail

    def extend(self, tokens: list[int]) -> None:
        """Adds the n-grams that end at least `follow` tokens before the end of the text."""
        for end in range(self.length + 1, len(tokens) - self.follow + 1):
            for n in range(1, min(self.ngram, end) + 1):
                key = tuple(tokens[end - n : end])
                if self.keeps_last or key not in self.ends:
                    self.ends[key] = end
            self.length = end
        self.tail = tokens[max(0, self.length - self.TAIL) : self.length]

    def find(self, tokens: list[int]) -> int | None:
        """The position after the earlier occurrence of the longest n-gram that ends the text."""
        for n in range(min(self.ngram, len(tokens)), 0, -1):
            end = self.ends.get(tuple(tokens[-n:]))
            if end is not None:
                return end
        return None
