"""`forerun index`: build, inspect, check and query an n-gram index.

Status 0: done; 1: `check` found damage; 2: bad input; 130: interrupted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli import index_build, index_fm, options
from forerun.cli._click_group import Commands
from forerun.cli.index_fm import read_ids
from forerun.cli.output import notice, print_json
from forerun.errors import ConfigError
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.ngrams.index.query.engine import Index

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    rich_markup_mode="rich",
    no_args_is_help=True,
    help="Count n-grams of any length in a corpus of your own.",
)

app.add_typer(index_fm.app, name="fm")
app.command("build")(index_build.build)

Where = index_build.Where
Query = Annotated[str, typer.Argument(help="Text, or token ids with --ids.", show_default=False)]
Terms = Annotated[list[str], typer.Argument(help="Text; several: each must be near the others.")]
Tokenizer = Annotated[
    str | None, typer.Option("--tokenizer", help="Tokenizer of the index; default: its own copy.")
]
Support = Annotated[
    int, typer.Option("--max-support", help="Most occurrences to read; 0: all, exact.")
]
Whole = Annotated[
    bool, typer.Option("--whole", help="Use the whole context, not its longest known suffix.")
]
Window = Annotated[int, typer.Option("--window", help="Tokens to show per document.")]
Limit = Annotated[int, typer.Option("--limit", "-n", help="Number of different passages.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Random seed of the shown occurrences.")]
Verify = index_fm.Verify


@app.command("info")
def info(index: Where, is_json: options.Json = False) -> None:
    """Show the contents, size and build of an index."""
    from forerun.cli.index_show import lines, remarks, summary
    from forerun.ngrams.index.build.manifest import read_manifest

    found = summary(index, read_manifest(index))
    print_json(found) if is_json else typer.echo("\n".join(lines(found) + remarks(found)))


@app.command("check")
def check(
    index: Where,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also check the order of the suffixes.")
    ] = False,
    is_json: options.Json = False,
) -> None:
    """Compare all files with their checksums. Status 1 if one is damaged or missing."""
    from forerun.cli.index_show import Bars
    from forerun.ngrams.index.build.check import check as run

    with Bars() as bars:
        found = run(index, deep=deep, report=lambda done, total: bars.report("check", done, total))
    if is_json:
        print_json(
            {
                "index": str(index),
                "is_whole": not found,
                "findings": [{"file": f.file, "problem": f.problem} for f in found],
            }
        )
    else:
        for finding in found:
            typer.echo(f"{finding.file}: {finding.problem}")
        typer.echo(f"{index}: {counted(len(found), 'problem')}" if found else f"{index}: whole")
    raise typer.Exit(1 if found else 0)


@app.command("checksum")
def checksum(index: Where) -> None:
    """Add page checksums to an index of an older release, so that queries notice damage."""
    from forerun.ngrams.index.build.verify import add_page_sums

    manifest = add_page_sums(index)
    typer.echo(f"{index}: {manifest.bytes_of('pages'):,} bytes of page checksums; all files match")


@app.command("count")
def count(
    index: Where,
    queries: options.Queries,
    ids: options.AsIds = False,
    tokenizer: Tokenizer = None,
    verify: Verify = "fast",
    is_json: options.Json = False,
) -> None:
    """Count the occurrences of texts."""
    engine = load(index, tokenizer, verify)
    tokens = [read_query(engine, query, ids) for query in queries]
    counts = engine.count_many(tokens).tolist()
    for query, found, n in zip(queries, tokens, counts, strict=True):
        if is_json:
            print_json({"query": query, "ids": found, "count": n})
        else:
            typer.echo(f"{n}\t{query}" if len(queries) > 1 else str(n))


@app.command("prob")
def prob(
    index: Where,
    context: Query,
    following: Annotated[str, typer.Argument(help="Following text; its first token is used.")],
    ids: options.AsIds = False,
    whole: Whole = False,
    tokenizer: Tokenizer = None,
    verify: Verify = "fast",
    is_json: options.Json = False,
) -> None:
    """Show the probability of a token after a context's longest suffix in the corpus."""
    engine = load(index, tokenizer, verify)
    tokens, after = read_query(engine, context, ids), read_query(engine, following, ids)
    if not after:
        raise ConfigError("expected a token that follows the context, got nothing")
    found = (engine.prob if whole else engine.infgram_prob)(tokens, after[0])
    if is_json:
        print_json(
            {
                "ids": tokens,
                "token": after[0],
                "prob": found.prob,
                "count": found.count,
                "context_count": found.context_count,
                "suffix_length": found.suffix_length,
            }
        )
        return
    shown = "unknown: the context does not occur" if found.prob is None else f"{found.prob:.6g}"
    typer.echo(
        f"{shown}  ({found.count} of {found.context_count}, "
        f"{found.suffix_length} of {counted(len(tokens), 'token')} of the context)"
    )


@app.command("ntd")
def ntd(
    index: Where,
    context: Query,
    ids: options.AsIds = False,
    whole: Whole = False,
    max_support: Support = 1000,
    top: Annotated[int, typer.Option("--top", min=0, help="Tokens to show; 0: all.")] = 20,
    tokenizer: Tokenizer = None,
    verify: Verify = "fast",
    is_json: options.Json = False,
) -> None:
    """Show the next-token distribution after a context."""
    from forerun.cli.index_show import next_record

    engine = load(index, tokenizer, verify)
    tokens = read_query(engine, context, ids)
    found = (engine.ntd if whole else engine.infgram_ntd)(tokens, max_support or None)
    record = next_record(engine, tokens, found, top)
    if is_json:
        print_json(record)
        return
    about = " (approximate)" if found.is_approximate else ""
    typer.echo(
        f"{counted(found.context_count, 'occurrence')} of the last "
        f"{counted(found.suffix_length, 'token')}, {counted(len(found.ids), 'next token')}{about}"
    )
    for row in record["next"]:
        typer.echo(f"{row['prob']:9.4%} {row['count']:>10}  {row['id']:>7}  {row['text']!r}")


