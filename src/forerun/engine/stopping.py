"""Where a sequence ends: end-of-sequence tokens, stop strings, length. Ids, text and logprobs are
cut at the same place, also in the middle of an accepted draft."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Protocol

from forerun.core.records import Sequence


class Stream(Protocol):
    """An incremental detokenizer."""

    def push(self, token: int) -> str:
        """Text that has become certain with this token."""

    def extend(self, tokens: Many[int]) -> str:
        """The same with these tokens."""
        return "".join(map(self.push, tokens))


class Stops:
    """Ends sequences. Stop strings and text need `stream`, which makes a detokenizer."""

    def __init__(self, eos_ids: Many[int] = (), stream: Callable[[], Stream] | None = None) -> None:
        self.eos_ids = frozenset(eos_ids)
        self._stream = stream

    def start(self, seq: Sequence) -> None:
        """A sequence joins; a stop string may have begun in what it has generated before."""
        if self._stream:
            seq.scratch[self] = text = Text(self._stream, seq.sampling.stop)
            text.extend(seq.generated)

    def renew(self, seq: Sequence) -> None:
        """Takes back a cut of a running sequence; its tokens were not appended."""
        seq.finish = seq.end = None
        self.start(seq)

    def cut(self, seq: Sequence, tokens: list[int]) -> list[int]:
        """The tokens up to the end of the sequence; sets seq.finish (and seq.end) if it is met."""
        s, text, before = seq.sampling, self._text(seq), len(seq.tokens) - seq.num_prompt
        ends = frozenset() if s.ignore_eos else self.eos_ids
        is_last = before + len(tokens) >= seq.limit
        if not (is_last or s.stop or s.stop_token_ids) and ends.isdisjoint(tokens):  # nearly always
            if text:
                text.extend(tokens)
            return tokens
        for count, token in enumerate(tokens, start=1):
            total, kept = before + count, None
            if text and token not in ends:
                kept = text.push(token, total >= s.min_new_tokens)
            if kept is not None:
                seq.finish, seq.end = "stop", seq.num_prompt + kept
            elif token in ends or token in s.stop_token_ids:
                seq.finish = "stop"
            elif total >= seq.limit:
                seq.finish = "length"
            if seq.finish:
                return tokens[:count]
        return tokens

    def text(self, seq: Sequence) -> str:
        """The text generated so far, without what a stop string cut off."""
        text = self._text(seq)
        return text.so_far(seq.finish is not None) if text else ""

    def begins(self, seq: Sequence) -> list[int]:
        """Where in the text each token begins; a token that ends a text may be left out."""
        text = self._text(seq)
        return text.begins if text else []

    def _text(self, seq: Sequence) -> Text | None:
        return seq.scratch.get(self)

    def finish(self, seq: Sequence) -> None:
        """A sequence has ended; its text stays readable as long as the sequence lives."""


MAX_PENDING_TOKENS = 64  # tokens without text yet: a long answer decoded at once would stall others


class Text:
    """Text of one sequence, searched for stop strings; without any it is decoded when needed.

    Many tokens are decoded at a time, until the place where each begins is asked for.
    """

    def __init__(self, stream: Callable[[], Stream], stop: Many[str]) -> None:
        self._make, self._stop = stream, stop
        self._hold = max(map(len, stop), default=1) - 1  # a stop string may have begun here
        self._tokens: list[int] = []
        self._is_cut = False
        self._begin(has_places=bool(stop))

    def _begin(self, *, has_places: bool) -> None:
        self._has_places = has_places  # whether the place where each token begins is known
        self._stream = self._make()
        self._text = ""
        self._done = 0  # tokens that are decoded
        self._begins: list[int] = []

    @property
    def begins(self) -> list[int]:
        """Length of the text before each token."""
        if not self._has_places:
            self._begin(has_places=True)
        self._catch_up()
        return self._begins

    def extend(self, tokens: list[int]) -> None:
        """Adds tokens; stop strings are not looked for."""
        self._tokens += tokens
        if len(self._tokens) - self._done >= MAX_PENDING_TOKENS:
            self._catch_up()

    def push(self, token: int, may_stop: bool = True) -> int | None:
        """Adds a token; the number of tokens to keep if a stop string has appeared, else None."""
        self.extend([token])
        if not self._stop or not may_stop:
            return None
        self._catch_up()
        before = self._begins[-1]
        found = [self._text.find(s, max(0, before - len(s) + 1)) for s in self._stop]
        hits = [at for at in found if at >= 0]
        if not hits:
            return None
        self._text, self._is_cut = self._text[: min(hits)], True
        # a token stays if its text begins before the stop string does
        return sum(begin < min(hits) for begin in self._begins)

    def so_far(self, is_final: bool) -> str:
        """Certain text: while more may come, the last characters may belong to a stop string."""
        self._catch_up()
        if is_final and not self._is_cut:
            self._text += self._flush()
        if is_final or not self._hold:
            return self._text
        return self._text[: max(0, len(self._text) - self._hold)]

    def _catch_up(self) -> None:
        new = self._tokens[self._done :]
        if new and not self._has_places:
            self._text += self._stream.extend(new)
            self._done += len(new)
            return
        for token in new:
            begin = len(self._text)
            self._text += self._stream.push(token)
            self._begins.append(begin)
            self._done += 1

    def _flush(self) -> str:
        flush = getattr(self._stream, "flush", None)
        return flush() if flush else ""
