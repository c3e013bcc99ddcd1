"""Charts of the report: ticks, figures and labels that fit."""

from __future__ import annotations

from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st
from report_page import SVG

from forerun.bench import charts


@given(st.floats(1e-6, 1e9), st.integers(2, 8))
def test_ticks_cover_the_largest_value(most: float, count: int) -> None:
    found = charts.ticks(most, count)
    assert found[0] == 0 and found[-1] >= most * (1 - 1e-9)
    assert 2 <= len(found) <= 2 * count + 2


def test_figures_have_three_digits() -> None:
    shown = [charts.number(v) for v in (0.0, 1234.5, 99.96, 1.5, 0.6712, 0.0123, float("nan"))]
    assert shown == ["0", "1,234", "100.0", "1.50", "0.671", "0.0123", "-"]


def test_labels_that_do_not_fit_are_left_out() -> None:
    line = charts.Line("a", [(float(i), 1.0) for i in range(1, 200)])
    svg = ElementTree.fromstring(charts.lines("t", [line], "x", "y"))
    labels = [one.text for one in svg.iter(f"{SVG}text") if "mid" in (one.get("class") or "")]
    assert labels[-1] == "199" and 5 < len(labels) < 20


def test_long_names_are_shortened_to_both_ends() -> None:
    assert charts.clip("stand:nodes=32", 20) == "stand:nodes=32"
    short = charts.clip("stand:" + "x" * 50 + "nodes=32", 20)
    assert len(short) == 20 and short.startswith("stand:") and short.endswith("nodes=32")
