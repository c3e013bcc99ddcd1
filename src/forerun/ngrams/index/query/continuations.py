"""From the end of a text to the most frequent continuations in a datastore, as a counted tree."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from forerun.ngrams.index.build.suffix_array import Shard
from forerun.ngrams.index.query import continuation_kernels as kernels
from forerun.ngrams.index.query import kernels as searching
from forerun.ngrams.index.query.continuation_kernels import Firsts, Wish, likeliest
from forerun.ngrams.index.query.engine import Index
from forerun.ngrams.index.query.kernels import END
from forerun.ngrams.index.query.results import Match

NO_IDS, NO_SHARES = np.empty(0, np.int64), np.empty(0)


class Found(NamedTuple):
    """Continuations of a match, surest first; parents[i] < i, -1 is the text's end."""

    tokens: np.ndarray  # int32 [n]
    parents: np.ndarray  # int32 [n]
    counts: np.ndarray  # int64 [n], places of the match that go on like this
    match: int  # tokens of the suffix that was found; 0: none
    places: int  # where it was found


NOTHING = Found(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64), 0, 0)
ANY = Firsts(NO_IDS, NO_SHARES)


def retrieve(
    index: Index,
    tokens: Many[int],
    wish: Wish,
    *,
    lengths: tuple[int, int] = (2, 16),
    firsts: Firsts | None = None,
    bypass: int = 0,
) -> Found:
    """The most frequent continuations of the longest suffix of `tokens` that occurs.

    lengths: of a match, least and most. A shorter one is taken where nothing follows the longest.
    firsts: what continuations may begin with, unless the match has `bypass` tokens or more (and
    `bypass` is not 0). Of several shards, the rarest continuations of each may be counted short.
    """
    query, bound = index.ids(tokens[-lengths[1] :]), firsts is not None
    firsts = ANY if firsts is None else _as_stored(index, firsts)
    if len(index.shards) > 1:
        return _of_many(index, query, wish, lengths[0], firsts if bound else None, bypass)
    out = _room(wish.nodes)
    size, match, places = kernels.retrieve(
        index.shards[0][:], query, lengths[0], wish[:], firsts[:], bound, bypass, _ends(index), out
    )
    ids, parents, counts = out
    return Found(ids[:size], parents[:size], counts[:size], match, places)


Part = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, parents, counts


def _of_many(
    index: Index, query: np.ndarray, wish: Wish, shortest: int, firsts: Firsts | None, bypass: int
) -> Found:
    """`retrieve` of several shards: what they found is added up."""
    match, places = index.longest_suffix(query)
    while match >= shortest:
        allowed = None if 0 < bypass <= match else firsts
        found = _at(index, match, places, wish, allowed)
        goes_on = len(found[0]) or (allowed and len(_at(index, match, places, wish, None)[0]))
        if goes_on:
            return Found(*found, match, places.count)
        match -= 1
        places = index.find(query[len(query) - match :])
    return NOTHING


def _at(index: Index, match: int, places: Match, wish: Wish, firsts: Firsts | None) -> Part:
    """What goes on from these places, in all shards."""
    shards = zip(index.shards, places.intervals, strict=True)
    parts = [
        _of_shard(index, shard, match, interval, wish, firsts)
        for shard, interval in shards
        if interval[0] < interval[1]
    ]
    return parts[0] if len(parts) == 1 else added(parts, firsts or ANY, wish.nodes)


def _of_shard(
    index: Index,
    shard: Shard,
    match: int,
    interval: tuple[int, int],
    wish: Wish,
    firsts: Firsts | None,
) -> Part:
    out, bound = _room(wish.nodes), firsts is not None
    size = kernels.continuations(
        shard[:], match, *interval, wish[:], (firsts or ANY)[:], bound, _ends(index), out
    )
    tokens, parents, counts = out
    return tokens[:size], parents[:size], counts[:size]


def _room(nodes: int) -> Part:
    """For a counted tree."""
    tokens, parents = np.empty((2, nodes), np.int32)
    return tokens, parents, np.empty(nodes, np.int64)


def _ends(index: Index) -> tuple[int, int]:
    """The separator, and what it stands for."""
    return index.separator, index.eos if index.eos != index.separator else END


def _as_stored(index: Index, firsts: Firsts) -> Firsts:
    """The end id is a separator in the text."""
    if index.eos == index.separator:
        return firsts
    return Firsts(np.where(firsts.ids == index.eos, index.separator, firsts.ids), firsts.weights)


def added(parts: Many[Part], allowed: Firsts, nodes: int) -> Part:
    """One counted tree of several: counts of equal paths add up, the best `nodes` stay."""
    counts: dict[tuple[int, ...], int] = {}
    for tokens, parents, found in parts:
        paths: list[tuple[int, ...]] = []
        for token, parent, count in zip(
            tokens.tolist(), parents.tolist(), found.tolist(), strict=True
        ):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
            counts[paths[-1]] = counts.get(paths[-1], 0) + count
    weight = dict(zip(allowed.ids.tolist(), allowed.weights.tolist(), strict=True))
    best = sorted(
        counts,
        key=lambda path: (-counts[path] * weight.get(path[0], 1.0), len(path), path[-1], path),
    )[:nodes]
    place = {path: i for i, path in enumerate(best)} | {(): -1}
    return (
        np.array([path[-1] for path in best], np.int32),
        np.array([place[path[:-1]] for path in best], np.int32),
        np.array([counts[path] for path in best], np.int64),
    )


def warm_up(index: Index) -> None:
    """Compiles what `retrieve` runs, for the number types of this index."""
    likeliest(np.zeros(1, np.int32), np.ones(1), 1)
    searching.longest_of(index.shards[0][:], NO_IDS)
    for firsts in (None, Firsts(np.zeros(1, np.int64), np.ones(1))):
        retrieve(index, [int(index.shards[0].text[-1])], Wish(1, 1), lengths=(1, 1), firsts=firsts)
