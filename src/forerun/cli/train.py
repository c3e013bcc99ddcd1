"""`forerun train NAME`: train a model or head; options are those of the recipe."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import registry
from forerun.cli import _signature, options
from forerun.cli._call_line import call_line
from forerun.cli._progress import Display
from forerun.errors import ConfigError
from forerun.training.plans import has_run, options_of_run, recipe_name

if TYPE_CHECKING:
    from forerun.training.recipes.base import Recipe

TORCHRUN = "TORCHELASTIC_RUN_ID"  # set by torchrun
DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
Out = Annotated[Path, typer.Option(help="Folder for data, checkpoints and results.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the run in --out, with its options.")
]


def every(out: Out = Path()) -> None:
    """Options of every recipe."""


def resumable(resume: Resume = False) -> None:
    """Options of a recipe that can be resumed."""


class Group(_signature.Methods):
    """Recipes; a recipe is imported when it is called."""

    kind = "recipe"
    is_resumed = False  # whether options without a default may be left out

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Also accepts options before the recipe's name; ranks of torchrun above 0 work here."""
        self.is_resumed = "--resume" in args
        set_up("cuda" if any("cuda" in word for word in args) else "cpu")
        if TORCHRUN in os.environ:
            _join_torchrun(ctx)
        known = registry.names("recipe")
        name = next((word for word in args if word.replace("-", "_") in known), None)
        if name and args[0].startswith("-") and args[0] != "--help":
            args = [name, *(word for word in args if word != name)]
        return super().parse_args(ctx, args)

    def make(self, name: str) -> Any:
        cls: Any = registry.get("recipe", name)
        shared = [p.replace(default=Path(name)) for p in _signature.declared(every)]
        shared += _signature.declared(resumable) if cls.can_resume else []
        own = _signature.parameters(cls, panel=f"Options of {name}", hidden=frozenset())
        if self.is_resumed:
            own = [p.replace(default=None) if p.default is p.empty else p for p in own]
        about = registry.summary("recipe", name)
        return _signature.command(name, partial(_command, cls), [*own, *shared], about)


app = typer.Typer(
    cls=Group,
    add_completion=False,
    rich_markup_mode="rich",
    help="Train a model or head with a recipe. Ctrl-C saves; --resume continues. "
    "`forerun train RECIPE --help` shows the options of a recipe.",
)


@app.callback()
def _root() -> None:
    """Recipes."""


def _command(cls: type[Recipe], ctx: typer.Context, given: dict[str, Any]) -> None:
    """Runs a recipe and prints its results."""
    name, out = recipe_name(cls), given["out"]
    device = given.get("device", "cpu")
    if not DEVICE.fullmatch(device):
        raise ConfigError(f"--device must be cpu, cuda or cuda:N to train on, got {device!r}")
    resume = given.get("resume", False)
    chosen = _kept(cls, ctx, out) if resume else {}
    chosen |= _signature.given(cls, given) | _threads(ctx, given)
    _check_complete(cls, chosen, out)
    recipe = cls(**chosen)
    if TORCHRUN in os.environ:
        _check_processes(name, recipe)
    options.check_out_folder(out)
    options.check_folder_name(out)
    typer.echo(f"training {name} in {out}, seed {recipe.seed}")
    with Display() as display:
        try:
            lines = recipe.train(out, resume=resume, watch=display.draw)
        except KeyboardInterrupt:
            typer.echo(f"\n{_stopped(ctx, recipe, out)}")
            raise typer.Exit(130) from None
    for line in lines:
        typer.echo(line)


def _join_torchrun(ctx: typer.Context) -> None:
    """Rank 0 of torchrun runs the command; the others work for it until it ends."""
    from forerun.training import torchrun
    from forerun.training.processes import follow

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    others = torchrun.join(*(int(os.environ[name]) for name in names))
    if others.rank == 0:
        ctx.find_root().call_on_close(others.release)
        return
    try:
        follow(others)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit()


def _check_processes(name: str, recipe: Recipe) -> None:
    """Raises ConfigError if torchrun started other numbers of processes than the recipe uses."""
    size, used = int(os.environ["WORLD_SIZE"]), getattr(recipe, "processes", 1)
    if size != used:
        raise ConfigError(
            f"torchrun started {size} processes, and {name} with these options trains in {used}; "
            f"start {used}, e.g. with --nproc-per-node {used}"
        )


def _threads(ctx: typer.Context, given: dict[str, Any]) -> dict[str, int]:
    """Under torchrun --threads is its number of processes, unless it is given."""
    if TORCHRUN not in os.environ or "threads" not in given or options.is_given(ctx, "threads"):
        return {}
    return {"threads": int(os.environ["WORLD_SIZE"])}


def _kept(cls: type[Recipe], ctx: typer.Context, out: Path) -> dict[str, Any]:
    """The earlier run's options that this call does not give."""
    found = options_of_run(out, cls)
    return {name: value for name, value in found.items() if not options.is_given(ctx, name)}


def _check_complete(cls: type[Recipe], chosen: dict[str, Any], out: Path) -> None:
    """Raises ConfigError if a resumed run lacks an option without a default."""
    needed = [name for name, p in registry.options(cls).items() if p.default is p.empty]
    if missing := [f"--{name.replace('_', '-')}" for name in needed if name not in chosen]:
        raise ConfigError(
            f"{out} has no run of {recipe_name(cls)} to take {' and '.join(missing)} from; check "
            f"--out, or give {'it' if len(missing) == 1 else 'them'}"
        )


def _stopped(ctx: typer.Context, recipe: Recipe, out: Path) -> str:
    """The message after Ctrl-C, with the command that continues."""
    start = "torchrun ... -m " if TORCHRUN in os.environ else ""
    if not recipe.can_resume:
        return f"stopped; finished parts are reused by: {call_line(ctx)}"
    if not has_run(out):
        return f"stopped before the run began; start again with: {start}{call_line(ctx)}"
    return f"stopped and saved; continue with: {start}{call_line(ctx, resume=True)}"


def set_up(device: str) -> None:
    """Sets environment variables that torch reads when it is loaded, also in child processes.

    Batches have many shapes: oneDNN compiles a kernel again when its cache is full. On a CPU each
    process has one thread: --threads counts processes.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")
    if device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
