"""`forerun search`: best of n, beam search over steps, DVTS, superposed drafts; by prompts."""

from __future__ import annotations

import importlib
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import registry
from forerun.assets import is_embedded
from forerun.cli import options
from forerun.cli import superposed as superposing
from forerun.cli.memory import check_kept, kept
from forerun.cli.output import Results, notice, painted, print_json, stats_lines
from forerun.cli.prompts import Job, as_shown, read_jobs
from forerun.core.sampling import MAX_SAMPLES, Sampling
from forerun.errors import ConfigError, UnknownName
from forerun.utils.signals import delayed_interrupt
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.search.best_of import BestOf
    from forerun.search.steps import Found

NUMBERS = {"superposed": 3}  # of -n, where it is not 16
METHODS = ("best_of", "step_beam", "dvts", "superposed")
SCORERS = ("arithmetic", "likelihood", "reward:MODEL", "MODULE:FUNCTION")
EMBEDDED_STEPS = (".", "\n")  # the reasoner writes one sentence per computation

PromptFile = Annotated[
    Path | None, typer.Option("--prompt-file", "-f", help="As for `forerun generate`.")
]
Method = Annotated[
    str, typer.Option("--method", help="best_of, step_beam (or beam), dvts, superposed.")
]
Number = Annotated[
    int | None, typer.Option("-n", help="Trajectories, or branches at a time: 16; drafts: 3.")
]
Select = Annotated[
    str | None,
    typer.Option(
        "--select",
        help="majority, weighted, score; best_of also likelihood, mean_likelihood. Default: "
        "majority for best_of without --scorer, score with one; weighted for the others.",
    ),
]
ScorerSpec = Annotated[
    str | None,
    typer.Option(
        "--scorer",
        help="arithmetic (checks stated sums, no answer key), likelihood, reward:MODEL (folder or "
        "hub id of a Hugging Face reward model), MODULE:FUNCTION (a callable on prompt, text).",
    ),
]
Answer = Annotated[
    str | None,
    typer.Option("--answer", help="Regular expression of the final answer; last match, group 1."),
]
EarlyStop = Annotated[
    bool, typer.Option("--early-stop", help="End when the vote is decided: fewer samples.")
]
Alone = Annotated[int, typer.Option("--alone", help="best_of: so many run one by one first.")]
Width = Annotated[int, typer.Option("--width", help="Continuations of every stem; divides -n.")]
StepEnd = Annotated[
    list[str],
    typer.Option("--step-end", help="Text that ends a step; may come again; \\n is a line break."),
]
StepTokens = Annotated[int, typer.Option("--step-tokens", help="Longest step.")]
MaxSteps = Annotated[int, typer.Option("--max-steps", help="Most steps of a branch.")]
Aggregate = Annotated[
    str, typer.Option("--aggregate", help="Of step scores: last, min, mean, product.")
]
Ngrams = Annotated[
    list[str],
    typer.Option("--ngrams", help="superposed: text that tells drafts apart; may come again."),
]
NgramWeight = Annotated[
    float | None, typer.Option("--ngram-weight", help="superposed: 0 to 1, 0.54 unasked.")
]
Stop = Annotated[list[str], typer.Option("--stop", help="Text that ends a trajectory.")]


