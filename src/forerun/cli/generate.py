"""`forerun generate`: samples from a model, as text with statistics or as JSON lines."""

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
from forerun.cli._signals import exit_at_once
from forerun.cli.memory import check_kept, kept
from forerun.cli.output import (
    Results,
    counted,
    logprob_lines,
    notice,
    painted,
    print_json,
    sample_record,
    stats_lines,
)
from forerun.cli.prompts import Job, as_shown, read_jobs
from forerun.core.sampling import Sampling, from_json
from forerun.errors import ConfigError, UnknownName
from forerun.utils.signals import delayed_interrupt

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.engine.generation import Sample

TopK = Annotated[
    int,
    typer.Option("--top-k", help="Keep the k likeliest; 0: off.", rich_help_panel=options.SAMPLING),
]
Fields = Annotated[
    list[str],
    typer.Option(
        "--set",
        help="Another field of Sampling, as min_p=0.05, ignore_eos=true or logprobs=3.",
        rich_help_panel=options.SAMPLING,
    ),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat", help="Apply the model's chat template.", rich_help_panel=options.PROMPTS
    ),
]
# fields of Sampling that `--set` writes, too
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
# `--controller fixed:nodes=N,depth=N` replaces these
Nodes = Annotated[int | None, typer.Option("--nodes", hidden=True)]
Depth = Annotated[int | None, typer.Option("--depth", hidden=True)]
Tenant = Annotated[str, typer.Option("--tenant", hidden=True)]  # keeps memories apart
Verbose = Annotated[bool, typer.Option("--verbose", "-v", hidden=True)]  # the call, with --json too

MANY = 1000  # samples of a call that had better be announced


@dataclass
class Output:
    """Where finished samples go, and what has been counted."""

    is_json: bool
    streams: bool
    num_samples: int
    results: Results
    call: str
    decode: Callable[[list[int]], str] = str  # shows the tokens of --logprobs
    num_done: int = 0

    def __post_init__(self) -> None:
        from forerun.engine.stats import Stats

        self.stats = Stats()
        self.begin()

    def begin(self) -> None:
        """What is timed begins: all is loaded, compiled and measured that decoding needs."""
        self.start = time.perf_counter()

    def piece(self, text: str) -> None:
        """Text as it becomes certain, on a terminal."""
        if self.streams and text:
            sys.stdout.write(text)
            sys.stdout.flush()

    def sample(self, sample: Sample, job: Job, seed: int) -> None:
        """A finished sample: shown first, then written to the file."""
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
        self.results.write(record)

    def footer(self) -> None:
        """Statistics of all that was finished, for people."""
        if self.is_json or not self.num_done:
            return
        seconds = time.perf_counter() - self.start
        for line in stats_lines(self.stats, self.num_done, seconds):
            painted(line, "dim", stderr=True)

    def interrupted(self) -> str:
        """What Ctrl-C left."""
        asked = counted(self.num_samples, "sample")
        if not self.num_done:
            return f"interrupted before the first of {asked} was finished; there is nothing to keep"
        where = f", kept in {self.results.path}" if self.results.path else ""
        return f"interrupted: {self.num_done} of {asked} finished{where}"

    def _text(self, sample: Sample) -> None:
        if self.num_samples > 1:
            head = (
                f"--- prompt {sample.prompt_index}, sample {sample.index}: "
                f"{counted(len(sample.tokens), 'token')}, {sample.finish}, "
                f"tau {sample.stats.tau:.2f}"
            )
            painted(head, "cyan")
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
    drafter: options.DrafterSpec = registry.DRAFTER,
    verifier: options.VerifierSpec = registry.VERIFIER,
    controller: options.ControllerSpec = registry.CONTROLLER,
    target: options.TargetSpec = None,
    constraint: options.ConstraintSpecs = [],  # noqa: B006
    nodes: Nodes = None,
    depth: Depth = None,
    batch: options.Batch = registry.BATCH,
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
    """Sample from a model, faster, with the law of plain decoding."""
    generate_ray.check(engine, actors)
    seed = generate_ray.seed_for(engine, out) if seed is None else seed
    jobs = read_jobs(prompt, prompt_file, _sampling(ctx.params | {"seed": seed}))
    parts = _parts(ctx.params, jobs)
    here, call = options.is_here(ctx.params), options.call_line(ctx, seed=seed)
    options.check_model(model, dtype, device, batch, weights, here=here)
    if memory is not None and here:
        check_kept(memory)
    with Results(out if here else None) as results:
        if verbose or not is_json:
            options.announce(ctx, seed=seed)
        if here:
            _here(ctx.params, jobs, parts, results, call)
        else:
            _on_ray(ctx.params, jobs, parts, call, seed)


def _parts(given: dict[str, Any], jobs: list[Job]) -> dict[str, str]:
    """Drafter, verifier and controller, as they were named. Raises ConfigError for any option."""
    constraints.check(given)
    parts = {"drafter": given["drafter"], "verifier": given["verifier"]}
    parts["controller"] = _controller(given["controller"], given["nodes"], given["depth"])
    samplings = tuple(job.sampling for job in jobs)
    here, target = options.is_here(given), given["target"]
    options.check_parts(here=here, samplings=samplings, target=target, **parts)
    return parts


