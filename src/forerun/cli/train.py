"""`forerun train NAME`: trains a model or head by its recipe."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from forerun.training.loop import Progress


def command(
    ctx: typer.Context,
    name: Annotated[
        str, typer.Argument(help="What to train: reasoner, acceptance_head or judge_head.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for data, checkpoints and what is made [the recipe's name]."),
    ] = None,
    problems: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Training problems [reasoner 160000, acceptance_head 2000, judge_head 800].",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Decides data, initial weights and order [0].")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Training time, at most [reasoner 60; acceptance_head: its 600 steps]. "
            "Not for judge_head, which is solved for.",
        ),
    ] = None,
    draft_minutes: Annotated[
        float | None,
        typer.Option(min=0.01, help="Training time of the reasoner's small draft [10]."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU cores, reasoner only [2].")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N, reasoner only [cpu].")
    ] = None,
    held_out: Annotated[
        int | None,
        typer.Option(min=1, help="Held-out problems for evaluation, reasoner only [200]."),
    ] = None,
    resume: Annotated[
        bool | None,
        typer.Option(
            "--resume",
            help="Continue the run in --out. Not for judge_head: labels found there serve again.",
        ),
    ] = None,
) -> None:
    """Train a model or a head by its recipe and export it. Ctrl-C saves; --resume continues."""
    given = {key: value for key, value in ctx.params.items() if value is not None}
    recipe = check(given.pop("name"), given)
    set_up(given.get("device", "cpu"))
    with Display() as display:
        try:
            lines = recipe.run({"out": Path(name)} | given, display)
        except KeyboardInterrupt:
            typer.echo(f"\n{_stopped(ctx, name, recipe)}")
            raise typer.Exit(130) from None
    for line in lines:
        typer.echo(line)


@dataclass(frozen=True)
class Recipe:
    """run: from the options given to the lines that say what was made. options: all that it has."""

    run: Callable[[dict[str, Any], Display], list[str]]
    options: frozenset[str]


def check(name: str, given: dict[str, Any]) -> Recipe:
    """The recipe of a name.

    Raises UnknownName, ConfigError for an option or a device that it does not have, DataError for
    what cannot be --out.
    """
    if name not in RECIPES:
        raise UnknownName.of("recipe", name, list(RECIPES))
    known = RECIPES[name].options
    if foreign := sorted(given.keys() - known):
        flags, own = (
            ", ".join(f"--{option.replace('_', '-')}" for option in names)
            for names in (foreign, sorted(known))
        )
        raise ConfigError(f"recipe {name!r} has no {flags}; it takes {own}")
    device = given.get("device", "cpu")
    if not DEVICE.fullmatch(device):
        raise ConfigError(f"--device must be cpu, cuda or cuda:N to train on, got {device!r}")
    out = given.get("out", Path(name))
    options.check_out_folder(out)
    options.check_folder_name(out)
    return RECIPES[name]


def _stopped(ctx: typer.Context, name: str, recipe: Recipe) -> str:
    """What Ctrl-C leaves behind."""
    again = {"resume": True} if "resume" in recipe.options else {}
    call = options.call_line(ctx, name=None, **again).replace("train", f"train {name}", 1)
    if again:
        return f"stopped and saved; continue with: {call}"
    return f"stopped; nothing is kept of a step that was not finished; begin again with: {call}"


def _plan(cls: type[Any], given: dict[str, Any], **names: str) -> Any:
    """A recipe's plan: its own defaults where nothing was given. names: option -> field."""
    fields = {names.get(key, key): value for key, value in given.items() if key != "resume"}
    return cls(**fields)


def _reasoner(given: dict[str, Any], display: Display) -> list[str]:
    from forerun.models.load import choose_device
    from forerun.training.recipes.reasoner import Plan, run

    plan = _plan(Plan, given, problems="num_problems", held_out="num_held_out")
    choose_device(plan.device)  # raises ConfigError where torch sees no GPU
    typer.echo(
        f"training reasoner in {plan.out}: {plan.minutes:g} + {plan.draft_minutes:g} min on "
        f"{plan.device}, seed {plan.seed}"
    )
    reports = run(plan, given.get("resume", False), display.events())
    return [
        f"{model}: one sample {r.one_sample:.1f} %, majority@{r.num_samples} {r.majority:.1f} %"
        f", entropy {r.mean_entropy:.2f} nats per token, {r.fork_share:.0f} % forks"
        f", tau {r.tau:.2f} -> {plan.out / model}"
        for model, r in reports.items()
    ]


