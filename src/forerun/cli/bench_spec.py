"""`forerun bench answers` and `forerun bench spec`: Spec-Bench's answer files and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.output import console, notice, print_json
from forerun.errors import ConfigError, DataError, UnknownName
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.tasks.spec_bench import Question

TASK = "spec_bench:"
MAX_SHOWN_IDS = 3


def answers(
    folder: options.RunFolder,
    method: Annotated[str, typer.Option("--method", help="One of the run's methods.")],
    out: Annotated[Path, typer.Option("--out", help="Answer file to write.")],
    number: Annotated[int, typer.Option("--round", help="Round, from 0.")] = 0,
) -> None:
    """Write a run's answers in Spec-Bench's format.

    The run needs --texts, -n 1 and a task spec_bench:question.jsonl.
    """
    from forerun.bench import spec_bench
    from forerun.bench.results import read_run

    if out.exists():
        raise ConfigError(f"{out} exists; use another --out, or remove it")

    manifest, records = read_run(folder)
    if method not in manifest.methods:
        raise UnknownName.of("method of this run", method, manifest.methods)
    if not 0 <= number < manifest.rounds:
        raise ConfigError(f"--round must be from 0 to {manifest.rounds - 1}, got {number}")
    named = {name: found.get("task", name) for name, found in manifest.tasks.items()}
    tasks = {name: text for name, text in named.items() if text.startswith(TASK)}
    if not tasks:
        raise ConfigError(
            f"{folder} has no Spec-Bench task, got {', '.join(manifest.tasks)}; run with "
            f"--tasks {TASK}PATH"
        )
    lines, gone = [], list[str]()
    for task, text in tasks.items():
        mine = [r for r in records if (r.task, r.method, r.round) == (task, method, number)]
        questions = _questions(text.removeprefix(TASK))
        lines += spec_bench.answers(questions, mine, method)
        gone += spec_bench.unanswered(questions, mine)
    if not lines:
        raise DataError(
            f"{method} answered no question completely in round {number} of {folder}: {_few(gone)}"
        )
    spec_bench.write_answers(out, lines)
    if gone:
        whole = counted(len(lines) + len(gone), "question")
        notice(f"{len(gone)} of {whole} left out for missing turns: {_few(gone)}")
    typer.echo(f"{out}: {counted(len(lines), 'answer')} of {method}")


def _questions(path: str) -> list[Question]:
    """The questions of a run's task, from its stored path."""
    from forerun.tasks._file_task import split_part
    from forerun.tasks.spec_bench import SpecBenchTask

    file = split_part(path)[0]
    if not file.is_file():
        raise DataError(
            f"the run's question file {file} is missing; paths are relative to the folder where "
            "the run was started, so run this command there"
        )
    return SpecBenchTask.of_path(path).questions


def spec(
    method: Annotated[Path, typer.Argument(help="Answer file of a method.")],
    baseline: Annotated[Path, typer.Argument(help="Answer file of plain decoding.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="Model with the tokenizer that counts the baseline's tokens."
        ),
    ],
    is_json: options.Json = False,
) -> None:
    """Print the figures that Spec-Bench publishes.

    Speed-up and mean accepted tokens by category, over the questions of both files.
    """
    from forerun.bench import spec_bench
    from forerun.bench.json_fields import shown
    from forerun.models.paths import located
    from forerun.models.tokenizer import Tokenizer

    here, there = spec_bench.read_answers(method), spec_bench.read_answers(baseline)
    encode = Tokenizer.load(located(tokenizer)).encode
    found = spec_bench.table(here, there, encode)
    pairs = (here, there), (there, here)
    gone = [[shown(name) for name in spec_bench.unshared(*pair)] for pair in pairs]
    if not found:
        raise DataError(
            f"{method} and {baseline} share no question, {_few(gone[0])} against {_few(gone[1])}; "
            "use two files of the same questions"
        )
    for path, left in zip((method, baseline), gone, strict=True):
        if left:
            notice(f"{path}: {counted(len(left), 'question')} not in the other file: {_few(left)}")
    if is_json:
        print_json([vars(row) for row in found])
        return
    from forerun.bench.formatting import factor, number
    from forerun.cli.bench_show import make_table

    itself = spec_bench.speed(there, there, encode, "overall")
    columns = "category", "questions", "mean accepted", "tokens/s", "baseline", "speed-up"
    rows: list[list[Any]] = [
        [
            row.group,
            str(row.num_questions),
            "-" if row.mean_accepted is None else f"{row.mean_accepted:.2f}",
            number(row.tokens_per_second),
            number(row.baseline_tokens_per_second),
            factor(row.speed_up),
        ]
        for row in found
    ]
    out = console()
    out.print(make_table("Spec-Bench's accounting", columns, rows))
    if itself is not None:
        out.print(
            "Baseline tokens are counted from its re-tokenised texts, minus one per turn: the "
            f"baseline against itself is {factor(itself.speed_up)} as fast.",
            soft_wrap=True,
        )


def _few(named: Sequence[str]) -> str:
    """The first ids and the number of the others."""
    more = f" and {len(named) - MAX_SHOWN_IDS} more" if len(named) > MAX_SHOWN_IDS else ""
    return ", ".join(named[:MAX_SHOWN_IDS]) + more
