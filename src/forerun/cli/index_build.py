"""`forerun index build`: the options of a build, and how they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli import options
from forerun.cli.output import notice, print_json
from forerun.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from forerun.ngrams.index.build.manifest import Manifest

Where = Annotated[Path, typer.Argument(help="Folder of the index.", show_default=False)]


def build(
    index: Where,
    sources: options.Sources,
    tokenizer: Annotated[
        str,
        typer.Option(help="Model folder, tokenizer.json, hub id, bytes or ids."),
    ] = "reasoner",
    memory: Annotated[str, typer.Option(help="Memory limit of sorting and merging.")] = "2GB",
    width: Annotated[str, typer.Option(help="Bytes per token: auto, 1, 2 or 4.")] = "auto",
    shards: Annotated[int, typer.Option(min=1, help="Number of parts of the index.")] = 1,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Tokenising processes, or Ray tasks; default: one per core."),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="local, or ray: a cluster that shares the folder.")
    ] = "local",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Sorting threads; default: one per core.")
    ] = None,
    field: options.TextField = "",
    split: options.Split = "file",
    on_error: options.OnError = "fail",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing index when this one is done.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard an unfinished build and start again.")
    ] = False,
    is_json: options.Json = False,
) -> None:
    """Build an index. The same command resumes an interrupted build."""
    from forerun.bench.machine import num_cores
    from forerun.cli.index_show import Bars, lines, remarks, summary
    from forerun.ngrams.index.build import build as building
    from forerun.ngrams.index.build.documents import Reading
    from forerun.utils import jit_cache

    options.check_folder_name(index)
    is_ids = tokenizer == "ids"
    asked = building.Options(
        tokenizer=tokenizer,
        reading=Reading(field or ("tokens" if is_ids else "text"), split, is_ids),
        width=read_width(width),
        shards=shards,
        on_error=on_error,
        memory=read_size(memory),
        threads=threads or num_cores(),
        workers=workers or num_cores(),
    )
    jit_cache.watch(notice)
    with Bars() as bars:
        manifest = builder(engine)(
            index, sources, asked, overwrite=overwrite, restart=restart, report=bars.report
        )
    found = summary(index, manifest)
    for remark in remarks(found):
        notice(remark)
    print_json(found) if is_json else typer.echo("\n".join(lines(found)))


def builder(engine: str) -> Callable[..., Manifest]:
    """The build function of an engine. Raises UnknownName; ConfigError if it is missing."""
    if engine == "local":
        from forerun.ngrams.index.build.build import build

        return build
    if engine != "ray":
        raise UnknownName.of("engine", engine, ["local", "ray"])
    from forerun.integrations import ray_batch, ray_index

    ray_batch.ray_module()
    return ray_index.build


def read_size(text: str) -> int:
    """Bytes of "2GB", "500MB" or a number. Raises ConfigError."""
    units = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
    given = text.strip().upper().replace("IB", "B")
    number = given.rstrip("KMGTB")
    try:
        return int(float(number) * units[given[len(number) :]])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"expected a size such as 2GB or 500MB, got {text!r}") from None


def read_width(text: str) -> int:
    """0 for "auto". Raises ConfigError."""
    if text == "auto":
        return 0
    if text not in ("1", "2", "4"):
        raise ConfigError(f"--width must be auto, 1, 2 or 4, got {text!r}")
    return int(text)
