"""Small charts as inline SVG: bars with intervals, lines, stacked bars.

Drawn 400 units wide, so that text stays readable where a chart is as wide as a phone. Colours
come from variables of the page, with a light and a dark set in `STYLE`; no meaning hangs on colour
alone: own methods are filled, peers hatched, plain decoding is pale; lines have marks and dashes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LINE = 400, 15  # units; one line of text
NUM_SERIES = 8  # colours, marks and dashes before they repeat

_VARIABLES = """
--ink:#1f2328; --dim:#59636e; --paper:#ffffff; --rule:#d1d9e0;
--s0:#0b5fc2; --s1:#b35900; --s2:#137a52; --s3:#8a3ba8; --s4:#a3233d; --s5:#00707f; --s6:#6b5b00;
--s7:#59636e;"""
_DARK_VARIABLES = """
--ink:#e6edf3; --dim:#9aa5b1; --paper:#11161d; --rule:#39424d;
--s0:#5aa9ff; --s1:#f0a04b; --s2:#4cc38a; --s3:#c99bf0; --s4:#ff8593; --s5:#4fc9d8; --s6:#d6c34a;
--s7:#9aa5b1;"""
STYLE = (
    f":root {{ color-scheme: light dark; {_VARIABLES} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK_VARIABLES} }} }}\n"
    f"@media print {{ :root {{ color-scheme: light; {_VARIABLES} }} }}\n"
    "svg text { font-family: system-ui, sans-serif; font-size: 13px; fill: var(--ink);"
    " paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }\n"
    "svg .dim { fill: var(--dim); }\nsvg .strong { font-weight: 650; }\n"
    "svg .end { text-anchor: end; }\nsvg .mid { text-anchor: middle; }\n"
    "svg .rule { stroke: var(--rule); stroke-width: 1; }\n"
    "svg .ink { stroke: var(--ink); stroke-width: 1.5; fill: none; }\n"
    "svg .one { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 3 3; }\n"
    "svg .own { fill: var(--s0); }\n"
    "svg .peer { fill: url(#hatch1); stroke: var(--s1); }\n"
    "svg .plain { fill: var(--rule); stroke: var(--dim); }\n"
) + "".join(f"svg .s{i} {{ stroke: var(--s{i}); fill: var(--s{i}); }}\n" for i in range(NUM_SERIES))
_HATCHES = ((1, "M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4"), (2, "M0,4 h8"), (3, "M4,0 v8"))
DEFS = (
    '<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs>'
    + "".join(
        f'<pattern id="hatch{i}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="var(--s{i})" fill-opacity="0.25"/>'
        f'<path d="{path}" stroke="var(--s{i})" stroke-width="2"/></pattern>'
        for i, path in _HATCHES
    )
    + "</defs></svg>"
)
KINDS = {"own": "forerun", "peer": "peer", "plain": "our plain decoding"}
PAPER = 'style="fill:var(--paper)"'
DASHES = ("", "6 3", "2 3", "8 3 2 3", "12 4", "4 2 1 2", "1 4", "10 2 4 2")


@dataclass(frozen=True)
class Bar:
    """One bar: a label, a value, its interval, and what kind of method it is."""

    label: str
    value: float
    interval: tuple[float, float] | None
    said: str  # the value and its interval in words
    kind: str = "own"  # own, peer, plain
    note: str = ""  # as "fastest"
    is_first: bool = False


@dataclass(frozen=True)
class Line:
    """One line through points (x, y) in the order of x."""

    label: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Stack:
    """One bar in parts, which keep the order of the chart's parts."""

    label: str
    values: list[float]


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """One escaped label; `kind` is CSS classes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def clip(words: str, most: int) -> str:
    """A label that fits; its beginning and its end are kept."""
    return words if len(words) <= most else f"{words[: most - 9]}…{words[-8:]}"


def ticks(most: float, count: int = 4) -> list[float]:
    """Round numbers from 0 that cover `most`, about `count` of them."""
    rough = max(most, 1e-12) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * k for k in (1, 2, 2.5, 5, 10) if unit * k >= rough * (1 - 1e-9))
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def number(value: float) -> str:
    """A figure with three significant digits."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 100 or size == 0:
        return f"{value:,.0f}"
    digits = 2 - math.floor(math.log10(size))
    return f"{value:.3g}" if digits > 6 else f"{value:.{max(digits, 0)}f}"


