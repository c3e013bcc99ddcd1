"""Templates fitted from counts: what is counted, how it is ranked, who finds it again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_tiny

import forerun
from forerun.core.records import Plan
from forerun.core.sampling import Sampling
from forerun.core.tree import POINT, TreeBuilder
from forerun.core.tree_template import DEFAULT, Template, best_first, grid
from forerun.growers import _fit_template as fitting
from forerun.growers._fit_template import PlaceCounts, prior_rate, ranking

PLACES = grid(3, 2, 2)


def tree_of(*parents: int):
    """A tree of POINT nodes with these parents."""
    tree = TreeBuilder()
    for token, parent in enumerate(parents):
        tree.add(token, parent, POINT, None)
    return tree.build()


def test_accepted_nodes_are_counted_at_their_places() -> None:
    tally = PlaceCounts(PLACES)
    tree = tree_of(-1, -1, -1, 1, 1, 4)  # node 4 is the second child of the second child
    tally.count(tree, [1, 4, 5], Plan(nodes=9, depth=3))
    tally.count(tree, [], Plan(nodes=3, depth=3))
    hits = {tally.places[i]: int(n) for i, n in enumerate(tally.hits) if n}
    assert hits == {(1,): 1, (1, 1): 1, (1, 1, 0): 1}
    assert tally.tries[:3].tolist() == [2, 2, 2] and tally.tries[3:9].tolist() == [1] * 6
    assert tally.tries[9:].sum() == 0 and tally.passes == 2


def test_places_below_the_plans_depth_were_not_offered() -> None:
    tally = PlaceCounts(PLACES)
    tally.count(tree_of(-1), [0], Plan(nodes=21, depth=1))
    assert tally.tries.tolist() == [1.0] * 3 + [0.0] * 18


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=21, max_size=21))
def test_rankings_are_valid_nested_and_follow_the_counts(counts: list[int]) -> None:
    worth = dict(zip(PLACES.places, map(float, counts), strict=True))
    found = ranking(worth)  # Template itself refuses a place before its parent or elder sibling
    assert sorted(found.places) == sorted(PLACES.places)
    pooled = fitting._pooled(worth)
    for stem in {place[:-1] for place in pooled}:
        family = [pooled[place] for place in sorted(pooled) if place[:-1] == stem]
        assert family == sorted(family, reverse=True)
        assert sum(family) == pytest.approx(sum(worth[p] for p in worth if p[:-1] == stem))
    for size in range(1, 21):  # the next place is the best of those that may come
        taken, rest = set(found.places[:size]), set(found.places[size:])
        may = [
            p for p in rest
            if (len(p) == 1 or p[:-1] in taken) and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in taken)
        ]  # fmt: skip
        assert pooled[found.places[size]] == max(pooled[p] for p in may)


def test_monotone_counts_give_the_top_sets() -> None:
    """Counts that fall along paths and siblings: the first N places are the N largest counts."""
    worth = {place: prior_rate(place) * 1000 for place in best_first(300).places}
    found = ranking(worth)
    assert len(found) == 300
    for size in (8, 79, 256):
        kept = sorted((worth[p] for p in found.places[:size]), reverse=True)
        np.testing.assert_allclose(kept, sorted(worth.values(), reverse=True)[:size])


def test_without_counts_the_ranking_is_the_belief() -> None:
    assert PlaceCounts(best_first(200)).ranked().places[:12] == best_first(12).places


def test_files_keep_counts_and_places(tmp_path: Path) -> None:
    tally = PlaceCounts(PLACES)
    tree = tree_of(-1, -1)
    for accepted in ([1], [1], [0], []):
        tally.count(tree, accepted, Plan(nodes=2, depth=3))
    found = tally.ranked()
    path = tmp_path / fitting.FILE_NAME
    found.save(path, **tally.facts(found))
    assert Template.load(path) == found
    facts = json.loads(path.read_text())
    hits = dict(zip(found.places, facts["hits"], strict=True))
    assert facts["passes"] == 4 and (hits[0,], hits[1,]) == (1, 2)


def test_a_fitted_template_is_found_in_the_models_folder(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny")
    model = forerun.load(folder)
    assert model.drafter("stand:tree=template").template == DEFAULT
    best_first(9, (0.5, 0.5)).save(folder / fitting.FILE_NAME)
    assert model.drafter("stand:tree=template,entries=4").template == best_first(9, (0.5, 0.5))
    assert model.drafter("stand:entries=5").is_dynamic  # the default grows without a template


def test_a_fitted_template_is_found_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    folder = make_tiny(tmp_path / "tiny")
    assert fitting.fitted_file(str(folder)) is None
    place = fitting.cache_file(str(folder))
    place.parent.mkdir(parents=True)
    grid(2).save(place)
    assert fitting.fitted_file(str(folder)) == place
    other = make_tiny(tmp_path / "other", seed=1)  # same shape, other weights
    assert fitting.fitted_file(str(other)) is None


def test_counting_decodes_and_measures_apart(tmp_path: Path) -> None:
    model = forerun.load(make_tiny(tmp_path / "tiny"))
    sampling = Sampling(n=3, max_new_tokens=20, seed=1, ignore_eos=True)
    *_, tally = fitting.count_places(model, ["the cat sat", "one two"], sampling, nodes=40, depth=8)
    parts = {"drafter": "stand:tree=template", "controller": "fixed:nodes=40,depth=8", "batch": 1}
    (a,) = model.generate(["the cat sat"], sampling, **parts)
    (b,) = model.generate(["one two"], sampling, **parts)
    assert tally.passes == a.stats.passes + b.stats.passes
    # the last draft of a text may be cut off behind what was accepted
    assert tally.hits.sum() >= a.stats.accepted + b.stats.accepted > 0
    tau = fitting.measure(model, ["ten nine"], sampling, tally.ranked(), 8)
    assert 1.0 <= tau < 9.0
