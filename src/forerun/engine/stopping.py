"""Stop conditions: end-of-sequence tokens, stop strings, length.

Ids, text and logprobs are cut at the same position, also within an accepted draft.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from types import MappingProxyType
from typing import Protocol

from forerun.core.records import Sequence


class Stream(Protocol):
    """An incremental detokenizer. specials: special tokens, which have no text, by id."""

    specials: Mapping[int, str] = MappingProxyType({})

    def begin(self, context: Many[int]) -> None:
        """Starts after these tokens; their text is not part of the output."""

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
            text = Text(self.stream, s.stop, seq.tokens[: seq.num_prompt])
            seq.scratch[self] = text
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

    def decode(self, tokens: Many[int], context: Many[int]) -> str:
        """The text of tokens that follow `context`."""
        if self.stream is None:
            return ""
        text = Text(self.stream, (), context)
        text.extend(list(tokens))
        return text.so_far(is_final=True)

    def token_texts(self, seq: Sequence) -> list[str]:
        """The text of each token. Joined, they begin with the text of the sequence.

        An end-of-sequence token may be left out.
        """
        self.text(seq)  # the last token has the incomplete characters of a finished sequence
        text = self._text(seq)
        return text.pieces if text else []

    def _text(self, seq: Sequence) -> Text | None:
        return seq.scratch.get(self)

    def finish(self, seq: Sequence) -> None:
        """A sequence has ended; its text stays readable as long as the sequence exists."""


MAX_PENDING_TOKENS = 64  # not decoded yet: decoding a long answer at once would stall the batch


class Text:
    """The text of one sequence, searched for stop strings; without any it is decoded lazily.

    prompt: the tokens before. Tokens are decoded in bulk until token offsets are requested.
    """

    def __init__(
        self, stream: Callable[[], Stream], stop: Many[str], prompt: Many[int] = ()
    ) -> None:
        self._make, self._stop, self._prompt = stream, stop, prompt
        self._hold = max(map(len, stop), default=1) - 1  # last characters may begin a stop string
        self._tokens: list[int] = []
        self._is_cut = self._is_flushed = False
        self._restart(has_starts=bool(stop))

    def _restart(self, *, has_starts: bool) -> None:
        self._has_starts = has_starts  # whether token offsets are recorded
        self._stream = self._make()
        self._stream.begin(self._prompt)
        self._marked = Marked(self._stop, self._stream.specials)
        self._text = ""
        self._done = 0  # number of decoded tokens
        self._starts: list[int] = []
        self._pieces: list[str] = []

    @property
    def starts(self) -> list[int]:
        """The length of the text before each token."""
        self._need_starts()
        return self._starts

    @property
    def pieces(self) -> list[str]:
        """The text of each token, also behind a stop string; the last has what was left."""
        self._need_starts()
        return self._pieces

    def _need_starts(self) -> None:
        if not self._has_starts:
            is_flushed = self._is_flushed
            self._restart(has_starts=True)
            self._is_flushed = False
            self._catch_up()
            if is_flushed:
                self._flush()
        self._catch_up()

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
        # a token stays if its text begins before the stop string does
        hits = [(at, sum(start < at for start in self._starts)) for at in found if at >= 0]
        hits += self._marked.find(self._starts)
        if not hits:
            return None
        at, kept = min(hits)
        self._text, self._is_cut = self._text[:at], True
        return kept

    def so_far(self, is_final: bool) -> str:
        """The text without characters that may belong to an incomplete stop string."""
        self._catch_up()
        if is_final and not self._is_cut:
            self._flush()
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
            piece = self._stream.push(token)
            self._starts.append(len(self._text))
            self._pieces.append(piece)
            self._text += piece
            self._marked.push(token, piece)
            self._done += 1

    def _flush(self) -> None:
        """Adds the text of incomplete characters, once."""
        flush = getattr(self._stream, "flush", None)
        rest = flush() if flush and not self._is_flushed else ""
        self._is_flushed = True
        self._text += rest
        if self._pieces:
            self._pieces[-1] += rest


class Marked:
    """Finds stop strings that contain the name of a special token, which has no text."""

    def __init__(self, stop: Many[str], specials: Mapping[int, str]) -> None:
        names = [name for name in specials.values() if name] if stop else []
        self._stop = [s for s in stop if any(name in s for name in names)]
        self._specials = specials
        self._text = ""  # with the names of special tokens
        self._starts: list[int] = []  # of each token in it
        self._is_special: list[bool] = []

    def push(self, token: int, piece: str) -> None:
        """Adds a token and its text."""
        if self._stop:
            self._starts.append(len(self._text))
            self._is_special.append(token in self._specials)
            self._text += self._specials.get(token, piece)

    def find(self, starts: list[int]) -> list[tuple[int, int]]:
        """Stop strings that end in the last token: where the text ends, and the tokens to keep.

        starts: of the tokens in the text without names.
        """
        hits = []
        for stop in self._stop:
            at = self._text.find(stop, max(0, self._starts[-1] - len(stop) + 1))
            if at >= 0:
                token = bisect_right(self._starts, at) - 1
                offset = at - self._starts[token]
                end = starts[token] + (0 if self._is_special[token] else offset)
                hits.append((end, token + bool(offset)))
        return hits
