"""`forerun bench`: measure methods and peers, report, compare runs, profile a step.

Status 0: done; 1: every measurement failed, or `compare` found a method that is slower, missing or
failing; 2: bad input; 130: interrupted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import bench_spec, bench_suite, bench_tasks, loading, options
from forerun.cli._call_line import call_line
from forerun.cli._click_group import Commands
from forerun.cli.output import console, notice, print_json

if TYPE_CHECKING:
    from forerun.bench.planning import RunRequest
    from forerun.core.sampling import Sampling

DEFAULT_SAMPLES = 16  # per prompt, at a temperature above 0
REQUEST_FIELDS = (  # options with the name of a field of `RunRequest`
    *("model", "examples", "rounds", "dtype", "device", "seed", "texts"),
    *("turns", "retry", "optimum"),
)

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    rich_markup_mode="rich",
    no_args_is_help=True,
    help="Measure methods and peers on the same prompts.",
)

Methods = Annotated[
    str, typer.Option("--methods", help="Methods, e.g. plain,stand,stand:nodes=32.")
]
Peers = Annotated[str, typer.Option("--peers", help="Peers, e.g. transformers,vllm:ngram.")]
PeersDir = Annotated[
    Path | None,
    typer.Option("--peers-dir", help="Folder of the peers' environments (`make peers`)."),
]
Tasks = Annotated[
    str, typer.Option("--tasks", help="Tasks, e.g. reasoning,code; or tasks of the suite.")
]
RunFolder = Annotated[Path, typer.Option("--out", help="Run folder; an existing run is resumed.")]
TopK = Annotated[int, typer.Option("--top-k", help="Sample from the k likeliest tokens; 0: off.")]
TopP = Annotated[float, typer.Option("--top-p", help="Nucleus sampling; 1: off.")]
Examples = Annotated[
    int | None,
    typer.Option("--examples", help="Prompts per task; default 20, or all of a file."),
]
Samples = Annotated[
    int | None,
    typer.Option("-n", min=1, help="Samples per prompt; default 16, or 1 at temperature 0."),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens", help="Token limit per answer; prompts too long for it are skipped."
    ),
]
Rounds = Annotated[int, typer.Option("--rounds", help="Repetitions of the whole run.")]
Turns = Annotated[
    int,
    typer.Option(
        "--turns",
        help="Steps after which local methods alternate on a prompt; 0: one after the other.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", help="CPU threads; default: OMP_NUM_THREADS, or all cores."),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of all methods.")]
Texts = Annotated[bool, typer.Option("--texts", help="Store generated texts in the records.")]
Retry = Annotated[
    bool, typer.Option("--retry", help="Measure failures again, and start skipped peers again.")
]
Optimum = Annotated[
    bool,
    typer.Option(
        "--optimum",
        help="Also compute the optimal acceptance, in an untimed second run.",
    ),
]


@app.command("run")
def run(
    ctx: typer.Context,
    out: RunFolder,
    methods: Methods = "plain,stand",
    tasks: Tasks = "reasoning",
    model: options.ModelName = "reasoner",
    peers: Peers = "",
    peers_dir: PeersDir = None,
    target: options.TargetSpec = None,
    constraint: options.ConstraintSpecs = [],  # noqa: B006 - typer makes a new list per call
    n: Samples = None,
    temperature: options.Temperature = 0.6,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_new_tokens: MaxNewTokens = 512,
    examples: Examples = None,
    rounds: Rounds = 1,
    turns: Turns = 0,
    threads: Threads = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    seed: Seed = 0,
    texts: Texts = False,
    optimum: Optimum = False,
    retry: Retry = False,
    suite: bench_suite.SuiteName = None,
    mode: bench_suite.ModeName = None,
    half: bench_suite.Half = None,
    data_dir: bench_suite.DataDir = None,
    is_json: options.Json = False,
) -> None:
    """Run methods and peers on the same prompts.

    Methods are interleaved prompt by prompt; every prompt by every method is one record in the run
    folder. The same command resumes an interrupted run. Status 1 if all failed.
    """
    from forerun.cli.bench_run import Bench

    request = _request(ctx)
    from forerun.errors import ConfigError

    if peers_dir is not None and not peers_dir.is_dir():
        raise ConfigError(
            f"--peers-dir {peers_dir} is not a folder; give the folder that `make peers` filled"
        )
    bench = Bench(request, out, peers_dir)
    notice(f"# {request.command}")
    bench.run(is_json)


def _request(ctx: typer.Context) -> RunRequest:
    """The options of `bench run` as a request. Raises ConfigError, UnknownName, DataError."""
    from forerun.bench.machine import default_threads
    from forerun.bench.method_names import split_methods, split_names
    from forerun.bench.peers import parse as parse_peer
    from forerun.bench.planning import RunRequest

    given = ctx.params
    for name in split_names(given["peers"], "peer") if given["peers"] else ():
        parse_peer(name)
    methods = split_methods(",".join(filter(None, [given["methods"], given["peers"]])))
    if chosen := bench_suite.chosen(ctx):
        sampling = bench_suite.sampling(ctx, chosen)
        methods, tasks = chosen.methods(methods), [task.label for task in chosen.tasks]
    else:
        sampling, tasks = _sampling(given), split_names(given["tasks"], "task")
    kept = {name: given[name] for name in REQUEST_FIELDS}
    return RunRequest(
        methods,
        tasks,
        sampling=sampling,
        threads=default_threads() if given["threads"] is None else given["threads"],
        command=call_line(ctx),
        target=given["target"] or "",
        constraint=tuple(given["constraint"]),
        suite=chosen,
        **kept,
    )


def _sampling(given: dict[str, Any]) -> Sampling:
    """Sampling parameters from the options."""
    from forerun.core.sampling import Sampling

    default = 1 if given["temperature"] == 0 else DEFAULT_SAMPLES  # greedy samples are identical
    names = ("temperature", "top_k", "top_p", "max_new_tokens")
    return Sampling(**{name: given[name] for name in names}, n=given["n"] or default)


@app.command("report")
def report(folder: options.RunFolder) -> None:
    """Write the report of a run as HTML and Markdown."""
    from forerun.bench.report import write_report

    for path in write_report(folder):
        typer.echo(str(path))


@app.command("compare")
def compare(
    before: Annotated[Path, typer.Argument(help="Run folder.")],
    after: Annotated[Path, typer.Argument(help="Run folder of the same prompts.")],
    max_slowdown: Annotated[
        float, typer.Option("--max-slowdown", help="Allowed loss of speed, as a share.")
    ] = 0.05,
    relative: Annotated[
        bool, typer.Option("--relative", help="Compare speed-ups over plain decoding.")
    ] = False,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", help="Methods to compare, e.g. plain,stand; default: all of the first run."
        ),
    ] = None,
    is_json: options.Json = False,
) -> None:
    """Check whether a run became slower.

    Both runs need the same prompts and settings. Status 1 if a method is slower than allowed, is
    missing or newly fails, or if the second run is incomplete.
    """
    from forerun.bench import compare as comparison
    from forerun.bench.method_names import split_methods
    from forerun.bench.results import read_run
    from forerun.cli import bench_show

    found = comparison.compare(
        read_run(before),
        read_run(after),
        max_slowdown=max_slowdown,
        relative=relative,
        only=() if methods is None else split_methods(methods),
    )
    if is_json:
        print_json(found.to_dict())
    else:
        bench_show.show_comparison(console(), found, max_slowdown, relative)
    raise typer.Exit(1 if found.is_worse else 0)


@app.command("profile")
def profile(
    ctx: typer.Context,
    model: options.ModelName = "reasoner",
    drafter: Annotated[
        str, typer.Option("--drafter", "-d", help="One method, e.g. stand:context=4,nodes=32.")
    ] = "stand",
    task: Annotated[str, typer.Option("--task", help="Task of the prompt.")] = "reasoning",
    n: options.Number = 4,
    temperature: options.Temperature = 0.6,
    max_new_tokens: options.MaxNewTokens = 256,
    rounds: Rounds = 3,
    threads: Threads = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the samples.")] = 0,
    is_json: options.Json = False,
) -> None:
    """Show the time of a decoding step by part.

    Parts outside the target's pass above 10 % are flagged.
    """
    from forerun.bench.local_runner import parts_of
    from forerun.bench.machine import default_threads
    from forerun.bench.method_names import split_methods
    from forerun.bench.planning import RunRequest, check_request
    from forerun.core.sampling import Sampling
    from forerun.errors import ConfigError
    from forerun.tasks import get_task

    if len(names := split_methods(drafter)) > 1:
        raise ConfigError(f"--drafter takes one method, got {', '.join(names)}; give one of them")
    parts = parts_of(drafter)
    sampling = Sampling(temperature, max_new_tokens=max_new_tokens, n=n, seed=seed)
    threads = default_threads() if threads is None else threads
    check_request(RunRequest([drafter], [task], model, sampling, rounds=rounds, threads=threads))
    source = get_task(task)
    notice("# " + call_line(ctx))
    import torch

    from forerun.bench.profile import profile as measure
    from forerun.cli.bench_show import show_breakdown
    from forerun.tasks.base import prepare

    torch.set_num_threads(threads)
    loaded: Any = loading.load(model, dtype=dtype, device=device, batch=parts.batch)
    loading.warm_up(loaded, drafter=parts.drafter, verifier=parts.verifier)
    prompt = prepare(source.example(0), loaded.tokenizer).prompt
    found = measure(loaded, prompt, sampling, parts, rounds=rounds)
    if is_json:
        print_json(found.to_dict())
    else:
        show_breakdown(console(), found)


app.command("tasks")(bench_tasks.tasks)
app.command("inflate")(bench_tasks.inflate)
app.command("answers")(bench_spec.answers)
app.command("spec")(bench_spec.spec)
