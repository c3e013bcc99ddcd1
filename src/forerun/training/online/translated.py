"""Learning for a draft with another tokenizer: OmniDraft's hybrid distillation.

Ramakrishnan et al., "OmniDraft: A Cross-vocabulary, Online Adaptive Drafter for On-device
Speculative Decoding", 2025. Every token that a request emitted is a position, with the target's
distribution from the verification pass. At the end of the request its text is written in the
draft's tokens; positions that do not begin and end between two of them are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.core.records import Sequence, Step
from forerun.drafters._ngram_law import MAX_NGRAM
from forerun.errors import ConfigError
from forerun.models.vocab_map import NONE

from .corrections import ClassOf, Corrections, Episode, OnEnd, OpenRequest, log_probs, top_of
from .cross_vocab_losses import hybrid_loss, run_logq
from .learner import OnlineOptions
from .objectives import AUTO, FromCorrections, Objective, teacher_of

if TYPE_CHECKING:
    from forerun.drafters._translation import Translation
    from forerun.drafters.online import Online


@dataclass(frozen=True, eq=False)
class TranslatedEpisode(Episode):
    """Positions of one request in draft tokens; `rows` has one row per draft token of a position.

    tokens, rows, ids, logp, tail: as in `Episode`; ids count the mapped tokens, and only direct
    positions have ids, logp and tail.
    """

    labels: np.ndarray  # int64 [k], the draft token after each row
    position: np.ndarray  # int64 [k], its position, ascending
    p: np.ndarray  # float32 [n], p(t) at temperature 1
    is_direct: np.ndarray  # bool [n]

    @property
    def size(self) -> int:
        """Number of positions."""
        return len(self.p)


class Row(NamedTuple):
    """The target's distribution at a position: its top k over the mapped tokens, and p(t)."""

    ids: np.ndarray
    logp: np.ndarray
    tail: float
    p: float


class Hybrid(Objective[TranslatedEpisode]):
    """L_DM + lambda L_ngram.

    translation: gives the vocabularies once the drafter is bound. ngram_weight: lambda.
    by_target: p(t) in place of lambda.
    """

    episode = TranslatedEpisode

    def __init__(
        self,
        translation: Callable[[], Translation],
        *,
        ngram_weight: float = 0.2,
        by_target: bool = False,
    ) -> None:
        if not 0 <= ngram_weight < float("inf"):
            raise ConfigError(f"ngram_weight must be at least 0, got {ngram_weight}")
        self._translation = translation
        self.ngram_weight, self.by_target = ngram_weight, by_target

    def listener(self, class_of: ClassOf, on_end: OnEnd, **options: Any) -> Corrections:
        return Translated(self._translation, class_of, on_end, **options)

    def loss(self, logits: Tensor, episode: TranslatedEpisode) -> Tensor:
        p = torch.from_numpy(episode.p)
        return hybrid_loss(
            logits,
            torch.from_numpy(episode.labels),
            torch.from_numpy(episode.position),
            torch.from_numpy(episode.is_direct),
            teacher_of(episode),
            torch.from_numpy(self._translation().map.shared),
            p if self.by_target else torch.full_like(p, self.ngram_weight),
        )

    def acceptance(self, logits: Tensor, episode: TranslatedEpisode) -> Tensor:
        """Mean of min(1, q(d_1) .. q(d_n) / p(t)) over emitted tokens t.

        With t ~ p its expectation is sum_t min(p(t), q(t)), but for longer n-grams and for draft
        tokens that lead to no target token.
        """
        labels, position = torch.from_numpy(episode.labels), torch.from_numpy(episode.position)
        logq = run_logq(logits, labels, position, episode.size)
        return (logq.exp() / torch.from_numpy(episode.p).clamp_min(1e-9)).clamp(max=1).mean()

    def smallest(self) -> TranslatedEpisode:
        row, one = np.zeros((1, 1), np.float32), np.zeros(1, np.int64)
        teacher = np.zeros((1, 1), np.int32), row - 1.0, row[0]
        rows = np.zeros(2, np.int32), np.ones(1, np.int64), *teacher
        return TranslatedEpisode(*rows, one, one, np.ones(1, np.float32), np.ones(1, bool))


