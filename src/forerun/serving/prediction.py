"""Predicted outputs: a text that the answer will repeat in good part is copied as a draft.

A chain follows the prediction from its beginning. After a rejection the last tokens of the answer
are looked up in the prediction, the longest n-gram first and the place after the last one before
others. The chain doubles while all of it is accepted, and is short again after a rejection.

Law: POINT nodes, exact under every rule that judges them.
"""

from __future__ import annotations

from bisect import bisect_right

from forerun.tree import EMPTY, Tree, chain

LENGTHS = 8, 4, 2  # n-grams looked up; one token would be a coincidence too often
FIRST = 8  # nodes of the first chain
LONG = 32  # nodes of the longest, where the request names no size


class Expected:
    """The predicted text and where its n-grams end; shared by all samples of a request."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._places: dict[tuple[int, ...], list[int]] = {}  # n-gram -> places after it, rising
        for n in LENGTHS:
            for end in range(n, len(tokens)):
                self._places.setdefault(tuple(tokens[end - n : end]), []).append(end)

    def find(self, generated: list[int], last: int) -> int | None:
        """The place after the longest n-gram that ends the answer: after `last`, or the first."""
        for n in LENGTHS:
            places = self._places.get(tuple(generated[-n:]))
            if places:
                after = bisect_right(places, last)
                return places[after] if after < len(places) else places[0]
        return None


class Prediction:
    """Where one answer stands in its prediction, and what the copies were worth."""

    def __init__(self, expected: Expected, longest: int = LONG) -> None:
        self.expected, self.longest = expected, longest
        self.accepted = self.rejected = 0
        self._at: int | None = 0  # place in the prediction of the token that comes next
        self._seen = 0  # generated tokens that were followed
        self._length = FIRST

    def draft(self, generated: list[int], most: int) -> Tree:
        """A chain of at most `most` nodes that continues the answer so far."""
        self._follow(generated)
        if self._at is None:
            return EMPTY
        count = min(self._length, self.longest, most)
        return chain(self.expected.tokens[self._at : self._at + count]) if count > 0 else EMPTY

    def judge(self, num_nodes: int, num_accepted: int) -> None:
        """What became of the last chain."""
        self.accepted += num_accepted
        self.rejected += num_nodes - num_accepted
        if num_nodes:
            is_whole = num_accepted == num_nodes
            after = 2 * self._length if is_whole else min(FIRST, self._length) // 2
            self._length = max(1, min(after, self.longest))

    def _follow(self, generated: list[int]) -> None:
        """Moves on by the new tokens; looks the place up again where they differ."""
        new, tokens = generated[self._seen :], self.expected.tokens
        self._seen = len(generated)
        if self._at is not None and tokens[self._at : self._at + len(new)] == new:
            self._at += len(new)
        else:
            self._at = self.expected.find(generated, self._at or 0)
        if self._at is not None and self._at >= len(tokens):
            self._at = None
