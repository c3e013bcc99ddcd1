"""`forerun demo`: best-of-n on held-out problems, STAND beside plain decoding in the same run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.cli.output import Results, console, notice, print_json
from forerun.errors import ConfigError
from forerun.interrupts import uninterrupted
from forerun.sampling import Sampling
from forerun.words import counted

if TYPE_CHECKING:
    from rich.table import Table

    from forerun.demo import Outcome
    from forerun.records import Step

Problems = Annotated[int, typer.Option("--problems", help="Held-out problems of mixed level.")]
Number = Annotated[int, typer.Option("-n", help="Samples per problem.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="Of both.")]
Tokens = Annotated[int, typer.Option("--max-new-tokens", help="Longest solution.")]
Seed = Annotated[int, typer.Option("--seed", help="Of both.")]

Size = Annotated[
    str,
    typer.Option(
        "--size",
        help="Pad the model to this size (30M, 0.1B, 0.3B, 1B, 8B): the same answers at the cost "
        "of a model of that size; own: as it is.",
    ),
]

PLAIN, OWN = "none", "own"
MOST_PROBLEMS = 10_000


@dataclass
class Board:
    """What the live view shows: counts so far, and the speed of what runs now."""

    arms: tuple[str, str]
    num_problems: int
    outcomes: list[Outcome] = field(default_factory=list)
    tokens: int = 0
    start: float = field(default_factory=time.perf_counter)
    taken: float = 0.0  # share of the cores that was lost

    def __call__(self, step: Step) -> None:
        self.tokens += sum(map(len, step.emitted))

    def finish(self, outcome: Outcome) -> None:
        """A problem is done by one arm."""
        self.outcomes.append(outcome)
        self.tokens, self.start = 0, time.perf_counter()

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title=f"problem {len(self.outcomes) // 2 + 1} of {self.num_problems}")
        for column in ("", "done", "tokens/s", "one sample", "majority"):
            table.add_column(column)
        for arm in self.arms:
            table.add_row(*self._row(arm))
        now = self.tokens / max(time.perf_counter() - self.start, 1e-9)
        table.caption = f"now {now:.0f} tokens/s"
        return table

    def _row(self, arm: str) -> list[str]:
        from forerun.demo import figures

        mine = [o for o in self.outcomes if o.arm == arm]
        if not mine:
            return [label(arm), "0", "-", "-", "-"]
        f = figures(mine)
        rates = [f"{f['accuracy_one']:.0%}", f"{f['accuracy_majority']:.0%}"]
        return [label(arm), str(len(mine)), f"{f['wall_tokens_per_second']:.0f}", *rates]


def command(
    ctx: typer.Context,
    model: options.ModelName = "reasoner",
    size: Size = "",
    problems: Problems = 20,
    n: Number = 16,
    temperature: Temperature = 0.6,
    max_new_tokens: Tokens = 512,
    drafter: options.DrafterSpec = "stand",
    batch: options.Batch = 1,
    seed: Seed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    weights: options.Weights = "auto",
    out: options.Out = None,
    is_json: options.Json = False,
) -> None:
    """Best-of-n on held-out problems: STAND beside plain decoding.

    The embedded reasoner is so small that it sits in the processor's cache, where one row costs as
    little as its arithmetic; it is padded to 0.1B parameters unless --size says otherwise.
    """
    asked = Sampling(temperature=temperature, max_new_tokens=max_new_tokens, n=n, seed=seed)
    if not 1 <= problems <= MOST_PROBLEMS:
        raise ConfigError(f"--problems must be in 1..{MOST_PROBLEMS}, got {problems}")
    if drafter == PLAIN:
        raise ConfigError("the demo compares a drafter with plain decoding; give --drafter stand")
    options.check_parts(drafter=drafter)
    options.check_model(model, dtype, device, batch, weights)
    notice(f"# {options.call_line(ctx)}")
    board = Board((PLAIN, drafter), problems)
    size = size or ("0.1B" if model == "reasoner" else OWN)
    with Results(out) as results, padded(model, size) as folder:
        loaded = options.load(folder, dtype=dtype, device=device, batch=batch, weights=weights)
        options.warm_up(loaded, drafter=drafter)
        try:
            _run(loaded, asked, batch, board, results)
        except KeyboardInterrupt:
            _report(board, n, is_json)
            done = len(board.outcomes) // 2
            notice(f"interrupted: {done} of {counted(problems, 'problem')} finished")
            raise typer.Exit(130) from None
        except Exception:  # a full disk, say: what was measured is shown before the error
            if board.outcomes:
                _report(board, n, is_json)
            raise
    _report(board, n, is_json)


@contextmanager
def padded(model: str, size: str) -> Iterator[str]:
    """The model to load: as it is, or padded in a folder that is gone afterwards."""
    if size == OWN:
        yield model
        return
    from forerun.bench.inflate import inflate

    with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
        made = inflate(model, Path(folder) / "padded", size)
        notice(f"{model} padded to {made.num_bytes / 1e6:.0f} MB: same answers, the cost of {size}")
        yield str(made.folder)


def label(arm: str) -> str:
    """What people call an arm."""
    return "plain" if arm == PLAIN else arm


def _run(model: Any, asked: Sampling, batch: int, board: Board, results: Results) -> None:
    """Runs all problems after a warm-up that is not counted."""
    import torch
    from rich.live import Live

    from forerun.bench import machine
    from forerun.bench.tasks.reasoning import ReasoningTask
    from forerun.demo import compare, warm_up

    task = ReasoningTask("heldout")
    err = console(stderr=True)
    warm_up(model, task.example(board.num_problems), board.arms, asked, batch=batch)
    examples = [task.example(i) for i in range(board.num_problems)]
    board.start, watch = time.perf_counter(), machine.Watch(torch.get_num_threads())
    try:
        with Live(board, console=err, refresh_per_second=4, transient=True) as live:
            live.auto_refresh = err.is_terminal
            for done in compare(model, examples, board.arms, asked, batch=batch, on_step=board):
                with uninterrupted():
                    board.finish(done)
                    results.write(done.to_dict())
                if not err.is_terminal:
                    notice(_line(done))
    finally:
        board.taken = watch.taken() or 0.0


def _line(done: Outcome) -> str:
    return (
        f"problem {done.problem} (level {done.level}), {label(done.arm)}: {done.num_right} of "
        f"{len(done.answers)} right, {done.tokens_per_second:.0f} tokens/s, "
        f"tau {done.total.tau:.2f}"
    )


def _report(board: Board, n: int, is_json: bool) -> None:
    from forerun.bench.alerts import lost_cores
    from forerun.bench.metrics import FEW, TAKEN
    from forerun.demo import summary

    found = summary(board.outcomes, board.arms) | {"taken": round(board.taken, 3)}
    if is_json:
        print_json(found)
        return
    out = console()
    if not found["problems"]:
        out.print("no problem was finished by both")
        return
    out.print(_table(found, board.arms, n))
    out.print(_by_trajectory(found, board.arms[1]))
    problems = counted(found["problems"], "problem")
    ends = found["speed_up_interval"]
    interval = "95 % interval {:.2f} to {:.2f}".format(*ends) if ends else "one gives no interval"
    if found["problems"] >= FEW:
        points = f"{100 / found['problems'] ** 0.5:.0f} points"
        chance = f"by chance alone their majorities differ by some {points} on so few problems"
    else:
        chance = f"accuracies are shown from {FEW} problems on, fewer tell chance only"
    out.print(
        f"[bold]speed-up {found['speed_up']:.2f}x[/] (geometric mean of {problems}; {interval}; "
        "wall time, prefill included)"
    )
    out.print(f"both sides draw from the same law: {chance}")
    if board.taken > TAKEN:
        out.print(f"{lost_cores(board.taken)}: this machine was not quiet")


def _table(found: dict[str, Any], arms: tuple[str, str], n: int) -> Table:
    from rich.table import Table

    from forerun.bench.metrics import FEW

    table = Table(title=f"best of {n} on {counted(found['problems'], 'held-out problem')}")
    table.add_column("")
    figures = [found["arms"][arm] for arm in arms]
    for arm in arms:
        table.add_column(label(arm), justify="right")
    accuracy = {
        "accuracy of one sample": [f"{f['accuracy_one']:.1%}" for f in figures],
        f"accuracy of majority@{n}": [f"{f['accuracy_majority']:.1%}" for f in figures],
    }
    rows = (accuracy if found["problems"] >= FEW else {}) | {
        "tokens per second": [f"{f['wall_tokens_per_second']:.0f}" for f in figures],
        "tau (tokens per pass)": [f"{f['stats']['tau']:.2f}" for f in figures],
        "acceptance of drafted": [f"{f['stats']['acceptance_rate']:.1%}" for f in figures],
    }
    names = {"draft": "draft", "forward": "target pass", "verify": "verify", "other": "other"}
    for name, text in names.items():
        rows[f"time: {text}"] = [_share(f["stats"]["seconds"], name) for f in figures]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _share(seconds: dict[str, float], name: str) -> str:
    return f"{seconds.get(name, 0.0) / (sum(seconds.values()) or 1.0):.0%}"


def _by_trajectory(found: dict[str, Any], arm: str) -> Table:
    from rich.table import Table

    table = Table(title=f"{label(arm)} by trajectory")
    groups = found["arms"][arm]["by_trajectory"]
    table.add_column("")
    for name in groups:
        table.add_column(name, justify="right")
    table.add_row("tau", *(f"{g['tau']:.2f}" for g in groups.values()))
    table.add_row("acceptance", *(f"{g['acceptance_rate']:.1%}" for g in groups.values()))
    return table
