"""`forerun bench run`: checks the options, measures the machine, runs the harness."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import typer

from forerun.cli import loading, options
from forerun.cli.output import console, notice, print_json
from forerun.errors import DataError
from forerun.utils.text import counted

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.bench.planning import ChosenExamples, RunRequest
    from forerun.bench.run_writer import RunWriter


class Bench:
    """One `forerun bench run`."""

    def __init__(self, request: RunRequest, out: Path, peers_dir: Path | None) -> None:
        from forerun.bench import method_names, planning
        from forerun.bench.contestants import Setup
        from forerun.bench.local_runner import LocalMethod
        from forerun.bench.run_writer import check_plan
        from forerun.models.load import choose_device
        from forerun.models.paths import located, model_folder
        from forerun.tasks import get_task

        planning.check_request(request)
        self.request, self.out = request, out
        self.tasks = {name: get_task(self._text(name)) for name in request.tasks}
        for name in request.methods:
            method_names.check_name(name)
        method_names.check_sampling(request.methods, replace(request.sampling, seed=request.seed))
        options.check_model(request.model, request.dtype, request.device)
        check_folder(out)
        check_plan(out, planning.plan_of(request))
        self.path = model_folder(located(request.model))
        device = str(choose_device(request.device))
        how = request.dtype, request.threads
        setup = Setup(self.path, *how, device=device, environments=peers_dir)
        makers = [cache(self._twin) if request.turns else self._model for _ in request.methods]
        pairs = zip(request.methods, makers, strict=True)
        self.contestants = [method_names.make(name, model, setup) for name, model in pairs]
        local = [one for one in self.contestants if isinstance(one, LocalMethod)]
        for one in local:
            one.has_headroom, parts = request.optimum, one.parts
            one.constraint = request.constraint
            specs = {kind: getattr(parts, kind) for kind in ("drafter", "controller", "verifier")}
            options.check_parts(samplings=(request.sampling,), **specs)
        options.check_parts(target=request.target or None, constraint=request.constraint)
        self.batch = max([1, *(one.parts.batch for one in local)])
        self._loaded: Model | None = None

    def _text(self, name: str) -> str:
        """A task in the form of `get_task`; tasks of a suite have labels."""
        suite = self.request.suite
        return suite.of(name).text(suite.folder) if suite else name

    def run(self, is_json: bool) -> None:
        """Measures and prints a summary. Raises typer.Exit: 130 if interrupted, 1 if all failed."""
        import torch

        from forerun.bench import planning
        from forerun.bench.run_writer import RunWriter
        from forerun.cli.bench_show import Ticker

        torch.set_num_threads(self.request.threads)
        model = self._model()
        with Ticker() as ticker:
            chosen = [
                planning.choose(name, task, self.request, model, ticker.choosing)
                for name, task in self.tasks.items()
            ]
        path = self.path if self.path.is_dir() else None
        plan = planning.manifest(self.request, model, path, chosen)
        with RunWriter(self.out, plan) as writer:
            try:
                self._measure(writer)
                self._decode(writer, chosen)
                is_complete = True
            except KeyboardInterrupt:
                is_complete = False
            if is_complete or writer.done:
                self._summary(writer, is_json)
        if not is_complete:
            kept = f"{counted(len(writer.done), 'record')} kept; the same command resumes the run"
            none = "nothing was measured; the same command starts again"
            notice(f"interrupted: {kept if writer.done else none}")
            raise typer.Exit(130)
        failed = sum(record.error is not None for record in writer.done)
        if failed:
            notice(f"{failed} of {len(writer.done)} failed; --retry measures them again")
        gone = [name for name, found in writer.manifest.peers.items() if isinstance(found, str)]
        if gone:
            notice(f"left out: {', '.join(gone)}; --retry starts them again")
        if failed == len(writer.done):
            raise typer.Exit(1)

    def _model(self) -> Model:
        """The loaded model, with its cost model measured completely."""
        from forerun.engine.cost.step import cost_of

        if self._loaded is None:
            request = self.request
            how: dict[str, Any] = {"dtype": request.dtype, "device": request.device}
            target = request.target or None
            self._loaded = loading.load(request.model, batch=self.batch, target=target, **how)
            cost_of(self._loaded.target, is_full=True)
        return self._loaded

    def _twin(self) -> Model:
        """A copy with its own cache, for methods that alternate on a prompt."""
        return self._model().twin()

    def _measure(self, writer: RunWriter) -> None:
        """Measures the machine's limits and the cost curve once per run."""
        import torch

        from forerun.bench import hardware_limits, theory

        if writer.manifest.limits:
            return
        notice("measuring the machine's limits and the cost curve")
        plan, target = writer.manifest, self._model().target
        found = hardware_limits.limits(
            self.request.threads, getattr(torch, plan.dtype), str(plan.machine["device"])
        )
        curve = theory.cost_curve(target)
        writer.update(
            replace(
                plan,
                limits={name: round(value, 3) for name, value in found.items()},
                cost_curve={rows: round(seconds, 9) for rows, seconds in curve.items()},
            )
        )

    def _decode(self, writer: RunWriter, chosen: list[ChosenExamples]) -> None:
        from forerun.bench.alerts import plan_alerts
        from forerun.bench.harness import Harness
        from forerun.bench.planning import units
        from forerun.cli.bench_show import Ticker

        for line in plan_alerts(writer.manifest):
            notice(line)
        with Ticker() as ticker:
            Harness(
                units(chosen, self.request.rounds),
                self.contestants,
                writer,
                self._model(),
                self.request.sampling,
                seed=self.request.seed,
                turns=self.request.turns,
                retry=self.request.retry,
                texts=self.request.texts,
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
            notice(f"records: {self.out}; report: `forerun bench report {self.out}`")


def check_folder(folder: Path) -> None:
    """Checks early that a run folder can be created and written; leaves no traces.

    Raises DataError, also for a folder with other files.
    """
    from forerun.bench.results import RECORDS

    records, created = folder / RECORDS, list[Path]()
    doing = f"create the run folder {folder}"
    try:
        options.check_out_folder(folder)
        created = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        doing = f"write {records}"
        _check_others(folder)
        with TemporaryFile(dir=folder):
            pass
        if records.exists():
            os.close(os.open(records, os.O_RDWR))
    except OSError as error:
        raise DataError(f"cannot {doing}: {error.strerror}; use another --out") from None
    finally:
        for each in created:
            with suppress(OSError):
                each.rmdir()


def _check_others(folder: Path) -> None:
    """Raises DataError for a folder with files other than a run and logs."""
    from forerun.bench.results import MANIFEST, RECORDS

    names = sorted(os.listdir(folder))
    others = [name for name in names if not name.startswith(".") and not name.endswith(".log")]
    if others and MANIFEST not in names and RECORDS not in names:
        more = f" and {len(others) - 1} more" if others[1:] else ""
        raise DataError(
            f"{folder} is not a run folder and contains {others[0]!r}{more}; use a new or empty "
            "--out"
        )
