"""Tasks: numbered prompts, most with a checker, for evaluation, training and timing.

A task is a file, its name is the name that users type, with options as `needles:lengths=2000+8000`
or, where the task is somebody's file, its path: `file:prompts.jsonl`. Helpers are files that begin
with an underscore, or with another file's name and an underscore.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
from typing import TYPE_CHECKING, Any

from forerun.errors import ConfigError, UnknownName
from forerun.registry import parse

if TYPE_CHECKING:
    from forerun.tasks.base import Task

__all__ = ["get_task", "is_file", "is_pass_fail", "task_names"]


def task_names() -> list[str]:
    """All tasks, without importing any of them."""
    found = sorted(module.name for module in pkgutil.iter_modules(__path__))
    helped = [*found, "base"]
    return [
        name
        for name in found
        if name != "base"
        and not name.startswith("_")
        and not any(name.startswith(f"{one}_") for one in helped)
    ]


def get_task(text: str) -> Task:
    """The task of a text such as "reasoning", "needles:lengths=2000+8000", "file:prompts.jsonl".

    Raises UnknownName for a name or an option, ConfigError for a value, DataError for a file.
    """
    head, _, rest = text.strip().partition(":")
    name = head.replace("-", "_")
    if name not in task_names():
        if os.path.isfile(text.strip()):
            raise ConfigError(
                f"{text} is a file; write file:{text} if it holds prompts, spec_bench:{text} if "
                "questions of Spec-Bench"
            )
        raise UnknownName.of("task", head, task_names())
    cls = _class_of(name)
    if is_file(cls):
        if not rest:
            raise ConfigError(f"task {name!r} needs a file; write {name}:PATH")
        return cls.of_path(rest)
    return cls(**_defaults(cls) | _values(name, cls, parse(text)[1]))


def is_file(task: Any) -> bool:
    """Whether a task, or its class, is made of somebody's file, whose examples can be counted."""
    return hasattr(task, "of_path")


def is_pass_fail(text: str) -> bool:
    """Whether the answers to a task, as --tasks has it, are right or wrong and nothing between."""
    name = text.partition(":")[0].replace("-", "_")
    return name in task_names() and getattr(_class_of(name), "is_pass_fail", False)


def _class_of(name: str) -> Any:
    """The class of the file that has examples and a score."""
    module = importlib.import_module(f"{__name__}.{name}")
    found = [
        thing
        for thing in vars(module).values()
        if inspect.isclass(thing)
        and thing.__module__ == module.__name__
        and hasattr(thing, "example")
        and hasattr(thing, "score")
    ]
    assert len(found) == 1, f"{module.__name__} must define one task, has {found}"
    return found[0]


def _defaults(cls: Any) -> dict[str, Any]:
    """A task that is also trained on is measured on what was held out."""
    return {"split": "heldout"} if "split" in inspect.signature(cls).parameters else {}


def _values(name: str, cls: Any, texts: dict[str, str]) -> dict[str, Any]:
    known = inspect.signature(cls).parameters
    values = {}
    for key, text in texts.items():
        if key not in known:
            raise UnknownName.of(f"option of task {name!r}:", key, known)
        try:
            values[key] = _typed(text, str(known[key].annotation))
        except ValueError:
            kind = "a whole number" if known[key].annotation == "int" else "numbers such as 1+2+3"
            raise ConfigError(f"task {name!r}: {key} takes {kind}, got {text!r}") from None
    return values


def _typed(text: str, kind: str) -> Any:
    """A whole number, several as a+b+c, or the text."""
    if kind == "int":
        return int(text)
    if kind.startswith("tuple"):
        return tuple(int(piece) for piece in text.split("+"))
    return text
