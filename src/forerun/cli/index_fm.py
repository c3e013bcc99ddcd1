"""`forerun index fm`: build and query an FM-index, a corpus index in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli._click_group import Commands
from forerun.cli.output import notice, print_json
from forerun.errors import ConfigError, DataError
from forerun.registry import MAX_NUMBER
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.ngrams.index.build.encoders import Encoder
    from forerun.ngrams.index.fm.index import FMIndex

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    rich_markup_mode="rich",
    no_args_is_help=True,
    help="Build and query an FM-index: a compressed corpus index in one file.",
)

File = Annotated[Path, typer.Argument(help="File of the FM-index.", show_default=False)]
TokenizerName = Annotated[
    str,
    typer.Option("--tokenizer", help="Model folder, tokenizer.json, hub id or embedded model."),
]

Verify = Annotated[
    str,
    typer.Option(
        "--verify",
        help="full: verify all files first; fast: what a query reads; off: only sizes.",
    ),
]


@app.command("build")
def build(
    file: File,
    sources: options.Sources,
    tokenizer: TokenizerName = "reasoner",
    field: options.TextField = "text",
    split: options.Split = "file",
    on_error: options.OnError = "fail",
    sample: Annotated[
        int, typer.Option(min=1, max=MAX_NUMBER, help="Sample every n-th suffix position.")
    ] = 32,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    is_json: options.Json = False,
) -> None:
    """Build an FM-index in memory and write it.

    `generate --constraint corpus:index=FILE` restricts text to it.
    """
    from forerun.models.identity import tokenizer_hash
    from forerun.ngrams.index.build import encoders
    from forerun.ngrams.index.build.documents import Reading
    from forerun.ngrams.index.fm.index import FMIndex
    from forerun.utils import jit_cache

    if on_error not in ("fail", "skip"):
        raise ConfigError(f"--on-error must be fail or skip, got {on_error!r}")
    if file.exists() and not overwrite:
        raise ConfigError(f"{file} exists; give another file, or replace it with --overwrite")
    reader = encoders.load(tokenizer)
    if reader.eos is None:
        raise ConfigError(
            f"tokenizer {tokenizer} has no end id to separate documents; use another tokenizer"
        )
    texts = read_texts(sources, Reading(field, split), on_error)
    documents = (ids for text in texts if len(ids := reader.encode_arrays([text])[0]))
    jit_cache.watch(notice)
    index = FMIndex.of(documents, reader.eos, sample=sample, tokenizer=tokenizer_hash(reader))
    index.save(file)
    found = {
        "file": str(file),
        "tokens": index.length,
        "documents": index.num_documents,
        "bytes": file.stat().st_size,
        "bytes_per_token": round(index.bytes_per_token, 3),
    }
    if is_json:
        print_json(found)
    else:
        typer.echo(
            f"{file}: {counted(index.length, 'token')}, "
            f"{counted(index.num_documents, 'document')}, {found['bytes']:,} bytes "
            f"({index.bytes_per_token:.2f} per token)"
        )


@app.command("count")
def count(
    file: File,
    queries: options.Queries,
    ids: options.AsIds = False,
    tokenizer: TokenizerName = "reasoner",
    verify: Verify = "fast",
    is_json: options.Json = False,
) -> None:
    """Count the occurrences of texts."""
    index, reader = load(file, tokenizer, ids, verify)
    for query in queries:
        tokens = read_query(reader, query)
        n = index.count(tokens)
        if is_json:
            print_json({"query": query, "ids": tokens, "count": n})
        else:
            typer.echo(f"{n}\t{query}" if len(queries) > 1 else str(n))


@app.command("locate")
def locate(
    file: File,
    query: Annotated[str, typer.Argument(help="Text, or token ids with --ids.")],
    ids: options.AsIds = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Occurrences to show.")] = 10,
    window: Annotated[int, typer.Option(min=0, help="Tokens to show on each side.")] = 12,
    tokenizer: TokenizerName = "reasoner",
    verify: Verify = "fast",
    is_json: options.Json = False,
) -> None:
    """Show where a text occurs: document, token offset and surrounding text."""
    index, reader = load(file, tokenizer, ids, verify)
    tokens = read_query(reader, query)
    if not tokens:
        raise ConfigError("expected a text to look for, got nothing")
    rows = index.find(tokens)
    places = index.locate(rows, limit) - len(tokens)
    documents = index.document_of(places + len(tokens) - 1)
    for place, document in sorted(zip(places.tolist(), documents.tolist(), strict=True)):
        start, stop = int(index.starts[document]) + 1, int(index.starts[document + 1])
        around = index.text(
            max(start, place - window), min(stop, place + len(tokens) + window)
        ).tolist()
        shown = reader.decode(around) if reader else " ".join(map(str, around))
        record = {"document": document, "offset": place - start, "ids": around, "text": shown}
        if is_json:
            print_json(record)
        else:
            typer.echo(f"document {document}, token {place - start}: {shown!r}")
    if not is_json:
        typer.echo(f"{counted(rows[1] - rows[0], 'occurrence')} in all")


def read_texts(sources: list[Path], how: Any, on_error: str) -> Any:
    """The texts of all sources. Raises DataError at an unreadable record, or skips it."""
    from forerun.ngrams.index.build.documents import Document, list_sources, read

    skipped = 0
    for record in read(list_sources(sources), how):
        if isinstance(record, Document):
            yield record.text
        elif on_error == "fail":
            raise DataError(
                f"{record.where}: {record.reason}; repair it, or skip such records with "
                "--on-error skip"
            )
        else:
            skipped += 1
    if skipped:
        notice(f"skipped {counted(skipped, 'unreadable record')}")


def load(file: Path, tokenizer: str, is_ids: bool, verify: str) -> tuple[FMIndex, Encoder | None]:
    """The index and the encoder of its queries, None for ids. Raises ConfigError, DataError."""
    from forerun.ngrams.index.build import encoders
    from forerun.ngrams.index.fm.index import FMIndex
    from forerun.utils import jit_cache

    jit_cache.watch(notice)
    index = FMIndex.load(file, verify=verify)
    if is_ids:
        return index, None
    from forerun.models.identity import tokenizer_hash

    reader = encoders.load(tokenizer)
    index.check_tokenizer(tokenizer_hash(reader), file)
    return index, reader


def read_query(reader: Encoder | None, text: str) -> list[int]:
    """Token ids of a query. Raises DataError."""
    return read_ids(text) if reader is None else list(reader.encode(text))


def read_ids(text: str) -> list[int]:
    """Token ids separated by spaces or commas. Raises DataError."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise DataError(f"expected token ids such as '5 17 3', got {text!r:.60}") from None
