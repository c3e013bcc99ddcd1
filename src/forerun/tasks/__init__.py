"""Tasks: numbered prompts, most with a checker, for evaluation, training and timing.

The module name is the name that users type, with options, e.g. `needles:lengths=2000+8000`. A task
that reads a file takes its path instead: `file:prompts.jsonl`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from forerun import registry
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.tasks.base import Task

__all__ = ["get_task", "is_file", "is_pass_fail", "task_names"]


def task_names() -> list[str]:
    """Names of all tasks; imports none of them."""
    return registry.names("task")


def get_task(text: str) -> Task:
    """The task of a text such as "reasoning", "needles:lengths=2000+8000", "file:prompts.jsonl".

    A task that is used for training gives its held-out examples. Raises UnknownName for a name or
    an option, ConfigError for a value, DataError for a file.
    """
    head, _, rest = text.strip().partition(":")
    name = head.replace("-", "_")
    if name not in task_names() and os.path.isfile(text.strip()):
        raise ConfigError(
            f"{text} is a file; write file:{text} for prompts, or spec_bench:{text} for questions "
            "of Spec-Bench"
        )
    cls: Any = registry.get("task", name)
    if is_file(cls):
        if not rest:
            raise ConfigError(f"task {name!r} needs a file; write {name}:PATH")
        return cls.of_path(rest)
    held_out = {"split": "heldout"} if registry.is_option_unset("task", text, "split") else {}
    return registry.make("task", text, **held_out)


def is_file(task: Any) -> bool:
    """Whether a task, or its class, reads a file of the user, with a known number of examples."""
    return hasattr(task, "of_path")


def is_pass_fail(text: str) -> bool:
    """Whether the scores of a task, named as for --tasks, are only 0 or 1."""
    name = text.partition(":")[0].replace("-", "_")
    return name in task_names() and getattr(registry.get("task", name), "is_pass_fail", False)
