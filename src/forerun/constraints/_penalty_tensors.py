"""Bias, bans and penalties as tensors: `Adjust.logits` for all rows of a tree, on their device.

Most entries are the same for all rows: those of the text before the tree. The tokens on the path to
a node, and bans that end on it, differ by row. Both go to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from forerun.utils.device_copy import to_device

if TYPE_CHECKING:
    from forerun.constraints._penalties import History

FIELDS = 6  # of an entry: row, id, bias, whether the text has it, penalty, whether it is banned


def adjusted(logits: Tensor, states: Many[History], banned: Many[tuple[int, ...]]) -> Tensor:
    """Adjusted logits of rows [R, V] with a state and the banned tokens of each.

    Raises IndexError for ids without a logit.
    """
    common, own = _common(states[0], banned[0]), _own(states, banned)
    entries = np.concatenate([common, own], axis=1)
    if entries[1].max(initial=0.0) >= logits.shape[1]:
        raise IndexError(f"token {int(entries[1].max())} has no logit: there are {logits.shape[1]}")
    sent = to_device(entries, logits.device)
    num, factor = common.shape[1], states[0].sampling.repetition_penalty
    ids = sent[1, :num].long()
    found = logits.index_copy(1, ids, _edited(logits[:, ids], sent[:, :num], factor))
    where = sent[0, num:].long(), sent[1, num:].long()
    return found.index_put(where, _edited(logits[where], sent[:, num:], factor))


def _edited(scores: Tensor, entries: Tensor, factor: float) -> Tensor:
    """Scores [..., k] after their entries [FIELDS, k], in the order of `Adjust.logits`."""
    bias, penalty = entries[2].to(scores.dtype), entries[4].to(scores.dtype)
    scores = scores + bias
    if factor != 1.0:
        penalised = torch.where(scores > 0, scores / factor, scores * factor)
        scores = torch.where(entries[3] > 0, penalised, scores)
    return (scores - penalty).masked_fill(entries[5] > 0, -torch.inf)


def _common(state: History, banned: tuple[int, ...]) -> np.ndarray:
    """The entries [FIELDS, k] that all rows share, without the tokens since the summary."""
    s, past = state.sampling, state.past
    counts = s.presence_penalty or s.frequency_penalty
    seen = past.seen if counts or s.repetition_penalty != 1.0 else past.seen[:0]
    places = past.places if len(seen) else {}
    others = [token for token in {*s.logit_bias, *banned} if token not in places]
    entries = np.zeros((FIELDS, len(seen) + len(others)))
    entries[1] = np.concatenate([seen, np.array(others, np.int64)])
    entries[3, : len(seen)] = 1.0
    if counts and len(seen):
        times = past.times
        entries[4, : len(seen)] = (times > 0) * s.presence_penalty + s.frequency_penalty * times
    places = places | {token: len(seen) + i for i, token in enumerate(others)}
    for token, bias in s.logit_bias.items():
        entries[2, places[token]] = bias
    entries[5, [places[token] for token in banned]] = 1.0
    return entries


def _own(states: Many[History], banned: Many[tuple[int, ...]]) -> np.ndarray:
    """The entries [FIELDS, m] that single rows have in place of the common ones."""
    first, entries = states[0], list[tuple[float, ...]]()
    for row, (state, bans) in enumerate(zip(states, banned, strict=True)):
        tokens = set(state.path)
        if state.past is not first.past:  # folded on the way to this row
            before = first.past.counts
            tokens |= {t for t, num in state.past.counts.items() if num != before.get(t, 0)}
        tokens |= set(bans) ^ set(banned[0])
        entries += [(row, *_entry(state, token, bans)) for token in tokens]
    return np.array(entries, np.float64).reshape(-1, FIELDS).T


def _entry(state: History, token: int, banned: tuple[int, ...]) -> tuple[float, ...]:
    """The entry of a token after all tokens of a state, without its row."""
    s, past = state.sampling, state.past
    times = past.counts.get(token, 0) + state.path.count(token)
    penalty = s.presence_penalty + s.frequency_penalty * times if times else 0.0
    is_seen = times > 0 or token in past.prompt
    return token, s.logit_bias.get(token, 0.0), is_seen, penalty, token in banned
