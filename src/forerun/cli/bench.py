"""`forerun bench`: measure methods and peers side by side, report, compare runs, profile a step.

Status 0: done; 1: nothing of a run was decoded, or `compare` found a method that became slower, is
gone or fails; 2: bad input; 130: interrupted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli import bench_spec, bench_suite, bench_tasks, options
from forerun.cli._click_group import Commands
from forerun.cli.output import console, notice, print_json

SAMPLES = 16  # of a prompt, where texts differ

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    rich_markup_mode="rich",
    no_args_is_help=True,
    help="Measure methods and peers side by side.",
)

Methods = Annotated[
    str, typer.Option("--methods", help="Methods by name, as plain,stand,stand:nodes=32.")
]
Peers = Annotated[
    str, typer.Option("--peers", help="Peers beside them, as transformers,vllm:ngram.")
]
PeersDir = Annotated[
    Path | None, typer.Option("--peers-dir", help="Where `make peers` put their environments.")
]
Tasks = Annotated[
    str, typer.Option("--tasks", help="Tasks by name, as reasoning,code; of a suite, its names.")
]
RunFolder = Annotated[Path, typer.Option("--out", help="Run folder; one that is there goes on.")]
TopK = Annotated[int, typer.Option("--top-k", help="0: off.")]
TopP = Annotated[float, typer.Option("--top-p", help="1: off.")]
Examples = Annotated[
    int | None,
    typer.Option("--examples", help="Prompts per task; without it 20, of a file all."),
]
Samples = Annotated[
    int | None,
    typer.Option("-n", min=1, help="Samples per prompt; without it 16, at temperature 0 one."),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens", help="Longest text; prompts that leave no room for it are left out."
    ),
]
Rounds = Annotated[int, typer.Option("--rounds", help="How often everything is done.")]
Turns = Annotated[
    int,
    typer.Option(
        "--turns",
        help="Own methods decode a prompt at the same time, so many steps in turn; 0: one after "
        "the other.",
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", help="Else OMP_NUM_THREADS, or all cores.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of all contestants.")]
Texts = Annotated[bool, typer.Option("--texts", help="Keep what was generated in the records.")]
Retry = Annotated[
    bool, typer.Option("--retry", help="Try again what has failed in this run, peers included.")
]
Optimum = Annotated[
    bool,
    typer.Option(
        "--optimum",
        help="Decode every prompt once more, untimed: how many drafts the best rule would accept.",
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

    They take turns prompt by prompt, and every prompt by every method is one record in the run
    folder. The same command goes on with a run that ended early. Status 1 if all failed.
    """
    from forerun.bench.machine import usual_threads
    from forerun.bench.method_names import split_methods, split_names
    from forerun.bench.peers import parse as parse_peer
    from forerun.bench.planning import Asked
    from forerun.core.sampling import Sampling

    for name in split_names(peers, "peer") if peers else ():
        parse_peer(name)
    named = split_methods(",".join(filter(None, [methods, peers])))
    if chosen := bench_suite.chosen(ctx):
        sampling = bench_suite.sampling(ctx, chosen)
        named, tasks_named = chosen.methods(named), [task.label for task in chosen.tasks]
    else:
        usual = 1 if temperature == 0 else SAMPLES  # greedy ones are all the same
        sampling = Sampling(temperature, top_k, top_p, max_new_tokens=max_new_tokens, n=n or usual)
        tasks_named = split_names(tasks, "task")
    asked = Asked(
        named,
        tasks_named,
        model,
        sampling,
        examples=examples,
        rounds=rounds,
        threads=usual_threads() if threads is None else threads,
        dtype=dtype,
        device=device,
        seed=seed,
        texts=texts,
        command=options.call_line(ctx),
        turns=turns,
        retry=retry,
        optimum=optimum,
        target=target or "",
        constraint=tuple(constraint),
        suite=chosen,
    )
    from forerun.cli.bench_run import Bench

    bench = Bench(asked, out, peers_dir)
    notice(f"# {asked.command}")
    bench.run(is_json)


@app.command("report")
def report(folder: options.RunFolder) -> None:
    """Make a page and a table of a run."""
    from forerun.bench.report import write_report

    for path in write_report(folder):
        typer.echo(str(path))


@app.command("compare")
def compare(
    before: Annotated[Path, typer.Argument(help="Run folder.")],
    after: Annotated[Path, typer.Argument(help="Run folder of the same prompts.")],
    max_slowdown: Annotated[
        float, typer.Option("--max-slowdown", help="Share that a method may lose.")
    ] = 0.05,
    relative: Annotated[
        bool, typer.Option("--relative", help="Compare speed-ups over plain decoding.")
    ] = False,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods", help="What to compare, as plain,stand; without it all of the first run."
        ),
    ] = None,
    is_json: options.Json = False,
) -> None:
    """Check whether a run became slower.

    Both runs must have done the same; status 1 if a method lost more than is allowed, is missing or
    fails where it did not before, or if the second run is incomplete.
    """
    from forerun.bench import compare as comparing
    from forerun.bench.method_names import split_methods
    from forerun.bench.results import read_run
    from forerun.cli import bench_show

    found = comparing.compare(
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
        str, typer.Option("--drafter", "-d", help="One method, as stand:context=4,nodes=32.")
    ] = "stand",
    task: Annotated[str, typer.Option("--task", help="Where the prompt comes from.")] = "reasoning",
    n: options.Number = 4,
    temperature: options.Temperature = 0.6,
    max_new_tokens: options.MaxNewTokens = 256,
    rounds: Rounds = 3,
    threads: Threads = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the samples.")] = 0,
    is_json: options.Json = False,
) -> None:
    """Show where a step's time goes.

    What takes much time outside the target's pass is flagged.
    """
    from forerun.bench.local_runner import parts_of
    from forerun.bench.machine import usual_threads
    from forerun.bench.method_names import split_methods
    from forerun.bench.planning import Asked, check_asked
    from forerun.core.sampling import Sampling
    from forerun.errors import ConfigError
    from forerun.tasks import get_task

    if len(names := split_methods(drafter)) > 1:
        raise ConfigError(f"a profile is of one drafter, got {', '.join(names)}; name one of them")
    parts = parts_of(drafter)
    sampling = Sampling(temperature, max_new_tokens=max_new_tokens, n=n, seed=seed)
    threads = usual_threads() if threads is None else threads
    check_asked(Asked([drafter], [task], model, sampling, rounds=rounds, threads=threads))
    source = get_task(task)
    notice("# " + options.call_line(ctx))
    import torch

    from forerun.bench.profile import profile as measure
    from forerun.cli.bench_show import show_budget
    from forerun.tasks.base import prepare

    torch.set_num_threads(threads)
    loaded: Any = options.load(model, dtype=dtype, device=device, batch=parts.batch)
    options.warm_up(loaded, drafter=parts.drafter, verifier=parts.verifier)
    prompt = prepare(source.example(0), loaded.tokenizer).prompt
    found = measure(loaded, prompt, sampling, parts, rounds=rounds)
    if is_json:
        print_json(found.to_dict())
    else:
        show_budget(console(), found)


app.command("tasks")(bench_tasks.tasks)
app.command("inflate")(bench_tasks.inflate)
app.command("answers")(bench_spec.answers)
app.command("spec")(bench_spec.spec)
