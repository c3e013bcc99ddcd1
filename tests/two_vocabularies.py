"""Two tiny tokenizers to enumerate: a draft of letters, a target that also merges them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import cache

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from fakes import FakeRunner
from forerun.drafters.cross_vocab import CrossVocab
from forerun.models.draft_link import ForeignDraft
from forerun.models.tokenizer import Tokenizer

DRAFT = ("a", "b")  # ids 0, 1
TARGET = ("b", "a", "ab")  # ids 0, 1, 2
WIDTH = 4  # of hidden rows
Law = Callable[[Many[int]], np.ndarray]


@cache
def letters(tokens: tuple[str, ...]) -> Tokenizer:
    """A BPE of these tokens; longer ones are merges of their last letter and the rest."""
    known = {token: i for i, token in enumerate(tokens)}
    merges = [(token[:-1], token[-1]) for token in tokens if len(token) > 1]
    backend = Backend(models.BPE(known, merges))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), [])


class LetterRunner(FakeRunner):
    """A fake draft model; `calls` counts its passes."""

    def __init__(self, law: Law, vocab: int = len(DRAFT)) -> None:
        super().__init__(law)
        self.vocab_size, self.calls, self.num_held = vocab, 0, 0

    def rows_at(self, requests):
        self.calls += 1
        return super().rows_at(requests)


class HiddenLetters(LetterRunner):
    """A fake draft with a random hidden row for every text; `asked` keeps the paths."""

    keeps_hidden = False

    def __init__(self, law: Law, vocab: int = len(DRAFT)) -> None:
        super().__init__(law, vocab)
        self.asked: list[tuple[int, ...]] = []

    def hidden_at(self, seq, path) -> torch.Tensor:
        assert self.keeps_hidden and path
        self.asked.append(tuple(path))
        text = [len(seq.tokens), *seq.tokens, *path]
        return torch.from_numpy(np.random.default_rng(text).normal(size=WIDTH))


def crossed(
    law: Law,
    draft: tuple[str, ...] = DRAFT,
    target: tuple[str, ...] = TARGET,
    runner: type[LetterRunner] = LetterRunner,
    **options: object,
) -> CrossVocab:
    """A drafter for a target with the tokens `target`, and a fake draft model of `draft`."""
    return CrossVocab(
        model=ForeignDraft(runner(law, len(draft)), letters(draft)),  # type: ignore[arg-type]
        tokenizer=letters(target),
        **options,  # type: ignore[arg-type]
    )
