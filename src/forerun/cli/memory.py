"""`forerun memory`: show, merge and cap memory files, which hold what drafters have learned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import loading, options
from forerun.cli._click_group import Commands
from forerun.cli.output import console, notice, print_json
from forerun.errors import ConfigError, DataError, ForerunError
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.core.roles import Drafter
    from forerun.engine.stats import Stats
    from forerun.state.drafter_files import Memory

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    rich_markup_mode="rich",
    no_args_is_help=True,
    help="Show, merge and cap memory files.",
)

Files = Annotated[list[Path], typer.Argument(help="Memory files.", show_default=False)]
OutFile = Annotated[
    Path, typer.Option("--out", "-o", help="File to write: new, or one of the inputs.")
]
Capped = Annotated[
    Path | None, typer.Option("--out", "-o", help="File to write; default: in place.")
]
Megabytes = Annotated[
    float | None,
    typer.Option("--mb", help="Size limit in MiB; least recently used entries are dropped."),
]
Tenant = Annotated[
    str | None, typer.Option("--tenant", help="New owner; '' shares it among all tenants.")
]
After = Annotated[str | None, typer.Option("--after", help="Also show the drafts after this text.")]
Nodes = Annotated[
    int, typer.Option("--nodes", min=0, max=1024, help="Draft nodes to show with --after.")
]


@app.command("info")
def info(
    files: Files,
    after: After = None,
    model: options.ModelName = "reasoner",
    nodes: Nodes = 12,
    is_json: options.Json = False,
) -> None:
    """Check memory files and show their contents and origin."""
    is_sound = True
    for file in files:
        try:
            _info(file, after, model, nodes, is_json)
        except ForerunError as error:  # the other files are still shown
            notice(f"error: {error}")
            is_sound = False
    if not is_sound:
        raise typer.Exit(2)


def _info(file: Path, after: str | None, model: str, nodes: int, is_json: bool) -> None:
    from forerun.state import drafter_files

    memory = drafter_files.read(file)
    found = {"path": str(file)} | memory.to_dict()
    if after is not None:
        found["drafts"] = _drafts(memory, model, after, nodes)
    if is_json:
        print_json(found)
    else:
        _show(memory)
        for line in found.get("drafts", ()):
            print(f"  drafts    {line!r}")


@app.command("merge")
def merge(
    files: Files,
    out: OutFile,
    mb: Megabytes = None,
    tenant: Tenant = None,
    is_json: options.Json = False,
) -> None:
    """Merge memories into one; means are weighted by their counts."""
    from forerun.state import drafter_files

    if out.exists() and out.resolve() not in {file.resolve() for file in files}:
        raise DataError(f"{out} exists and is not one of the inputs; give --out another name")
    _report(drafter_files.merge(files, out, max_bytes=_bytes(mb), tenant=tenant), is_json)


@app.command("cap")
def cap(
    files: Files,
    mb: Annotated[float, typer.Option("--mb", help="Size limit of each file in MiB.")],
    out: Capped = None,
    is_json: options.Json = False,
) -> None:
    """Reduce memories to a size; least recently used entries are dropped."""
    from forerun.state import drafter_files

    if out is not None and (len(files) > 1 or out.exists()):
        raise ConfigError("--out needs one input and a new file; without it files shrink in place")
    for file in files:
        _report(drafter_files.merge([file], out or file, max_bytes=_bytes(mb)), is_json)


def check_memory_file(path: Path) -> None:
    """Raises DataError if no memory can be saved there, or a file there is not a memory."""
    from forerun.state import array_file as files

    files.check_place(path)
    if path.exists():
        files.read_origin(path)


@contextmanager
def memory_saved(
    model: Model,
    path: Path | None,
    drafter: str,
    tenant: str,
    *,
    is_quiet: bool,
    stats: Stats | None = None,
) -> Iterator[None]:
    """Loads the file of --memory if it exists, and saves it when the block ends.

    stats: counts of the block; a notice is printed if no draft came from the file.
    """
    if path is None:
        yield
        return
    held = model.memory(path, drafter=drafter, tenant=tenant)
    try:
        with held:
            yield
    finally:
        if held.after and not is_quiet:
            notice(f"memory: {_summary(held.after)}, saved to {path}")
            if held.before and stats and _is_unread(held.drafter, held.before, stats):
                notice(
                    f"memory: no draft came from it, other parts of {drafter} made all drafts; "
                    f"--drafter {held.before.snapshot.kind} always uses it"
                )


def _is_unread(drafter: Drafter, memory: Memory, stats: Stats) -> bool:
    """Whether all drafts came from other parts of the drafter."""
    from forerun.core.roles import name_of

    by = {name for name, count in stats.drafted_by.items() if count}
    return bool(by) and not by & {name_of(drafter), memory.snapshot.kind}


def _bytes(mb: float | None) -> int | None:
    from forerun.ngrams.tables.logits.pool import in_bytes

    return None if mb is None else in_bytes(mb, "--mb")


def _report(memory: Memory, is_json: bool) -> None:
    if is_json:
        print_json(memory.to_dict())
    else:
        print(f"{memory.path}: {_summary(memory)}")


def _summary(memory: Memory) -> str:
    from forerun.ngrams.tables.suffix.response_store import CONTEXT_TOKENS

    counts = memory.snapshot.counts
    names = {"texts": f"texts with up to {CONTEXT_TOKENS} tokens of each prompt"}
    held = {name: size for name, size in counts.items() if name not in ("tokens", "evicted")}
    learned = f"learned from {counted(counts['tokens'], 'token')}"
    said = [f"{size} {names.get(name, name)}" for name, size in held.items()]
    return ", ".join([*said, learned, f"{memory.snapshot.nbytes / 2**20:.2f} MiB"])


def _show(memory: Memory) -> None:
    """Prints one line per fact."""
    from forerun.core.records import written

    held, origin = memory.snapshot, memory.origin
    per_token = held.nbytes / max(held.counts["tokens"], 1)
    facts = {
        "kind": held.kind,
        "settings": ", ".join(f"{name}={written(value)}" for name, value in held.settings.items()),
        "holds": _summary(memory),
        "evicted": str(held.counts.get("evicted", 0)),
        "per token": f"{per_token:.0f} bytes",
        "tenant": origin.tenant or "all",
        "tokenizer": origin.tokenizer[:16] or "unknown",
        "models": ", ".join(f"{name} ({code[:16] or 'unknown'})" for name, code in origin.models),
        "created": origin.created,
        "changed": f"{origin.changed} by forerun {origin.writer}",
    }
    out = console()
    out.print(f"[bold]{memory.path}[/]", soft_wrap=True)
    for label, fact in facts.items():
        out.print(f"  {label:9} {fact}", markup=False, soft_wrap=True)


def _drafts(memory: Memory, model: str, after: str, nodes: int) -> list[str]:
    """The drafts of the memory after a text, one per path of the tree."""
    from forerun.state import drafter_files

    loaded: Any = loading.load(model, dtype="auto", device="auto", batch=1)
    drafter_files.check_fits(memory, drafter_files.origin_of(loaded, memory.origin.tenant))
    tokens = loaded.tokenizer.encode(after)
    tree = drafter_files.draft(memory, tokens, nodes)
    inner = set(tree.parents.tolist())
    leaves = [node for node in range(len(tree)) if node not in inner]
    return [loaded.tokenizer.decode(tree.path(leaf), tokens) for leaf in leaves]
