"""The suite options of `forerun bench run`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.options import is_given
from forerun.cli.output import notice
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.bench.suite import SuiteRun
    from forerun.core.sampling import Sampling

SuiteName = Annotated[
    str | None,
    typer.Option("--suite", help="Suite to run: real (docs/tasks.md), or a .toml file."),
]
ModeName = Annotated[
    str | None,
    typer.Option("--mode", help="Mode of the suite, e.g. greedy; default: its first."),
]
Half = Annotated[
    str | None,
    typer.Option("--half", help="Half of the suite's examples: tuning or held_out (default)."),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder of the suite's prompt files.")
]
LIMITS = ("examples", "max_new_tokens")  # reduce the suite's own values
SAMPLING = ("temperature", "top_k", "top_p", "n")  # replace those of the mode


def chosen(ctx: typer.Context) -> SuiteRun | None:
    """The selected suite, mode and half; None without --suite.

    Raises ConfigError, UnknownName, DataError.
    """
    from forerun.bench.method_names import split_names
    from forerun.bench.suite import find_suite, run_of
    from forerun.bench.suite_examples import HELD_OUT

    given = ctx.params
    if given["suite"] is None:
        for name in ("mode", "half", "data_dir"):
            if given[name] is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} needs a suite; add --suite real, or drop {flag}")
        return None
    return run_of(
        find_suite(given["suite"]),
        mode=given["mode"],
        half=given["half"] or HELD_OUT,
        data_dir=given["data_dir"],
        only=split_names(given["tasks"], "task") if is_given(ctx, "tasks") else (),
        limits={name: given[name] for name in LIMITS if is_given(ctx, name)},
    )


def sampling(ctx: typer.Context, run: SuiteRun) -> Sampling:
    """The sampling of the suite's mode, with the options on the command line."""
    found = run.suite.modes[run.mode].sampling(run.max_new_tokens)
    given = {name: ctx.params[name] for name in SAMPLING if is_given(ctx, name)}
    changed = [f"{name} {value}" for name, value in given.items() if value != getattr(found, name)]
    if changed:
        notice(f"options replace settings of mode {run.mode!r}: {', '.join(changed)}")
    return replace(found, **given)
