"""The most frequent continuations of a text in a datastore, as a tree with counts."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from forerun.ngrams.index.build.suffix_array import Shard
from forerun.ngrams.index.query import continuation_kernels as kernels
from forerun.ngrams.index.query import kernels as searching
from forerun.ngrams.index.query.continuation_kernels import FirstTokens, TreeLimits, likeliest
from forerun.ngrams.index.query.engine import Index
from forerun.ngrams.index.query.kernels import END
from forerun.ngrams.index.query.results import Match

NO_IDS, NO_SHARES = np.empty(0, np.int64), np.empty(0)


class Continuations(NamedTuple):
    """Continuations of a match, most frequent first; parents[i] < i, -1: the text's end."""

    tokens: np.ndarray  # int32 [n]
    parents: np.ndarray  # int32 [n]
    counts: np.ndarray  # int64 [n], occurrences of the match with this continuation
    match: int  # tokens of the matching suffix; 0: none
    places: int  # occurrences of the match


NOTHING = Continuations(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64), 0, 0)
ANY = FirstTokens(NO_IDS, NO_SHARES)


def retrieve(
    index: Index,
    tokens: Many[int],
    limits: TreeLimits,
    *,
    lengths: tuple[int, int] = (2, 16),
    firsts: FirstTokens | None = None,
    bypass: int = 0,
) -> Continuations:
    """The most frequent continuations of the longest suffix of `tokens` that occurs.

    lengths: shortest and longest match. A shorter match is used if nothing follows the longest.
    firsts: allowed first tokens, unless the match has at least `bypass` tokens (0: no bypass). With
    several shards, counts of rare continuations may be too low.
    """
    query, is_bound = index.ids(tokens[-lengths[1] :]), firsts is not None
    firsts = ANY if firsts is None else _as_stored(index, firsts)
    if len(index.shards) > 1:
        return _of_many(index, query, limits, lengths[0], firsts if is_bound else None, bypass)
    shard, ends, out = index.shards[0][:], _ends(index), _new_tree(limits.nodes)
    size, match, places = kernels.retrieve(
        shard, query, lengths[0], limits[:], firsts[:], is_bound, bypass, ends, out
    )
    index.check_reads()
    ids, parents, counts = out
    return Continuations(ids[:size], parents[:size], counts[:size], match, places)


Part = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, parents, counts


def _of_many(
    index: Index,
    query: np.ndarray,
    limits: TreeLimits,
    shortest: int,
    firsts: FirstTokens | None,
    bypass: int,
) -> Continuations:
    """`retrieve` for several shards; their results are added up."""
    match, places = index.longest_suffix(query)
    while match >= shortest:
        allowed = None if 0 < bypass <= match else firsts
        found = _at(index, match, places, limits, allowed)
        if len(found[0]) or (allowed and len(_at(index, match, places, limits, None)[0])):
            return Continuations(*found, match, places.count)
        match -= 1
        places = index.find(query[len(query) - match :])
    return NOTHING


def _at(
    index: Index, match: int, places: Match, limits: TreeLimits, firsts: FirstTokens | None
) -> Part:
    """The continuations of these occurrences, in all shards."""
    shards = zip(index.shards, places.intervals, strict=True)
    parts = [
        _of_shard(index, shard, match, interval, limits, firsts)
        for shard, interval in shards
        if interval[0] < interval[1]
    ]
    return parts[0] if len(parts) == 1 else added(parts, firsts or ANY, limits.nodes)


def _of_shard(
    index: Index,
    shard: Shard,
    match: int,
    interval: tuple[int, int],
    limits: TreeLimits,
    firsts: FirstTokens | None,
) -> Part:
    out, prunes = _new_tree(limits.nodes), firsts is not None
    size = kernels.continuations(
        shard[:], match, *interval, limits[:], (firsts or ANY)[:], prunes, _ends(index), out
    )
    index.check_reads()
    tokens, parents, counts = out
    return tokens[:size], parents[:size], counts[:size]


def _new_tree(nodes: int) -> Part:
    """Arrays for a tree with counts."""
    tokens, parents = np.empty((2, nodes), np.int32)
    return tokens, parents, np.empty(nodes, np.int64)


def _ends(index: Index) -> tuple[int, int]:
    """The separator, and the id that replaces it in drafts."""
    return index.separator, index.eos if index.eos != index.separator else END


def _as_stored(index: Index, firsts: FirstTokens) -> FirstTokens:
    """The first tokens with eos replaced by the separator."""
    if index.eos == index.separator:
        return firsts
    return FirstTokens(
        np.where(firsts.ids == index.eos, index.separator, firsts.ids), firsts.weights
    )


def added(parts: Many[Part], allowed: FirstTokens, nodes: int) -> Part:
    """The sum of several trees: counts of equal paths are added, the best `nodes` are kept."""
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
    """Compiles the kernels of `retrieve` for the number types of this index."""
    likeliest(np.zeros(1, np.int32), np.ones(1), 1)
    searching.longest_of(index.shards[0][:], NO_IDS)
    for firsts in (None, FirstTokens(np.zeros(1, np.int64), np.ones(1))):
        retrieve(
            index, [int(index.shards[0].text[-1])], TreeLimits(1, 1), lengths=(1, 1), firsts=firsts
        )
