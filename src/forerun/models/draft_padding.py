"""A draft model with fewer logits than its target: another padding of one vocabulary.

The surplus ids stand for no token. The draft never proposes them; if the target emits one, the
draft reads SUBSTITUTE instead. Drafts stay exact, as any distribution of drafts is.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from forerun.core.records import Sequence

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.core.growing import Path
    from forerun.runner.model_runner import ModelRunner

Tokens = TypeVar("Tokens", list[int], tuple[int, ...])
SUBSTITUTE = 0  # id that the draft reads for a surplus id


class PaddedRunner:
    """A runner with `vocab_size` logits; those that the inner runner lacks are -inf."""

    def __init__(self, inner: ModelRunner, vocab_size: int) -> None:
        self.inner, self.vocab_size = inner, vocab_size
        self._views: WeakKeyDictionary[Sequence, Sequence] = WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def num_unread(self, seq: Sequence) -> int:
        """As `Runner.num_unread`."""
        return self.inner.num_unread(self._view(seq))

    def rows_at(self, requests: Many[tuple[Sequence, Path]]) -> Tensor:
        """As `Runner.rows_at`: logits [n, vocab_size]."""
        import torch.nn.functional as F  # a drafter's options are checked without torch

        views = {seq: self._view(seq) for seq, _ in requests}
        rows = self.inner.rows_at([(views[seq], self._known(path)) for seq, path in requests])
        return F.pad(rows, (0, self.vocab_size - self.inner.vocab_size), value=float("-inf"))

    def hidden_at(self, seq: Sequence, path: Path) -> Tensor:
        """As `Runner.hidden_at`."""
        return self.inner.hidden_at(self._view(seq), self._known(path))

    def release(self, seq: Sequence) -> None:
        """As `Runner.release`."""
        if seq in self._views:
            self.inner.release(self._views.pop(seq))

    def _view(self, seq: Sequence) -> Sequence:
        """The sequence as the draft reads it; one object as long as the sequence exists."""
        tokens, view = self._known(seq.tokens), self._views.get(seq)
        if view is None:
            view = self._views[seq] = replace(seq, tokens=tokens)
        view.tokens = tokens
        return view

    def _known(self, tokens: Tokens) -> Tokens:
        """The tokens with SUBSTITUTE for surplus ids; the same object if there are none."""
        size = self.inner.vocab_size
        if max(tokens, default=0) < size:  # the usual case: no copy at each step
            return tokens
        return type(tokens)(token if token < size else SUBSTITUTE for token in tokens)