def frame(height: float, title: str, summary: str, parts: Sequence[str]) -> str:
    """The SVG element around parts, with its name and description for those who do not see it."""
    words = escape(f"{title}. {summary}", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{words}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}">' + "".join(parts) + "</svg>"
    )


def standalone(title: str, svg: str) -> str:
    """A chart as a file of its own: with style, hatches, a background and its title."""
    head, body = svg.split(">", 1)
    start, height = head.split(f'viewBox="0 0 {WIDTH} ')
    tall = int(height.rstrip('"')) + 40
    ground = f'<rect x="-10" y="-30" width="{WIDTH + 20}" height="{tall}" {PAPER}/>'
    return (
        f'{start}viewBox="-10 -30 {WIDTH + 20} {tall}"><style>{STYLE}</style>{DEFS}{ground}'
        f"{text(4, -10, title, 'strong')}{body}\n"
    )


def bars(title: str, rows: Sequence[Bar], mark: float | None = None) -> str:
    """Bars with intervals, one under another; a dashed line at `mark`; who is who below."""
    height, step, left, right = 58 + 42 * len(rows), 42, 4, WIDTH - 8
    most = max([r.interval[1] if r.interval else r.value for r in rows] + [mark or 0.0, 1e-9])
    scale = (right - left) / most
    parts = [_legend(rows, height - 12)]
    if mark is not None:
        x = left + mark * scale
        parts.append(f'<line class="one" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - 40}"/>')
    for i, row in enumerate(rows):
        y = 18 + step * i
        label = clip(row.label, 33 - len(row.note)) + (f", {row.note}" if row.note else "")
        parts += [
            text(left, y, label, "strong" if row.is_first else ""),
            text(right, y, row.said, "end"),
            f'<rect class="bar {row.kind}" x="{left}" y="{y + 6}" rx="2" height="13" '
            f'width="{max(row.value * scale, 0):.1f}"/>',
            _whisker(row.interval, left, scale, y + 12.5),
        ]
    said = "; ".join(", ".join(filter(None, (r.label, r.note, r.said))) for r in rows)
    return frame(height, title, said, parts)


def _legend(rows: Sequence[Bar], y: float) -> str:
    """What filled, hatched and pale bars are."""
    parts, x = [], 4.0
    for kind, words in KINDS.items():
        if any(row.kind == kind for row in rows):
            parts.append(f'<rect class="key {kind}" x="{x}" y="{y - 10}" width="14" height="11"/>')
            parts.append(text(x + 20, y, words, "dim"))
            x += 36 + 7 * len(words)
    return "".join(parts)


def _whisker(interval: tuple[float, float] | None, left: float, scale: float, y: float) -> str:
    if interval is None:
        return ""
    a, b = (left + end * scale for end in interval)
    return f'<path class="ink" d="M{a:.1f},{y - 4} v8 M{a:.1f},{y} H{b:.1f} M{b:.1f},{y - 4} v8"/>'


