"""Positions of a transformers model: how far they reach, and tables that depend on a pass.

Two kinds of rotary embeddings choose their table by the last position of a pass: `longrope` has one
for short and one for long texts, `dynamic` computes one for every length. `generate` runs the
prompt as one pass and then one pass per token. Cells and rows are those of `generate` only if every
token is computed in a pass with the table that it has there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

UNLIMITED = 1 << 30
STATE = ("inv_freq", "max_seq_len_cached", "attention_scaling", "long_inv_freq")
POSITION_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


def trained_length(text: Any) -> int:
    """Number of positions that a config declares, with the factor of its rotary embeddings."""
    own = max_positions(text)
    if own is None:
        return UNLIMITED
    return max([own, *(stretched(own, params) for params in rope_params(text))])


def max_positions(text: Any) -> int | None:
    """The declared number of positions, without scaling."""
    found = (getattr(text, name, None) for name in POSITION_FIELDS)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def rope_params(text: Any) -> list[dict[str, Any]]:
    """The parameters of all rotary embeddings of a config, mostly one."""
    params = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [value for value in params.values() if isinstance(value, dict)]
    return nested or [params]


def rope_type(params: dict[str, Any]) -> str:
    """The kind of rotary embeddings, such as "yarn"."""
    return str(params.get("rope_type") or params.get("type") or "default")


def stretched(own: int, params: dict[str, Any]) -> int:
    """`own` times the factor of scaled embeddings; yarn scales its original length."""
    kind, factor = rope_type(params), params.get("factor")
    if not isinstance(factor, int | float) or factor <= 1:
        return own
    if kind in ("linear", "dynamic"):
        return int(own * factor)
    if kind == "yarn":
        return int((params.get("original_max_position_embeddings") or own) * factor)
    return own


def hard_limit(model: Any, text: Any) -> int:
    """Number of positions that the model can compute: UNLIMITED unless it stores one row for each.

    Looks for embeddings and stored tables of the declared length, other than the token embedding.
    """
    own = max_positions(text)
    if own is None:
        return UNLIMITED
    sizes = range(own, own + 3)  # OPT and relatives have two more rows
    tokens = model.get_input_embeddings()
    for module in model.modules():
        is_table = isinstance(module, torch.nn.Embedding) and module is not tokens
        if is_table and module.num_embeddings in sizes:
            return own
        tables = [x for x in module._buffers.values() if x is not None and x.dim() > 1]
        if any(size in sizes for table in tables for size in table.shape):
            return own
    is_alibi = "mpt" in str(getattr(text, "model_type", ""))  # built for max_seq_len positions
    return own if is_alibi else UNLIMITED


@dataclass
class LengthRope:
    """Rotary embeddings with a table that depends on the last position of the pass.

    switch: passes of up to this many positions use the base table. grows: each later length has a
    table of its own; otherwise all share one. recomputes: `generate` computes all cells again when
    a text passes the switch.
    """

    modules: list[Any]  # empty for code that is not of transformers
    switch: int
    grows: bool
    recomputes: bool

    def pass_sizes(self, start: int, num: int) -> list[int]:
        """Sizes of the passes for `num` tokens from position `start` on; 0 is a prompt."""
        stop = start + num
        if start == 0 or stop <= self.switch or (start >= self.switch and not self.grows):
            return [num]
        short = max(self.switch - start, 0)
        late = [1] * (num - short) if self.grows else [num - short]
        return [short, *late] if short else late

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """The modules in the state of a new model; afterwards they are as before."""
        before = [self._state(module) for module in self.modules]
        try:
            for module in self.modules:
                if self.grows:
                    self._reset(module)
            yield
        finally:
            for module, state in zip(self.modules, before, strict=True):
                self._restore(module, state)

    @staticmethod
    def _state(module: Any) -> dict[str, Any]:
        names = [n for n in (*vars(module), *module._buffers) if n.endswith(STATE)]
        values = {name: getattr(module, name) for name in names if not name.startswith("original_")}
        return {
            name: (value, value.clone()) if isinstance(value, Tensor) else (value, None)
            for name, value in values.items()
        }

    @staticmethod
    def _restore(module: Any, state: dict[str, Any]) -> None:
        for name in [n for n in vars(module) if n.endswith("long_inv_freq") and n not in state]:
            delattr(module, name)
        for name, (value, content) in state.items():
            if content is not None:
                with torch.no_grad():
                    value.copy_(content)
            if getattr(module, name) is not value:
                setattr(module, name, value)

    @staticmethod
    def _reset(module: Any) -> None:
        for name in [n for n in module._buffers if n.endswith("original_inv_freq")]:
            base = name.replace("original_inv_freq", "inv_freq")
            setattr(module, base, getattr(module, name).clone())
        for name in [n for n in vars(module) if n.endswith("max_seq_len_cached")]:
            setattr(module, name, module.original_max_seq_len)


def length_rope(model: Any, text: Any) -> LengthRope | None:
    """The length-dependent rotary embeddings of a model, if it has any."""
    params = [p for p in rope_params(text) if depends_on_length(p)]
    own = max_positions(text)
    if not params or own is None:
        return None
    grows = any("dynamic" in rope_type(p) for p in params)
    originals = [p.get("original_max_position_embeddings") for p in params]
    switches = [own if grows else original or own for original in originals]
    modules = [m for m in model.modules() if _is_rotary(m)]
    return LengthRope(modules, min(switches), grows, _recomputes(model, text))


def depends_on_length(params: dict[str, Any]) -> bool:
    """Whether rotary tables change with the length of a pass."""
    kind = rope_type(params)
    is_split = kind == "longrope" and params.get("short_factor") != params.get("long_factor")
    return is_split or "dynamic" in kind


def _is_rotary(module: Any) -> bool:
    return hasattr(module, "rope_type") and any(n.endswith("inv_freq") for n in module._buffers)


def _recomputes(model: Any, text: Any) -> bool:
    """Whether the class drops its cache at the switch, as phi3 does."""
    if not hasattr(text, "original_max_position_embeddings"):
        return False
    try:
        source = inspect.getsource(type(model).prepare_inputs_for_generation)
    except (OSError, TypeError):  # no source, such as a compiled package
        return False
    return "original_max_position_embeddings" in source