def _on_ray(
    given: dict[str, Any], jobs: list[Job], parts: dict[str, str], call: str, seed: int
) -> None:
    names = ("model", "tenant", "dtype", "device", "weights", "batch", "target")
    how: dict[str, Any] = {name: given[name] for name in names}
    made = partial(constraints.shapers, given=dict(given))
    setup = generate_ray.Setup(**how | parts, shapers=made)
    generate_ray.run(given, jobs, setup, call, seed, given["is_json"])


def _here(
    given: dict[str, Any], jobs: list[Job], parts: dict[str, str], results: Results, call: str
) -> None:
    """All prompts in this process; whatever ends it, finished samples are out and counted."""
    batch, drafter, tenant = given["batch"], given["drafter"], given["tenant"]
    total, is_json = sum(job.sampling.n for job in jobs), given["is_json"]
    streams = total == 1 and not is_json and sys.stdout.isatty()
    if total >= MANY and not is_json:
        notice(f"{total} samples, {batch} at a time; Ctrl-C ends them and keeps what is finished")
    output = Output(is_json, streams, total, results, call)
    try:
        how = {name: given[name] for name in ("dtype", "device", "weights", "target")}
        loaded = options.load(given["model"], batch=batch, **how)
        output.decode = loaded.tokenizer.decode
        with exit_at_once("interrupted before anything was begun"):  # they compile
            shapers = constraints.shapers(loaded, given)
        chat = given["chat"]
        _hint_chat(loaded, jobs, chat, is_json)
        jobs = [replace(job, prompt=_prompt(loaded, job.prompt, chat)) for job in jobs]
        options.warm_up(loaded, **parts)
        how = {"is_quiet": is_json, "stats": output.stats}
        with kept(loaded, given["memory"], drafter, tenant, **how):
            _run(loaded, jobs, parts | {"tenant": tenant, "shapers": shapers}, batch, output)
    except KeyboardInterrupt:
        output.footer()
        notice(output.interrupted())
        raise typer.Exit(130) from None
    except Exception:
        output.footer()
        raise
    output.footer()


def _sampling(given: dict[str, Any]) -> Sampling:
    """Sampling parameters of the options. Raises ConfigError."""
    renamed = {
        "logit_bias": _biases(given["logit_bias"]),
        "banned_tokens": tuple(given["ban"]),
        "stop": tuple(given["stop"]),
        "stop_token_ids": tuple(given["stop_token_id"]),
    }
    names = Sampling.__dataclass_fields__.keys() & given.keys()
    own = {name: given[name] for name in names} | renamed
    return Sampling(**own | _fields(given["fields"]))


def _fields(texts: list[str]) -> dict[str, Any]:
    """Fields of Sampling, each of a text NAME=VALUE. Raises ConfigError, UnknownName."""
    known = Sampling.__dataclass_fields__.keys() - {"n", "seed"}
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ConfigError(f"--set takes NAME=VALUE, as min_p=0.05, got {text!r}")
        if name not in known:
            raise UnknownName.of("field of --set:", name, known)
        if name in found:
            raise ConfigError(f"--set names {name} twice; write it once")
        found[name] = _json(value.strip())
    return from_json(found)


def _json(text: str) -> Any:
    """A value as JSON writes it; any other text stands for itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _biases(texts: list[str]) -> dict[int, float]:
    """Token id -> bias. Raises ConfigError for a token that comes twice."""
    biases: dict[int, float] = {}
    for token, bias in map(_bias, texts):
        if token in biases:
            raise ConfigError(
                f"--logit-bias names token {token} twice, with {biases[token]:g} and {bias:g}; "
                "write one of them"
            )
        biases[token] = bias
    return biases


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ConfigError(f"--logit-bias must be ID=BIAS, as 42=-1.5, got {text!r}") from None


def _controller(spec: str, nodes: int | None, depth: int | None) -> str:
    """--nodes and --depth are short for a fixed controller."""
    sizes = {"nodes": nodes, "depth": depth}
    given = {name: size for name, size in sizes.items() if size is not None}
    if not given:
        return spec
    if spec not in (registry.CONTROLLER, "fixed"):
        raise ConfigError(f"--nodes and --depth belong to controller 'fixed', not {spec!r}")
    return "fixed:" + ",".join(f"{k}={v}" for k, v in given.items())


def _prompt(model: Model, prompt: str | list[int], chat: bool) -> str | list[int]:
    """What the model is really shown."""
    if isinstance(prompt, str) and chat:
        return model.chat_prompt(prompt)
    return as_shown(model.name, prompt)


def _hint_chat(model: Model, jobs: list[Job], chat: bool, is_quiet: bool) -> None:
    """Names --chat where a model has a chat template and a prompt looks like plain text."""
    is_plain = any(isinstance(job.prompt, str) and "<|" not in job.prompt for job in jobs)
    if is_plain and model.tokenizer.has_chat_template and not chat and not is_quiet:
        notice("this model has a chat template; --chat applies it to the prompt")


def _run(model: Model, jobs: list[Job], how: dict[str, Any], batch: int, output: Output) -> None:
    """Runs all jobs; text goes out as it comes, samples as they finish."""
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
