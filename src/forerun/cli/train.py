"""`forerun train NAME`: trains a model or head by its recipe.

A command per registered recipe, with the options of the recipe's constructor. A recipe is imported
when its command is called; the list of recipes shows the first lines of their files.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import registry
from forerun.cli import options
from forerun.cli._click_group import Commands
from forerun.cli._progress import Display
from forerun.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from forerun.training.recipes.base import Recipe

DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
HELP = re.compile(r"^(\w+): (.*(?:\n(?!\w+: ).+)*)", re.MULTILINE)  # option: text, to a blank line
TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "Path": Path}
TEXTS = {"str", "ModelName", "File", "Corpus"}  # annotations of options that are given as text


class Recipes(Commands):
    """The registered recipes as commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        return registry.names("recipe")

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Options may stand before the recipe's name."""
        known = registry.names("recipe")
        name = next((word for word in args if word.replace("-", "_") in known), None)
        if name and args[0].startswith("-") and args[0] != "--help":
            args = [name, *(word for word in args if word != name)]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = registry.names("recipe")
        name = args[0].replace("-", "_")
        if name not in known:
            raise UnknownName.of("recipe", args[0], known, "`forerun train --help` lists all")
        set_up("cuda" if any("cuda" in word for word in args) else "cpu")
        return name, command_of(name), args[1:]

    def get_command(self, ctx: Any, name: str) -> Any:
        """A command without options, for the list of recipes: nothing is imported for it."""
        return _typer_command(name, lambda: None, summary(name))


app = typer.Typer(cls=Recipes, add_completion=False, rich_markup_mode=None)


@app.callback()
def _train() -> None:
    """Train a model or head by its recipe. Ctrl-C saves; --resume continues."""


def summary(name: str) -> str:
    """First line of a recipe's file, read without importing it."""
    spec = importlib.util.find_spec(f"{registry.KINDS['recipe'][0]}.{name}")
    if spec is None or not spec.origin:  # of another package
        return (registry.get("recipe", name).__doc__ or "").partition("\n")[0]
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf-8"))) or ""
    return text.partition("\n")[0]


def command_of(name: str) -> Any:
    """The command of a recipe."""
    cls: type[Recipe] = registry.get("recipe", name)

    def command(ctx: typer.Context, **given: Any) -> None:
        train(ctx, name, {key: value for key, value in ctx.params.items() if value is not None})

    parameters = [inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += [_option(*one) for one in option_types(cls).items()]
    parameters[0] = parameters[0].replace(annotation=typer.Context)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return _typer_command(name, command, (cls.__doc__ or "").partition("\n")[0])


def option_types(cls: type[Recipe]) -> dict[str, Any]:
    """Options of a recipe's command by name, as annotations of typer."""
    folder = cls.__module__.rpartition(".")[2]
    found = {"out": _annotated(Path, "Folder for data, checkpoints and what is made", folder)}
    help_of = descriptions(cls)
    for name, parameter in registry.options(cls).items():
        kind = _type(str(parameter.annotation))
        if kind is not None:
            found[name] = _annotated(kind, help_of.get(name, ""), parameter.default)
    if cls.can_resume:
        found["resume"] = Annotated[
            bool | None, typer.Option("--resume", help="Continue the run in --out.")
        ]
    return found


def descriptions(cls: type) -> dict[str, str]:
    """What class docstrings say about options, by lines `name: text`; own words before a base's."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        found |= {name: " ".join(text.split()) for name, text in HELP.findall(_own_doc(one))}
    return found


def _own_doc(cls: type) -> str:
    return inspect.cleandoc(vars(cls).get("__doc__") or "")


def _type(annotation: str) -> type | None:
    """The type that the command line gives an option; None where it cannot give one."""
    kinds = [kind.strip() for kind in annotation.split("|") if kind.strip() != "None"]
    if len(kinds) != 1:
        return str if set(kinds) & TEXTS else None
    if kinds[0] in TEXTS or kinds[0].startswith("tuple"):
        return str
    return TYPES.get(kinds[0])


def _annotated(kind: type, text: str, default: Any) -> Any:
    """An option of typer that is None where it is not given; its help states the default."""
    text = f"{text[:1].upper()}{text[1:].rstrip('.')}"
    if default is inspect.Parameter.empty:
        text += " [required]"
    elif default is not None:
        text += f" [{_shown(default)}]"
    return Annotated[kind | None, typer.Option(help=f"{text}.")]


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "+".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _option(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def _typer_command(name: str, function: Any, text: str) -> Any:
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, help=text, short_help=text)(function)
    return typer.main.get_command(single)


def train(ctx: typer.Context, name: str, given: dict[str, Any]) -> None:
    """Runs a recipe with the options given, and prints what it made."""
    out, resume = given.pop("out", Path(name)), given.pop("resume", False)
    recipe = make(name, given)
    options.check_out_folder(out)
    options.check_folder_name(out)
    typer.echo(f"training {name} in {out}, seed {recipe.seed}")
    with Display() as display:
        try:
            lines = recipe.train(out, resume=resume, watch=display.draw)
        except KeyboardInterrupt:
            typer.echo(f"\n{_stopped(ctx, recipe)}")
            raise typer.Exit(130) from None
    for line in lines:
        typer.echo(line)


def make(name: str, given: dict[str, Any]) -> Recipe:
    """The recipe with its options. Raises ConfigError for what it cannot be made with."""
    device = given.get("device", "cpu")
    if not DEVICE.fullmatch(device):
        raise ConfigError(f"--device must be cpu, cuda or cuda:N to train on, got {device!r}")
    cls = registry.get("recipe", name)
    for option, parameter in registry.options(cls).items():
        if parameter.default is inspect.Parameter.empty and option not in given:
            flag = option.replace("_", "-")
            raise ConfigError(f"recipe {name!r} needs --{flag} (see `forerun train {name} --help`)")
        if option in given and str(parameter.annotation).startswith("tuple"):
            text = f"{name}:{option}={given[option]}"
            given[option] = registry.resolve("recipe", text)[1][option]
    return cls(**given)


def _stopped(ctx: typer.Context, recipe: Recipe) -> str:
    """What Ctrl-C leaves, and the call that continues."""
    again = {"resume": True} if recipe.can_resume else {}
    call = options.call_line(ctx, **again).replace("forerun ", "forerun train ", 1)
    if again:
        return f"stopped and saved; continue with: {call}"
    return f"stopped; what was finished in the folder is used again by: {call}"


def set_up(device: str) -> None:
    """Sets what torch reads when it is loaded, here and in the processes started from here.

    Batches have many shapes: oneDNN compiles a kernel again when its cache is full. On a CPU each
    process has one thread: --threads counts processes.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")
    if device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
