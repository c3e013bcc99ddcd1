"""Bar charts with intervals as inline SVG, with a light and a dark colour set.

Local methods are filled, peers hatched, plain decoding pale, so no meaning rests on colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 400  # SVG units
ROW_HEIGHT = 42
MAX_LABEL_CHARS = 33

_LIGHT = (
    "--ink:#1f2328; --dim:#59636e; --paper:#fff; --rule:#d1d9e0; --own:#0b5fc2; --peer:#b35900;"
)
_DARK = (
    "--ink:#e6edf3; --dim:#9aa5b1; --paper:#11161d; --rule:#39424d; --own:#5aa9ff; --peer:#f0a04b;"
)
STYLE = (
    f":root {{ color-scheme: light dark; {_LIGHT} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}\n"
    f"@media print {{ :root {{ color-scheme: light; {_LIGHT} }} }}\n"
    "svg text { font: 13px system-ui, sans-serif; fill: var(--ink); }\n"
    "svg .strong { font-weight: 650; }\nsvg .end { text-anchor: end; }\n"
    "svg .interval { stroke: var(--ink); stroke-width: 1.5; fill: none; }\n"
    "svg .one { stroke: var(--ink); stroke-dasharray: 3 3; }\n"
    "svg .own { fill: var(--own); }\n"
    "svg .peer { fill: url(#hatch); stroke: var(--peer); }\n"
    "svg .plain { fill: var(--rule); stroke: var(--dim); }\n"
)
HATCH = (
    '<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>'
    '<pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse">'
    '<rect width="8" height="8" fill="var(--peer)" fill-opacity="0.25"/>'
    '<path d="M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4" stroke="var(--peer)" stroke-width="2"/>'
    "</pattern></defs></svg>"
)
KINDS = {"own": "forerun", "peer": "peer", "plain": "our plain decoding"}


@dataclass(frozen=True)
class Bar:
    """One bar: label, value, interval, and the kind of the method."""

    label: str
    value: float
    interval: tuple[float, float] | None
    text: str  # value and interval
    kind: str = "own"  # own, peer, plain
    note: str = ""  # as "fastest"
    is_first: bool = False


def bars(title: str, rows: Sequence[Bar], mark: float | None = None) -> str:
    """An SVG of horizontal bars with intervals, a dashed line at `mark`, and a legend."""
    height, left, right = 58 + ROW_HEIGHT * len(rows), 4, WIDTH - 8
    most = max([r.interval[1] if r.interval else r.value for r in rows] + [mark or 0.0, 1e-9])
    scale = (right - left) / most
    parts = [_legend(rows, height - 12)]
    if mark is not None:
        x = left + mark * scale
        parts.append(f'<line class="one" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - 40}"/>')
    for i, row in enumerate(rows):
        parts += _bar(row, 18 + ROW_HEIGHT * i, left, right, scale)
    summary = "; ".join(", ".join(filter(None, (r.label, r.note, r.text))) for r in rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'aria-label="{escape(f"{title}. {summary}", quote=True)}" '
        f'viewBox="0 0 {WIDTH} {height}">{"".join(parts)}</svg>'
    )


def _bar(row: Bar, y: float, left: float, right: float, scale: float) -> list[str]:
    label = clip(row.label, MAX_LABEL_CHARS - len(row.note)) + (f", {row.note}" if row.note else "")
    return [
        _text(left, y, label, "strong" if row.is_first else ""),
        _text(right, y, row.text, "end"),
        f'<rect class="bar {row.kind}" x="{left}" y="{y + 6}" rx="2" height="13" '
        f'width="{max(row.value * scale, 0):.1f}"/>',
        _interval(row.interval, left, scale, y + 12.5),
    ]


def _interval(ends: tuple[float, float] | None, left: float, scale: float, y: float) -> str:
    if ends is None:
        return ""
    a, b = (left + end * scale for end in ends)
    path = f"M{a:.1f},{y - 4} v8 M{a:.1f},{y} H{b:.1f} M{b:.1f},{y - 4} v8"
    return f'<path class="interval" d="{path}"/>'


def _legend(rows: Sequence[Bar], y: float) -> str:
    parts, x = [], 4.0
    for kind, words in KINDS.items():
        if any(row.kind == kind for row in rows):
            parts.append(f'<rect class="key {kind}" x="{x}" y="{y - 10}" width="14" height="11"/>')
            parts.append(_text(x + 20, y, words))
            x += 36 + 7 * len(words)
    return "".join(parts)


def _text(x: float, y: float, words: str, classes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}">{escape(words)}</text>'


def clip(words: str, most: int) -> str:
    """A label shortened in the middle."""
    return words if len(words) <= most else f"{words[: most - 9]}…{words[-8:]}"
