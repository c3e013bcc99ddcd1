"""`forerun compress METHOD`: make a draft model cheaper; options are those of the method."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli import _signature, options
from forerun.cli._click_group import Commands
from forerun.errors import DataError, UnknownName

METHODS = {"vocab-trim": "Reduce a draft's head to the tokens that its target uses (VocabTrim)."}
Draft = Annotated[str, typer.Option("--draft", help="Folder or hub id of the draft model.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="New folder; default: DRAFT-trimmed.")
]


def every(draft: Draft, out: Out = None) -> None:
    """Options of every method."""


class Group(Commands):
    """Ways to make a draft model cheaper; a method is imported when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(METHODS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A placeholder for the list of commands."""
        return _signature.command(cmd_name, lambda *_: None, (), METHODS[cmd_name])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0].replace("_", "-")
        if name not in METHODS:
            listing = f"see `{ctx.command_path} --help`"
            raise UnknownName.of("compression", args[0], METHODS, listing)
        from forerun.compression.vocab_trim import VocabTrim

        own = _signature.parameters(VocabTrim, panel=f"Options of {name}")
        made = [*_signature.declared(every), *own]
        run = partial(_command, VocabTrim)
        return name, _signature.command(name, run, made, METHODS[name]), args[1:]


app = typer.Typer(
    cls=Group,
    add_completion=False,
    rich_markup_mode="rich",
    help="Make a draft model cheaper. `forerun compress METHOD --help` shows the options.",
)


@app.callback()
def _root() -> None:
    """Ways to make a draft model cheaper."""


def _command(cls: Any, ctx: typer.Context, given: dict[str, Any]) -> None:
    """Runs a method and prints its report."""
    from forerun.models.paths import located, model_folder

    method = cls(**_signature.given(cls, given))
    for name in (given["draft"], method.model):
        options.check_model(name)
    folder = Path(model_folder(located(given["draft"])))
    out = given["out"] or Path(f"{folder.name}-trimmed")
    options.check_out_folder(out)
    if out.is_dir() and any(out.iterdir()):
        raise DataError(f"--out {out} is not empty; give a new folder")
    for line in method.trim(folder, out):
        typer.echo(line)
