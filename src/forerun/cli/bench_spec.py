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
FEW = 3  # ids that a message names


def answers(
    folder: options.RunFolder,
    method: Annotated[str, typer.Option("--method", help="One of the run's methods.")],
    out: Annotated[Path, typer.Option("--out", help="Answer file to write.")],
    number: Annotated[int, typer.Option("--round", help="Which round, from 0.")] = 0,
) -> None:
    """Write a run's answers in Spec-Bench's format.

    The run was made with --texts and -n 1 on a task spec_bench:question.jsonl.
    """
    from forerun.bench import spec_bench
    from forerun.bench.results import read_run

    if out.exists():
        raise ConfigError(f"{out} is there already; give --out another name, or remove it first")

    manifest, records = read_run(folder)
    if method not in manifest.methods:
        raise UnknownName.of("method of this run", method, manifest.methods)
    if not 0 <= number < manifest.rounds:
        raise ConfigError(f"--round must be from 0 to {manifest.rounds - 1}, got {number}")
    named = {name: found.get("task", name) for name, found in manifest.tasks.items()}
    tasks = {name: text for name, text in named.items() if text.startswith(TASK)}
    if not tasks:
        raise ConfigError(
            f"{folder} has no Spec-Bench task, only {', '.join(manifest.tasks)}; run with "
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
            f"{method} answered no question in full in round {number} of {folder}: {_few(gone)}"
        )
    spec_bench.write_answers(out, lines)
    if gone:
        whole = counted(len(lines) + len(gone), "question")
        notice(f"{len(gone)} of {whole} left out, without an answer to every turn: {_few(gone)}")
    typer.echo(f"{out}: {counted(len(lines), 'answer')} of {method}")


def _questions(path: str) -> list[Question]:
    """The questions of a run's task; it has their path as it was given."""
    from forerun.tasks._file_task import divided
    from forerun.tasks.spec_bench import SpecBenchTask

    file = divided(path)[0]
    if not file.is_file():
        raise DataError(
            f"the run names its questions as {file}, seen from the folder where it was started; "
            "run this there, or put the file at that path"
        )
    return SpecBenchTask.of_path(path).questions


def spec(
    method: Annotated[Path, typer.Argument(help="Answer file of a method.")],
    baseline: Annotated[Path, typer.Argument(help="Answer file of plain decoding.")],
    tokenizer: Annotated[
        str, typer.Option("--model", "-m", help="Whose tokenizer counts the baseline's tokens.")
    ],
    is_json: options.Json = False,
) -> None:
    """Print the figures that Spec-Bench publishes.

    Speed-up and mean accepted tokens by category, over the questions that both files answer.
    """
    from forerun.bench import spec_bench
    from forerun.bench.fields import shown
    from forerun.models.paths import located
    from forerun.models.tokenizer import Tokenizer

    here, there = spec_bench.read_answers(method), spec_bench.read_answers(baseline)
    encode = Tokenizer.load(located(tokenizer)).encode
    found = spec_bench.table(here, there, encode)
    pairs = (here, there), (there, here)
    gone = [[shown(name) for name in spec_bench.unshared(*pair)] for pair in pairs]
    if not found:
        raise DataError(
            f"{method} and {baseline} answer no question in common, {_few(gone[0])} against "
            f"{_few(gone[1])}; name two files of the same questions"
        )
    for path, left in zip((method, baseline), gone, strict=True):
        if left:
            are = "is" if len(left) == 1 else "are"
            notice(
                f"{path}: {counted(len(left), 'question')} {are} left out, which the other file "
                f"does not answer: {_few(left)}"
            )
    if is_json:
        print_json([vars(row) for row in found])
        return
    from forerun.bench.charts import number
    from forerun.bench.ranking import factor
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
            "The baseline's tokens are its texts tokenised again, less one per turn, and not those "
            f"that its file states: against itself it is {factor(itself.speed_up)} as fast.",
            soft_wrap=True,
        )


def _few(named: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(named) - FEW} more" if len(named) > FEW else ""
    return ", ".join(named[:FEW]) + more
