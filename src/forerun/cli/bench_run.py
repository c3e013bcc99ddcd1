"""One `forerun bench run`: parts are checked, the machine is measured, contestants take turns."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import typer

from forerun.cli import options
from forerun.cli.output import console, notice, print_json
from forerun.errors import DataError
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.bench.planning import Asked, Chosen
    from forerun.bench.run_writer import RunWriter


class Bench:
    """One `forerun bench run`."""

    def __init__(self, asked: Asked, out: Path, peers_dir: Path | None) -> None:
        from forerun.bench import method_names, planning
        from forerun.bench.contestants import Setup
        from forerun.bench.local_runner import Own
        from forerun.bench.run_writer import check_plan
        from forerun.models.load import choose_device
        from forerun.models.paths import located, model_folder
        from forerun.tasks import get_task

        planning.check_asked(asked)
        self.asked, self.out = asked, out
        self.tasks = {name: get_task(self._text(name)) for name in asked.tasks}
        for name in asked.methods:
            method_names.check_name(name)
        method_names.check_sampling(asked.methods, replace(asked.sampling, seed=asked.seed))
        options.check_model(asked.model, asked.dtype, asked.device)
        check_folder(out)
        check_plan(out, planning.plan_of(asked))
        self.path = model_folder(located(asked.model))
        device = str(choose_device(asked.device))
        how = asked.dtype, asked.threads
        setup = Setup(self.path, *how, device=device, environments=peers_dir)
        makers = [cache(self._twin) if asked.turns else self._model for _ in asked.methods]
        pairs = zip(asked.methods, makers, strict=True)
        self.contestants = [method_names.make(name, model, setup) for name, model in pairs]
        own = [one for one in self.contestants if isinstance(one, Own)]
        for one in own:
            one.is_bounded, parts = asked.optimum, one.parts
            specs = {kind: getattr(parts, kind) for kind in ("drafter", "controller", "verifier")}
            options.check_parts(samplings=(asked.sampling,), **specs)
        self.batch = max([1, *(one.parts.batch for one in own)])
        self._loaded: Model | None = None

    def _text(self, name: str) -> str:
        """A task as `get_task` takes it; those of a suite have names of their own."""
        suite = self.asked.suite
        return suite.of(name).text(suite.folder) if suite else name

    def run(self, is_json: bool) -> None:
        """Measures, prints a summary; raises typer.Exit: 130 if interrupted, 1 if all failed."""
        import torch

        from forerun.bench import planning
        from forerun.bench.run_writer import RunWriter
        from forerun.cli.bench_show import Ticker

        torch.set_num_threads(self.asked.threads)
        model = self._model()
        with Ticker() as ticker:
            chosen = [
                planning.choose(name, task, self.asked, model, ticker.choosing)
                for name, task in self.tasks.items()
            ]
        path = self.path if self.path.is_dir() else None
        plan = planning.manifest(self.asked, model, path, chosen)
        with RunWriter(self.out, plan) as writer:
            try:
                self._measure(writer)
                self._decode(writer, chosen)
                is_whole = True
            except KeyboardInterrupt:
                is_whole = False
            if is_whole or writer.done:
                self._summary(writer, is_json)
        if not is_whole:
            kept = f"kept {counted(len(writer.done), 'record')}; the same command goes on"
            none = "nothing was measured; the same command starts again"
            notice(f"interrupted: {kept if writer.done else none}")
            raise typer.Exit(130)
        failed = sum(record.error is not None for record in writer.done)
        if failed:
            notice(f"{failed} of {len(writer.done)} failed; with --retry they are tried again")
        gone = [name for name, found in writer.manifest.peers.items() if isinstance(found, str)]
        if gone:
            notice(f"left out: {', '.join(gone)}; with --retry they are started again")
        if failed == len(writer.done):
            raise typer.Exit(1)

    def _model(self) -> Model:
        """The model of the run; its costs are measured in full before anything is timed."""
        from forerun.engine.cost.forward import FULL_SECONDS
        from forerun.engine.cost.step import cost_of

        if self._loaded is None:
            asked = self.asked
            self._loaded = options.load(
                asked.model, dtype=asked.dtype, device=asked.device, batch=self.batch
            )
            cost_of(self._loaded.target, FULL_SECONDS)
        return self._loaded

    def _twin(self) -> Model:
        """For one of those that decode the same prompt at the same time."""
        return self._model().twin()

    def _measure(self, writer: RunWriter) -> None:
        """What is measured once, before the first prompt: the machine's limits and c(N)."""
        import torch

        from forerun.bench import machine, theory

        if writer.manifest.limits:
            return
        notice("measuring the machine's limits and the cost curve")
        plan, target = writer.manifest, self._model().target
        found = machine.limits(
            self.asked.threads, getattr(torch, plan.dtype), str(plan.machine["device"])
        )
        curve = theory.cost_curve(target)
        writer.update(
            replace(
                plan,
                limits={name: round(value, 3) for name, value in found.items()},
                cost_curve={rows: round(seconds, 9) for rows, seconds in curve.items()},
            )
        )

    def _decode(self, writer: RunWriter, chosen: list[Chosen]) -> None:
        from forerun.bench.alerts import of_the_plan
        from forerun.bench.harness import Harness
        from forerun.bench.planning import units
        from forerun.cli.bench_show import Ticker

        for line in of_the_plan(writer.manifest):
            notice(line)
        with Ticker() as ticker:
            Harness(
                units(chosen, self.asked.rounds),
                self.contestants,
                writer,
                self._model(),
                self.asked.sampling,
                seed=self.asked.seed,
                turns=self.asked.turns,
                retry=self.asked.retry,
                texts=self.asked.texts,
                on_record=ticker,
                notice=ticker.say,
            ).run()

    def _summary(self, writer: RunWriter, is_json: bool) -> None:
        from forerun.cli import bench_show

        if is_json:
            print_json(bench_show.summary(writer.manifest, writer.done))
            return
        bench_show.show_summary(console(), writer.manifest, writer.done)
        if writer.done:
            records = f"records are in {self.out}"
            notice(f"{records}; `forerun bench report {self.out}` makes a page of them")


def check_folder(folder: Path) -> None:
    """Refuses what cannot be a run's folder, before anything slow happens; leaves all as it was.

    Raises DataError for a file, what cannot be made or written, and a folder of other things.
    """
    from forerun.bench.results import RECORDS

    records, made = folder / RECORDS, list[Path]()
    doing = f"make the run folder {folder}"
    try:
        options.check_out_folder(folder)
        made = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        doing = f"write {records}"
        _check_others(folder)
        with TemporaryFile(dir=folder):
            pass
        if records.exists():
            os.close(os.open(records, os.O_RDWR))
    except OSError as error:
        raise DataError(f"cannot {doing}: {error.strerror}; give --out another place") from None
    finally:
        for each in made:
            with suppress(OSError):
                each.rmdir()


def _check_others(folder: Path) -> None:
    """Raises DataError for a folder that holds no run but other things; logs are none."""
    from forerun.bench.results import MANIFEST, RECORDS

    names = sorted(os.listdir(folder))
    others = [name for name in names if not name.startswith(".") and not name.endswith(".log")]
    if others and MANIFEST not in names and RECORDS not in names:
        more = f" and {len(others) - 1} more" if others[1:] else ""
        raise DataError(
            f"{folder} is no run's folder and not empty: it holds {others[0]!r}{more}; give --out "
            "a new or empty folder, or that of a run"
        )