def lines(
    title: str,
    series: Sequence[Line],
    x_title: str,
    y_title: str,
    names: dict[float, str] | None = None,
    log_x: bool = False,
) -> str:
    """Lines with marks over a shared x; `names` labels places of x, else the values do."""
    series = [line for line in series if line.points]
    left, right, top, bottom = 38, WIDTH - 10, 26, 216
    xs = sorted({x for line in series for x, _ in line.points})
    ys = ticks(max([y for line in series for _, y in line.points], default=1.0))
    place: Callable[[float], float] = math.log2 if log_x else float
    low, high = (place(xs[0]), place(xs[-1])) if xs else (0.0, 1.0)

    def at(point: tuple[float, float]) -> tuple[float, float]:
        across = (place(point[0]) - low) / (high - low) if high > low else 0.5
        return left + 8 + across * (right - left - 16), bottom - point[1] / ys[-1] * (bottom - top)

    labels = [(at((x, 0.0))[0], (names or {}).get(x, f"{x:g}")) for x in xs]
    parts = [text(2, 12, y_title, "dim"), text(right, bottom + 33, x_title, "dim end")]
    for y in ys:
        level = at((low, y))[1] if not log_x else bottom - y / ys[-1] * (bottom - top)
        parts.append(f'<line class="rule" x1="{left}" x2="{right}" y1="{level}" y2="{level}"/>')
        parts.append(text(left - 5, level + 4, f"{y:g}", "dim end"))
    parts += [text(x, bottom + 17, name, "mid") for x, name in _apart(labels)]
    for i, line in enumerate(series):
        spots = [at(point) for point in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(
            f'<polyline class="line s{i % NUM_SERIES}" points="{path}" style="fill:none" '
            f'stroke-width="2" stroke-dasharray="{DASHES[i % NUM_SERIES]}"/>'
        )
        parts += [_spot(i, x, y) for x, y in spots]
        parts += _key(i, line.label, bottom + 51 + i * (LINE + 4))
    said = "; ".join(
        f"{line.label}: " + ", ".join(f"{x:g} {number(y)}" for x, y in line.points)
        for line in series
    )
    return frame(bottom + 48 + len(series) * (LINE + 4), title, said, parts)


def _apart(labels: list[tuple[float, str]], gap: float = 8.0) -> list[tuple[float, str]]:
    """The labels that fit beside each other, the last one always among them."""
    kept: list[tuple[float, str]] = []
    for x, name in reversed(labels):
        if not kept or kept[-1][0] - x > 3.5 * (len(name) + len(kept[-1][1])) + gap:
            kept.append((x, name))
    return kept[::-1]


def _key(i: int, label: str, y: float) -> list[str]:
    dash = DASHES[i % NUM_SERIES]
    return [
        f'<path class="s{i % NUM_SERIES}" d="M6,{y - 4} h34" stroke-width="2" '
        f'stroke-dasharray="{dash}"/>',
        _spot(i, 23, y - 4, "key"),
        text(48, y, clip(label, 46)),
    ]


def _spot(i: int, x: float, y: float, kind: str = "spot") -> str:
    """A mark: circle, square, triangle, diamond, and the same ones hollow."""
    shapes = (
        "m-4,0 a4,4 0 1,0 8,0 a4,4 0 1,0 -8,0",
        "m-4,-4 h8 v8 h-8z",
        "m0,-5 l5,9 h-10z",
        "m0,-5 l5,5 l-5,5 l-5,-5z",
    )
    hollow = " {PAPER}" if i % NUM_SERIES >= len(shapes) else ""
    shape = shapes[i % len(shapes)]
    return f'<path class="{kind} s{i % NUM_SERIES}"{hollow} d="M{x:.1f},{y:.1f} {shape}"/>'


def stacks(title: str, rows: Sequence[Stack], names: Sequence[str]) -> str:
    """Bars of full width, cut into shares; parts differ by hatch, and wide ones say their share."""
    left, right, top = 4, WIDTH - 8, 22 + LINE
    parts = []
    for i, name in enumerate(names):
        x = left + i * (right - left) / len(names)
        parts.append(f'<rect class="key" x="{x:.1f}" y="6" width="14" height="12" {_fill(i)}/>')
        parts.append(text(x + 19, 16, name))
    for j, row in enumerate(rows):
        total, x, y = sum(row.values) or 1.0, float(left), top + 40 * j
        parts.append(text(left, y + 8, clip(row.label, 50)))
        for i, value in enumerate(row.values):
            width = value / total * (right - left)
            share = f"{100 * value / total:.0f} %"
            parts.append(
                f'<rect class="part" x="{x:.1f}" y="{y + 13}" width="{width:.1f}" height="15" '
                f"{_fill(i)}><title>{escape(row.label)}: {escape(names[i])} {share}</title></rect>"
            )
            if width > 34:
                parts.append(_tag(x + width / 2, y + 25, share))
            x += width
    said = "; ".join(
        f"{row.label}: "
        + ", ".join(
            f"{name} {100 * value / (sum(row.values) or 1.0):.0f} %"
            for name, value in zip(names, row.values, strict=True)
        )
        for row in rows
    )
    return frame(top + 40 * len(rows) + 4, title, said, parts)


def _tag(x: float, y: float, words: str) -> str:
    """A label on its own ground, readable over a hatch."""
    half = 3.6 * len(words) + 2
    ground = f'<rect x="{x - half:.1f}" y="{y - 10}" width="{2 * half:.1f}" height="13" rx="2" '
    return f"{ground}{PAPER}/>{text(x, y, words, 'mid')}"


def _fill(i: int) -> str:
    """Parts: full, slanted, level, upright, pale."""
    paint = ("var(--s0)", "url(#hatch1)", "url(#hatch2)", "url(#hatch3)", "var(--rule)")[i % 5]
    edge = ("var(--s0)", "var(--s1)", "var(--s2)", "var(--s3)", "var(--dim)")[i % 5]
    return f'style="fill:{paint};stroke:{edge}"'
