"""`forerun bench tasks` and `forerun bench inflate`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from forerun import registry
from forerun.cli import loading, options
from forerun.cli.output import notice, print_json


def tasks(is_json: options.Json = False) -> None:
    """List the tasks."""
    found = {name: registry.summary("task", name) for name in registry.names("task")}
    if is_json:
        print_json(found)
        return
    for name, text in found.items():
        typer.echo(f"{name:16} {text}")


def inflate(
    source: Annotated[str, typer.Argument(help="Folder, hub id, or reasoner.")],
    target: Annotated[Path, typer.Argument(help="New folder.")],
    size: Annotated[str, typer.Option("--size", help="30M, 0.1B, 0.3B, 1B or 8B.")] = "0.3B",
    dtype: Annotated[str, typer.Option("--dtype", help="bf16, fp16 or fp32.")] = "bf16",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the new weights.")] = 0,
) -> None:
    """Pad a checkpoint to a larger size with the same outputs.

    For realistic timing; labelled in every report.
    """
    from forerun.cli._signals import exit_at_once
    from forerun.cli.index_show import Bars

    with exit_at_once(loading.EARLY_INTERRUPT):
        from forerun.bench.inflate import inflate as pad
    try:
        with Bars() as bars:
            report = partial(bars.report, "inflate")
            made = pad(source, target, size, dtype=dtype, seed=seed, report=report)
    except KeyboardInterrupt:
        if target.exists():  # interrupted after the end
            raise
        notice("interrupted: nothing was kept; the same command starts again")
        raise typer.Exit(130) from None
    typer.echo(f"{made.folder}: {made.num_bytes / 2**20:.0f} MiB in {made.seconds:.1f} s")
