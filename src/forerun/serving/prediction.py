"""Predicted outputs: drafts copied from a text that the client expects the answer to repeat.

A chain follows the prediction from its start. After a rejection the last n-gram of the answer is
looked up in the prediction: the longest n-gram first, and matches after the last position first.
The chain doubles while it is accepted completely, and is short again after a rejection.

Law: kept. POINT nodes, exact with every verifier that accepts them.
"""

from __future__ import annotations

from bisect import bisect_right

from forerun.core.tree import EMPTY, Tree, chain

NGRAM_SIZES = 8, 4, 2  # looked up in this order; single tokens match by chance too often
FIRST_CHAIN = 8  # nodes
MAX_CHAIN = 32  # nodes, unless the request sets a size


class PredictedText:
    """The predicted text with an index of its n-grams; shared by all samples of a request."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._ends: dict[tuple[int, ...], list[int]] = {}  # n-gram -> its ends, ascending
        for n in NGRAM_SIZES:
            for end in range(n, len(tokens)):
                self._ends.setdefault(tuple(tokens[end - n : end]), []).append(end)

    def find(self, generated: list[int], last: int) -> range:
        """The match of the longest n-gram at the end of the answer: the next after `last`, else
        the first one."""
        for n in NGRAM_SIZES:
            ngram = tuple(generated[-n:])
            if ends := self._ends.get(ngram):
                after = bisect_right(ends, last)
                end = ends[after] if after < len(ends) else ends[0]
                return range(end - len(ngram), end)
        return range(0)


class Prediction:
    """The position of one answer in its predicted text, and the matched tokens."""

    def __init__(self, predicted: PredictedText, max_nodes: int = MAX_CHAIN) -> None:
        self.predicted, self.max_nodes = predicted, max_nodes
        self._matched = set[int]()  # positions in the prediction that the answer repeats
        self._at: int | None = 0  # position of the next token in the prediction
        self._num_read = 0  # generated tokens read so far
        self._length = FIRST_CHAIN

    def draft(self, generated: list[int], max_nodes: int) -> Tree:
        """A chain of at most `max_nodes` nodes that continues the answer."""
        self._advance(generated)
        if self._at is None:
            return EMPTY
        count = min(self._length, self.max_nodes, max_nodes)
        return chain(self.predicted.tokens[self._at : self._at + count]) if count > 0 else EMPTY

    def num_matched(self, generated: list[int]) -> int:
        """Number of prediction tokens in the answer, from any drafter."""
        self._advance(generated)
        return len(self._matched)

    def update_length(self, num_nodes: int, num_accepted: int) -> None:
        """Sets the length of the next chain from the acceptance of the last."""
        if num_nodes:
            is_whole = num_accepted == num_nodes
            after = 2 * self._length if is_whole else min(FIRST_CHAIN, self._length) // 2
            self._length = max(1, min(after, self.max_nodes))

    def _advance(self, generated: list[int]) -> None:
        """Reads the new tokens; looks the position up again after a mismatch."""
        for end in range(self._num_read + 1, len(generated) + 1):
            at = self._at
            if at is not None and self.predicted.tokens[at : at + 1] == generated[end - 1 : end]:
                match = range(at, at + 1)
            else:
                start = max(0, end - NGRAM_SIZES[0])
                match = self.predicted.find(generated[start:end], at or 0)
            self._matched.update(match)
            self._at = match.stop or None
        self._num_read = len(generated)
