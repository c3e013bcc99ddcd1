"""Options for constraints: `--constraint`, and the older options that it replaces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from forerun import registry
from forerun.cli.options import check_files, check_part, runs_locally
from forerun.cli.output import notice
from forerun.errors import ConfigError, DataError
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.core.roles import Shaper

PANEL = "Constraints"
JsonSchemaFile = Annotated[
    Path | None,
    typer.Option("--json-schema", help="JSON schema of the text, a file.", rich_help_panel=PANEL),
]
Pattern = Annotated[
    str | None,
    typer.Option("--regex", help="Regular expression of the text.", rich_help_panel=PANEL),
]
GrammarFile = Annotated[
    Path | None,
    typer.Option(
        "--grammar",
        help="Grammar of the text, a .lark, .gbnf or .ebnf file.",
        rich_help_panel=PANEL,
    ),
]
Choices = Annotated[
    str | None,
    typer.Option("--choice", help='Allowed texts, e.g. "yes|no".', rich_help_panel=PANEL),
]
How = Annotated[
    str,
    typer.Option(
        "--constraint-sampling",
        help="How tokens are drawn under a constraint: mask, asap, awrs or smc.",
        rich_help_panel=PANEL,
    ),
]
Start = Annotated[
    str | None,
    typer.Option(
        "--constraint-start",
        help="The constraint applies after this text, e.g. </think>.",
        rich_help_panel=PANEL,
    ),
]
Memory = Annotated[
    Path | None,
    typer.Option(
        "--constraint-memory",
        help="File of what asap learned; loaded if it exists, and saved.",
        rich_help_panel=PANEL,
    ),
]
SHORT = {  # options that are constraints, and the argument of each
    "json_schema": ("json_schema", "file"),
    "regex": ("regex", "pattern"),
    "grammar": ("grammar", "file"),
    "choice": ("choice", "options"),
}

# older options: `--constraint` replaces them
Files = Annotated[list[str], typer.Option("--style", hidden=True)]
Strength = Annotated[float | None, typer.Option("--style-lambda", hidden=True)]
Form = Annotated[str | None, typer.Option("--style-form", hidden=True)]
Mix = Annotated[Path | None, typer.Option("--mix", hidden=True)]
MixWeights = Annotated[str | None, typer.Option("--mix-weights", hidden=True)]
Within = Annotated[Path | None, typer.Option("--within", hidden=True)]
Begin = Annotated[str | None, typer.Option("--within-begin", hidden=True)]
Window = Annotated[int | None, typer.Option("--within-window", hidden=True)]


class Chosen(NamedTuple):
    """Name and options of a constraint from an older option."""

    name: str
    options: dict[str, Any]


def check(given: dict[str, Any]) -> None:
    """Checks constraints before a model is loaded. Raises ConfigError, DataError."""
    is_local = runs_locally(given)
    for name, options in _of_older(given):
        cls: Any = registry.get("constraint", name)
        paths = {} if is_local else registry.reference_options(cls)
        if name == "ngram_style" and is_local:
            check_files("--style", options["style"], folders=False)
        cls.check_options(**{o: value for o, value in options.items() if o not in paths})
    for spec in given["constraint"]:
        check_part("constraint", spec, is_local)
    if is_local:
        list(_of_short(given))
    if given.get("constraint_memory") and given["constraint_sampling"] != "asap":
        raise ConfigError(
            "--constraint-memory keeps what --constraint-sampling asap learns; add that option"
        )


@contextmanager
def asap_saved(model: Model, path: Path | None, tenant: str, *, is_quiet: bool) -> Iterator[None]:
    """Loads the file of --constraint-memory if it exists, and saves it when the block ends."""
    if path is None:
        yield
        return
    with (file := model.asap_memory(path, tenant=tenant)):
        yield
    if not is_quiet:
        kept = counted(file.counts["tokens"], "prefix", "prefixes")
        notice(f"constraint memory: {kept} of {counted(file.counts['prompts'], 'prompt')}")


def shapers(model: Model, given: dict[str, Any]) -> list[Shaper]:
    """The constraints, those of older options first. Raises ConfigError, DataError."""
    older: list[Shaper] = [
        registry.get("constraint", name)(**options, tokenizer=model.tokenizer)
        for name, options in _of_older(given)
    ]
    named = [model.constraint(spec) for spec in given["constraint"]]
    return [*older, *named, *map(model.constraint, _of_short(given))]


def _of_short(given: dict[str, Any]) -> Iterator[Shaper]:
    """Constraints of --json-schema, --regex, --grammar and --choice. Raises as they do."""
    for option, (name, argument) in SHORT.items():
        if (value := given.get(option)) is not None:
            text = str(value) if isinstance(value, Path) else value
            yield registry.get("constraint", name)(**{argument: text})


def _of_older(given: dict[str, Any]) -> Iterator[Chosen]:
    """Constraints of --style, --mix and --within, in the order in which they apply."""
    _check_pairs(given)
    if given["style"]:
        own = {"strength": given["style_lambda"], "form": given["style_form"]}
        yield Chosen("ngram_style", {"style": tuple(given["style"])} | _asked(own))
    if given["mix"] is not None:
        weights = given["mix_weights"]
        own = {"weigh": None if weights is None else _weights(weights)}
        yield Chosen("infini", {"index": str(given["mix"])} | _asked(own))
    if given["within"] is not None:
        own = {"begin": given["within_begin"], "window": given["within_window"]}
        yield Chosen("corpus", {"index": str(given["within"])} | _asked(own))


def _check_pairs(given: dict[str, Any]) -> None:
    """Raises ConfigError for an option of a constraint that is not in use."""
    style = "style FILE, a style text"
    needs = {"style_lambda": style, "style_form": style, "mix_weights": "mix, a corpus"}
    needs |= {"within_begin": "within, a corpus", "within_window": "within, a corpus"}
    for name, other in needs.items():
        if given[name] is not None and not given[name.partition("_")[0]]:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} needs --{other}; got {given[name]!r}")


def _asked(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _weights(text: str) -> tuple[float, ...] | str:
    """SPARSE,OTHER as numbers, or the path of a forest file. Raises DataError."""
    try:
        sparse, other = map(float, text.split(","))
    except ValueError:
        if Path(text).is_file():
            return text
        raise DataError(
            f"--mix-weights must be SPARSE,OTHER, e.g. 0.5,0.1, or a forest file, got {text!r}"
        ) from None
    return sparse, other