@app.command("search")
def search(
    index: Where,
    terms: Terms,
    ids: options.AsIds = False,
    limit: Limit = 3,
    window: Window = 100,
    seed: Seed = 0,
    max_diff_tokens: Annotated[
        int,
        typer.Option("--max-diff-tokens", min=0, help="Longest distance between terms in tokens."),
    ] = 100,
    max_clause_freq: Annotated[
        int,
        typer.Option("--max-clause-freq", min=1, help="Occurrences of a term to use, at random."),
    ] = 50_000,
    tokenizer: Tokenizer = None,
    verify: Verify = "fast",
    is_json: options.Json = False,
) -> None:
    """Show passages with a text, or with several near each other. "a|b" is either of two."""
    from forerun.cli.index_show import passage_record
    from forerun.ngrams.index.query import documents as passages

    engine = load(index, tokenizer, verify)
    cnf = [[read_query(engine, t, ids) for t in term.split("|") if t] for term in terms]
    if len(cnf) == 1 and len(cnf[0]) == 1:
        match = engine.find(cnf[0][0])
        total, is_near = float(match.count), False
        found = passages.search(
            engine, match, len(cnf[0][0]), limit=limit, window=window, seed=seed
        )
    else:
        ranges = engine.find_cnf(
            cnf, max_clause_freq=max_clause_freq, max_diff_tokens=max_diff_tokens, seed=seed
        )
        total, is_near = ranges.count, ranges.is_approximate
        found = passages.search_ranges(engine, ranges.ranges, limit=limit, window=window, seed=seed)
    records = [passage_record(engine, passage) for passage in found]
    if is_json:
        print_json({"count": total, "is_approximate": is_near, "passages": records})
        return
    typer.echo(f"{'about ' if is_near else ''}{total:g} found")
    for r in records:
        typer.echo(f"--- document {r['document']} {r['metadata'].get('path', '')}")
        typer.echo(r["text"])


@app.command("attribute")
def attribute(
    index: Where,
    text: Annotated[str, typer.Argument(help="The text, or - for standard input.")],
    ids: options.AsIds = False,
    min_length: Annotated[int, typer.Option("--min-length", help="Least tokens of a span.")] = 5,
    max_count: Annotated[
        int,
        typer.Option("--max-count", min=0, help="Skip spans that occur more often; 0: no limit."),
    ] = 0,
    delimiters: Annotated[
        str, typer.Option("--delimiters", help="Tokens of this text end a span.")
    ] = "",
    words: Annotated[bool, typer.Option("--words", help="Start spans at word starts.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Spans to show; 0: all.")] = 20,
    documents: Annotated[int, typer.Option("--documents", help="Documents per span.")] = 1,
    window: Window = 50,
    seed: Seed = 0,
    tokenizer: Tokenizer = None,
    verify: Verify = "fast",
    is_json: options.Json = False,
) -> None:
    """Show which spans of a text occur in the corpus, the unlikeliest first."""
    from forerun.cli.index_show import span_record
    from forerun.cli.prompts import STDIN, from_stdin
    from forerun.ngrams.index.query.attribution import novelty

    engine = load(index, tokenizer, verify)
    tokens = read_query(engine, from_stdin() if text == STDIN else text, ids)
    found = engine.attribute(
        tokens,
        min_length=min_length,
        max_count=max_count or None,
        delimiters=set(read_query(engine, delimiters, ids)),
        word_starts=engine.encoder.starts() if words else None,
        limit=limit or None,
        documents=documents,
        window=window,
        seed=seed,
    )
    new, records = novelty(engine, tokens), [span_record(engine, tokens, span) for span in found]
    if is_json:
        print_json(
            {
                "tokens": len(tokens),
                "spans": records,
                "uncovered": dict(zip(map(str, new.lengths), new.uncovered, strict=True)),
                "creativity": new.index,
            }
        )
        return
    for r in records:
        typer.echo(f"[{r['start']}:{r['stop']}] {r['count']}x  {r['text']!r}")
        for p in r["documents"]:
            typer.echo(f"    document {p['document']} {p['metadata'].get('path', '')}")
    typer.echo(
        f"{counted(len(records), 'span')} in {counted(len(tokens), 'token')}; creativity "
        f"{new.index:.3f}: the share of the text in no span of n tokens that occurs, mean over n = "
        f"{new.lengths[0]} to {new.lengths[-1]}"
    )


def load(path: Path, tokenizer: str | None, verify: str) -> Index:
    """Opens the index. Raises ConfigError, DataError."""
    from forerun.ngrams.index.query.engine import Index
    from forerun.utils import jit_cache

    jit_cache.watch(notice)
    return Index.open(path, tokenizer=tokenizer, verify=verify)


def read_query(index: Index, text: str, is_ids: bool) -> list[int]:
    """Token ids of a query. Raises DataError."""
    return read_ids(text) if is_ids else list(index.encoder.encode(text))