def command(
    ctx: typer.Context,
    model: options.ModelName = "reasoner",
    prompt: options.Prompt = [],  # noqa: B006 - typer makes a new list per call
    prompt_file: PromptFile = None,
    method: Method = "best_of",
    n: Number = None,
    select: Select = None,
    scorer: ScorerSpec = None,
    answer: Answer = None,
    early_stop: EarlyStop = False,
    alone: Alone = 0,
    width: Width = 4,
    step_end: StepEnd = [],  # noqa: B006
    step_tokens: StepTokens = 128,
    max_steps: MaxSteps = 40,
    aggregate: Aggregate = "last",
    temperature: options.Temperature = 0.6,
    top_p: options.TopP = 1.0,
    max_new_tokens: options.MaxNewTokens = 512,
    stop: Stop = [],  # noqa: B006
    ngrams: Ngrams = [],  # noqa: B006
    ngram_weight: NgramWeight = None,
    seed: options.Seed = None,
    drafter: options.DrafterSpec = registry.DRAFTER,
    verifier: options.VerifierSpec = registry.VERIFIER,
    controller: options.ControllerSpec = registry.CONTROLLER,
    batch: Annotated[
        int | None, typer.Option("--batch", "-b", help="Sequences at once. Default: all.")
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    memory: options.MemoryFile = None,
    tenant: options.Tenant = "",
    out: options.Out = None,
    is_json: options.Json = False,
) -> None:
    """Spend samples on a better answer: best of n, beam search over steps, or DVTS.

    Method superposed drafts several continuations in one run; those are approximate.
    """
    method = _method(method)
    n = NUMBERS.get(method, 16) if n is None else n
    given = ctx.params | {"n": n}
    _check(method, given)
    if method == "superposed":
        superposing.command(ctx, given)
        return
    seed = secrets.randbits(31) if seed is None else seed
    jobs = read_jobs(prompt, prompt_file, _sampling(given, seed))
    parts = {"drafter": drafter, "verifier": verifier, "controller": controller}
    samplings = tuple(job.sampling for job in jobs)
    options.check_parts(here=True, samplings=samplings, **parts)
    options.check_model(model, dtype, device, n if batch is None else batch)
    if memory is not None:
        check_kept(memory)
    call = options.call_line(ctx, seed=seed)
    with Results(out) as results:
        how = _options(method, given | {"seed": seed}, is_embedded(model)) | parts
        how["tenant"] = tenant
        if not is_json:
            options.announce(ctx, seed=seed)
        _search(method, given, jobs, how, results, call)


def _sampling(given: dict[str, Any], seed: int) -> Sampling:
    """What is asked of every trajectory. Raises ConfigError."""
    names = ("temperature", "top_p", "max_new_tokens")
    shared = {name: given[name] for name in names}
    return Sampling(**shared, stop=tuple(given["stop"]), seed=seed)


def _search(
    method: str,
    given: dict[str, Any],
    jobs: list[Job],
    how: dict[str, Any],
    results: Results,
    call: str,
) -> None:
    """One prompt after another; whatever ends it, finished ones are out."""
    num_done, n = 0, given["n"]
    try:
        # beside those that run, the cells of stems are kept
        room = (given["batch"] or n) + n
        model = options.load(
            given["model"], dtype=given["dtype"], device=given["device"], batch=room
        )
        options.warm_up(model, **{kind: how[kind] for kind in ("drafter", "verifier")})
        memory, is_json = given["memory"], given["is_json"]
        with kept(model, memory, how["drafter"], how["tenant"], is_quiet=is_json):
            for i, job in enumerate(jobs):
                own = how | {"sampling": replace(job.sampling, n=1), "prompt_index": i}
                start = time.perf_counter()
                found = _run(method, model, as_shown(model.name, job.prompt), own)
                record = to_record(found, call) | ({} if job.id is None else {"id": job.id})
                with delayed_interrupt():
                    results.write(record)
                    print_json(record) if is_json else _show(found, time.perf_counter() - start)
                    num_done += 1
    except KeyboardInterrupt:
        asked = counted(len(jobs), "prompt")
        where = f", kept in {results.path}" if num_done and results.path else ""
        notice(f"interrupted: {num_done} of {asked} finished{where}")
        raise typer.Exit(130) from None


def _method(name: str) -> str:
    known = {"beam": "step_beam"} | {m: m for m in METHODS}
    plain = name.replace("-", "_")
    if plain not in known:
        raise UnknownName.of("search method", name, METHODS)
    return known[plain]


def _check(method: str, given: dict[str, Any]) -> None:
    """Options of one method are no options of the others. Raises ConfigError."""
    if given["n"] > MAX_SAMPLES:
        raise ConfigError(
            f"-n must be at most {MAX_SAMPLES}, got {given['n']}: a search holds all its samples "
            "until it has chosen; `forerun generate` writes as many as you like, one after the "
            "other"
        )
    own: dict[str, dict[str, Any]] = {
        "best_of": {"early_stop": False, "alone": 0},
        "steps": {
            "width": 4,
            "step_end": [],
            "step_tokens": 128,
            "max_steps": 40,
            "aggregate": "last",
        },
    }
    if method != "superposed":
        superposing.refuse(method, given)
        if given["n"] < 1:
            raise ConfigError(f"-n must be at least 1, got {given['n']}")
    foreign = own["steps" if method == "best_of" else "best_of"]
    for name, default in foreign.items():
        if given[name] not in (default, ()):
            where = "step_beam and dvts" if method == "best_of" else "best_of"
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} belongs to --method {where}, not to {method}")


