"""`forerun seal`: train a SEAL generator of passages' n-grams, and search with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli._click_group import Commands
from forerun.cli.output import print_json
from forerun.errors import DataError
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.retrieval.seal import Seal, SearchResult

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    rich_markup_mode="rich",
    no_args_is_help=True,
    help="Find passages by generating their n-grams (SEAL).",
)

Run = Annotated[Path, typer.Argument(help="Folder of the generator and index.")]


@app.command("build")
def build(
    run: Run,
    passages: Annotated[Path, typer.Argument(help="JSON lines with fields title and body.")],
    minutes: Annotated[float, typer.Option(min=0.01, help="Total training time.")] = 10.0,
    held_out: Annotated[
        int, typer.Option(min=1, help="Passages to exclude from training questions.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Index passages and train a generator on them.

    The same command with more --minutes continues training.
    """
    from forerun.cli._progress import Display
    from forerun.training import plans
    from forerun.training.recipes.seal import Seal

    options.check_folder_name(run)
    recipe = Seal(passages=passages, minutes=minutes, evaluated=held_out, seed=seed)
    with Display() as display:
        try:
            lines = recipe.train(run, resume=plans.has_run(run), watch=display.draw)
        except KeyboardInterrupt:
            typer.echo("\nstopped and saved; the same command continues")
            raise typer.Exit(130) from None
    for line in lines:
        typer.echo(line)


@app.command("search")
def search(
    run: Run,
    queries: Annotated[list[str], typer.Argument(help="Queries.")],
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Passages to show.")] = 5,
    score: Annotated[str, typer.Option(help="Score: intersective, lm_fm or lm.")] = "intersective",
    beams: Annotated[int, typer.Option(min=1, help="Beam width of the n-gram search.")] = 15,
    ngrams: Annotated[int, typer.Option(min=0, help="N-grams to show per query.")] = 0,
    is_json: options.Json = False,
) -> None:
    """Show the passages that the generated n-grams find, best first."""
    from forerun.retrieval.seal import Options, Seal
    from forerun.training.recipes import seal as recipe

    for part in (recipe.MODEL, recipe.INDEX):
        if not (run / part).exists():
            raise DataError(f"{run} has no {part}; make it with `forerun seal build`")
    seal = Seal(*recipe.load(run), Options(beams=beams))
    for query, found in zip(queries, seal.search(queries, k=limit, score=score), strict=True):
        record = record_of(seal, query, found, ngrams)
        if is_json:
            print_json(record)
            continue
        typer.echo(f"{query!r}: {counted(len(record['passages']), 'passage')}")
        for row in record["passages"]:
            typer.echo(f"{row['score']:9.1f}  [{row['number']}] {row['title']}: {row['body']}")
        for row in record["ngrams"]:
            typer.echo(f"    {row['weight']:9.1f}  {row['count']:>6}x  {row['text']!r}")


def record_of(seal: Seal, query: str, found: SearchResult, ngrams: int) -> dict[str, Any]:
    """The result of a query as JSON."""
    from forerun.retrieval.seal import top_ngrams

    rows = zip(found.passages.tolist(), found.scores.tolist(), strict=True)
    names = ("text", "count", "logp", "weight")
    said = top_ngrams(found.generated.grams, seal, ngrams)
    return {
        "query": query,
        "passages": [
            {"number": number, "score": score, **vars(seal.passages.passage(number))}
            for number, score in rows
        ],
        "ngrams": [dict(zip(names, gram, strict=True)) for gram in said],
    }