class Translated(Corrections):
    """Listener that records every emitted token of a recorded step.

    It writes finished requests in draft tokens; positions of steps that were left out are missing.
    """

    def __init__(
        self,
        translation: Callable[[], Translation],
        class_of: ClassOf,
        on_end: OnEnd,
        **options: Any,
    ) -> None:
        super().__init__(class_of, on_end, **options)
        self._translation = translation

    def rows_of(
        self, request: OpenRequest, step: Step, i: int, tried: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        return list(enumerate(step.visited(i), step.start(i) - 1))

    def stored(self, logits: np.ndarray, token: int) -> Row:
        vocab = self._translation().map
        kept = top_of(log_probs(logits[vocab.forward[vocab.shared]]), self.top_k)
        return Row(*kept, float(np.exp(log_probs(logits)[token])))

    def episode(self, request: OpenRequest, seq: Sequence) -> TranslatedEpisode | None:
        runs = draft_runs(self._translation(), seq.tokens[: request.rows[-1] + 2])
        if runs is None:
            return None
        tokens, found = runs
        kept = [
            (row, *found[at + 1])
            for at, row in zip(request.rows, request.tops, strict=True)
            if at + 1 in found and found[at + 1][0] + len(found[at + 1][1]) <= self.max_length
        ]
        return _episode(tokens, kept) if kept else None


Runs = dict[int, tuple[int, tuple[int, ...]]]  # index of a target token -> first draft token, run


def draft_runs(translation: Translation, tokens: list[int]) -> tuple[list[int], Runs] | None:
    """A text in draft tokens, and the run of each target token that the drafter could emit.

    A target token has a run if the draft's tokens begin and end with it and are the ones that the
    drafter emits it by. None if a byte has no draft token.
    """
    ids = translation.view().follow(tokens)
    before, instead = translation.start
    first = len(before) if tokens[: len(before)] == before else 0
    ours = [_piece(translation.to_draft.piece(t), translation.map.source_of(t)) for t in tokens]
    theirs = [_piece(translation.to_target.piece(d), d) for d in ids]
    ours[:first], theirs[: len(instead)] = [b""] * first, [b""] * len(instead)
    if b"".join(ours) != b"".join(theirs):
        return None
    run_of = cache(translation.run_of)  # texts repeat tokens, and each run is tokenized
    ends = list(accumulate(map(len, theirs)))
    at = {end: i + 1 for i, end in enumerate(ends)}  # bytes before -> index of the next draft token
    at |= {0: len(instead)}
    found: Runs = {}
    for i, (start, end) in enumerate(pairwise(accumulate(map(len, ours), initial=0))):
        if start in at and end in at and start < end and at[start] > 0:
            run = tuple(ids[at[start] : at[end]])
            if run == run_of(tokens[i]) and len(run) <= MAX_NGRAM:
                found[i] = at[start], run
    return ids, found


def _piece(piece: bytes | None, source: int) -> bytes:
    """The bytes of a token; a special token counts as its draft id, one without it as nothing."""
    if piece is not None:
        return piece
    return b"" if source == NONE else b"<%d>" % source


def _episode(tokens: list[int], kept: list[tuple[Row, int, tuple[int, ...]]]) -> TranslatedEpisode:
    """The episode of the positions (row, index of the first draft token, run)."""
    rows = [start + j - 1 for _, start, run in kept for j in range(len(run))]
    labels = [draft for _, _, run in kept for draft in run]
    position = [i for i, (_, _, run) in enumerate(kept) for _ in run]
    is_direct = np.array([len(run) == 1 for _, _, run in kept])
    direct = [row for row, _, run in kept if len(run) == 1]
    k = len(kept[0][0].ids)
    return TranslatedEpisode(
        np.array(tokens[: rows[-1] + 1], np.int32),
        np.array(rows, np.int64),
        np.array([row.ids for row in direct], np.int32).reshape(-1, k),
        np.array([row.logp for row in direct], np.float32).reshape(-1, k),
        np.array([row.tail for row in direct], np.float32),
        np.array(labels, np.int64),
        np.array(position, np.int64),
        np.array([row.p for row, _, _ in kept], np.float32),
        is_direct,
    )


def objective_for(
    drafter: Online,
    options: OnlineOptions,
    translation: Callable[[], Translation] | None = None,
) -> Objective[Any]:
    """What is learned for a drafter's draft. translation: that of the drafter by default.

    Raises ConfigError for a loss that does not fit the draft.
    """
    if not drafter.is_foreign:
        return FromCorrections(options.loss)
    if options.loss != AUTO or options.compat:
        what = f"loss {options.loss}" if options.loss != AUTO else "compat"
        raise ConfigError(
            f"{what} needs a draft with the target's tokenizer, and this one has another; drop it"
        )
    return Hybrid(
        translation or (lambda: drafter.translation),
        ngram_weight=options.ngram_weight,
        by_target=options.ngram_by_target,
    )
