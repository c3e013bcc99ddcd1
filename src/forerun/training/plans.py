"""What a folder was begun with: written down at the start, compared whenever somebody goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, DataError
from forerun.utils.files import write_atomically

NAME = "plan.json"


def read_plan(folder: Path) -> dict[str, Any]:
    """The settings that the folder was begun with; empty where none are written down."""
    path = folder / NAME
    if not path.exists():
        return {}
    try:
        plan = json.loads(path.read_text())
        return {**plan["settings"]}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a readable plan ({error!r}); restore it, or choose another --out"
        ) from error


def check_plan(folder: Path, settings: dict[str, Any]) -> None:
    """Raises ConfigError with the first setting that is not what the folder was begun with."""
    now = json.loads(json.dumps(settings))  # tuples as they come back
    for name, before in read_plan(folder).items():
        if now.get(name) != before:
            raise ConfigError(
                f"{folder} was begun with {name} {before}, but this run has {name} "
                f"{now.get(name)}; go on with the former, or choose another --out"
            )


def write_plan(folder: Path, settings: dict[str, Any], budgets: dict[str, Any]) -> None:
    """Writes settings, which must not change, and budgets, which may."""
    text = json.dumps({"settings": settings, "budgets": budgets}, indent=2) + "\n"
    write_atomically(folder / NAME, lambda part: part.write_text(text))
