"""Temporary states of a user's transformers model; each context restores what it changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

IMPLEMENTATION = "_attn_implementation_internal"  # the field behind `config._attn_implementation`


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Sets all modules to eval within the context; each one returns to its own mode.

    Flags are set directly: a `train` or `eval` method of a module may do more than set its flag.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Sets an attention implementation that returns weights, within the context.

    Parts of a model may have different implementations, so each config returns to its own.
    """
    configs = {id(config): config for config in _configs(model)}.values()
    before = [(config, vars(config).get(IMPLEMENTATION)) for config in configs]
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        for config, name in before:
            vars(config)[IMPLEMENTATION] = name


def _configs(model: Any) -> Iterator[Any]:
    """The configs of a model and its modules, with their sub-configs."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or not hasattr(config, "to_dict"):
            continue
        yield config
        for name in getattr(config, "sub_configs", ()):
            if (part := getattr(config, name, None)) is not None:
                yield part
