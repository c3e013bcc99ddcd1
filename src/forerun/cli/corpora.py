"""Corpora in `forerun generate`: one mixed into the model's law, one to stay within."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.options import is_here
from forerun.errors import ConfigError, DataError

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.core.roles import Shaper
    from forerun.ngrams.index.query.interpolate import Weigh

Mix = Annotated[
    Path | None,
    typer.Option("--mix", help="Folder of an n-gram index that is mixed into the model's law."),
]
MixWeights = Annotated[
    str | None,
    typer.Option("--mix-weights", help="SPARSE,OTHER in 0..1 (0.5,0.1 unasked), or a forest file."),
]
Within = Annotated[
    Path | None,
    typer.Option("--within", help="FM-index that the whole text must occur in (index fm build)."),
]
Begin = Annotated[
    str | None,
    typer.Option("--within-begin", help="anywhere (unasked), document, prompt."),
]
Window = Annotated[
    int | None,
    typer.Option("--within-window", help="Only so many tokens before each one count."),
]


def check(given: dict[str, Any]) -> None:
    """Raises ConfigError for options that cannot work."""
    needs = {"mix_weights": "mix", "within_begin": "within", "within_window": "within"}
    for name, other in needs.items():
        if given[name] is not None and given[other] is None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} needs --{other}, a corpus; got {given[name]!r}")
    if is_here(given):
        _check_files(given)
    if given["within_begin"] is not None or given["within_window"] is not None:
        from forerun.constraints import corpus

        corpus.check(given["within_begin"] or corpus.ANYWHERE, given["within_window"])


def _check_files(given: dict[str, Any]) -> None:
    """Raises DataError for what is not there."""
    if given["mix_weights"]:
        weights_of(given["mix_weights"])
    if given["mix"] is not None:
        from forerun.ngrams.index.build.manifest import read_manifest

        read_manifest(given["mix"])
    if given["within"] is not None and not given["within"].is_file():
        raise DataError(f"no file {given['within']}; make it with `forerun index fm build`")


def shapers(model: Model, given: dict[str, Any]) -> list[Shaper]:
    """The mixture, then the constraint, as far as they are asked for. Raises DataError."""
    found: list[Shaper] = []
    if given["mix"] is not None:
        from forerun.constraints.infini import WEIGHTS, InfiniMix

        weigh = weights_of(given["mix_weights"]) if given["mix_weights"] else WEIGHTS
        found.append(InfiniMix(given["mix"], weigh, tokenizer=model.tokenizer))
    if given["within"] is not None:
        from forerun.constraints.corpus import ANYWHERE, Corpus

        found.append(
            Corpus(
                given["within"],
                begin=given["within_begin"] or ANYWHERE,
                window=given["within_window"],
                tokenizer=model.tokenizer,
            )
        )
    return found


def weights_of(text: str) -> Weigh:
    """Two numbers, or a forest from its file. Raises ConfigError, DataError."""
    from forerun.ngrams.index.query.interpolate import Forest, TwoWeights

    numbers = text.split(",")
    try:
        sparse, other = map(float, numbers)
    except ValueError:
        if Path(text).is_file():
            return Forest.load(text)
        raise DataError(
            f"--mix-weights must be SPARSE,OTHER as 0.5,0.1, or a forest's file, got {text!r}"
        ) from None
    return TwoWeights(sparse, other)
