"""Predicted outputs: a text that the answer will repeat in good part is copied as a draft.

A chain follows the prediction from its beginning. After a rejection the last tokens of the answer
are looked up in the prediction, the longest n-gram first and the place after the last one before
others. The chain doubles while all of it is accepted, and is short again after a rejection.

Law: POINT nodes, exact under every rule that judges them.
"""

from __future__ import annotations

from bisect import bisect_right

from forerun.core.tree import EMPTY, Tree, chain

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

    def find(self, generated: list[int], last: int) -> range:
        """Where the longest n-gram stands that ends the answer: behind `last`, or the first."""
        for n in LENGTHS:
            ngram = tuple(generated[-n:])
            if ends := self._places.get(ngram):
                after = bisect_right(ends, last)
                end = ends[after] if after < len(ends) else ends[0]
                return range(end - len(ngram), end)
        return range(0)


class Prediction:
    """Where one answer stands in its prediction, and how much of it was said."""

    def __init__(self, expected: Expected, longest: int = LONG) -> None:
        self.expected, self.longest = expected, longest
        self._said = set[int]()  # places in the prediction whose tokens the answer has
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

    def num_said(self, generated: list[int]) -> int:
        """Tokens of the prediction that the answer has, whoever drafted them."""
        self._follow(generated)
        return len(self._said)

    def judge(self, num_nodes: int, num_accepted: int) -> None:
        """What became of the last chain."""
        if num_nodes:
            is_whole = num_accepted == num_nodes
            after = 2 * self._length if is_whole else min(FIRST, self._length) // 2
            self._length = max(1, min(after, self.longest))

    def _follow(self, generated: list[int]) -> None:
        """Moves on by the new tokens; looks the place up again after one that differs."""
        for end in range(self._seen + 1, len(generated) + 1):
            at = self._at
            if at is not None and self.expected.tokens[at : at + 1] == generated[end - 1 : end]:
                said = range(at, at + 1)
            else:
                said = self.expected.find(generated[max(0, end - LENGTHS[0]) : end], at or 0)
            self._said.update(said)
            self._at = said.stop or None
        self._seen = len(generated)
