"""`plan.json`: settings of a training folder, written at the start, compared on every resume."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from inspect import Parameter
from pathlib import Path
from typing import Any, ClassVar, Protocol

from forerun import registry
from forerun.errors import ConfigError, DataError
from forerun.models.identity import model_hash
from forerun.models.paths import located, model_folder
from forerun.utils.files import reports_no_room, write_atomically

NAME = "plan.json"
RECIPE_KEY = "train"  # plan.json: name of the recipe; "recipe" is an option of draft
RENAMED = {  # settings in folders of earlier versions
    "num_problems": "problems",
    "num_texts": "problems",
    "num_tokenizer_problems": "tokenizer_problems",
    "SHA-256 of prompts": "prompts_hash",
}


class Planned(Protocol):
    """The fields of a recipe that plans use."""

    may_change: ClassVar[frozenset[str]]

    def fixed(self) -> dict[str, Any]:
        """Constants of the recipe."""
        ...


def begin(folder: Path, recipe: Planned, *, is_trained: bool, resume: bool) -> None:
    """Starts or continues a run in a folder: `check`, then `write`."""
    check(folder, recipe, is_trained=is_trained, resume=resume)
    write(folder, recipe)


def check(folder: Path, recipe: Planned, *, is_trained: bool, resume: bool) -> None:
    """Checks that a run may start or continue in a folder; writes nothing.

    is_trained: whether the folder has a checkpoint. Raises ConfigError if the folder has something
    that must not be overwritten, or a run with other settings.
    """
    check_resume(folder, is_trained, resume)
    check_plan(folder, settings(recipe))


def write(folder: Path, recipe: Planned) -> None:
    """Writes the plan of a recipe."""
    write_plan(folder, settings(recipe), budgets(recipe))


def check_resume(folder: Path, is_trained: bool, resume: bool) -> None:
    """Raises ConfigError if a run would overwrite something, or there is none to resume.

    Hidden files and folders with plans of their own, such as recorded answers, may be there.
    """
    if not has_run(folder):
        paths = folder.iterdir() if folder.exists() else ()
        if not all((path / NAME).exists() for path in paths if path.name[0] != "."):
            raise ConfigError(
                f"{folder} has files, but none of a training run; choose a new or empty folder"
            )
        if resume:
            raise ConfigError(
                f"there is no run in {folder} to resume; check --out, or drop --resume"
            )
    elif is_trained and not resume:
        raise ConfigError(
            f"{folder} holds an earlier run; continue it with --resume, or choose another --out"
        )


def has_run(folder: Path) -> bool:
    """Whether a run was started in a folder; old ones have a checkpoint but no plan."""
    return (folder / NAME).exists() or any(folder.glob("*.pt"))


def has_results(folder: Path) -> bool:
    """Whether a folder has files other than plans."""
    return any(path.is_file() and path.name != NAME for path in folder.rglob("*"))


def settings(recipe: Planned) -> dict[str, Any]:
    """What a resumed run must not change, for JSON: name of the recipe, options, constants."""
    kept = [name for name in registry.options(type(recipe)) if name not in recipe.may_change]
    chosen = {name: plain(getattr(recipe, name)) for name in kept}
    return {RECIPE_KEY: recipe_name(type(recipe))} | chosen | recipe.fixed()


def budgets(recipe: Planned) -> dict[str, Any]:
    """Options that a resumed run may change."""
    kept = [name for name in registry.options(type(recipe)) if name in recipe.may_change]
    return {name: plain(getattr(recipe, name)) for name in kept}


def recipe_name(cls: type) -> str:
    """The name of a recipe on the command line."""
    return cls.__module__.rpartition(".")[2]


def options_of_run(folder: Path, cls: type) -> dict[str, Any]:
    """The options that the last run of a recipe in a folder had; unset ones are left out.

    Empty if the folder has a run of another recipe, or none. Raises DataError.
    """
    found = read_plan(folder) | read_budgets(folder)
    if found.get(RECIPE_KEY, recipe_name(cls)) != recipe_name(cls):
        return {}
    read = {name: _read(found.get(name), option) for name, option in registry.options(cls).items()}
    return {name: value for name, value in read.items() if value is not None}


def _read(value: Any, option: Parameter) -> Any:
    """The value of an option from JSON; None for what the command line cannot express."""
    if isinstance(value, str) and "Path" in registry.type_names(option):
        return Path(value)
    if isinstance(value, list):
        return tuple(value)
    return value if isinstance(value, bool | int | float | str) else None


def model_hashes(**names: str) -> dict[str, str]:
    """The hash of each model, for a plan. names: models by the option that names them.

    A hub model is downloaded first. Raises ModelError.
    """
    folders = {option: model_folder(located(name)) for option, name in names.items()}
    return {f"{option}_hash": model_hash(str(folder)) for option, folder in folders.items()}


def plain(value: Any) -> Any:
    """An option as a JSON value."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value) if isinstance(value, Path) else value


def read_plan(folder: Path) -> dict[str, Any]:
    """The settings in a folder's plan.json; empty if there is none. Raises DataError."""
    path = folder / NAME
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())["settings"].items()
        return {RENAMED.get(name, name): value for name, value in found}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not a readable plan ({error!r}); restore it, or choose another --out"
        ) from error


def read_budgets(folder: Path) -> dict[str, Any]:
    """What the last run in a folder was given of the options that may change."""
    try:
        found = json.loads((folder / NAME).read_text()).get("budgets", {})
    except (OSError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def check_plan(folder: Path, wanted: dict[str, Any]) -> None:
    """Raises ConfigError for the first setting that differs from the folder's plan.

    The plan of a run that has written nothing else, such as one that was refused, does not count.
    """
    if not has_results(folder):
        return
    wanted = json.loads(json.dumps(wanted))  # tuples become lists, as they are read back
    for name, before in read_plan(folder).items():
        if name not in wanted or wanted[name] == before:
            continue
        if name.endswith("_hash"):
            what, now = name.removesuffix("_hash"), wanted[name]
            raise ConfigError(
                f"the content of {what} has changed since {folder} was started (SHA-256 "
                f"{before[:12]}, now {now[:12]}); restore it, or choose another --out"
            )
        raise ConfigError(
            f"{folder} was started with {name} {before}, but this run has {name} "
            f"{wanted[name]}; use the first, or choose another --out"
        )


def write_plan(folder: Path, kept: dict[str, Any], changing: dict[str, Any]) -> None:
    """Writes plan.json: settings that a resumed run must keep, and those that may change.

    Raises CapacityError if the disk has no room.
    """
    text = json.dumps({"settings": kept, "budgets": changing}, indent=2) + "\n"
    with reports_no_room(folder / NAME):
        write_atomically(folder / NAME, lambda part: part.write_text(text))
