"""`forerun demo`: compare decoding with and without drafts on several answers per prompt.

A real model answers everyday prompts if it can be loaded or fetched; otherwise the embedded
reasoner solves held-out problems.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import loading, options
from forerun.cli._call_line import call_line
from forerun.cli.output import Results, console, notice, print_json
from forerun.core.sampling import Sampling, check_samples
from forerun.errors import ConfigError, ForerunError
from forerun.utils.signals import delayed_interrupt
from forerun.utils.text import counted

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from forerun.api import Model
    from forerun.bench.demo import Outcome
    from forerun.core.records import Sequence, Step
    from forerun.models.tokenizer import TextStream, Tokenizer
    from forerun.tasks.base import Example

Problems = Annotated[
    int | None,
    typer.Option("--problems", help="Number of prompts; default: 20 for the reasoner, else all."),
]
Number = Annotated[
    int | None, typer.Option("-n", help="Answers per prompt; default: 16 for the reasoner, else 8.")
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="Sampling temperature; 0 is greedy.")
]
Tokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", help="Token limit; default: 512 for the reasoner, else 160."),
]
Seed = Annotated[int, typer.Option("--seed", help="Random seed.")]
ModelName = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="Folder, hub id or name; default: smollm2, otherwise reasoner."
    ),
]
Drafters = Annotated[
    str,
    typer.Option("--drafter", help="Drafter; default: stand, and auto for a real model."),
]

Size = Annotated[
    str,
    typer.Option(
        "--size",
        help="Pad the model to this size (30M, 0.1B, 0.3B, 1B, 8B) with the same answers; "
        "own: no padding.",
    ),
]

PLAIN, OWN = "none", "own"
DEFAULT_MODEL = "smollm2"  # if it is installed or can be fetched
MAX_PROBLEMS = 10_000
MIN_SCORED_PROMPTS = 10  # to show accuracies
NUM_TEXT_LINES = 6  # of the running answer, shown below the table


@dataclass(frozen=True)
class Setup:
    """Prompts, arms (the baseline first) and sampling of the demo."""

    examples: list[Example]
    warm_up: Example
    arms: tuple[str, ...]
    sampling: Sampling
    batch: int
    is_scored: bool  # whether answers can be checked


@dataclass
class Board:
    """The live view: counts so far, and text and speed of the running answer."""

    setup: Setup
    tokenizer: Tokenizer
    outcomes: list[Outcome] = field(default_factory=list)
    tokens: int = 0
    start: float = field(default_factory=time.perf_counter)
    lost: float = 0.0  # share of the cores
    text: str = ""
    stream: TextStream | None = None

    def __call__(self, step: Step) -> None:
        self.tokens += sum(map(len, step.emitted))
        for seq, tokens in zip(step.seqs, step.emitted, strict=True):
            if seq is step.seqs[0] and not self.setup.is_scored:
                self._show(seq, tokens)

    def _show(self, seq: Sequence, tokens: list[int]) -> None:
        """Adds tokens to the text of the first running answer; a new answer starts a new text."""
        from forerun.models.tokenizer import TextStream

        if self.stream is None or len(seq.generated) == len(tokens):
            prompt = seq.tokens[: seq.num_prompt]
            self.stream, self.text = TextStream(self.tokenizer, prompt), ""
        self.text += self.stream.extend(tokens)

    def finish(self, outcome: Outcome) -> None:
        """Adds the outcome of one arm on one prompt."""
        self.outcomes.append(outcome)
        self.tokens, self.start, self.stream, self.text = 0, time.perf_counter(), None, ""

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        setup = self.setup
        number = len(self.outcomes) // len(setup.arms) + 1
        table = Table(title=f"prompt {number} of {len(setup.examples)}")
        for column in ("", "done", "tokens/s", *(["one sample", "majority"] * setup.is_scored)):
            table.add_column(column)
        for arm in setup.arms:
            table.add_row(*self._row(arm))
        now = self.tokens / max(time.perf_counter() - self.start, 1e-9)
        table.caption = f"now {now:.0f} tokens/s"
        return Group(table, Text("\n".join(self.text.splitlines()[-NUM_TEXT_LINES:])))

    def _row(self, arm: str) -> list[str]:
        from forerun.bench.demo import figures

        mine = [o for o in self.outcomes if o.arm == arm]
        width = 5 if self.setup.is_scored else 3
        if not mine:
            return [label(arm), "0", "-", "-", "-"][:width]
        f = figures(mine)
        rates = [f"{f['accuracy_one']:.0%}", f"{f['accuracy_majority']:.0%}"]
        return [label(arm), str(len(mine)), f"{f['wall_tokens_per_second']:.0f}", *rates][:width]


def command(
    ctx: typer.Context,
    model: ModelName = "",
    size: Size = "",
    problems: Problems = None,
    n: Number = None,
    temperature: Temperature = 0.6,
    max_new_tokens: Tokens = None,
    drafter: Drafters = "",
    batch: options.Batch = 1,
    seed: Seed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    weights: options.Weights = "auto",
    out: options.Out = None,
    is_json: options.Json = False,
) -> None:
    """Compare STAND and auto with plain decoding on several answers per prompt.

    A model with a chat template answers everyday prompts; others, as the embedded reasoner, solve
    held-out problems. The reasoner fits into the processor's cache, which hides the cost of a pass,
    so it is padded to 0.1B parameters by default.
    """
    if problems is not None and not 1 <= problems <= MAX_PROBLEMS:
        raise ConfigError(f"--problems must be in 1..{MAX_PROBLEMS}, got {problems}")
    if n is not None:
        check_samples([Sampling(n=n)], "use more --problems")
    if drafter == PLAIN:
        raise ConfigError("--drafter none is plain decoding, the baseline; use --drafter stand")
    if drafter:
        options.check_parts(drafter=drafter)
    options.check_model(model or "reasoner", dtype, device, batch, weights)
    model = model or chosen_model(device)
    options.check_model(model, dtype, device, batch, weights)
    notice(f"# {call_line(ctx, model=model)}")
    size = size or ("0.1B" if model == "reasoner" else OWN)
    with Results(out) as results, padded(model, size) as folder:
        loaded = loading.load(folder, dtype=dtype, device=device, batch=batch, weights=weights)
        sampling = partial(Sampling, temperature, seed=seed)
        setup = _setup(loaded, sampling, drafter, problems, n, max_new_tokens, batch)
        for arm in setup.arms[1:]:
            loading.warm_up(loaded, drafter=arm)
        board = Board(setup, loaded.tokenizer)
        try:
            _run(loaded, board, results)
        except KeyboardInterrupt:
            _report(board, is_json)
            done = len(board.outcomes) // len(setup.arms)
            notice(f"interrupted: {done} of {counted(len(setup.examples), 'prompt')} finished")
            raise typer.Exit(130) from None
        except Exception:  # e.g. a full disk; the results so far are still shown
            if board.outcomes:
                _report(board, is_json)
            raise
    _report(board, is_json)


def chosen_model(device: str) -> str:
    """The default model if it is installed or can be fetched, else the embedded reasoner.

    Raises ConfigError, before it fetches, if there is no such device.
    """
    from forerun.cli.pull import Line
    from forerun.models.load import choose_device
    from forerun.models.pull import pull

    choose_device(device)
    line = Line(DEFAULT_MODEL)
    try:
        pull(DEFAULT_MODEL, report=line.show)
    except ForerunError as error:
        line.end()
        notice(f"using the embedded reasoner, as {DEFAULT_MODEL} cannot be fetched: {error}")
        return "reasoner"
    finally:
        line.end()
    return DEFAULT_MODEL


def _setup(
    model: Model,
    sampling: Callable[..., Sampling],
    drafter: str,
    problems: int | None,
    n: int | None,
    max_new_tokens: int | None,
    batch: int,
) -> Setup:
    """Everyday prompts for a model with a chat template, held-out problems for others."""
    from forerun.bench.demo import everyday, held_out

    if model.tokenizer.has_chat_template:
        examples = everyday(model)
        chosen = sampling(n=n or 8, max_new_tokens=max_new_tokens or 160)
        arms = (PLAIN, drafter) if drafter else (PLAIN, "stand", "auto")
        return Setup(examples[:problems], examples[0], arms, chosen, batch, is_scored=False)
    examples = held_out((problems or 20) + 1)
    chosen = sampling(n=n or 16, max_new_tokens=max_new_tokens or 512)
    arms = (PLAIN, drafter or "stand")
    return Setup(examples[:-1], examples[-1], arms, chosen, batch, is_scored=True)


@contextmanager
def padded(model: str, size: str) -> Iterator[str]:
    """The model to load: unchanged, or padded in a temporary folder."""
    if size == OWN:
        yield model
        return
    from forerun.bench.inflate import inflate

    with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
        made = inflate(model, Path(folder) / "padded", size)
        notice(
            f"{model} padded to {made.num_bytes / 1e6:.0f} MB: same answers at the cost of {size}"
        )
        yield str(made.folder)


def label(arm: str) -> str:
    """The displayed name of an arm."""
    return "plain" if arm == PLAIN else arm


def _run(model: Model, board: Board, results: Results) -> None:
    """Runs all prompts after an uncounted warm-up."""
    import torch
    from rich.live import Live

    from forerun.bench import cpu_load
    from forerun.bench.demo import compare, warm_up

    setup, err = board.setup, console(stderr=True)
    how = {"batch": setup.batch}
    warm_up(model, setup.warm_up, setup.arms, setup.sampling, **how)
    board.start, meter = time.perf_counter(), cpu_load.CoreLossMeter(torch.get_num_threads())
    runs = compare(model, setup.examples, setup.arms, setup.sampling, on_step=board, **how)
    try:
        with Live(board, console=err, refresh_per_second=4, transient=True) as live:
            live.auto_refresh = err.is_terminal
            for done in runs:
                with delayed_interrupt():
                    board.finish(done)
                    results.write(done.to_dict())
                if not err.is_terminal:
                    notice(_line(done, setup))
    finally:
        board.lost = meter.lost() or 0.0


def _line(done: Outcome, setup: Setup) -> str:
    name = f"problem {done.problem} (level {done.level})"
    if not setup.is_scored:
        name = f"prompt {setup.examples[done.problem].id}"
    right = f"{done.num_right} of {len(done.answers)} right, " if setup.is_scored else ""
    speed = f"{done.tokens_per_second:.0f} tokens/s, tau {done.total.tau:.2f}"
    return f"{name}, {label(done.arm)}: {right}{speed}"


def _report(board: Board, is_json: bool) -> None:
    from forerun.bench.alerts import lost_cores_text
    from forerun.bench.demo import summary
    from forerun.bench.disturbance import MAX_EXTRA_LOSS

    setup = board.setup
    found = summary(board.outcomes, setup.arms) | {"taken": round(board.lost, 3)}
    if is_json:
        print_json(found)
        return
    out = console()
    if not found["problems"]:
        out.print("no prompt was finished by all arms")
        return
    out.print(_table(found, setup))
    for arm in setup.arms[1:]:
        out.print(_by_trajectory(found, arm))
    for arm in setup.arms[1:]:
        out.print(_speed_up(found, arm))
    if setup.is_scored and found["problems"] >= MIN_SCORED_PROMPTS:
        points = f"{100 / found['problems'] ** 0.5:.0f} points"
        out.print(
            "both sides sample the same distribution; by chance their majorities differ by about "
            f"{points} here"
        )
    elif setup.is_scored:
        out.print(f"accuracies are shown from {MIN_SCORED_PROMPTS} problems on")
    if board.lost > MAX_EXTRA_LOSS:
        out.print(f"busy machine: {lost_cores_text(board.lost)}")


def _speed_up(found: dict[str, Any], arm: str) -> str:
    """The summary line of one arm, with an interval from five prompts on."""
    figures = found["arms"][arm]
    ends = figures["speed_up_interval"]
    interval = "; 95 % interval {:.2f} to {:.2f}".format(*ends) if ends else ""
    return (
        f"[bold]{label(arm)}: speed-up {figures['speed_up']:.2f}x[/] (geometric mean of "
        f"{counted(found['problems'], 'prompt')}{interval}; wall time, prefill included)"
    )


def _table(found: dict[str, Any], setup: Setup) -> Table:
    from rich.table import Table

    n, kind = setup.sampling.n, "held-out problem" if setup.is_scored else "prompt"
    title = f"best of {n} on" if setup.is_scored else f"{n} answers to each of"
    table = Table(title=f"{title} {counted(found['problems'], kind)}")
    table.add_column("")
    figures = [found["arms"][arm] for arm in setup.arms]
    for arm in setup.arms:
        table.add_column(label(arm), justify="right")
    accuracy = {
        "accuracy of one sample": [f"{f['accuracy_one']:.1%}" for f in figures],
        f"accuracy of majority@{n}": [f"{f['accuracy_majority']:.1%}" for f in figures],
    }
    rows = (accuracy if setup.is_scored and found["problems"] >= MIN_SCORED_PROMPTS else {}) | {
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
