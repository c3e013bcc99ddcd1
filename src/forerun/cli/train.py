"""`forerun train NAME`: trains a model or head by its recipe."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli import options
from forerun.errors import UnknownName

if TYPE_CHECKING:
    from forerun.training.loop import Progress

RECIPES = ("reasoner", "acceptance_head", "judge_head")


def command(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help=f"What to train: {', '.join(RECIPES)}.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for data, checkpoints and what is made [the recipe's name]."),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Training time, at most.")] = 60.0,
    draft_minutes: Annotated[
        float, typer.Option(min=0.01, help="Training time of the reasoner's small draft.")
    ] = 10.0,
    threads: Annotated[int, typer.Option(min=1, help="CPU cores for the reasoner.")] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda, for the reasoner.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Decides data, initial weights and order.")] = 0,
    problems: Annotated[
        int | None, typer.Option(min=2, help="Training problems [160000; 2000 for a head].")
    ] = None,
    held_out: Annotated[
        int, typer.Option(min=1, help="Held-out problems to evaluate the reasoner on.")
    ] = 200,
    resume: Annotated[bool, typer.Option(help="Continue the run in --out.")] = False,
) -> None:
    """Train a model or a head by its recipe and export it. Ctrl-C saves; --resume continues."""
    if name not in RECIPES:
        raise UnknownName.of("recipe", name, RECIPES)
    set_up(device)
    given = ctx.params | {"out": out or Path(name)}
    with Display() as display:
        try:
            recipes = _reasoner, _acceptance_head, _judge_head
            lines = dict(zip(RECIPES, recipes, strict=True))[name](given, display)
        except KeyboardInterrupt:
            call = options.call_line(ctx, name=None, resume=True)
            call = call.replace("train", f"train {name}", 1)
            typer.echo(f"\nstopped and saved; continue with: {call}")
            raise typer.Exit(130) from None
    for line in lines:
        typer.echo(line)


def _reasoner(given: dict[str, Any], display: Display) -> list[str]:
    from forerun.training.recipes.reasoner import Plan, run

    out, minutes, draft_minutes = (given[key] for key in ("out", "minutes", "draft_minutes"))
    plan = Plan(
        out,
        minutes,
        draft_minutes,
        given["threads"],
        given["device"],
        given["seed"],
        given["problems"] or 160_000,
        num_held_out=given["held_out"],
    )
    typer.echo(
        f"training reasoner in {out}: {minutes:g} + {draft_minutes:g} min on {plan.device}, "
        f"seed {plan.seed}"
    )
    reports = run(plan, given["resume"], display.events())
    return [
        f"{model}: one sample {r.one_sample:.1f} %, majority@{r.num_samples} {r.majority:.1f} %"
        f", entropy {r.mean_entropy:.2f} nats per token, {r.fork_share:.0f} % forks"
        f", tau {r.tau:.2f} -> {out / model}"
        for model, r in reports.items()
    ]


def _acceptance_head(given: dict[str, Any], display: Display) -> list[str]:
    from forerun.training.recipes.acceptance_head import Plan, run

    plan = Plan(
        given["out"],
        num_texts=given["problems"] or Plan.num_texts,
        minutes=given["minutes"],
        seed=given["seed"],
    )
    typer.echo(
        f"training acceptance_head in {plan.out}: {plan.max_steps} steps, at most "
        f"{plan.minutes:g} min, seed {plan.seed}"
    )
    show = display.events().on_step
    progress, area = run(plan, given["resume"], lambda p, spent: show("head", p, spent))
    return [
        f"head: {progress.step} steps, area under the curve {area:.3f} on a tenth of the texts"
        f" -> {plan.out}"
    ]


def _judge_head(given: dict[str, Any], display: Display) -> list[str]:
    from forerun.training.recipes.judge_head import Plan, run

    plan = Plan(
        given["out"], num_problems=given["problems"] or Plan.num_problems, seed=given["seed"]
    )
    typer.echo(f"training judge_head in {plan.out}: {plan.num_problems} problems, seed {plan.seed}")
    found = run(plan, lambda what, share: display.draw(what, share, ""))
    return [
        f"head: area under the curve {found.auc:.3f} on {found.correct} correct and "
        f"{found.mistakes} wrong tokens held out; delta {found.head.delta:.3f} keeps "
        f"{found.kept_correct:.1%} of the former, {found.kept_mistakes:.1%} of the latter"
        f" -> {plan.out}"
    ]


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
