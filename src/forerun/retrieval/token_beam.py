"""Constrained beam search over tokens that keeps all candidates.

Bevilacqua et al., "Autoregressive Search Engines", 2022. A guide gives the allowed next tokens. The
score of a candidate is the sum of the model's log-probabilities. They are not renormalised over the
allowed tokens: that would favour n-grams with few allowed continuations. Each step records its best
2 K candidates, so the result also has the prefixes of all beams.

Law: the log-probability of every hypothesis is the model's, and the guide allows every hypothesis.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, NamedTuple, Protocol

import numpy as np

from forerun.utils.numbers import whole


class Scorer(Protocol):
    """A language model that continues a batch of prompts."""

    def begin(self, prompts: Many[Many[int]]) -> tuple[Any, np.ndarray]:
        """A state with a row per prompt, and next-token log-probabilities [prompts, V]."""
        ...

    def go_on(self, state: Any, rows: np.ndarray, tokens: np.ndarray) -> tuple[Any, np.ndarray]:
        """The next state and log-probabilities [len(rows), V].

        Row i continues row rows[i] by tokens[i].
        """
        ...


class Guide(Protocol):
    """The constraint of a beam search: allowed next tokens by state. States are immutable."""

    start: Any

    def next(self, state: Any) -> np.ndarray:
        """The allowed ids, int64."""
        ...

    def advance(self, state: Any, token: int) -> Any:
        """The state after an allowed id."""
        ...


class Free:
    """A guide that allows all ids below `size`."""

    start: Any = ()

    def __init__(self, size: int) -> None:
        self._all = np.arange(size)

    def next(self, state: Any) -> np.ndarray:
        return self._all

    def advance(self, state: Any, token: int) -> Any:
        return state


class Hypothesis(NamedTuple):
    """A candidate: its tokens, the model's log-probability, and the guide's state after it."""

    tokens: tuple[int, ...]
    logp: float
    state: Any
    is_whole: bool = False  # finished: ends in the end token, or is a beam of full length


class Searched(NamedTuple):
    """The candidates of one prompt."""

    found: list[Hypothesis]  # every recorded candidate, step by step, best first within a step
    first: np.ndarray  # log-probabilities [V] of the first token


def beam_search(
    scorer: Scorer,
    prompts: Many[Many[int]],
    guide: Guide,
    *,
    beams: int = 15,
    length: int = 10,
    end: int | None = None,
) -> list[Searched]:
    """Candidates of up to `length` tokens for every prompt; the token `end` finishes one."""
    whole("beams", beams)
    whole("length", length)
    state, logps = scorer.begin(prompts)
    found: list[list[Hypothesis]] = [[] for _ in prompts]
    firsts = [row.copy() for row in logps]
    live = [[Hypothesis((), 0.0, guide.start)] for _ in prompts]
    for depth in range(1, length + 1):
        rows, tokens, at = [], [], 0
        for i, beam in enumerate(live):
            best = _best(beam, logps[at : at + len(beam)], guide, 2 * beams)
            marked = [h._replace(is_whole=h.tokens[-1] == end) for _, h in best]
            going = [k for k, h in enumerate(marked) if not h.is_whole][:beams]
            if depth == length:
                for k in going:
                    marked[k] = marked[k]._replace(is_whole=True)
            found[i] += marked
            rows += [at + best[k][0] for k in going]
            tokens += [marked[k].tokens[-1] for k in going]
            at += len(beam)
            live[i] = [marked[k] for k in going]
        if not rows or depth == length:
            break
        state, logps = scorer.go_on(state, np.array(rows), np.array(tokens))
    return [Searched(h, first) for h, first in zip(found, firsts, strict=True)]


def _best(
    beam: list[Hypothesis], logps: np.ndarray, guide: Guide, most: int
) -> list[tuple[int, Hypothesis]]:
    """The `most` best continuations of a prompt's beams, each with the index of its beam."""
    ids = [guide.next(h.state) for h in beam]
    if not sum(map(len, ids)):
        return []
    scores = np.concatenate([h.logp + logps[b, ids[b]] for b, h in enumerate(beam)])
    owners = np.repeat(np.arange(len(beam)), [len(found) for found in ids])
    flat = np.concatenate(ids)
    top = np.arange(len(flat))
    if len(flat) > most:
        top = np.argpartition(-scores, most)[:most]
    top = top[np.lexsort((flat[top], owners[top], -scores[top]))]
    out = []
    for k in top.tolist():
        h, token = beam[owners[k]], int(flat[k])
        state = guide.advance(h.state, token)
        out.append((int(owners[k]), Hypothesis((*h.tokens, token), float(scores[k]), state)))
    return out
