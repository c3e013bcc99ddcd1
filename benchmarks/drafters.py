"""One table of all drafters that need no second model, on several kinds of text.

    python benchmarks/drafters.py --size 0.3B --examples 10 --tokens 400 --out drafters

Runs `forerun bench run` once per column group, on the embedded reasoner padded to --size: best of 8
on the reasoning task at temperatures 0, 0.6 and 1, and copying, code and story text at 0.6. Prints
Markdown: tau, acceptance, microseconds of drafting per step, and speed over plain decoding, then
the order in the papers (Spec-Bench and STAND) for comparison. Methods take turns of --turns steps.
The same command continues an interrupted run; each group's folder is a run for `forerun bench
report`. Drafters with a datastore get solutions of training problems. `suffix` and `auto` (here
without the reasoner's draft model) learn across prompts, `stand` from the samples of one prompt.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import scripts
import torch

from forerun.bench import metrics
from forerun.bench.inflate import inflate
from forerun.bench.padding import SIZES
from forerun.bench.results import Record, read_records
from forerun.cli.main import main as forerun
from forerun.tasks.reasoning import ReasoningTask

METHODS = (
    "plain",
    "prompt_lookup",
    "lookahead",
    "sam",
    "suffix",
    "suffix:scope=group",
    "token_recycling",
    "aded:corpus={corpus}",
    "rest:corpus={corpus}",
    "infini:index={index}",
    "stand:choice=top",
    "stand",
    "stand:scope=tenant",
    "auto:model=none",
    "auto",
    "cascade",
    "fuse",
)
GROUPS = {  # name -> task, temperature, samples per prompt
    "reasoning, T = 0": ("reasoning", 0.0, 8),
    "reasoning, T = 0.6": ("reasoning", 0.6, 8),
    "reasoning, T = 1": ("reasoning", 1.0, 8),
    "copying": ("copying", 0.6, 2),
    "code": ("code", 0.6, 2),
    "story": ("story", 0.6, 2),
}
PAPERS = (  # tau / speed over plain, of 7B models
    "Token Recycling's table, Spec-Bench, greedy: token_recycling 2.70 / 2.03, rest 1.84 / 1.22, "
    "prompt_lookup 1.75 / 1.53, lookahead 1.64 / 1.27; on summaries prompt_lookup is the fastest",
    "SAM Decoding's table, Spec-Bench: token_recycling 2.83 / 1.84, sam 2.30 / 1.84, "
    "prompt_lookup 1.75 / 1.56",
    "STAND's tables, reasoning, four samples, mean of three tasks: stand 3.33 / 2.54, stand:choice="
    "top 2.94 / 2.32, token_recycling 2.74 / 2.26, sam 1.84 / 1.67, prompt_lookup 1.77 / 1.61",
)
PROBLEMS = 2000  # training problems in the datastore


def datastore(folder: Path) -> dict[str, Path]:
    """Solutions of training problems as a text file and as an index; made once."""
    corpus, index = folder / "corpus.txt", folder / "index"
    if not corpus.exists():
        task = ReasoningTask("train")
        texts = [task.example(i).prompt + task.solution(i) for i in range(PROBLEMS)]
        corpus.write_text("\n\n".join(texts))
    if not index.exists():
        run("index", "build", str(index), str(corpus), "--split", "paragraph")
    return {"corpus": corpus, "index": index}


def run(*arguments: str) -> None:
    """One command of forerun. Raises SystemExit if it fails."""
    status = forerun([*arguments])
    if status:
        raise SystemExit(status)


def rows(records: list[Record], methods: list[str]) -> Iterator[list[str]]:
    """tau, acceptance, draft microseconds per step, speed over plain; a row per method."""
    for method in methods:
        mine = [r for r in records if r.method == method]
        if not mine or any(r.error for r in mine):
            yield ["failed" if mine else "-"] * 4
            continue
        counts = metrics.totals(sample for r in mine for sample in r.samples)
        steps, drafting = counts.passes or 1, metrics.time_split(mine).get("draft", 0.0)
        speed = metrics.speed_up(records, method)
        yield [
            f"{counts.tau or 0:.2f}",
            f"{counts.acceptance_rate or 0:.0%}",
            f"{1e6 * drafting / steps:.0f}",
            f"{speed.ratio:.2f}" if speed else "-",
        ]


def table(folder: Path, methods: list[str]) -> None:
    """Prints what the runs of all groups came to."""
    found = {name: read_records(folder / slug(name)) for name in GROUPS}
    print("| | " + " | ".join(found) + " |")
    print("|---" * (1 + len(found)) + "|")
    columns = [list(rows(records, methods)) for records in found.values()]
    for i, method in enumerate(methods):
        cells = [" / ".join(column[i]) for column in columns]
        print(f"| {method.partition(':corpus')[0].partition(':index')[0]} | {' | '.join(cells)} |")
    print(
        "\nEach cell: tau / accepted of drafted / draft us per step / tokens per second over plain."
    )
    for line in PAPERS:
        print(f"Papers: {line}.")


def slug(name: str) -> str:
    return name.replace(", T = ", "-").replace(" ", "-")


def main() -> None:
    parser = scripts.parser(__doc__)
    parser.add_argument("--out", type=Path, help="run folder; default: temporary")
    parser.add_argument("--size", default="own", help=f"{', '.join(SIZES)}; own: not padded")
    parser.add_argument("--examples", type=scripts.count, default=2, help="prompts per group")
    parser.add_argument(
        "--tokens", type=scripts.count, default=200, help="maximum tokens of a sample"
    )
    parser.add_argument(
        "--turns", type=scripts.number, default=12, help="steps per turn; 0: whole prompts"
    )
    parser.add_argument("--methods", help="only these methods, joined by ;")
    parser.add_argument("--threads", type=scripts.count, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bf16")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(given, given.out or Path(folder))


def measure(given: argparse.Namespace, out: Path) -> None:
    """All runs, and their table."""
    out.mkdir(parents=True, exist_ok=True)
    places = datastore(out)
    chosen = given.methods.split(";") if given.methods else METHODS
    methods = [method.format(**places) for method in chosen]
    model = "reasoner"
    if given.size != "own":
        model = str(out / f"reasoner-{given.size}")
        if not Path(model).exists():
            inflate("reasoner", model, given.size, dtype=given.dtype)
    for name, (task, temperature, n) in GROUPS.items():
        run(
            *("bench", "run", "--out", str(out / slug(name)), "--model", model),
            *("--methods", ",".join(methods), "--tasks", task, "-n", str(n)),
            *("--temperature", str(temperature), "--max-new-tokens", str(given.tokens)),
            *("--examples", str(given.examples), "--threads", str(given.threads)),
            *("--dtype", given.dtype, "--turns", str(given.turns)),
        )
    table(out, methods)


if __name__ == "__main__":
    scripts.run(main)
