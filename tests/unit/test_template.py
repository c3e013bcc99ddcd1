"""Templates are prefix-closed, and their shapes say the same as their places."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.tree_template import DEFAULT, RANK_VALUES, Template, best_first, grid, levels
from forerun.errors import ConfigError, DataError


@st.composite
def templates(draw: st.DrawFn) -> Template:
    """Any valid ranking, grown one legal place at a time."""
    places: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(0, 15))):
        stems = [(), *places]
        nexts = [(*s, sum(len(p) == len(s) + 1 and p[:-1] == s for p in places)) for s in stems]
        places.append(draw(st.sampled_from(nexts)))
    return Template(tuple(places))


def is_closed(places: tuple[tuple[int, ...], ...]) -> bool:
    """Every place's parent and elder sibling are there."""
    known = {(), *places}
    return all(
        place[:-1] in known and (place[-1] == 0 or (*place[:-1], place[-1] - 1) in known)
        for place in places
    )


@settings(deadline=None)
@given(templates(), st.integers(0, 20))
def test_every_prefix_of_a_template_is_closed(template, nodes):
    assert is_closed(template.places[:nodes])


@settings(deadline=None)
@given(templates(), st.integers(-1, 20))
def test_shape_arrays_agree_with_the_places(template, nodes):
    shape = template.first(nodes)
    kept = template.places[: max(0, nodes)]
    count = len(kept)
    assert len(shape.parents) == len(shape.depths) == count
    assert len(shape.widths) == len(shape.firsts) == count + 1
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(shape.parents.tolist()):
        assert parent < node
        stem = paths[parent] if parent >= 0 else ()
        paths.append((*stem, node - int(shape.firsts[parent])))
    assert sorted(paths) == sorted(kept)
    assert [len(path) for path in paths] == shape.depths.tolist()
    assert shape.depths.tolist() == sorted(shape.depths.tolist())
    for node in range(-1, count):
        assert shape.widths[node] == (shape.parents == node).sum()


@settings(deadline=None)
@given(templates(), st.integers(0, 6))
def test_levels_list_each_parents_children_by_rank(template, depth):
    shape = template.first(len(template))
    found = levels(shape, depth)
    listed = [node for level in found for kids in level.values() for node in kids]
    assert listed == [n for n in range(len(template)) if shape.depths[n] <= depth]
    for at, level in enumerate(found, start=1):
        for parent, kids in level.items():
            assert all(shape.parents[kid] == parent and shape.depths[kid] == at for kid in kids)
            assert kids == list(range(kids[0], kids[0] + len(kids)))


def test_best_first_takes_the_most_valuable_places():
    values, template = (0.6, 0.3, 0.1), best_first(12, (0.6, 0.3, 0.1), depth=4)
    assert is_closed(template.places)

    def worth(place: tuple[int, ...]) -> float:
        return float(np.prod([values[rank] for rank in place]))

    everything = grid(3, 3, 3, 3).places
    best = sorted(map(worth, everything), reverse=True)[:12]
    np.testing.assert_allclose([worth(p) for p in template.places], best, rtol=1e-12)


def test_default_template():
    assert len(DEFAULT) == 625
    assert max(map(len, DEFAULT.places)) <= 20
    assert max(rank for place in DEFAULT.places for rank in place) < len(RANK_VALUES)


def test_grid_is_the_full_tree():
    assert grid(2, 1).places == ((0,), (1,), (0, 0), (1, 0))
    assert grid(3).first(2).parents.tolist() == [-1, -1]


@pytest.mark.parametrize(
    "places",
    [((0,), (0,)), ((0, 0), (0,)), ((1,),), ((0,), (2,)), ((),), ((0,), (0, 1)), ((-1,),)],
    ids=str,
)
def test_a_ranking_that_breaks_the_order_is_refused(places):
    with pytest.raises(ConfigError, match="template place"):
        Template(places)


def test_saved_templates_come_back(tmp_path):
    best_first(30).save(tmp_path / "t.json")
    assert Template.load(tmp_path / "t.json") == best_first(30)
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_saving_touches_no_other_file(tmp_path):
    (tmp_path / "t.tmp").write_text("mine")
    best_first(3).save(tmp_path / "t.json")
    assert (tmp_path / "t.tmp").read_text() == "mine"


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"places": 3}', '{"places": [["a"]]}', "[1"]
    + ['{"places": []}', '{"places": [[1e999]]}', '{"places": [[0.7], [1.2]]}', '{"places": [0]}'],
)
def test_a_file_that_is_no_template_is_refused(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(DataError, match="not a template"):
        Template.load(tmp_path / "t.json")


def test_a_file_with_a_broken_order_is_refused(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps({"places": [[1]]}))
    with pytest.raises((DataError, ConfigError), match="template"):
        Template.load(tmp_path / "t.json")