def _options(method: str, given: dict[str, Any], is_ours: bool) -> dict[str, Any]:
    """Keyword arguments of the method. Raises ConfigError for a scorer or pattern."""
    from forerun.search import answers

    parse = answers.pattern(given["answer"]) if given["answer"] else answers.last_answer
    n, batch = given["n"], given["batch"]
    common = {"n": n, "parse": parse, "batch": n if batch is None else batch}
    spec = given["scorer"]
    if method == "best_of":
        names: tuple[str, ...] = ("select", "early_stop", "alone")
        scorer = make_scorer(spec, given["device"]) if spec else None
        return common | {name: given[name] for name in names} | {"scorer": scorer}
    if spec is None and not is_ours:
        raise ConfigError(
            f"--method {method} needs --scorer, one of {', '.join(SCORERS)}; the embedded reasoner "
            "has 'arithmetic' by default"
        )
    ends = [text.replace("\\n", "\n") for text in given["step_end"]]
    names = ("width", "step_tokens", "max_steps", "aggregate")
    return (
        common
        | {name: given[name] for name in names}
        | {
            "scorer": make_scorer(spec or "arithmetic", given["device"]),
            "step_end": tuple(ends) or (EMBEDDED_STEPS if is_ours else ("\n",)),
            "select": given["select"] or "weighted",
        }
    )


def make_scorer(spec: str, device: str = "auto") -> Any:
    """The scorer that a text names. Raises ConfigError, ModelError."""
    from forerun.search.arithmetic import arithmetic
    from forerun.search.scorers import Likelihood, RewardModel

    own: dict[str, Callable[[], Any]] = {
        "arithmetic": lambda: arithmetic,
        "likelihood": Likelihood,
    }
    if spec in own:
        return own[spec]()
    kind, _, rest = spec.partition(":")
    if kind == "reward" and rest:
        return RewardModel(rest, device=device)
    if not rest:
        raise UnknownName.of("scorer", spec, SCORERS)
    try:
        return getattr(importlib.import_module(kind), rest)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"expected --scorer MODULE:FUNCTION that can be imported, got {spec!r}: {error}; "
            "for a file in this folder put PYTHONPATH=. before the call"
        ) from None


def _run(method: str, model: Model, prompt: str | list[int], how: dict[str, Any]) -> Any:
    function = getattr(importlib.import_module(f"forerun.search.{method}"), method)
    return function(model, prompt, **how)


def to_record(found: Any, call: str) -> dict[str, Any]:
    """A BestOf or Found as plain values: what was chosen, all votes, everything sampled."""
    record = {
        "prompt": found.prompt,
        "text": found.text,
        "answer": found.answer,
        "votes": found.votes,
        "seed": found.seed,
        "stats": found.stats.to_dict(),
        "abandoned_tokens": found.num_abandoned,
        "notes": found.notes,
        "call": call,
    }
    if hasattr(found, "tree"):
        tree = [branch.to_dict() for branch in found.tree]
        return record | {"method": found.method, "chosen": found.chosen.number, "tree": tree}
    rows = zip(found.samples, found.answers, found.scores, strict=True)
    samples = [
        {
            "index": sample.index,
            "text": sample.text,
            "tokens": sample.tokens,
            "finish": sample.finish,
            "answer": answer,
            "score": score,
            "tau": round(sample.stats.tau, 4),
        }
        for sample, answer, score in rows
    ]
    more = {"method": "best_of", "select": found.select, "num_asked": found.num_asked}
    return record | more | {"chosen": found.chosen.index, "samples": samples}


def _show(found: BestOf | Found, seconds: float) -> None:
    """The chosen text on standard output; how it came about beside it."""
    print(found.text, flush=True)
    num = len(found.samples) if hasattr(found, "samples") else len(found.finished)
    votes = ", ".join(f"{answer}: {weight:.4g}" for answer, weight in [*found.votes.items()][:6])
    lines = [f"answer {found.answer or '(none)'}; votes {votes or '(none)'}"]
    if hasattr(found, "tree"):
        lost = sum(branch.fate == "lost" for branch in found.tree)
        branches = counted(len(found.tree) - 1, "branch", "branches")
        lines.append(f"{branches}, {lost} lost, {num} finished")
    told = stats_lines(found.stats, num, seconds)
    if found.num_abandoned:
        told[0] += f"; {counted(found.num_abandoned, 'token')} of them in texts that were abandoned"
    for line in [*lines, *told]:
        painted(line, "dim", stderr=True)
