"""`forerun search NAME`: search for a better answer; options are those of the method."""

from __future__ import annotations

import secrets
import sys
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import registry
from forerun.cli import _constraints as constraints
from forerun.cli import _signature, loading, options
from forerun.cli._call_line import announce, call_line
from forerun.cli.memory import check_memory_file, memory_saved
from forerun.cli.output import Results, notice, print_json, print_styled, stats_lines
from forerun.cli.prompts import Job, as_shown, read_jobs
from forerun.core.sampling import Sampling
from forerun.utils.signals import delayed_interrupt
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.search.base import Search, Searched

DEFAULT_METHOD = "best_of"
ALIASES = {"beam": "step_beam"}
SAMPLING = ("temperature", "top_p", "max_new_tokens", "constraint_start")
PARTS = ("drafter", "verifier", "controller", "constraint")

Batch = Annotated[
    int | None,
    typer.Option(
        "--batch",
        "-b",
        help="Batch size in sequences; default: all.",
        rich_help_panel=options.MODEL,
    ),
]


def every(
    prompt: options.Prompt = [],  # noqa: B006 - typer makes a new list per call
    prompt_file: options.PromptFile = None,
    model: options.ModelName = "reasoner",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    max_new_tokens: options.MaxNewTokens = 512,
    out: options.Out = None,
    is_json: options.Json = False,
) -> None:
    """Options of every search."""


def drawing(
    temperature: options.Temperature = 0.6,
    top_p: options.TopP = 1.0,
    stop: options.Stop = [],  # noqa: B006
    seed: options.Seed = None,
    drafter: options.DrafterSpec = registry.DEFAULT_DRAFTER,
    verifier: options.VerifierSpec = registry.DEFAULT_VERIFIER,
    controller: options.ControllerSpec = registry.DEFAULT_CONTROLLER,
    target: options.TargetSpec = None,
    constraint: options.ConstraintSpecs = [],  # noqa: B006
    json_schema: constraints.JsonSchemaFile = None,
    regex: constraints.Pattern = None,
    grammar: constraints.GrammarFile = None,
    choice: constraints.Choices = None,
    constraint_start: constraints.Start = None,
    batch: Batch = None,
    memory: options.MemoryFile = None,
    tenant: options.Tenant = "",
) -> None:
    """Options of a search that samples."""


class Group(_signature.Methods):
    """Search methods; also accepts the older form without a method, or with --method."""

    kind, aliases = "search", ALIASES

    def make(self, name: str) -> Any:
        cls: Any = registry.get("search", name)
        shared = _signature.declared(every)
        if cls.draws:
            shared += _signature.declared(drawing)
        length = {"max_new_tokens": cls.num_tokens}
        shared = [p.replace(default=length.get(p.name, p.default)) for p in shared]
        own = _signature.parameters(cls, taken=[p.name for p in shared], panel=f"Options of {name}")
        about = registry.summary("search", name)
        return _signature.command(name, partial(_command, cls), [*own, *shared], about)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        return super().parse_args(ctx, _with_name(args))


app = typer.Typer(
    cls=Group,
    add_completion=False,
    rich_markup_mode="rich",
    help=(
        "Search for a better answer. The default METHOD is best_of; "
        "`forerun search METHOD --help` shows the options of a method."
    ),
)


@app.callback()
def _root() -> None:
    """Search methods."""


def _with_name(args: list[str]) -> list[str]:
    """The arguments with the method first: that of --method, or DEFAULT_METHOD."""
    if not args:
        is_piped = sys.stdin is not None and not sys.stdin.isatty()
        return [DEFAULT_METHOD] if is_piped else args
    for i, word in enumerate(args):
        flag, equals, value = word.partition("=")
        if flag == "--method":
            rest = args[i + 1 :] if equals else args[i + 2 :]
            named = value if equals else "".join(args[i + 1 : i + 2])
            return [named, *args[:i], *rest]
    is_own = args[0].startswith("-") and args[0] != "--help"
    return [DEFAULT_METHOD, *args] if is_own else args


