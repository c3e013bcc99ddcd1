"""`forerun prune NAME`: make a smaller model; options are those of the pruner."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun import registry
from forerun.cli import _signature, options
from forerun.compression.base import Pruner
from forerun.errors import DataError

Source = Annotated[str, typer.Argument(help="Folder, hub id or name of the model to prune.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="New folder for the pruned model.")]


def every(source: Source, out: Out) -> None:
    """Options of every pruner."""


class Group(_signature.Methods):
    """Pruners."""

    kind = "pruner"

    def make(self, name: str) -> Any:
        cls = registry.get("pruner", name)
        shared = _signature.declared(every)
        own = _signature.parameters(cls, taken=[p.name for p in shared], panel=f"Options of {name}")
        about = registry.summary("pruner", name)
        return _signature.command(name, partial(_command, cls), [*shared, *own], about)


app = typer.Typer(
    cls=Group,
    add_completion=False,
    rich_markup_mode="rich",
    help="Make a smaller model. `forerun prune METHOD --help` shows the options of a method.",
)


@app.callback()
def _root() -> None:
    """Pruners."""


def _command(cls: type[Pruner], ctx: typer.Context, given: dict[str, Any]) -> None:
    from forerun.models.paths import located, model_folder

    out: Path = given["out"]
    options.check_out_folder(out)
    if out.is_dir() and any(out.iterdir()):
        raise DataError(f"--out {out} is not empty; give a new folder")
    options.check_folder_name(out)
    options.check_model(given["source"])
    pruner = cls(**_signature.given(cls, given))
    for line in pruner.prune(Path(model_folder(located(given["source"]))), out):
        typer.echo(line)