def _acceptance_head(given: dict[str, Any], display: Display) -> list[str]:
    from forerun.training.recipes.acceptance_head import Plan, run

    plan = _plan(Plan, given, problems="num_texts")
    limit = f", at most {plan.minutes:g} min" if plan.minutes else ""
    typer.echo(
        f"training acceptance_head in {plan.out}: {plan.max_steps} steps{limit}, seed {plan.seed}"
    )
    show = display.events().on_step
    resume = given.get("resume", False)
    progress, area = run(plan, resume, lambda p, spent: show("head", p, spent))
    return [
        f"head: {progress.step} steps, area under the curve {area:.3f} on a tenth of the texts"
        f" -> {plan.out}"
    ]


def _judge_head(given: dict[str, Any], display: Display) -> list[str]:
    from forerun.training.recipes.judge_head import Plan, run

    plan = _plan(Plan, given, problems="num_problems")
    typer.echo(f"training judge_head in {plan.out}: {plan.num_problems} problems, seed {plan.seed}")
    found = run(plan, lambda what, share: display.draw(what, share, ""))
    return [
        f"head: delta {found.head.delta:.3f}; on {found.correct} correct and {found.mistakes} "
        f"wrong tokens that neither it nor delta has seen: area under the curve {found.auc:.3f}, "
        f"{found.kept_correct:.1%} of the former kept, {found.kept_mistakes:.1%} of the latter"
        f" -> {plan.out}"
    ]


DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
COMMON = {"out", "problems", "seed"}
LOOP = COMMON | {"minutes", "resume"}  # what is trained in steps
RECIPES = {
    "reasoner": Recipe(
        _reasoner, frozenset(LOOP | {"draft_minutes", "threads", "device", "held_out"})
    ),
    "acceptance_head": Recipe(_acceptance_head, frozenset(LOOP)),
    "judge_head": Recipe(_judge_head, frozenset(COMMON)),
}


def set_up(device: str) -> None:
    """What torch reads when it is loaded, here and in the processes started from here.

    Batches have many shapes, and oneDNN makes kernels anew for those that it has no room for. On
    a CPU, each process has one thread: --threads counts them.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")
    if device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"


class Display:
    """Progress of data, training and evaluation: bars on a terminal, else a line now and then."""

    def __init__(
        self,
        every: float = 30.0,  # seconds between lines
        is_terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        text = TextColumn("{task.description}")
        self.bars = Progress(
            text, BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn()
        )
        self.tasks: dict[str, Any] = {}
        self.every, self.clock = every, clock
        self.is_terminal = sys.stdout.isatty() if is_terminal is None else is_terminal
        self.printed: dict[str, float] = {}  # time of each title's last line

    def __enter__(self) -> Display:
        if self.is_terminal:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_terminal:
            self.bars.stop()

    def events(self) -> Any:
        """The callbacks that draw."""
        from forerun.training.recipes.reasoner import Events

        return Events(
            on_data=lambda done, total: self.draw("data", done / total, f"{done}/{total} shards"),
            on_step=self._on_step,
            on_evaluation=lambda what, done, total: self.draw(
                f"evaluation: {what}", done / total, f"{done}/{total} problems"
            ),
        )

    def draw(self, title: str, share: float, note: str) -> None:
        """Moves the bar of that title, made on first use; or prints the line that is due."""
        if not self.is_terminal:
            self._print(title, share, note)
            return
        if title not in self.tasks:
            self.tasks[title] = self.bars.add_task(title, total=1.0, note="")
        self.bars.update(self.tasks[title], completed=min(1.0, share), note=note)

    def _print(self, title: str, share: float, note: str) -> None:
        now = self.clock()
        if title not in self.printed or share >= 1 or now - self.printed[title] >= self.every:
            self.printed[title] = now
            typer.echo(f"{title}  {min(1.0, share):.0%}  {note}")

    def _on_step(self, model: str, p: Progress, spent: float) -> None:
        left = p.seconds * (1 - spent) / spent / 60 if spent > 0 else 0.0
        self.draw(
            model,
            spent,
            f"step {p.step}  {p.tokens / 1e6:.2f} M tokens  {p.rate:,.0f} tokens/s  "
            f"loss {p.loss:.3f}  {max(0.0, left):.0f} min left",
        )
