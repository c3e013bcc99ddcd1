"""`forerun compress vocab-trim`: reduce the head of a draft model to the tokens that matter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.cli import options
from forerun.errors import DataError

app = typer.Typer(
    add_completion=False, rich_markup_mode="rich", help="Make a draft model cheaper to run."
)


@app.callback()
def _root() -> None:
    """Ways to make a draft model cheaper."""


@app.command("vocab-trim")
def vocab_trim(
    draft: Annotated[str, typer.Option("--draft", help="Folder or hub id of the draft model.")],
    calibrate: Annotated[
        Path, typer.Option("--calibrate", help="Prompts as JSON lines, or one as a text file.")
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="The target that the draft serves.")
    ] = "reasoner",
    keep: Annotated[
        str, typer.Option("--keep", help="Tokens of the head; auto measures sizes.")
    ] = "auto",
    source: Annotated[
        str, typer.Option("--source", help="Texts to count in: target, draft or raw.")
    ] = "target",
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens per generated text.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0)] = 0.0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="New folder; default: DRAFT-trimmed.")
    ] = None,
) -> None:
    """Reduce a draft's head to the tokens that the target uses (VocabTrim)."""
    from forerun.compression.vocab_trim import VocabTrim
    from forerun.models.paths import located, model_folder

    for name in (draft, model):
        options.check_model(name)
    pruner = VocabTrim(
        calibrate=str(calibrate),
        model=model,
        keep=keep,
        source=source,
        tokens=tokens,
        temperature=temperature,
    )
    folder = Path(model_folder(located(draft)))
    out = out or Path(f"{folder.name}-trimmed")
    options.check_out_folder(out)
    if out.is_dir() and any(out.iterdir()):
        raise DataError(f"--out {out} is not empty; give a new folder")
    for line in pruner.prune(folder, out):
        typer.echo(line)
