"""`forerun train NAME`: trains a model or drafter by its recipe."""

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

RECIPES = ("reasoner",)


def command(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="What to train: reasoner.")],
    out: Annotated[
        Path, typer.Option(help="Folder for data, checkpoints and the finished models.")
    ] = Path("reasoner"),
    minutes: Annotated[float, typer.Option(min=0.01, help="Training time of the reasoner.")] = 60.0,
    draft_minutes: Annotated[
        float, typer.Option(min=0.01, help="Training time of its small draft.")
    ] = 10.0,
    threads: Annotated[int, typer.Option(min=1, help="CPU cores to use.")] = 2,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Decides data, initial weights and order.")] = 0,
    problems: Annotated[int, typer.Option(min=1, help="Training problems to generate.")] = 160_000,
    held_out: Annotated[int, typer.Option(min=1, help="Held-out problems to evaluate on.")] = 200,
    resume: Annotated[bool, typer.Option(help="Continue the run in --out.")] = False,
) -> None:
    """Train a model by its recipe, evaluate and export it. Ctrl-C saves; --resume continues."""
    if name not in RECIPES:
        raise UnknownName.of("recipe", name, RECIPES)
    set_up(device)
    from forerun.training.recipes.reasoner import Plan, run

    plan = Plan(out, minutes, draft_minutes, threads, device, seed, problems, num_held_out=held_out)
    typer.echo(
        f"training {name} in {out}: {minutes:g} + {draft_minutes:g} min on {device}, seed {seed}"
    )
    with Display() as display:
        try:
            reports = run(plan, resume, display.events())
        except KeyboardInterrupt:
            call = options.call_line(ctx, name=None, resume=True)
            call = call.replace("train", f"train {name}", 1)
            typer.echo(f"\nstopped and saved; continue with: {call}")
            raise typer.Exit(130) from None
    for model, r in reports.items():
        typer.echo(
            f"{model}: one sample {r.one_sample:.1f} %, majority@{r.num_samples} {r.majority:.1f} %"
            f", entropy {r.mean_entropy:.2f} nats per token, {r.fork_share:.0f} % forks"
            f", tau {r.tau:.2f} -> {out / model}"
        )


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
