"""Draws docs/results/demo.svg from what `forerun demo --json` printed.

    python docs/picture.py docs/results/demo.json docs/results/demo.svg

Left: tokens per second of both arms. Right: tau by trajectory index.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, BASE, TOP = 760, 300, 250, 60
GREY, BLUE = "#8a8f98", "#2f6fde"
STYLE = 'font-family="system-ui, sans-serif" fill="#24292f"'


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "middle") -> str:
    """One label."""
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}" {STYLE}>'
        f"{words}</text>"
    )


def bars(arms: dict[str, Any], left: int) -> list[str]:
    """Tokens per second of each arm."""
    rates = {name: arm["wall_tokens_per_second"] for name, arm in arms.items()}
    most, parts = max(rates.values()), []
    for i, (name, rate) in enumerate(rates.items()):
        x, height = left + 110 * i, (BASE - TOP - 20) * rate / most
        color = GREY if name == "none" else BLUE
        parts += [
            f'<rect x="{x}" y="{BASE - height:.1f}" width="80" height="{height:.1f}" rx="4" '
            f'fill="{color}"/>',
            text(x + 40, BASE - height - 8, f"{rate:.0f}"),
            text(x + 40, BASE + 20, "plain" if name == "none" else name),
        ]
    return parts


def line(arms: dict[str, Any], left: int) -> list[str]:
    """tau by trajectory index of the drafting arm."""
    name = next(name for name in arms if name != "none")
    taus = {group: row["tau"] for group, row in arms[name]["by_trajectory"].items()}
    most, step = max(taus.values()), 330 / max(len(taus) - 1, 1)
    points = [
        (left + step * i, BASE - (BASE - TOP - 20) * tau / most)
        for i, tau in enumerate(taus.values())
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{BLUE}" stroke-width="3"/>']
    for (x, y), (group, tau) in zip(points, taus.items(), strict=True):
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{BLUE}"/>',
            text(x, y - 10, f"{tau:.2f}"),
            text(x, BASE + 20, group),
        ]
    return parts


def draw(summary: dict[str, Any]) -> str:
    """The whole picture as SVG."""
    arms = summary["arms"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        text(145, 30, f"tokens per second ({summary['speed_up']:.2f}x)", 15),
        text(545, 30, "tau (tokens per pass) by trajectory", 15),
        f'<line x1="30" y1="{BASE}" x2="{WIDTH - 20}" y2="{BASE}" stroke="#d0d7de"/>',
        *bars(arms, 50),
        *line(arms, 380),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    target.write_text(draw(json.loads(source.read_text())))
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
