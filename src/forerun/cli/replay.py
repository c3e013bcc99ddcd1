"""`forerun replay`: measure deterministic drafts on recorded text, without a model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.output import console, print_json
from forerun.errors import ConfigError, DataError
from forerun.utils.text import counted

if TYPE_CHECKING:
    from rich.table import Table

    from forerun.bench.replay.recording import Trace
    from forerun.bench.replay.replay import Replayed

Files = Annotated[list[Path], typer.Argument(help="JSON or JSON lines files, also .gz.")]
TokenizerName = Annotated[
    str, typer.Option("--tokenizer", help="Model folder, hub id or tokenizer.json (.gz).")
]
Drafters = Annotated[list[str], typer.Option("--drafter", "-d", help="Draft method; repeatable.")]
Nodes = Annotated[int, typer.Option("--nodes", help="Draft nodes per step.")]
Depth = Annotated[int, typer.Option("--depth", help="Most tokens of a draft.")]
Prompts = Annotated[int | None, typer.Option("--prompts", help="Number of prompts; default: all.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Most tokens of a sample.")]
PromptField = Annotated[str, typer.Option("--prompt-field", help="Field with the prompt.")]
TextField = Annotated[
    list[str], typer.Option("--text-field", help="Field with the text; several are joined.")
]
SHOWN = (1, 2, 4, 8, 12, 16, 32, 64)  # trajectories that get a column


def command(
    files: Files,
    tokenizer: TokenizerName = "reasoner",
    drafter: Drafters = ["prompt_lookup"],  # noqa: B006 - typer makes a new list per call
    nodes: Nodes = 10,
    depth: Depth = 10,
    prompts: Prompts = None,
    max_tokens: MaxTokens = None,
    prompt_field: PromptField = "",
    text_field: TextField = [],  # noqa: B006
    is_json: options.Json = False,
) -> None:
    """Measure n-gram overlap and accepted drafts on recorded text; no model needed."""
    _check(nodes, depth, prompts, max_tokens)
    for spec in drafter:
        options.check_parts(drafter=spec)
    from forerun.bench.replay.recording import load_tokenizer, read_recordings, to_traces

    recordings = read_recordings(files, prompt_field, text_field)[:prompts]
    loaded = load_tokenizer(tokenizer)
    traces = to_traces(recordings, loaded, max_tokens)
    if not traces:
        raise DataError("the files contain no text; give prompts with samples")
    from forerun import registry
    from forerun.bench.replay.replay import check_can_replay, overlap, replay
    from forerun.core.records import Plan

    plan = Plan(nodes=nodes, depth=depth)
    parts = {spec: registry.make("drafter", spec, tokenizer=loaded) for spec in drafter}
    for spec, part in parts.items():
        check_can_replay(part, spec)
    shares = overlap(traces)
    found = {spec: replay(traces, p, plan, loaded.vocab_size, spec) for spec, p in parts.items()}
    summary = _summary(traces, tokenizer, loaded.vocab_size)
    if is_json:
        print_json(summary | {"overlap": _overlap_json(shares)} | _drafts_json(found, plan))
    else:
        _show(summary, traces, shares, found)


def _check(*sizes: int | None) -> None:
    for name, size in zip(("nodes", "depth", "prompts", "max-tokens"), sizes, strict=True):
        if size is not None and size < 1:
            raise ConfigError(f"--{name} must be at least 1, got {size}")


def _summary(traces: list[Trace], name: str, vocab_size: int) -> dict[str, Any]:
    samples = [sample for trace in traces for sample in trace.samples]
    return {
        "tokenizer": name,
        "vocabulary": vocab_size,
        "prompts": len(traces),
        "samples": len(samples),
        "tokens": sum(map(len, samples)),
    }


def _overlap_json(shares: dict[int, list[float]]) -> dict[str, list[float | None]]:
    return {
        str(n): [None if math.isnan(share) else round(share, 4) for share in row]
        for n, row in shares.items()
    }


def _drafts_json(found: dict[str, Replayed], plan: Any) -> dict[str, Any]:
    drafts = {spec: replayed.to_dict() for spec, replayed in found.items()}
    return {"nodes": plan.nodes, "depth": plan.depth, "drafters": drafts}


def _show(
    summary: dict[str, Any],
    traces: list[Trace],
    shares: dict[int, list[float]],
    found: dict[str, Replayed],
) -> None:
    out = console()
    facts = ", ".join(
        counted(summary[name], name[:-1]) for name in ("prompts", "samples", "tokens")
    )
    vocabulary = f"{summary['vocabulary']} tokens in the vocabulary of {summary['tokenizer']}"
    out.print(f"{facts}; {vocabulary}", markup=False)
    most = max(len(trace.samples) for trace in traces)
    columns = [m for m in SHOWN if m <= most] + ([most] if most not in SHOWN else [])
    table = _table("Repeated n-grams (%) in the first samples of a prompt", "samples", columns)
    for n, row in shares.items():
        cells = [row[m - 1] for m in columns]
        table.add_row(f"{n}-gram", *("-" if math.isnan(c) else f"{100 * c:.1f}" for c in cells))
    having = [sum(len(trace.samples) >= m for trace in traces) for m in columns]
    table.add_row("prompts", *map(str, having))
    out.print(table)
    table = _table("Accepted draft tokens per step, by number of the sample", "sample", columns)
    table.add_column("all", justify="right")
    table.add_column("tau", justify="right")
    for spec, replayed in found.items():
        by_index = [replayed.by_index[m - 1] for m in columns]
        cells = [stats.accepted / max(stats.passes, 1) for stats in [*by_index, replayed.total]]
        table.add_row(spec, *(f"{cell:.2f}" for cell in cells), f"{replayed.total.tau:.2f}")
    out.print(table)


def _table(title: str, corner: str, columns: list[int]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console().print(title, markup=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(corner)
    for column in columns:
        table.add_column(str(column), justify="right")
    return table
