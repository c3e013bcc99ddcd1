"""Command-line options of a method, from its constructor's signature and docstring.

The docstring describes options as `name: text.`; a text ends at the next option. The type comes
from the annotation: number, flag, text, or a tuple of them, which is a repeatable option. Options
of other types keep their default.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from forerun import registry
from forerun.cli._click_group import Commands
from forerun.errors import ConfigError, UnknownName

PLAIN = {"int": int, "float": float, "bool": bool, "Path": Path}
KEYWORD = inspect.Parameter.KEYWORD_ONLY
Run = Callable[[typer.Context, dict[str, Any]], Any]


def declared(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function as parameters of a command."""
    found = inspect.signature(function, eval_str=True).parameters.values()
    return [parameter.replace(kind=KEYWORD) for parameter in found]


def parameters(
    cls: type,
    *,
    taken: Collection[str] = (),
    panel: str = "",
    hidden: frozenset[str] = registry.MODEL_OPTIONS,
) -> list[Any]:
    """The options of a class as parameters of a command, without those in `taken`.

    hidden: options that the command sets itself.
    The class attribute `spellings` maps an option to a second name on the command line, `minimums`
    an option to its smallest value.
    """
    known, texts = registry.options(cls), descriptions(cls)
    more: Mapping[str, str] = getattr(cls, "spellings", {})
    least: Mapping[str, float] = getattr(cls, "minimums", {})
    skipped, readers = hidden | set(taken), getattr(cls, "readers", {})
    return [
        _parameter(p, texts.get(name, ""), more.get(name), panel, least.get(name))
        for name, p in known.items()
        if name not in skipped and (name in readers or _can_be_written(p))
    ]


def given(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor arguments among the values of a command's options.

    The class attribute `readers` maps an option to a function that converts its value.
    """
    known = registry.options(cls)
    found = {name: value for name, value in values.items() if name in known}
    found |= {name: tuple(v) for name, v in found.items() if isinstance(v, list | tuple)}
    found = {name: v for name, v in found.items() if _differs(v, known[name].default)}
    readers = getattr(cls, "readers", {})
    return {name: readers[name](v) if name in readers else v for name, v in found.items()}


def command(name: str, run: Run, options: Iterable[inspect.Parameter], help: str) -> Any:
    """A command with these options; `run` receives the context and their values."""

    def function(ctx: typer.Context, **values: Any) -> Any:
        return run(ctx, values)

    context = inspect.Parameter("ctx", KEYWORD, annotation=typer.Context)
    every = [context, *options]
    function.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in every}
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(name, help=help, cls=_Command)(function)
    return typer.main.get_command(app)


class Methods(Commands):
    """A group with a command for each method of a kind; imports only the method that is called.

    Subclasses set `kind` and implement `make`.
    """

    kind = ""
    aliases: Mapping[str, str] = {}

    def make(self, name: str) -> Any:
        """Builds the command of a method."""
        raise NotImplementedError

    def list_commands(self, ctx: Any) -> list[str]:
        return registry.names(self.kind)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A placeholder with the method's summary, for the list of commands."""
        return command(cmd_name, lambda *_: None, (), registry.summary(self.kind, cmd_name))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of the first argument. Raises UnknownName."""
        plain = args[0].replace("-", "_")
        name = self.aliases.get(plain, plain)
        known = registry.names(self.kind)
        if name not in known:
            listing = f"see `{ctx.command_path} --help`"
            what = "search method" if self.kind == "search" else self.kind
            raise UnknownName.of(what, args[0], {*known, *self.aliases}, listing)
        made = self.make(name)
        made.others = lambda: {one: self.make(one) for one in known if one != name}
        return name, made, args[1:]


class _Command(TyperCommand):
    """The command of one method; its errors name the method that has an unknown option."""

    others: Callable[[], Mapping[str, Any]] = staticmethod(dict)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            flag = getattr(error, "option_name", None)
            if not isinstance(flag, str) or "such option" not in str(error).lower():
                raise
            owners = [name for name, other in self.others().items() if _has(other, flag)]
            if not owners:
                raise
        raise ConfigError(f"{flag} belongs to {', '.join(owners)}, not to {self.name}")


def descriptions(cls: type) -> dict[str, str]:
    """Option -> its description in the docstrings of a class and its bases."""
    known = registry.options(cls)
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        found |= _described(base.__doc__ or "", known)
    return found


def _described(doc: str, known: Collection[str]) -> dict[str, str]:
    """The texts after `name:` or `name, other:` in a docstring."""
    if not known:
        return {}
    one = "|".join(map(re.escape, known))
    heading = re.compile(rf"(?:^|(?<=\s))((?:{one})(?:, (?:{one}))*): ")
    found: dict[str, str] = {}
    for paragraph in inspect.cleandoc(doc).split("\n\n"):
        _, *pieces = heading.split(" ".join(paragraph.split()))
        for names, text in zip(pieces[::2], pieces[1::2], strict=True):
            text = text.strip().rstrip(".")
            found |= {name: f"{text[:1].upper()}{text[1:]}." for name in names.split(", ")}
    return found


def _parameter(
    option: inspect.Parameter, text: str, more: str | None, panel: str, least: float | None
) -> Any:
    """An option as a parameter with a typer annotation."""
    kind, is_list = _type(option)
    has_default = option.default is not option.empty
    flags = [_flag(option.name), *([more] if more else [])]
    if kind is bool and option.default is True:
        flags[0] += f"/--no-{option.name.replace('_', '-')}"
    info = typer.Option(*flags, help=text or None, rich_help_panel=panel or None, min=least)
    default = _shown(option.default, is_list) if has_default else inspect.Parameter.empty
    annotation: Any = list[kind] if is_list else kind  # type: ignore[valid-type]
    if default is None:
        annotation = kind | None
    return inspect.Parameter(
        option.name, KEYWORD, default=default, annotation=Annotated[annotation, info]
    )


def _can_be_written(option: inspect.Parameter) -> bool:
    """Whether the command line can set the option."""
    texts = {*PLAIN, "str"}
    return any(
        kind in texts
        or kind.startswith(("tuple", "Callable"))
        or registry.REFERENCES.fullmatch(kind)
        for kind in registry.type_names(option)
    )


def _type(option: inspect.Parameter) -> tuple[Any, bool]:
    """The type of an option's values, and whether it is a list."""
    kinds = registry.type_names(option)
    inner = next((kind for kind in kinds if kind.startswith("tuple")), None)
    if inner:
        return registry.piece_type(inner), True
    is_text = "str" in kinds  # also where a path is taken
    return str if is_text else next((PLAIN[k] for k in kinds if k in PLAIN), str), False


def _shown(default: Any, is_list: bool) -> Any:
    """The default on the command line; None for an object that text cannot express."""
    if is_list:
        return list(default) if isinstance(default, Many) and not isinstance(default, str) else []
    return default if isinstance(default, bool | int | float | str) else None


def _differs(value: Any, default: Any) -> bool:
    """Whether a value was given that differs from the default."""
    if value is None or value == ():
        return False
    return bool(value != default)


def _flag(name: str) -> str:
    return f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"


def _has(made: Any, flag: str) -> bool:
    return any(flag in (*param.opts, *param.secondary_opts) for param in made.params)
