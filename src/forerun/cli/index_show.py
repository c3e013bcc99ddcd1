"""Output of `forerun index`: progress bars, summaries, JSON records."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.cli.output import notice
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.ngrams.index.build.manifest import Manifest
    from forerun.ngrams.index.query.attribution import Span
    from forerun.ngrams.index.query.documents import Passage
    from forerun.ngrams.index.query.engine import Ids, Index, Next

LINE_SECONDS = 10.0  # between progress lines without a terminal
UNITS = dict.fromkeys(("tokenise", "check", "inflate"), ("bytes", 1e6, "MB"))


class Bars:
    """Progress bars with the time left on a terminal; otherwise lines."""

    def __init__(self, is_terminal: bool | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.is_terminal = sys.stderr.isatty() if is_terminal is None else is_terminal
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%  {task.fields[note]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.tasks: dict[str, Any] = {}
        self.started: dict[str, float] = {}
        self.printed: dict[str, float] = {}

    def __enter__(self) -> Bars:
        if self.is_terminal:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_terminal:
            self.bars.stop()

    def report(self, stage: str, done: int, total: int) -> None:
        """Moves a stage's bar, or prints the line that is due."""
        now = time.monotonic()
        seconds = now - self.started.setdefault(stage, now)
        _, scale, unit = UNITS.get(stage, ("tokens", 1e6, "M tokens"))
        note = f"{done / scale:.1f} of {total / scale:.1f} {unit}"
        if not self.is_terminal:
            if now - self.printed.setdefault(stage, now) >= LINE_SECONDS:
                self.printed[stage] = now
                left = seconds * (total - done) / max(1, done)
                notice(f"{stage}: {note}, {left:.0f} s left")
            return
        if stage not in self.tasks:
            self.tasks[stage] = self.bars.add_task(stage, total=total, note="")
        self.bars.update(self.tasks[stage], completed=done, note=note)


def summary(path: Path, manifest: Manifest) -> dict[str, Any]:
    """The record of `forerun index info`."""
    tokens = max(1, manifest.tokens)
    core = manifest.bytes_of("tokens", "suffixes", "fences")
    seconds = dict(manifest.build["seconds"])
    total = sum(seconds.values())
    return {
        "index": str(path),
        "tokens": manifest.tokens,
        "documents": manifest.documents,
        "shards": len(manifest.shards),
        "width": manifest.width,
        "tokenizer": {k: v for k, v in manifest.tokenizer.items() if k != "files"},
        "eos": manifest.eos,
        "bytes": manifest.bytes_of(),
        "bytes_per_token": round(core / tokens, 3),
        "bytes_per_token_all": round(manifest.bytes_of() / tokens, 3),
        "skipped": dict(manifest.skipped),
        "notes": list(manifest.notes),
        "build": dict(manifest.build),
        "tokens_per_second": round(manifest.tokens / max(1e-9, total)),
        "sources": list(manifest.sources),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The summary as text."""
    build, tokenizer = found["build"], found["tokenizer"]
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in build["seconds"].items())
    return [
        f"{found['index']}: {found['tokens']:,} tokens in {found['documents']:,} documents, "
        f"{found['shards']} shard{'s' if found['shards'] != 1 else ''}",
        f"{found['width']} bytes per token of tokenizer {tokenizer['name']} "
        f"({tokenizer['vocabulary'] or 'unknown number of'} ids)",
        f"{found['bytes']:,} bytes on disk: {found['bytes_per_token']:.2f} per token for ids, "
        f"suffix array and fences, {found['bytes_per_token_all']:.2f} with documents and metadata",
        f"built {build['created']}: {seconds}; {found['tokens_per_second']:,} tokens/s, "
        f"peak memory {build['peak_bytes'] / 2**20:,.0f} MB of one process",
    ]


def remarks(found: dict[str, Any]) -> list[str]:
    """Notes of a build and its skipped records."""
    skipped = found["skipped"]
    if not skipped["count"]:
        return list(found["notes"])
    head = f"skipped {counted(skipped['count'], 'unreadable record')}:"
    return [*found["notes"], head, *(f"  {example}" for example in skipped["examples"])]


def next_record(index: Index, ids: Ids, found: Next, top: int) -> dict[str, Any]:
    """A next-token distribution as JSON, the likeliest first."""
    import numpy as np

    order = np.argsort(-found.counts, kind="stable")[: top or None]
    rows = [
        {
            "id": int(found.ids[i]),
            "text": text_of(index, [int(found.ids[i])]),
            "count": int(found.counts[i]),
            "prob": float(found.probs[i]),
        }
        for i in order
    ]
    return {
        "ids": list(ids),
        "suffix_length": found.suffix_length,
        "context_count": found.context_count,
        "is_approximate": found.is_approximate,
        "num_next": len(found.ids),
        "next": rows,
    }


def passage_record(index: Index, passage: Passage) -> dict[str, Any]:
    """A passage as JSON."""
    return {
        "document": passage.document,
        "length": passage.length,
        "offset": passage.offset,
        "shard": passage.shard,
        "position": passage.position,
        "is_blocked": passage.is_blocked,
        "metadata": passage.metadata,
        "ids": passage.ids,
        "text": text_of(index, passage.ids),
    }


def span_record(index: Index, ids: Ids, span: Span) -> dict[str, Any]:
    """A span as JSON."""
    return {
        "start": span.start,
        "stop": span.stop,
        "count": span.count,
        "unigram_logp": span.unigram_logp,
        "text": text_of(index, list(ids[span.start : span.stop])),
        "documents": [passage_record(index, passage) for passage in span.documents],
    }


def text_of(index: Index, ids: list[int]) -> str:
    """Text of ids, or the ids without a tokenizer. The end of a document is "<end>"."""
    from forerun.errors import ConfigError

    if index.eos in ids and index.eos == index.separator:
        return "".join(text_of(index, [i]) if i != index.eos else "<end>" for i in ids)
    try:
        return index.encoder.decode(ids)
    except ConfigError:
        return " ".join(map(str, ids))
