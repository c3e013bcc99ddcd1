"""The style options of `forerun generate`: checked before a model is loaded, then made a shaper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.options import check_files, is_here
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.constraints.ngram_style import NgramStyle

STRENGTH, FORM = 0.3, "floored"  # where nothing is said

Files = Annotated[
    list[str],
    typer.Option("--style", help="Text whose n-grams the output leans to; may come again."),
]
Strength = Annotated[
    float | None, typer.Option("--style-lambda", help=f"How far, 0 to 1; {STRENGTH} unasked.")
]
Form = Annotated[str | None, typer.Option("--style-form", help=f"{FORM} (unasked) or paper.")]


def check(given: dict[str, Any]) -> None:
    """Raises ConfigError for a style that cannot work."""
    strength, form = given["style_lambda"], given["style_form"]
    if not given["style"]:
        for flag, value in (("--style-lambda", strength), ("--style-form", form)):
            if value is not None:
                raise ConfigError(f"{flag} needs --style FILE, a text to lean to; got {value!r}")
        return
    if is_here(given):
        check_files("--style", given["style"], folders=False)
    from forerun.constraints import ngram_style

    ngram_style.check(STRENGTH if strength is None else strength, form or FORM)


def shapers(model: Model, given: dict[str, Any]) -> list[NgramStyle]:
    """The shaper of the options, or none. Raises DataError for a file that cannot be used."""
    if not given["style"]:
        return []
    from forerun.constraints.ngram_style import NgramStyle

    strength, form = given["style_lambda"], given["style_form"] or FORM
    strength = STRENGTH if strength is None else strength
    return [NgramStyle(given["style"], strength=strength, form=form, tokenizer=model.tokenizer)]
