"""Numbers, speed-ups and sizes as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from forerun.bench.metrics import SpeedUp

GIB, MIB = 1 << 30, 1 << 20
MIN_INTERVAL_PROMPTS = 3  # with two, Student's t gives an interval of orders of magnitude


def number(value: float) -> str:
    """A number with three significant digits."""
    if not math.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 100 or size == 0:
        return f"{value:,.0f}"
    digits = 2 - math.floor(math.log10(size))
    return f"{value:.3g}" if digits > 6 else f"{value:.{max(digits, 0)}f}"


def factor(value: float) -> str:
    """A ratio as "2.07x"; three digits outside 0.1 to 10; a dash for NaN."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.2f}x" if 0.1 <= value < 10 else f"{number(value)}x"


def span(low: float, high: float) -> str:
    """An interval of ratios as "2.01 to 2.14"."""
    return " to ".join(factor(end).removesuffix("x") for end in (low, high))


def times(speed: SpeedUp | None) -> str:
    """A speed-up with its interval as "2.07x (2.01 to 2.14)"; few prompts show none."""
    if speed is None:
        return "-"
    known = speed.interval if speed.prompts >= MIN_INTERVAL_PROMPTS else None
    return factor(speed.ratio) + (f" ({span(*known)})" if known else "")


def value_range(values: Sequence[float], form: Callable[[float], str]) -> str:
    """The extremes as "22.3 to 34.8", or "30.5" if both read the same."""
    return " to ".join(dict.fromkeys(form(end) for end in (min(values), max(values))))


def counts_by_name(counts: dict[str, int]) -> str:
    """Counts as "plain 2, stand 3"."""
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def part_of(part: int, whole: int) -> str:
    """ "9 of 10", or "10" if it is all."""
    return str(whole) if part == whole else f"{part} of {whole}"


def size_text(num_bytes: int) -> str:
    """Bytes as "1.5 GiB", or "14 MiB" below one GiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{max(num_bytes, 0) // MIB} MiB"
