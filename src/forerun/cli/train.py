"""`forerun train NAME`: trains a model or drafter by its recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.errors import UnknownName

if TYPE_CHECKING:
    from forerun.training.loop import Progress

RECIPES = ("reasoner",)


def command(
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
    from forerun.training.recipes.reasoner import Plan, run

    plan = Plan(out, minutes, draft_minutes, threads, device, seed, problems, num_held_out=held_out)
    typer.echo(
        f"training {name} in {out}: {minutes:g} + {draft_minutes:g} min on {device}, seed {seed}"
    )
    with Display() as display:
        try:
            reports = run(plan, resume, display.events())
        except KeyboardInterrupt:
            typer.echo(
                f"\nstopped and saved; continue with: forerun train {name} --out {out} --resume"
            )
            raise typer.Exit(130) from None
    for model, r in reports.items():
        typer.echo(
            f"{model}: one sample {r.one_sample:.1f} %, majority@{r.num_samples} {r.majority:.1f} %"
            f", entropy {r.mean_entropy:.2f} nats per token, {r.fork_share:.0f} % forks"
            f" -> {out / model}"
        )


class Display:
    """Progress bars for data, training and evaluation."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        text = TextColumn("{task.description}")
        self.bars = Progress(
            text, BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn()
        )
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Display:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def events(self) -> Any:
        """The callbacks that draw."""
        from forerun.training.recipes.reasoner import Events

        return Events(
            on_data=lambda done, total: self.draw("data", done / total, f"{done}/{total} shards"),
            on_step=self._on_step,
            on_evaluation=lambda done, total: self.draw(
                f"evaluation {self._turn()}", done / total, f"{done}/{total}"
            ),
        )

    def draw(self, title: str, share: float, note: str) -> None:
        """Moves the bar of that title, made on first use."""
        if title not in self.tasks:
            self.tasks[title] = self.bars.add_task(title, total=1.0, note="")
        self.bars.update(self.tasks[title], completed=min(1.0, share), note=note)

    def _turn(self) -> int:
        """Number of the evaluation that is running: 1 until its bar is full, then 2."""
        first = self.tasks.get("evaluation 1")
        return 2 if first is not None and self.bars.tasks[first].finished else 1

    def _on_step(self, model: str, p: Progress, spent: float) -> None:
        left = p.seconds * (1 - spent) / spent / 60 if spent > 0 else 0.0
        self.draw(
            model,
            spent,
            f"step {p.step}  loss {p.loss:.3f}  {p.rate:,.0f} tokens/s  {left:.0f} min left",
        )
