"""Stop conditions: end-of-sequence tokens, stop strings, length.

Ids, text and logprobs are cut at the same position, also within an accepted draft.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Protocol

from forerun.core.records import Sequence


class Stream(Protocol):
    """An incremental detokenizer."""

    def push(self, token: int) -> str:
        """The text completed by this token."""

    def extend(self, tokens: Many[int]) -> str:
        """The text completed by these tokens."""
        return "".join(map(self.push, tokens))


class Stops:
    """Checks stop conditions. Stop strings and text need `stream`, which makes a detokenizer."""

    def __init__(self, eos_ids: Many[int] = (), stream: Callable[[], Stream] | None = None) -> None:
        self.eos_ids = frozenset(eos_ids)
        self.stream = stream

    def start(self, seq: Sequence) -> None:
        """A sequence starts, possibly with generated text that contains part of a stop string."""
        s = seq.sampling
        seq.end_ids = (frozenset() if s.ignore_eos else self.eos_ids) | set(s.stop_token_ids)
        if self.stream:
            seq.scratch[self] = text = Text(self.stream, seq.sampling.stop)
            text.extend(seq.generated)

    def reset(self, seq: Sequence) -> None:
        """Undoes `cut` for tokens that were not appended."""
        seq.finish = seq.end = None
        self.start(seq)

    def cut(self, seq: Sequence, tokens: list[int]) -> list[int]:
        """The tokens up to a stop; sets seq.finish, and seq.end for a stop string."""
        s, text, before = seq.sampling, self._text(seq), len(seq.tokens) - seq.num_prompt
        is_last = before + len(tokens) >= seq.limit
        if not (is_last or s.stop) and seq.end_ids.isdisjoint(tokens):
            if text:
                text.extend(tokens)
            return tokens
        for count, token in enumerate(tokens, start=1):
            total, kept = before + count, None
            if text and (s.ignore_eos or token not in self.eos_ids):
                kept = text.push(token, total >= s.min_new_tokens)
            if kept is not None:
                seq.finish, seq.end = "stop", seq.num_prompt + kept
            elif token in seq.end_ids:
                seq.finish = "stop"
            elif total >= seq.limit:
                seq.finish = "length"
            if seq.finish:
                return tokens[:count]
        return tokens

    def text(self, seq: Sequence) -> str:
        """The text generated so far, cut at a stop string."""
        text = self._text(seq)
        return text.so_far(seq.finish is not None) if text else ""

    def token_starts(self, seq: Sequence) -> list[int]:
        """The text offset of each token; an end-of-sequence token may be left out."""
        text = self._text(seq)
        return text.starts if text else []

    def _text(self, seq: Sequence) -> Text | None:
        return seq.scratch.get(self)

    def finish(self, seq: Sequence) -> None:
        """A sequence has ended; its text stays readable as long as the sequence exists."""


MAX_PENDING_TOKENS = 64  # not decoded yet: decoding a long answer at once would stall the batch


class Text:
    """The text of one sequence, searched for stop strings; without any it is decoded lazily.

    Tokens are decoded in bulk until token offsets are requested.
    """

    def __init__(self, stream: Callable[[], Stream], stop: Many[str]) -> None:
        self._make, self._stop = stream, stop
        self._hold = max(map(len, stop), default=1) - 1  # last characters may begin a stop string
        self._tokens: list[int] = []
        self._is_cut = False
        self._restart(has_starts=bool(stop))

    def _restart(self, *, has_starts: bool) -> None:
        self._has_starts = has_starts  # whether token offsets are recorded
        self._stream = self._make()
        self._text = ""
        self._done = 0  # number of decoded tokens
        self._starts: list[int] = []

    @property
    def starts(self) -> list[int]:
        """The length of the text before each token."""
        if not self._has_starts:
            self._restart(has_starts=True)
        self._catch_up()
        return self._starts

    def extend(self, tokens: list[int]) -> None:
        """Adds tokens without a search for stop strings."""
        self._tokens += tokens
        if len(self._tokens) - self._done >= MAX_PENDING_TOKENS:
            self._catch_up()

    def push(self, token: int, may_stop: bool = True) -> int | None:
        """Adds a token; returns the number of tokens to keep if a stop string is complete."""
        self.extend([token])
        if not self._stop or not may_stop:
            return None
        self._catch_up()
        before = self._starts[-1]
        found = [self._text.find(s, max(0, before - len(s) + 1)) for s in self._stop]
        hits = [at for at in found if at >= 0]
        if not hits:
            return None
        self._text, self._is_cut = self._text[: min(hits)], True
        # a token stays if its text begins before the stop string does
        return sum(start < min(hits) for start in self._starts)

    def so_far(self, is_final: bool) -> str:
        """The text without characters that may belong to an incomplete stop string."""
        self._catch_up()
        if is_final and not self._is_cut:
            self._text += self._flush()
        if is_final or not self._hold:
            return self._text
        return self._text[: max(0, len(self._text) - self._hold)]

    def _catch_up(self) -> None:
        new = self._tokens[self._done :]
        if new and not self._has_starts:
            self._text += self._stream.extend(new)
            self._done += len(new)
            return
        for token in new:
            start = len(self._text)
            self._text += self._stream.push(token)
            self._starts.append(start)
            self._done += 1

    def _flush(self) -> str:
        flush = getattr(self._stream, "flush", None)
        return flush() if flush else ""
