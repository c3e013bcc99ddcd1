"""`forerun generate`: sample from a model; prints text with statistics, or JSON lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import registry
from forerun.cli import _constraints as constraints
from forerun.cli import generate_ray, options
from forerun.cli._call_line import announce, call_line
from forerun.cli._graphs import wants_graphs
from forerun.cli._signals import exit_at_once
from forerun.cli.memory import check_memory_file, memory_saved
from forerun.cli.output import (
    Results,
    counted,
    invalid_reason,
    logprob_lines,
    notice,
    particle_lines,
    print_json,
    print_styled,
    sample_record,
    stats_lines,
)
from forerun.cli.prompts import Job, as_shown, read_jobs
from forerun.core.sampling import Sampling, from_json
from forerun.errors import ConfigError, UnknownName
from forerun.utils.signals import delayed_interrupt

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.constraints._report import Report
    from forerun.engine.generation import Sample

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


@dataclass
class Output:
    """Prints and writes finished samples, and counts them."""

    is_json: bool
    streams: bool
    num_samples: int
    results: Results
    call: str
    decode: Callable[[list[int]], str] = str  # for the tokens of --logprobs
    num_done: int = 0

    def __post_init__(self) -> None:
        from forerun.engine.stats import Stats

        self.stats = Stats()
        self.begin()

    def begin(self) -> None:
        """Starts the clock, once everything is loaded and compiled."""
        self.start = time.perf_counter()

    def piece(self, text: str) -> None:
        """Prints accepted text on a terminal."""
        if self.streams and text:
            sys.stdout.write(text)
            sys.stdout.flush()

    def sample(self, sample: Sample, job: Job, seed: int) -> None:
        """Prints a finished sample, then writes it to the file."""
        self.num_done += 1
        self.stats.add(sample.stats)
        record = sample_record(sample, job.prompt, seed, self.call)
        if job.id is not None:
            record = {"id": job.id} | record
        if self.is_json:
            print_json(record)
        elif self.streams:
            print(flush=True)
        else:
            self._text(sample)
        if not self.is_json and sample.logprobs is not None:
            print(*logprob_lines(sample, self.decode), sep="\n", flush=True)
        if not self.is_json and sample.constraint is not None:
            self._constrained(sample, sample.constraint)
        self.results.write(record)

    def footer(self) -> None:
        """Prints statistics of all finished samples."""
        if self.is_json or not self.num_done:
            return
        seconds = time.perf_counter() - self.start
        for line in stats_lines(self.stats, self.num_done, seconds):
            print_styled(line, "dim", stderr=True)

    def interrupted(self) -> str:
        """The message after Ctrl-C."""
        asked = counted(self.num_samples, "sample")
        if not self.num_done:
            return f"interrupted before the first of {asked} was finished; nothing is kept"
        where = f", kept in {self.results.path}" if self.results.path else ""
        return f"interrupted: {self.num_done} of {asked} finished{where}"

    def _constrained(self, sample: Sample, report: Report) -> None:
        """Prints the particles that a text was drawn from, and why a text is not valid."""
        for line in particle_lines(report) if report.particles else ():
            print_styled(line, "dim", stderr=True)
        if not sample.valid:
            notice(invalid_reason(sample))

    def _text(self, sample: Sample) -> None:
        if self.num_samples > 1:
            head = (
                f"--- prompt {sample.prompt_index}, sample {sample.index}: "
                f"{counted(len(sample.tokens), 'token')}, {sample.finish}, "
                f"tau {sample.stats.tau:.2f}"
            )
            print_styled(head, "cyan")
        print(sample.text, flush=True)


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
    jobs = read_jobs(prompt, prompt_file, _sampling(ctx.params | {"seed": seed}))
    parts = _parts(ctx.params, jobs)
    is_local, call = options.runs_locally(ctx.params), call_line(ctx, seed=seed)
    options.check_model(model, dtype, device, batch, weights, is_local=is_local)
    if memory is not None and is_local:
        check_memory_file(memory)
    with Results(out if is_local else None) as results:
        if verbose or not is_json:
            announce(ctx, seed=seed)
        if is_local:
            _run_local(ctx.params, jobs, parts, results, call)
        else:
            _run_ray(ctx.params, jobs, parts, call, seed)


def _parts(given: dict[str, Any], jobs: list[Job]) -> dict[str, str]:
    """Specs of drafter, verifier and controller, checked. Raises ConfigError."""
    samplings = tuple(job.sampling for job in jobs)
    constraints.check(given, samplings)
    parts = {"drafter": given["drafter"], "verifier": given["verifier"]}
    parts["controller"] = _controller(given["controller"], given["nodes"], given["depth"])
    is_local, target = options.runs_locally(given), given["target"]
    options.check_parts(is_local=is_local, samplings=samplings, target=target, **parts)
    return parts


def _run_ray(
    given: dict[str, Any], jobs: list[Job], parts: dict[str, str], call: str, seed: int
) -> None:
    names = ("model", "tenant", "dtype", "device", "weights", "batch", "target")
    how: dict[str, Any] = {name: given[name] for name in names}
    made = partial(constraints.shapers, given=dict(given))
    setup = generate_ray.Setup(**how | parts, shapers=made, graphs=wants_graphs())
    generate_ray.run(given, jobs, setup, call, seed, given["is_json"])


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
        loaded = options.load(given["model"], batch=room, check=check, **how)
        output.decode = loaded.tokenizer.decode_inside
        with exit_at_once(options.EARLY_INTERRUPT):  # constraints compile kernels
            shapers = constraints.shapers(loaded, given)
        chat = given["chat"]
        _hint_chat(loaded, jobs, chat, is_json)
        jobs = [replace(job, prompt=_prompt(loaded, job.prompt, chat)) for job in jobs]
        options.warm_up(loaded, **parts)
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
        options.hint_small(loaded, drafter)


def _sampling(given: dict[str, Any]) -> Sampling:
    """Sampling parameters from the options. Raises ConfigError."""
    renamed = {
        "logit_bias": _biases(given["logit_bias"]),
        "banned_tokens": tuple(given["ban"]),
        "stop": tuple(given["stop"]),
        "stop_token_ids": tuple(given["stop_token_id"]),
    }
    names = (Sampling.__dataclass_fields__.keys() & given.keys()) - {"constraint"}
    own = {name: given[name] for name in names} | renamed
    return Sampling(**own | _fields(given["fields"]))


def _fields(texts: list[str]) -> dict[str, Any]:
    """Fields of Sampling from texts NAME=VALUE. Raises ConfigError, UnknownName."""
    known = Sampling.__dataclass_fields__.keys() - {"n", "seed", "constraint"}
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ConfigError(f"--set takes NAME=VALUE, e.g. min_p=0.05, got {text!r}")
        if name not in known:
            raise UnknownName.of("field of --set:", name, known)
        if name in found:
            raise ConfigError(f"--set gives {name} twice; write it once")
        found[name] = _json(value.strip())
    return from_json(found)


def _json(text: str) -> Any:
    """The JSON value of a text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _biases(texts: list[str]) -> dict[int, float]:
    """Token id -> bias. Raises ConfigError for a repeated token."""
    biases: dict[int, float] = {}
    for token, bias in map(_bias, texts):
        if token in biases:
            raise ConfigError(
                f"--logit-bias gives token {token} twice, with {biases[token]:g} and {bias:g}; "
                "write one of them"
            )
        biases[token] = bias
    return biases


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ConfigError(f"--logit-bias must be ID=BIAS, e.g. 42=-1.5, got {text!r}") from None


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
