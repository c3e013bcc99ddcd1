"""Constraints of forerun in `generate` of transformers: bound to the model in memory.

The mask is applied after logits processors and before top-k, top-p and min-p, where transformers
puts processors of the caller. Drafts keep the masked law; forced tokens are drafted.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any
from weakref import WeakKeyDictionary

from forerun import registry
from forerun.constraints._after import After
from forerun.constraints._all_of import AllOf
from forerun.constraints.base import Constraint
from forerun.core.roles import Shaper, name_of
from forerun.core.sampling import CONSTRAINT_SAMPLING
from forerun.errors import ConfigError, ModelError, UnknownName
from forerun.models.tokenizer import Tokenizer

Given = str | Constraint | Many[str | Constraint]
_tokenizers: WeakKeyDictionary[Any, dict[tuple[Any, ...], Tokenizer]] = WeakKeyDictionary()


def constraint_of(
    model: Any,
    vocab_size: int,
    eos_ids: Many[int],
    given: Given,
    *,
    start: str | None = None,
    sampling: str = "mask",
    tokenizer: Any = None,
) -> Constraint | None:
    """One constraint of those that a call names, ready for the model; None if it names none.

    eos_ids: end tokens of the call. tokenizer: of transformers; default: the model's own.
    Raises ConfigError, DataError.
    """
    check_sampling(sampling)
    named = list(given) if isinstance(given, list | tuple) else [given]
    if not named:
        _check_unused(start, tokenizer)
        return None
    own = tokenizer_of(model, eos_ids, tokenizer)
    bound = [_made(one, own).bind(own, vocab_size) for one in named]
    whole = bound[0] if len(bound) == 1 else AllOf(bound)
    return whole if start is None else After(start, whole).bind(own, vocab_size)


def check_sampling(how: str) -> None:
    """Raises ConfigError, UnknownName for a way to sample that this loop does not have."""
    if how == "mask":
        return
    name = str(how).partition(":")[0]
    if name not in CONSTRAINT_SAMPLING:
        raise UnknownName.of("constraint_sampling", name, CONSTRAINT_SAMPLING)
    raise ConfigError(
        f"constraint_sampling={how!r} gives weights, or learns from samples, for which generate "
        "has no place; use 'mask', or forerun.load(model).generate(...)"
    )


def tokenizer_of(model: Any, eos_ids: Many[int], given: Any = None) -> Tokenizer:
    """The tokenizer for constraints, with the end tokens of the call. Raises ConfigError."""
    if not eos_ids:
        raise ConfigError(
            "a constraint needs an end token; pass eos_token_id=tokenizer.eos_token_id to generate"
        )
    known = _tokenizers.setdefault(model, {})
    inner = getattr(given, "inner", given)
    key = (id(inner), *eos_ids)
    if key not in known:
        made = _own_tokenizer(model) if inner is None else inner
        known[key] = Tokenizer(made, eos_ids)  # keeps `inner` alive, so its id stays its own
    return known[key]


def _own_tokenizer(model: Any) -> Any:
    """The tokenizer of the model's folder. Raises ConfigError without one."""
    try:
        return Tokenizer.load(model).inner
    except ModelError as error:
        raise ConfigError(
            "a constraint needs the tokenizer, and that of the model cannot be loaded "
            f"({error}); pass constraint_tokenizer=tokenizer"
        ) from None


def check_no_constraint(processor: Any, where: str) -> None:
    """Raises ConfigError for a constraint of forerun in an argument of transformers."""
    if isinstance(processor, Shaper):
        raise ConfigError(
            f"{where} has forerun's constraint {type(processor).__name__}, which is not called as "
            "a function; pass it as constraint=..."
        )


def _made(one: Any, tokenizer: Tokenizer) -> Constraint:
    """A constraint by name or as it is. Raises ConfigError for a style, which forbids nothing."""
    made = registry.make("constraint", one, tokenizer=tokenizer) if isinstance(one, str) else one
    if not isinstance(made, Constraint):
        shown = name_of(made) if isinstance(made, Shaper) else repr(made)[:80]
        raise ConfigError(
            f"constraint must be a constraint such as JsonSchema(...), or a name such as "
            f"'regex:pattern=[0-9]+', got {shown}"
        )
    return made


def _check_unused(start: Any, tokenizer: Any) -> None:
    for name, value in (("constraint_start", start), ("constraint_tokenizer", tokenizer)):
        if value is not None:
            raise ConfigError(f"{name} needs a constraint; give one, or leave it out")
