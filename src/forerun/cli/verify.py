"""`forerun verify`: test losslessness on the user's model and machine, greedy and sampled.

Status 0: passed; 1: failed; 2: bad input; 130: interrupted, with a report of what was finished.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun import registry
from forerun.assets import is_embedded
from forerun.cli import loading, options
from forerun.cli._call_line import call_line
from forerun.cli.output import console, notice, print_json
from forerun.cli.prompts import as_shown, read_jobs
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.lossless.distribution import LawReport, PromptLaw
    from forerun.lossless.greedy import GreedyCase

NumPrompts = Annotated[int, typer.Option("--prompts", help="Number of built-in prompts.")]
PromptFile = Annotated[
    Path | None, typer.Option("--prompt-file", "-f", help="File of prompts, as in generate.")
]
Tokens = Annotated[int, typer.Option("--max-new-tokens", help="Tokens per greedy text.")]
LawPrompts = Annotated[
    int, typer.Option("--law-prompts", help="Prompts of the sampling test; 0: none.")
]
Samples = Annotated[int, typer.Option("--samples", help="Samples per prompt of the sampling test.")]
Seconds = Annotated[float, typer.Option("--seconds", help="Time limit of sampling per prompt.")]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="Temperature of the sampling test.")
]
TopK = Annotated[int, typer.Option("--top-k", help="Top-k of the sampling test; 0: off.")]
TopP = Annotated[float, typer.Option("--top-p", help="Top-p of the sampling test; 1: off.")]
MinP = Annotated[float, typer.Option("--min-p", help="Min-p of the sampling test; 0: off.")]
Seed = Annotated[int, typer.Option("--seed", help="Random seed of the sampling test.")]

TEXTS_PER_PROMPT = 2  # greedy


@dataclass
class Results:
    """Finished tests and their planned numbers."""

    num_texts: int
    num_laws: int
    cases: list[GreedyCase] = field(default_factory=list)
    laws: list[PromptLaw] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.cases) == self.num_texts and len(self.laws) == self.num_laws

    @property
    def law(self) -> LawReport:
        """The tests of all finished prompts."""
        from forerun.lossless.distribution import law_report

        return law_report(self.laws)

    @property
    def greedy_is_vacuous(self) -> bool:
        """Whether no draft was accepted in the greedy tests."""
        return not any(case.accepted for case in self.cases)

    @property
    def passed(self) -> bool | None:
        """None if nothing failed but not all was tested."""
        is_good = all(case.passed for case in self.cases) and self.law.passed
        return is_good and (True if self.is_complete else None)


def command(
    ctx: typer.Context,
    model: options.ModelName = "reasoner",
    drafter: options.DrafterSpec = registry.TREE_DRAFTER,
    verifier: options.VerifierSpec = registry.DEFAULT_VERIFIER,
    controller: options.ControllerSpec = "fixed",
    target: options.TargetSpec = None,
    constraint: options.ConstraintSpecs = [],  # noqa: B006 - typer makes a new list per call
    prompts: NumPrompts = 8,
    prompt_file: PromptFile = None,
    max_new_tokens: Tokens = 64,
    law_prompts: LawPrompts = 3,
    samples: Samples = 2000,
    seconds: Seconds = 60.0,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    batch: options.Batch = 8,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    weights: options.Weights = "auto",
    is_json: options.Json = False,
) -> None:
    """Test losslessness on your own model and machine."""
    asked = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    given = [job.prompt for job in read_jobs([], prompt_file, asked)] if prompt_file else None
    _check_counts(1, prompts=prompts, samples=samples, max_new_tokens=max_new_tokens)
    _check_counts(0, law_prompts=law_prompts)
    if not seconds > 0:
        raise ConfigError(f"--seconds must be above 0, got {seconds:g}; try 60")
    if law_prompts and asked.is_greedy:
        raise ConfigError("the sampling test needs --temperature above 0; or use --law-prompts 0")
    specs = {"drafter": drafter, "verifier": verifier, "controller": controller}
    samplings = (asked,) if law_prompts else ()
    more = {"target": target, "constraint": constraint}
    options.check_parts(is_local=True, samplings=samplings, **specs, **more)
    if not registry.make("verifier", verifier).lossless:
        raise ConfigError(
            f"verifier {verifier!r} is lossy, so there is nothing to verify (docs/laws.md); use a "
            "lossless one such as 'speculative'"
        )
    options.check_model(model, dtype, device, batch, weights)
    notice(f"# {call_line(ctx)}")
    how = {"dtype": dtype, "device": device, "weights": weights, "target": target}
    loaded = loading.load(model, batch=batch, **how)  # type: ignore[arg-type]
    loading.warm_up(loaded, **specs)
    from forerun.cli.verify_show import show, to_dict
    from forerun.lossless.greedy import Parts

    texts = [as_shown(loaded.name, text) for text in given or builtin_prompts(loaded, prompts)]
    found = Results(TEXTS_PER_PROMPT * len(texts), min(law_prompts, len(texts)))
    parts = Parts(**specs, constraint=tuple(constraint))
    limits = {"num_samples": samples, "seconds": seconds, "batch": batch}
    try:
        _greedy(loaded, texts, parts, max_new_tokens, found)
        _law(loaded, texts[: found.num_laws], parts, asked, limits, found, not is_json)
    except KeyboardInterrupt:
        notice(
            f"interrupted: {len(found.cases)} of {counted(found.num_texts, 'greedy text')} and "
            f"{len(found.laws)} of {counted(found.num_laws, 'sampling prompt')} finished"
        )
    if is_json:
        print_json(to_dict(loaded, found))
    else:
        show(loaded, found)
    raise typer.Exit((0 if found.passed else 1) if found.is_complete else 130)


def builtin_prompts(model: Model, count: int) -> list[str]:
    """Held-out problems for the embedded reasoner, short texts for other models."""
    from forerun.lossless.greedy import PROMPTS
    from forerun.tasks.reasoning import ReasoningTask

    task = ReasoningTask("heldout") if is_embedded(model.name) else None
    known = len(PROMPTS) if task is None else len(task)
    if count > known:
        raise ConfigError(
            f"--prompts {count} exceeds the {known} built-in prompts; use --prompt-file"
        )
    return list(PROMPTS[:count]) if task is None else [task.example(i).prompt for i in range(count)]


def _check_counts(least: int, **counts: int) -> None:
    for name, count in counts.items():
        if count < least:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} must be at least {least}, got {count}")


def _greedy(
    model: Model, texts: list[Any], parts: Any, max_new_tokens: int, found: Results
) -> None:
    from forerun.lossless.greedy import check_greedy

    options = {"max_new_tokens": max_new_tokens, "num_repeats": TEXTS_PER_PROMPT}
    with _Progress(True, "greedy texts", found.num_texts) as tick:
        for case in check_greedy(model, texts, parts, **options):
            found.cases.append(case)
            tick()


def _law(
    model: Model,
    texts: list[Any],
    parts: Any,
    asked: Sampling,
    limits: dict[str, Any],
    found: Results,
    is_shown: bool,
) -> None:
    from forerun.lossless.distribution import prompt_laws

    with _Progress(is_shown, "sampling", len(texts) * limits["num_samples"]) as tick:
        for law in prompt_laws(model, texts, parts, asked, on_sample=tick, **limits):
            found.laws.append(law)


class _Progress:
    """A progress bar on a terminal; yields a function to advance it."""

    def __init__(self, is_shown: bool, label: str, total: int) -> None:
        from rich.progress import Progress

        err = console(stderr=True)
        self._bar = Progress(
            console=err, transient=True, disable=not (is_shown and err.is_terminal)
        )
        self._task = self._bar.add_task(label, total=total)

    def __enter__(self) -> Any:
        self._bar.start()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()
