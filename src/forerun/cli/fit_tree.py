"""`forerun fit-tree`: rank the nodes of a draft tree by their acceptance on a model's texts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.assets import is_embedded
from forerun.cli import loading, options
from forerun.cli.output import console, notice, print_json
from forerun.cli.prompts import as_shown, read_jobs
from forerun.core.sampling import Sampling, check_samples
from forerun.errors import CapacityError, ConfigError, DataError

if TYPE_CHECKING:
    from forerun.api import Model
    from forerun.core.tree_template import Template
    from forerun.growers._fit_template import PlaceCounts

Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        "-f",
        help="JSON lines with a prompt each; default for the embedded reasoner: its problems.",
    ),
]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Prompts to fit on.")]
Number = Annotated[int, typer.Option("-n", min=1, help="Samples per prompt.")]
HeldOut = Annotated[
    int, typer.Option("--held-out", min=1, help="Other prompts to measure the result on.")
]
Sizes = Annotated[str, typer.Option("--sizes", help="Tree sizes to measure, joined by +.")]
OutFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="File to write; default: forerun-template.json in the model's folder, or in the "
        "user's cache if that is read-only. forerun finds both.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Random seed of the samples.")]


@dataclass(frozen=True)
class Split:
    """Prompts to fit on and prompts to measure on."""

    fit: list[Any]
    held_out: list[Any]


def command(
    model: options.ModelName = "reasoner",
    prompts: Prompts = None,
    samples: Samples = 30,
    n: Number = 4,
    held_out: HeldOut = 10,
    sizes: Sizes = "8+16+32",
    temperature: options.Temperature = 0.6,
    max_new_tokens: options.MaxNewTokens = 512,
    batch: options.Batch = 1,
    out: OutFile = None,
    seed: Seed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    is_json: options.Json = False,
) -> None:
    """Fit the draft tree's template to a model and its prompts.

    `--drafter stand:tree=template` then uses the template. Plain `stand` counts acceptance itself.
    """
    from forerun.core.tree_template import DEFAULT
    from forerun.state import array_file

    options.check_model(model, dtype, device, batch)
    widths = _sizes(sizes)
    sampling = Sampling(temperature=temperature, n=n, max_new_tokens=max_new_tokens, seed=seed)
    check_samples([sampling], "use more prompts")
    split = _split(model, prompts, samples, held_out)
    path = out or _default_path(model)
    array_file.check_place(_first_new_path(path))
    _check_replaced(path)
    loaded = loading.load(model, dtype=dtype, device=device, batch=batch)
    with _write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    tally = _count(loaded, split.fit, sampling, batch)
    found = tally.ranked()
    gains = _gains(loaded, split.held_out, sampling, {"before": DEFAULT, "after": found}, widths)
    facts = tally.facts(found) | {
        "model": Path(model).name,
        "fitted_on": {"prompts": len(split.fit), "trajectories": n, "temperature": temperature},
        "measured_on": {"prompts": len(split.held_out), "tau": gains},
        "date": datetime.now(UTC).date().isoformat(),
    }
    with _write_errors(path):
        found.save(path, **facts)
    record = {"file": str(path), "passes": tally.passes, "places": len(found), "tau": gains}
    print_json(record) if is_json else _show(record)


def _sizes(text: str) -> list[int]:
    from forerun.core.tree_template import DEFAULT

    try:
        found = [int(piece) for piece in text.split("+")]
    except ValueError:
        found = []
    most = len(DEFAULT)
    if not found or min(found) < 1 or max(found) > most:
        raise ConfigError(
            f"--sizes must be numbers of nodes in 1..{most}, as a template has {most} places, got "
            f"{text!r}; try 8+16+32"
        )
    return found


def _split(model: str, file: Path | None, samples: int, held_out: int) -> Split:
    """Splits the prompts; no prompt is in both parts. Raises ConfigError, DataError."""
    if file is None:
        if not is_embedded(model):
            raise ConfigError(
                "fit-tree needs --prompts FILE, JSON lines with your prompts; only the embedded "
                "models have built-in prompts"
            )
        from forerun.tasks.reasoning import ReasoningTask

        train, test = ReasoningTask("train"), ReasoningTask("heldout")
        fit = [train.example(i).prompt for i in range(samples)]
        return Split(fit, [test.example(i).prompt for i in range(held_out)])
    jobs = read_jobs([], file, Sampling())
    texts = [as_shown(model, prompt) for prompt in _distinct([job.prompt for job in jobs])]
    if len(texts) < 2:
        raise DataError(
            f"{file} has {len(texts)} different prompt(s); give two or more: some to fit on, some "
            "to measure on"
        )
    if len(texts) < samples + held_out:
        held_out = max(1, len(texts) * held_out // (samples + held_out))
        samples = len(texts) - held_out
        notice(f"{len(texts)} prompts: {samples} to fit on, {held_out} to measure on")
    return Split(texts[:samples], texts[samples : samples + held_out])


def _distinct(prompts: list[Any]) -> list[Any]:
    return list({str(prompt): prompt for prompt in prompts}.values())


def _check_replaced(path: Path) -> None:
    """Raises ConfigError if the file exists and is not a template."""
    from forerun.core.tree_template import Template
    from forerun.errors import DataError

    if path.exists():
        try:
            Template.load(path)
        except (DataError, ConfigError) as error:
            raise ConfigError(
                f"{path} exists and is not a template; give another file with --out"
            ) from error


def _default_path(model: str) -> Path:
    """The file in which a model's template is searched and written."""
    from forerun.assets import MODELS
    from forerun.growers import _fit_template as fitting

    folder = Path(model).expanduser()
    if model not in MODELS and folder.is_dir() and os.access(folder, os.W_OK):
        return folder / fitting.FILE_NAME
    cached = fitting.cache_file(model)
    if cached is None:
        raise ConfigError(f"there is no folder for the template of {model!r}; give --out FILE")
    return cached


def _first_new_path(path: Path) -> Path:
    """The file, or the outermost missing folder above it."""
    return next(place for place in (path, *path.parents) if place.parent.exists())


def _count(model: Model, prompts: list[Any], sampling: Sampling, batch: int) -> PlaceCounts:
    from forerun.growers import _fit_template as fitting

    start = said = time.perf_counter()
    counts = fitting.count_places(model, prompts, sampling, batch=batch)
    for done, tally in enumerate(counts, start=1):
        if time.perf_counter() - said > 10 or done == len(prompts):
            said = time.perf_counter()
            notice(
                f"{done} of {len(prompts)} prompts, {tally.passes} passes over "
                f"{fitting.MAX_NODES} nodes, {said - start:.0f} s"
            )
    return tally


def _gains(
    model: Model,
    prompts: list[Any],
    sampling: Sampling,
    templates: dict[str, Template],
    sizes: list[int],
) -> dict[str, dict[str, float]]:
    """Tree size -> tau before and after, on held-out prompts."""
    from forerun.growers import _fit_template as fitting

    return {
        str(size): {
            name: round(fitting.measure(model, prompts, sampling, template, size), 3)
            for name, template in templates.items()
        }
        for size in sizes
    }


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CapacityError(
            f"cannot write {path}: {error.strerror}; give --out another place"
        ) from None


def _show(record: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="tau on held-out prompts")
    for name in ("nodes", "before", "after"):
        table.add_column(name, justify="right")
    for size, taus in record["tau"].items():
        table.add_row(size, f"{taus['before']:.2f}", f"{taus['after']:.2f}")
    console().print(table)
    print(f"{record['places']} places ranked by {record['passes']} passes: {record['file']}")
