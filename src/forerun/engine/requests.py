"""Arguments of a generation call: prompts and sampling settings in one form, checked."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, DataError, UnknownName
from forerun.utils.numbers import whole

Prompts = str | Many[str] | Many[Many[int]]
Samplings = Sampling | Many[Sampling] | None


def as_prompts(prompts: Prompts) -> list[str | list[int]]:
    """Texts and token ids as a list. Raises DataError for anything else, and for no prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping):
        raise DataError(
            f"expected a prompt or a list of them, got {prompts!r}; such as '...', "
            "['...', '...'] or [[5, 6, 7]]"
        )
    found = [_as_prompt(i, prompt) for i, prompt in enumerate(prompts)]
    if not found:
        raise DataError("there is no prompt; give at least one")
    return found


def _as_prompt(i: int, prompt: Any) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    try:
        if isinstance(prompt, bytes):
            raise TypeError
        return [operator.index(token) for token in prompt]  # NumPy's integers too
    except TypeError:
        raise DataError(
            f"prompt {i} is {prompt!r}; expected a text or a list of token ids. Model.generate "
            "takes a list of those, such as ['...', '...'] or [[5, 6, 7]]"
        ) from None


def as_samplings(sampling: Samplings) -> list[Sampling]:
    """Sampling settings as a list; one default if None. Raises ConfigError."""
    if sampling is None:
        return [Sampling()]
    given = list(sampling) if isinstance(sampling, Iterable) else [sampling]
    if not all(isinstance(one, Sampling) for one in given):
        raise ConfigError(
            f"expected a Sampling, or a list with one for each prompt, got {sampling!r}; pass "
            "several prompts as one list, and options by name, such as temperature=0.6"
        )
    return given


def sampling_per_prompt(
    sampling: Samplings, num_prompts: int, overrides: Mapping[str, Any]
) -> list[Sampling]:
    """One setting for each prompt, with fields replaced by `overrides`. Raises ConfigError."""
    given = as_samplings(sampling)
    given = given * num_prompts if len(given) == 1 else given
    if len(given) != num_prompts:
        raise ConfigError(
            f"expected one sampling setting for all prompts, or one for each; prompts: "
            f"{num_prompts}, settings: {len(given)}"
        )
    return [replace(one, **overrides) for one in given]


def check_overrides(names: Iterable[str], options: Iterable[str]) -> None:
    """Raises UnknownName unless all are fields of Sampling; `options` are suggested too."""
    fields = Sampling.__dataclass_fields__
    if unknown := [name for name in names if name not in fields]:
        raise UnknownName.of("option", unknown[0], {*fields, *options})


def as_many(name: str, given: Any, kinds: Any) -> list[Any]:
    """One object of these kinds, or several, as a list. Raises ConfigError for anything else."""
    if isinstance(given, kinds):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise ConfigError(
            f"{name} must be one object or a list, got {given!r:.60}; pass () for none"
        )
    return list(given)


def check_batch(batch: int | None) -> None:
    """Raises ConfigError unless it is None or a positive integer."""
    if batch is not None:
        whole("batch", batch)


def check_tenant(tenant: str) -> None:
    """Raises ConfigError unless it is a string."""
    if not isinstance(tenant, str):
        raise ConfigError(f"tenant must be a string, got {tenant!r}; use '' for a single one")


def check_numbers(numbers: Many[int] | None, num_prompts: int) -> None:
    """Raises ConfigError unless it is None or has a non-negative integer for each prompt."""
    if numbers is None:
        return
    if len(numbers) != num_prompts:
        raise ConfigError(
            f"expected a number for each prompt or none; prompts: {num_prompts}, numbers: "
            f"{len(numbers)}"
        )
    for number in numbers:
        whole("each number of a prompt", number, 0)


def check_role(kind: str, part: Any, role: type) -> None:
    """Raises ConfigError unless `part` is a `role`."""
    if not isinstance(part, role):
        hint = '; drafter="none" decodes without drafts' if kind == "drafter" else ""
        raise ConfigError(
            f"expected the name of a {kind} or a {role.__name__} object, got {part!r}{hint}"
        )
