"""The parts of the script in order of value, their results, and the files with all results."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from .report import Row


@dataclass(frozen=True)
class Part:
    """One part: its module, its seconds, and a letter for the table."""

    letter: str
    module: str
    seconds: float
    title: str


PARTS = {
    "correctness": Part("a", "correctness", 120, "correctness"),
    "passes": Part("b", "passes", 110, "passes"),
    "decoding": Part("c", "decoding", 150, "decoding, the reasoner padded to 1B"),
    "hosttime": Part("d", "hosttime", 50, "where the time of a step goes"),
    "training": Part("e", "training", 45, "training"),
    "tests": Part("f", "unit_tests", 60, "unit tests"),
}
PREPARE = Part("", "prepare", 100, "prepared during (a)")  # seconds after which no part waits


@dataclass
class Result:
    """Rows and facts of a part.

    status: "done", "out of time", "killed", "failed", "interrupted" or "no time left".
    """

    name: str
    status: str = "no time left"
    seconds: float = 0.0
    limit: float = 0.0
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def ending(found: Result, status: int | None) -> list[Row]:
    """A row with the reason if a part did not run to its end."""
    match found.status:
        case "failed":
            why = f"its process ended with status {status}: see gpu.log"
            return [Row("FAILED", found.facts.get("error") or why)]
        case "killed":
            return [Row("FAILED", f"it did not end within {found.limit:.0f} s")]
        case "out of time":
            return [Row("stopped", f"at its limit of {found.limit:.0f} s")]
        case "interrupted":
            return [Row("stopped", "by a signal")]
    return []


def table(results: list[Result], smoke: bool) -> str:
    """All rows as Markdown."""
    lines = ["**Not a GPU: smoke only.** No time below means anything.", ""] if smoke else []
    facts = next((r.facts["machine"] for r in results if "machine" in r.facts), {})
    if facts:
        names = ("gpu", "nvidia_smi", "cpu", "torch", "triton", "cuda", "transformers", "revision")
        lines += [", ".join(f"{name} {facts[name]}" for name in names if facts.get(name)), ""]
    lines += ["| part | what | value | goal | | note |", "|---|---|---|---|---|---|"]
    for result in results:
        letter = PARTS[result.name].letter
        lines.append(f"| {letter} | **{PARTS[result.name].title}: {result.status}** | "
                     f"{result.seconds:.0f} s | <= {result.limit:.0f} s | | |")  # fmt: skip
        for row in result.rows:
            value = row.value if isinstance(row.value, str) else f"{row.value:.4g} {row.unit}"
            cells = (letter, row.name, value.strip(), row.goal, row.verdict, row.note)
            lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def write(
    options: argparse.Namespace, results: list[Result], start: float, *, is_finished: bool = False
) -> None:
    """Both files of results, each whole or not at all."""
    facts = {
        "format": 1,
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "is_gpu": not options.smoke,
        "limit": options.limit,
        "is_finished": is_finished,
        "seconds": time.monotonic() - start,
        "parts": [asdict(result) for result in results],
    }
    texts = {"gpu.json": json.dumps(facts, indent=1), "gpu.md": table(results, options.smoke)}
    for name, text in texts.items():
        part = options.out / f".{name}"
        part.write_text(text)
        os.replace(part, options.out / name)
