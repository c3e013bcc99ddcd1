"""`forerun generate`: sample from a model; prints text with statistics, or JSON lines."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import registry
from forerun.cli import _constraints as constraints
from forerun.cli import generate_ray, loading, options
from forerun.cli._call_line import announce, call_line
from forerun.cli._graphs import wants_graphs
from forerun.cli._sampling import read_sampling
from forerun.cli._signals import exit_at_once
from forerun.cli.generate_output import Output
from forerun.cli.memory import check_memory_file, memory_saved
from forerun.cli.output import Results, notice
from forerun.cli.prompts import Job, as_shown, read_jobs
from forerun.errors import ConfigError
from forerun.utils.signals import delayed_interrupt

if TYPE_CHECKING:
    from forerun.api import Model

TopK = Annotated[
    int,
    typer.Option(
        "--top-k",
        help="Sample from the k likeliest tokens; 0: off.",
        rich_help_panel=options.SAMPLING,
    ),
]
Fields = Annotated[
    list[str],
    typer.Option(
        "--set",
        help="More sampling options, e.g. min_p=0.05, ignore_eos=true, logprobs=3; repeatable.",
        rich_help_panel=options.SAMPLING,
    ),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat", help="Apply the model's chat template.", rich_help_panel=options.PROMPTS
    ),
]
# older options: `--set` replaces them
MinP = Annotated[float, typer.Option("--min-p", hidden=True)]
Repetition = Annotated[float, typer.Option("--repetition-penalty", hidden=True)]
Presence = Annotated[float, typer.Option("--presence-penalty", hidden=True)]
Frequency = Annotated[float, typer.Option("--frequency-penalty", hidden=True)]
Bias = Annotated[list[str], typer.Option("--logit-bias", hidden=True)]  # ID=BIAS
Ban = Annotated[list[int], typer.Option("--ban", hidden=True)]
MinNewTokens = Annotated[int, typer.Option("--min-new-tokens", hidden=True)]
StopId = Annotated[list[int], typer.Option("--stop-token-id", hidden=True)]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", hidden=True)]
Logprobs = Annotated[int | None, typer.Option("--logprobs", hidden=True)]
# older options: `--controller fixed:nodes=N,depth=N` replaces them
Nodes = Annotated[int | None, typer.Option("--nodes", hidden=True)]
Depth = Annotated[int | None, typer.Option("--depth", hidden=True)]
Tenant = Annotated[str, typer.Option("--tenant", hidden=True)]  # each has its own memory
Verbose = Annotated[bool, typer.Option("--verbose", "-v", hidden=True)]  # print the call

ANNOUNCED_SAMPLES = 1000  # from this number on, the number of samples is printed first


def command(
    ctx: typer.Context,
    model: options.ModelName = "reasoner",
    prompt: options.Prompt = [],  # noqa: B006 - typer makes a new list per call
    prompt_file: options.PromptFile = None,
    n: options.Number = 1,
    temperature: options.Temperature = 1.0,
    top_k: TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Repetition = 1.0,
    presence_penalty: Presence = 0.0,
    frequency_penalty: Frequency = 0.0,
    logit_bias: Bias = [],  # noqa: B006
    ban: Ban = [],  # noqa: B006
    min_new_tokens: MinNewTokens = 0,
    max_new_tokens: options.MaxNewTokens = 512,
    stop: options.Stop = [],  # noqa: B006
    stop_token_id: StopId = [],  # noqa: B006
    ignore_eos: IgnoreEos = False,
    seed: options.Seed = None,
    logprobs: Logprobs = None,
    fields: Fields = [],  # noqa: B006
    style: constraints.Files = [],  # noqa: B006
    style_lambda: constraints.Strength = None,
    style_form: constraints.Form = None,
    mix: constraints.Mix = None,
    mix_weights: constraints.MixWeights = None,
    within: constraints.Within = None,
    within_begin: constraints.Begin = None,
    within_window: constraints.Window = None,
    drafter: options.DrafterSpec = registry.DEFAULT_DRAFTER,
    verifier: options.VerifierSpec = registry.DEFAULT_VERIFIER,
    controller: options.ControllerSpec = registry.DEFAULT_CONTROLLER,
    target: options.TargetSpec = None,
    constraint: options.ConstraintSpecs = [],  # noqa: B006
    json_schema: constraints.JsonSchemaFile = None,
    regex: constraints.Pattern = None,
    grammar: constraints.GrammarFile = None,
    choice: constraints.Choices = None,
    constraint_sampling: constraints.How = "mask",
    constraint_start: constraints.Start = None,
    constraint_memory: constraints.Memory = None,
    nodes: Nodes = None,
    depth: Depth = None,
    batch: options.Batch = registry.DEFAULT_BATCH,
    memory: options.MemoryFile = None,
    tenant: Tenant = "",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    weights: options.Weights = "auto",
    chat: Chat = False,
    engine: generate_ray.Engine = "local",
    actors: generate_ray.Actors = None,
    out: options.Out = None,
    is_json: options.Json = False,
    verbose: Verbose = False,
) -> None:
    """Sample from a model: faster, with the distribution of plain decoding."""
    generate_ray.check(engine, actors)
    seed = generate_ray.seed_for(engine, out) if seed is None else seed
    jobs = read_jobs(prompt, prompt_file, read_sampling(ctx.params | {"seed": seed}))
    parts = _checked_parts(ctx.params, jobs)
    run, call = (_run_local if engine == "local" else _run_ray), call_line(ctx, seed=seed)
    with Results(out if engine == "local" else None) as results:
        if verbose or not is_json:
            announce(ctx, seed=seed)
        run(ctx.params | {"seed": seed}, jobs, parts, results, call)


def _checked_parts(given: dict[str, Any], jobs: list[Job]) -> dict[str, str]:
    """Specs of drafter, verifier and controller, once all options are checked.

    Raises ConfigError, DataError, ModelError.
    """
    samplings = tuple(job.sampling for job in jobs)
    constraints.check(given, samplings)
    parts = {"drafter": given["drafter"], "verifier": given["verifier"]}
    parts["controller"] = _controller(given["controller"], given["nodes"], given["depth"])
    is_local, target = options.runs_locally(given), given["target"]
    options.check_parts(is_local=is_local, samplings=samplings, target=target, **parts)
    model = (given[name] for name in ("model", "dtype", "device", "batch", "weights"))
    options.check_model(*model, is_local=is_local)
    if given["memory"] is not None and is_local:
        check_memory_file(given["memory"])
    return parts


def _run_ray(
    given: dict[str, Any], jobs: list[Job], parts: dict[str, str], results: Results, call: str
) -> None:
    """Runs all prompts on a Ray cluster, which writes its own results."""
    names = ("model", "tenant", "dtype", "device", "weights", "batch", "target")
    how: dict[str, Any] = {name: given[name] for name in names}
    made = partial(constraints.shapers, given=dict(given))
    setup = generate_ray.Setup(**how | parts, shapers=made, graphs=wants_graphs())
    generate_ray.run(given, jobs, setup, call, given["seed"], given["is_json"])


def _run_local(
    given: dict[str, Any], jobs: list[Job], parts: dict[str, str], results: Results, call: str
) -> None:
    """Runs all prompts in this process; finished samples are kept whatever ends it."""
    batch, drafter, tenant = given["batch"], given["drafter"], given["tenant"]
    total, is_json = sum(job.sampling.n for job in jobs), given["is_json"]
    streams = total == 1 and not is_json and sys.stdout.isatty()
    if total >= ANNOUNCED_SAMPLES and not is_json:
        notice(f"{total} samples, {batch} at a time; Ctrl-C ends them and keeps what is finished")
    output = Output(is_json, streams, total, results, call)
    try:
        how = {name: given[name] for name in ("dtype", "device", "weights", "target")}
        searches = constraints.particles([job.sampling for job in jobs])
        if searches and drafter not in (registry.DEFAULT_DRAFTER, "none"):
            notice(f"drafter {drafter} is not used: particles grow by one token a step")
        room = max(batch, *(search.n for search in searches), 1)
        check = options.chat_check(given["model"], is_needed=True) if given["chat"] else None
        loaded = loading.load(given["model"], batch=room, check=check, **how)
        output.decode = loaded.tokenizer.decode_inside
        with exit_at_once(loading.EARLY_INTERRUPT):  # constraints compile kernels
            shapers = constraints.shapers(loaded, given)
        chat = given["chat"]
        _hint_chat(loaded, jobs, chat, is_json)
        jobs = [replace(job, prompt=_prompt(loaded, job.prompt, chat)) for job in jobs]
        loading.warm_up(loaded, **parts)
        how = {"is_quiet": is_json, "stats": output.stats}
        asap = constraints.asap_saved(loaded, given["constraint_memory"], tenant, is_quiet=is_json)
        with asap, memory_saved(loaded, given["memory"], drafter, tenant, **how):
            _run(loaded, jobs, parts | {"tenant": tenant, "shapers": shapers}, batch, output)
    except KeyboardInterrupt:
        output.footer()
        notice(output.interrupted())
        raise typer.Exit(130) from None
    except Exception:
        output.footer()
        raise
    output.footer()
    if not is_json:
        loading.hint_small(loaded, drafter)


def _controller(spec: str, nodes: int | None, depth: int | None) -> str:
    """The controller spec; --nodes and --depth select a fixed controller."""
    sizes = {"nodes": nodes, "depth": depth}
    given = {name: size for name, size in sizes.items() if size is not None}
    if not given:
        return spec
    if spec not in (registry.DEFAULT_CONTROLLER, "fixed"):
        raise ConfigError(
            f"--nodes and --depth belong to controller 'fixed', not {spec!r}; drop --controller"
        )
    return "fixed:" + ",".join(f"{k}={v}" for k, v in given.items())


def _prompt(model: Model, prompt: str | list[int], chat: bool) -> str | list[int]:
    """The prompt after the chat template or the form of an embedded model."""
    if isinstance(prompt, str) and chat:
        return model.chat_prompt(prompt)
    return as_shown(model.name, prompt)


def _hint_chat(model: Model, jobs: list[Job], chat: bool, is_quiet: bool) -> None:
    """Suggests --chat if the model has a chat template and a prompt is plain text."""
    is_plain = any(isinstance(job.prompt, str) and "<|" not in job.prompt for job in jobs)
    if is_plain and model.tokenizer.has_chat_template and not chat and not is_quiet:
        notice("this model has a chat template; --chat applies it to the prompt")


def _run(model: Model, jobs: list[Job], how: dict[str, Any], batch: int, output: Output) -> None:
    """Runs all jobs; prints text as it comes and samples as they finish."""
    prompts: Any = [job.prompt for job in jobs]
    run = model.run(prompts, [job.sampling for job in jobs], batch=batch, **how)
    output.begin()
    for event in run.events():
        output.piece(event.text)
        if event.sample:
            job = jobs[event.prompt_index]
            seed = run.seed if job.sampling.seed is None else job.sampling.seed
            with delayed_interrupt():
                output.sample(event.sample, job, seed)
