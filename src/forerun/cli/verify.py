"""`forerun verify`: greedy identity and the sampled law on the user's own model and machine.

Status 0: nothing contradicts losslessness; 1: something does; 2: bad input.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.output import console, notice, print_json
from forerun.cli.prompts import as_shown, is_embedded, read_jobs
from forerun.errors import ConfigError
from forerun.sampling import Sampling

if TYPE_CHECKING:
    from forerun.engine.api import Model
    from forerun.verifying import GreedyCase, LawReport

NumPrompts = Annotated[int, typer.Option("--prompts", help="How many of the built-in prompts.")]
PromptFile = Annotated[
    Path | None, typer.Option("--prompt-file", "-f", help="Your own prompts, as in generate.")
]
Tokens = Annotated[int, typer.Option("--max-new-tokens", help="Length of the greedy texts.")]
LawPrompts = Annotated[int, typer.Option("--law-prompts", help="Prompts of the law test; 0: none.")]
Samples = Annotated[int, typer.Option("--samples", help="Samples per prompt of the law test.")]
Seconds = Annotated[float, typer.Option("--seconds", help="Longest sampling per prompt.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="Of the law test.")]
TopK = Annotated[int, typer.Option("--top-k", help="Of the law test; 0: off.")]
TopP = Annotated[float, typer.Option("--top-p", help="Of the law test; 1: off.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the law test.")]


def command(
    ctx: typer.Context,
    model: options.ModelName = "reasoner",
    drafter: options.DrafterSpec = "stand",
    verifier: options.VerifierSpec = "speculative",
    controller: options.ControllerSpec = "fixed",
    prompts: NumPrompts = 8,
    prompt_file: PromptFile = None,
    max_new_tokens: Tokens = 64,
    law_prompts: LawPrompts = 3,
    samples: Samples = 2000,
    seconds: Seconds = 60.0,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    batch: options.Batch = 8,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Check losslessness on your own model and machine."""
    asked = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    given = [job.prompt for job in read_jobs([], prompt_file, asked)] if prompt_file else None
    _check_counts(prompts=prompts, samples=samples, max_new_tokens=max_new_tokens)
    if law_prompts and asked.is_greedy:
        raise ConfigError("the law test needs a temperature above 0; or give --law-prompts 0")
    specs = {"drafter": drafter, "verifier": verifier, "controller": controller}
    options.check_parts(**specs)
    notice(f"# {options.call_line(ctx)}")
    loaded = options.load(model, dtype=dtype, device=device, batch=batch)
    options.warm_up(loaded, **specs)
    from forerun import verifying

    parts = verifying.Parts(**specs)
    texts = [as_shown(loaded.name, text) for text in given or builtin_prompts(loaded, prompts)]
    cases = _greedy(loaded, texts, parts, max_new_tokens)
    with _Progress(not is_json, "sampling", min(law_prompts, len(texts)) * samples) as tick:
        law = verifying.check_law(
            loaded,
            texts[:law_prompts],
            parts,
            asked,
            num_samples=samples,
            batch=batch,
            seconds=seconds,
            on_sample=tick,
        )
    passed = all(case.passed for case in cases) and law.passed
    if is_json:
        print_json(to_dict(loaded, cases, law, passed))
    else:
        _show(loaded, cases, law, bool(law_prompts), passed)
    raise typer.Exit(0 if passed else 1)


def builtin_prompts(model: Model, count: int) -> list[str]:
    """Held-out problems for the embedded reasoner, short texts of several kinds for the rest."""
    if is_embedded(model.name):
        from forerun.bench.tasks.reasoning import ReasoningTask

        task = ReasoningTask("heldout")
        return [task.example(i).prompt for i in range(count)]
    from forerun.verifying import PROMPTS

    if count > len(PROMPTS):
        raise ConfigError(
            f"there are {len(PROMPTS)} built-in prompts, got --prompts {count}; use --prompt-file"
        )
    return list(PROMPTS[:count])