def _command(cls: type[Search], ctx: typer.Context, given: dict[str, Any]) -> None:
    """Runs one search on all prompts."""
    seed = given.get("seed")
    seed = secrets.randbits(31) if seed is None and cls.draws else seed
    given = given | {"seed": seed}
    jobs = read_jobs(given["prompt"], given["prompt_file"], _sampling(given))
    _check(cls, given, jobs)
    changed = {"seed": seed} if cls.draws else {}
    call = call_line(ctx, **changed)
    with Results(given["out"]) as results:
        search = _made(cls, given)
        search.check_model(given["model"])
        if not given["is_json"]:
            announce(ctx, **changed)
        _run(search, given, jobs, results, call)


def _sampling(given: dict[str, Any]) -> Sampling:
    """The sampling of every trajectory. Raises ConfigError."""
    own = {name: given[name] for name in SAMPLING if name in given}
    return Sampling(**own, stop=tuple(given.get("stop", ())), seed=given["seed"])


def _check(cls: type[Search], given: dict[str, Any], jobs: list[Job]) -> None:
    """Checks the options without a model. Raises ConfigError, DataError, ModelError."""
    if cls.draws:
        samplings = [
            replace(job.sampling, constraint_sampling=cls.constraint_sampling) for job in jobs
        ]
        constraints.check(given, samplings)
        specs = {kind: given[kind] for kind in (*PARTS, "target")}
        options.check_parts(samplings=tuple(samplings), **specs)
    batch = given.get("batch")
    options.check_model(
        given["model"], given["dtype"], given["device"], 1 if batch is None else batch
    )
    if given.get("memory") is not None:
        check_memory_file(given["memory"])


def _made(cls: type[Search], given: dict[str, Any]) -> Search:
    """The search with its own options. Raises ConfigError, ModelError."""
    own = _signature.given(cls, given)
    offered = {"device": given["device"]} if "device" in registry.options(cls) else {}
    return cls(**own | offered)


def _run(
    search: Search, given: dict[str, Any], jobs: list[Job], results: Results, call: str
) -> None:
    """Runs prompts in order; finished ones are kept whatever ends it."""
    num_done = 0
    try:
        room = (given.get("batch") or search.n) + search.n  # KV cells of prefixes stay cached
        how: dict[str, Any] = {name: given[name] for name in ("dtype", "device")}
        model = loading.load(given["model"], batch=room, target=given.get("target"), **how)
        for job, found, seconds in _searches(search, model, given, jobs):
            record = found.to_dict() | {"call": call}
            record |= {} if job.id is None else {"id": job.id}
            with delayed_interrupt():
                results.write(record)
                print_json(record) if given["is_json"] else _show(found, seconds)
                num_done += 1
    except KeyboardInterrupt:
        asked = counted(len(jobs), "prompt")
        where = f", kept in {results.path}" if num_done and results.path else ""
        notice(f"interrupted: {num_done} of {asked} finished{where}")
        raise typer.Exit(130) from None


def _searches(search: Search, model: Model, given: dict[str, Any], jobs: list[Job]) -> Any:
    """Yields each job with its result and seconds."""
    if not search.draws:
        for job in jobs:
            yield job, *_timed(search, model, job, {"max_new_tokens": given["max_new_tokens"]})
        return
    how = {kind: given[kind] for kind in (*PARTS, "batch", "tenant")}
    how["constraint"] = constraints.shapers(model, given)
    loading.warm_up(model, drafter=given["drafter"], verifier=given["verifier"])
    is_quiet = given["is_json"]
    with memory_saved(model, given["memory"], given["drafter"], given["tenant"], is_quiet=is_quiet):
        for i, job in enumerate(jobs):
            own = how | {"sampling": replace(job.sampling, n=1), "prompt_index": i}
            yield job, *_timed(search, model, job, own)


def _timed(search: Search, model: Model, job: Job, how: dict[str, Any]) -> tuple[Searched, float]:
    start = time.perf_counter()
    found = search.run(model, as_shown(model.name, job.prompt), **how)
    return found, time.perf_counter() - start


def _show(found: Any, seconds: float) -> None:
    """Prints the answer on standard output, notes and statistics on standard error."""
    print(found.shown(), flush=True)
    lines = found.remarks(seconds)
    if hasattr(found, "stats"):
        statistics = stats_lines(found.stats, found.num_texts, seconds)
        if found.num_abandoned:
            tokens = counted(found.num_abandoned, "token")
            statistics[0] += f"; {tokens} of them in texts that were abandoned"
        lines += statistics
    for line in lines:
        print_styled(line, "dim", stderr=True)
