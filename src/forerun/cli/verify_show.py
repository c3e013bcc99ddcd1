"""Output of `forerun verify`: text for people, plain values for JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from forerun.cli.output import console
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.cli.verify import Results
    from forerun.lossless.distribution import LawReport, LawTest
    from forerun.lossless.greedy import GreedyCase

MAX_SHOWN = 40  # greedy texts, and sampling tests


def to_dict(model: Model, found: Results) -> dict[str, Any]:
    """The report as plain values."""
    from forerun.lossless.distribution import POWER
    from forerun.lossless.greedy import dtype_of

    law = found.law
    greedy = [asdict(case) | {"cause": case.cause, "passed": case.passed} for case in found.cases]
    for case in greedy:
        case["gap"] = case["gap"] if math.isfinite(case["gap"]) else None
    tests = [asdict(test) | {"passed": test.passed} for test in law.tests]
    for test in tests:
        test["statistic"] = test["statistic"] if math.isfinite(test["statistic"]) else None
    return {
        "model": model.name,
        "dtype": str(dtype_of(model)).removeprefix("torch."),
        "passed": found.passed,
        "interrupted": not found.is_complete,
        "greedy": greedy,
        "greedy_is_vacuous": found.greedy_is_vacuous,
        "law": {
            "passed": law.passed,
            "is_vacuous": law.is_vacuous,
            "num_samples": law.num_samples,
            "detectable": law.detectable,
            "power": POWER,
            "samples_for_one_percent": law.samples_for(0.01),
            "stats": law.stats.to_dict(),
            "tests": tests,
        },
    }


def show(model: Model, found: Results) -> None:
    """Prints the report."""
    from forerun.lossless.greedy import dtype_of

    out, cases, law = console(), found.cases, found.law
    dtype = str(dtype_of(model)).removeprefix("torch.")
    out.print(f"[bold]Greedy identity[/] with plain decoding, {dtype}; each prompt twice")
    _show_each(out, cases, _greedy_line)
    causes = Counter(case.cause for case in cases)
    out.print(
        f"  {causes['identical']} of {len(cases)} identical, "
        f"{counted(causes['numerical tie'], 'numerical tie')}, "
        f"{causes['the passes differ']} with different passes, "
        f"{counted(causes['violation'], 'violation')}; "
        f"{counted(sum(c.accepted for c in cases), 'draft token')} accepted; largest logit "
        f"difference {max((c.noise for c in cases), default=0):.2g} "
        f"(tolerance {max((c.tolerance for c in cases), default=0):.2g})"
    )
    if cases and found.greedy_is_vacuous:
        out.print(
            "  warning: no draft was accepted, so this test proves little; use a --drafter that "
            "drafts, more --prompts or more --max-new-tokens"
        )
    if found.laws:
        _show_law(out, law)
    verdicts = {
        True: "[green]passed[/]",
        None: "[yellow]interrupted[/], all finished tests passed",
        False: "[red]failed: decoding is not lossless here[/]",
    }
    power = power_line(law) if found.laws else "sampling was not tested"
    power = "" if found.passed is False else f"; {power}"
    out.print(f"[bold]verify[/] {verdicts[found.passed]}{power}", soft_wrap=True)


def _show_each(out: Any, found: Many[Any], line: Callable[[Any], str]) -> None:
    """One line each; of more than MAX_SHOWN, failures first, and a count of the others."""
    some = (
        found if len(found) <= MAX_SHOWN else sorted(found, key=lambda one: one.passed)[:MAX_SHOWN]
    )
    for one in some:
        style = None if one.passed else "red"
        out.print("  " + line(one), style=style, soft_wrap=True, markup=False)
    rest = len(found) - len(some)
    if rest:
        failed = sum(not one.passed for one in found) - sum(not one.passed for one in some)
        out.print(f"  ... and {rest} more, {failed} of them failed; --json lists all")


def power_line(law: LawReport) -> str:
    """The power of the sampling test, in one sentence."""
    from forerun.lossless.distribution import POWER

    needed = law.samples_for(0.01)
    if needed is None or law.detectable >= 1.0:
        return "the sampling test had too few samples; use more --samples"
    needed = round(needed, 2 - len(str(needed)))  # two digits
    return (
        f"the sampling test detects an error that moves {law.detectable:.1%} of a position's "
        f"probability with {POWER:.0%} power; 1% needs about {needed:,} --samples"
    )


def _greedy_line(case: GreedyCase) -> str:
    size = counted(case.num_tokens, "token")
    head = f"prompt {case.prompt_index}, text {case.index}: {size}, "
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
    out.print(
        f"[bold]Sampling[/] {counted(law.num_samples, 'sample')}, "
        f"{counted(law.stats.drafted, 'token')} drafted, {law.stats.accepted} accepted"
    )
    _show_each(out, law.tests, _law_line)
    if law.is_vacuous:
        why = "no tested token came after an accepted draft"
        why = why if law.tests else "no position varied enough to be tested"
        out.print(f"  warning: {why}, so this test proves little; try other prompts or options")


def _law_line(test: LawTest) -> str:
    border = f", {test.num_border} truncated differently by rounding" if test.num_border else ""
    prefixes = counted(test.num_beginnings, "prefix", "prefixes")
    return (
        f"prompt {test.prompt_index}, token {test.position + 1}: "
        f"{counted(test.num_samples, 'sample')} after {prefixes}, {test.num_drafted} with accepted "
        f"drafts{border}; {counted(test.num_bins, 'bin')}, p = {test.p_value:.3g}, "
        f"corrected {test.corrected:.3g}"
    )
