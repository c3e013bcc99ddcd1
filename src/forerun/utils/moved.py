"""Clear errors for modules that moved: `import forerun.roles` names `forerun.core.roles`."""

from __future__ import annotations

import sys


class MovedModules:
    """A finder of last resort; it finds nothing and raises for a module of an earlier release."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raises ImportError with the new names of a module that moved and of its parts."""
        package, _, old = name.partition(".")
        if package == "forerun" and (row := moved().get(old)):
            new, *renamed = row
            names = "".join(f"; {pair.replace('=', ' is now ')}" for pair in renamed)
            raise ImportError(
                f"{name} has moved; import forerun.{new} instead{names} (docs/structure.md)",
                name=name,
            )


def moved() -> dict[str, list[str]]:
    """From assets/moved_modules.txt: old name of a module to its new one and `Old=New` names.

    Names of modules lie below `forerun`.
    """
    from pathlib import Path  # here, so that `import forerun` stays fast

    file = Path(__file__).parents[1] / "assets" / "moved_modules.txt"
    rows = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
    return {old: row for old, *row in rows}


def watch_imports() -> None:
    """Adds the finder behind all others, once."""
    if not any(type(finder).__name__ == MovedModules.__name__ for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())  # type: ignore[arg-type]
