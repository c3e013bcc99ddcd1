"""The table of docs/results/real.md for one model: suite `real`, three modes, methods and peers.

    python benchmarks/real.py --model smollm2 --data-dir DATA --peers-dir .peers --out runs/smollm2
    python benchmarks/real.py --out runs/smollm2 --table        # of what has been measured so far

Each mode is one interleaved `forerun bench run` in a folder of --out: greedy (T = 0, one answer),
sampled (T = 0.6, eight answers in turn), batched (eight at once). The same command resumes. Without
--peers-dir only forerun's methods run. --examples, --max-new-tokens and --peers make a run shorter.

Columns: tokens per second with prefill, tau (tokens per pass), acceptance of drafted tokens, the
speed-up over plain decoding of the same batch size with a 95 % interval over prompts, and the mean
score of the tasks that have one ("right"). Peers that do not count passes have no tau. Below each
table stand `auto` over plain by task, the worst task first, and pass@k.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import scripts

from forerun.bench.disturbance import undisturbed
from forerun.bench.formatting import number, times
from forerun.bench.metrics import PLAIN, SpeedUp, mean_score
from forerun.bench.ranking import Entry, Ranking
from forerun.bench.results import Manifest, Record, read_run
from forerun.bench.scoring import pass_at_ks

METHODS = "plain,prompt_lookup,suffix,token_recycling,stand,auto"
IN_TURN = ("transformers", "transformers:lookup", "vllm", "vllm:ngram", "vllm:suffix")
PEERS = {
    "greedy": (*IN_TURN, "llama_cpp:f16"),
    "sampled": (*IN_TURN, "llama_cpp:f16"),
    "batched": ("transformers:batch", "vllm:batch", "vllm:ngram:batch", "vllm:suffix:batch")
    + ("llama_cpp:f16:batch",),
}
TITLES = {
    "greedy": "T = 0, one answer",
    "sampled": "T = 0.6, eight answers in turn",
    "batched": "T = 0.6, eight answers at once",
}
COLUMNS = ("method", "tokens/s", "tau", "acceptance", "speed-up", "right")


def command(mode: str, options: argparse.Namespace) -> list[str]:
    """The `forerun bench run` of a mode."""
    words = [sys.executable, "-m", "forerun", "bench", "run", "--suite", "real", "--mode", mode]
    words += ["--model", options.model, "--data-dir", str(options.data_dir), "--dtype", "bf16"]
    words += ["--methods", options.methods, "--out", str(options.out / mode), "--texts"]
    if options.peers_dir and (names := peers(mode, options)):
        words += ["--peers-dir", str(options.peers_dir), "--peers", ",".join(names)]
    for name in ("examples", "max_new_tokens", "tasks"):
        if (value := getattr(options, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words + (["--retry"] if options.retry else [])


def peers(mode: str, options: argparse.Namespace) -> list[str]:
    """The peers of a mode, or those of --peers among them."""
    return [
        name
        for name in PEERS[mode]
        if options.peers is None or name.removesuffix(":batch") in options.peers
    ]


def table(folder: Path) -> Iterator[str]:
    """Markdown lines of one mode."""
    manifest, records = read_run(folder)
    timed = undisturbed(records)
    ranking = Ranking(manifest, records, timed)
    plain = baseline(ranking)
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|---|" + "---:|" * (len(COLUMNS) - 1)
    for entry in ranking.entries:
        yield row(ranking, entry, plain)
    yield ""
    yield from worst_first(manifest, records, timed)
    yield from pass_rates(manifest, records)


def baseline(ranking: Ranking) -> Entry | None:
    """Plain decoding of as many answers at once as the methods decode."""
    names = [entry.method for entry in ranking.entries if entry.method.startswith(PLAIN)]
    return next((e for e in ranking.entries if names and e.method == names[-1]), None)


def row(ranking: Ranking, entry: Entry, plain: Entry | None) -> str:
    """The figures of one method on all tasks."""
    totals, score = entry.totals, mean_score(entry.records)
    up = ranking.over(entry, plain) if plain is not None and entry is not plain else None
    cells = [f"`{entry.method}`", number(entry.rate or 0.0)]
    cells += [number(totals.tau) if totals.tau else "", percent(totals.acceptance_rate)]
    cells += [times(up) if up else "", percent(score)]
    return "| " + " | ".join(cells) + " |"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def worst_first(
    manifest: Manifest, records: Sequence[Record], timed: Sequence[Record]
) -> Iterator[str]:
    """`auto` over plain of the same batch size by task."""
    found: list[tuple[str, SpeedUp]] = []
    for task in manifest.tasks:
        mine, quiet = ([r for r in some if r.task == task] for some in (records, timed))
        ranking = Ranking(manifest, mine, quiet)
        plain = baseline(ranking)
        auto = next((e for e in ranking.entries if e.method.split(":")[0] == "auto"), None)
        if plain and auto and (up := ranking.over(auto, plain)):
            found.append((task, up))
    found.sort(key=lambda pair: pair[1].ratio)
    if found:
        yield "`auto` over plain: " + ", ".join(f"{task} {times(up)}" for task, up in found) + "."


def pass_rates(manifest: Manifest, records: Sequence[Record]) -> Iterator[str]:
    """pass@k of plain decoding and `auto` on tasks that pass or fail, if an answer passed."""
    for task in manifest.tasks:
        for method in (m for m in manifest.methods if m.split(":")[0] in (PLAIN, "auto")):
            mine = [r for r in records if (r.task, r.method) == (task, method)]
            rates = pass_at_ks(manifest, task, mine)
            if any(rates.values()):
                each = ", ".join(f"pass@{k} {percent(rate)}" for k, rate in rates.items())
                yield f"{task}, `{method}`: {each}."


def main() -> None:
    parser = scripts.parser(__doc__)
    default = Path(__file__).parents[2] / "shared" / "data"
    parser.add_argument("--model", help="name, folder or .gguf file")
    parser.add_argument("--out", type=Path, help="folder of the runs")
    parser.add_argument("--data-dir", type=Path, default=default, help="folder of real data")
    parser.add_argument("--peers-dir", type=Path, help="environments of the peers (`make peers`)")
    parser.add_argument("--peers", nargs="+", choices=PEERS["greedy"], help="only these")
    parser.add_argument("--methods", default=METHODS, help="of forerun")
    parser.add_argument("--modes", nargs="+", choices=TITLES, default=list(TITLES), help="to run")
    parser.add_argument("--tasks", help="only these tasks of the suite, with commas")
    parser.add_argument("--examples", type=scripts.count, help="prompts of a task at most")
    parser.add_argument("--max-new-tokens", type=scripts.count, help="of an answer at most")
    parser.add_argument("--retry", action="store_true", help="measure failures again")
    parser.add_argument("--table", action="store_true", help="print the tables, run nothing")
    options = parser.parse_args()
    if not options.out or not (options.table or options.model):
        scripts.skip("it takes hours for a model; give --model and --out")
    if options.peers and not options.peers_dir:
        parser.error("--peers needs --peers-dir, the folder of their environments (`make peers`)")
    for mode in options.modes if not options.table else ():
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(command(mode, options), check=True, env=env, stdout=sys.stderr)
    for mode in options.modes:
        if (options.out / mode / "records.jsonl").is_file():
            print(f"\n### {TITLES[mode]}\n")
            print("\n".join(table(options.out / mode)), flush=True)


if __name__ == "__main__":
    scripts.run(main)