def to_dict(model: Model, cases: list[GreedyCase], law: LawReport, passed: bool) -> dict[str, Any]:
    """The whole report as plain values."""
    from forerun.verifying import dtype_of

    greedy = [asdict(case) | {"cause": case.cause, "passed": case.passed} for case in cases]
    for case in greedy:
        case["gap"] = case["gap"] if math.isfinite(case["gap"]) else None
    tests = [asdict(test) | {"passed": test.passed} for test in law.tests]
    for test in tests:
        test["statistic"] = test["statistic"] if math.isfinite(test["statistic"]) else None
    return {
        "model": model.name,
        "dtype": str(dtype_of(model)).removeprefix("torch."),
        "passed": passed,
        "greedy": greedy,
        "law": {
            "passed": law.passed,
            "is_vacuous": law.is_vacuous,
            "num_samples": law.num_samples,
            "stats": law.stats.to_dict(),
            "tests": tests,
        },
    }


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} must be at least 1, got {count}")


def _greedy(model: Model, texts: list[Any], parts: Any, max_new_tokens: int) -> list[GreedyCase]:
    from forerun.verifying import check_greedy

    with _Progress(True, "greedy texts", 2 * len(texts)) as tick:
        cases = []
        for case in check_greedy(model, texts, parts, max_new_tokens=max_new_tokens):
            cases.append(case)
            tick()
    return cases


class _Progress:
    """A bar on a terminal's standard error, nothing elsewhere; gives a function to advance it."""

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


def _show(
    model: Model, cases: list[GreedyCase], law: LawReport, has_law: bool, passed: bool
) -> None:
    from forerun.verifying import dtype_of

    out = console()
    dtype = str(dtype_of(model)).removeprefix("torch.")
    out.print(f"[bold]Greedy identity[/] with plain decoding, {dtype}")
    for case in cases:
        out.print("  " + _greedy_line(case), style=None if case.passed else "red", soft_wrap=True)
    causes = Counter(case.cause for case in cases)
    out.print(
        f"  {causes['identical']} of {len(cases)} identical, {causes['numerical tie']} numerical "
        f"ties, {causes['the passes differ']} whose passes differ, {causes['violation']} "
        f"violations; {sum(c.accepted for c in cases)} draft tokens accepted; largest logit "
        f"difference {max((c.noise for c in cases), default=0):.2g} "
        f"(tolerance {max((c.tolerance for c in cases), default=0):.2g})"
    )
    if has_law:
        _show_law(out, law)
    verdict = "[green]passed[/]" if passed else "[red]failed: decoding is not lossless here[/]"
    out.print(f"[bold]verify[/] {verdict}")


def _greedy_line(case: GreedyCase) -> str:
    head = f"prompt {case.prompt_index}, text {case.index}: {case.num_tokens} tokens, "
    if case.position is None and case.passed:
        return head + "identical"
    if case.position is None:
        return head + (
            f"same text, but {case.cause}: a logit by {case.noise:.2g} "
            f"(tolerance {case.tolerance:.2g})"
        )
    if case.expected is None:
        return head + f"violation: one text ends early, at position {case.position}"
    return head + (
        f"{case.cause} at position {case.position}: token {case.got} instead of {case.expected}, "
        f"top-2 logit gap {case.gap:.3g} (tolerance {case.tolerance:.2g}), passes differ by "
        f"{case.difference:.2g}"
    )


def _show_law(out: Any, law: LawReport) -> None:
    stats = law.stats
    out.print(
        f"[bold]Sampled law[/] {law.num_samples} samples, {stats.drafted} tokens drafted, "
        f"{stats.accepted} accepted"
    )
    for test in law.tests:
        out.print(
            f"  prompt {test.prompt_index}, token {test.position + 1}: {test.num_samples} samples "
            f"after {test.num_beginnings} beginnings, {test.num_drafted} with accepted drafts; "
            f"{test.num_bins} bins, p = {test.p_value:.3g}, corrected {test.corrected:.3g}",
            style=None if test.passed else "red",
            soft_wrap=True,
            markup=False,
        )
    if law.is_vacuous:
        why = "no tested token came after an accepted draft"
        why = why if law.tests else "nothing varied enough to be tested"
        out.print(f"  warning: {why}, so this test says little; try other prompts or options")
