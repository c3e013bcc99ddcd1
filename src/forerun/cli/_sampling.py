"""Sampling parameters from the options of `forerun generate`."""

from __future__ import annotations

import json
from typing import Any

from forerun.core.sampling import Sampling, from_json
from forerun.errors import ConfigError, UnknownName


def read_sampling(given: dict[str, Any]) -> Sampling:
    """Sampling parameters from the options. Raises ConfigError."""
    renamed = {
        "logit_bias": _biases(given["logit_bias"]),
        "banned_tokens": tuple(given["ban"]),
        "stop": tuple(given["stop"]),
        "stop_token_ids": tuple(given["stop_token_id"]),
    }
    names = (Sampling.__dataclass_fields__.keys() & given.keys()) - {"constraint"}
    own = {name: given[name] for name in names} | renamed
    return Sampling(**own | _fields(given["fields"]))


def _fields(texts: list[str]) -> dict[str, Any]:
    """Fields of Sampling from texts NAME=VALUE. Raises ConfigError, UnknownName."""
    known = Sampling.__dataclass_fields__.keys() - {"n", "seed", "constraint"}
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ConfigError(f"--set takes NAME=VALUE, e.g. min_p=0.05, got {text!r}")
        if name not in known:
            raise UnknownName.of("field of --set:", name, known)
        if name in found:
            raise ConfigError(f"--set gives {name} twice; write it once")
        found[name] = _json(value.strip())
    return from_json(found)


def _json(text: str) -> Any:
    """The JSON value of a text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _biases(texts: list[str]) -> dict[int, float]:
    """Token id -> bias. Raises ConfigError for a repeated token."""
    biases: dict[int, float] = {}
    for token, bias in map(_bias, texts):
        if token in biases:
            raise ConfigError(
                f"--logit-bias gives token {token} twice, with {biases[token]:g} and {bias:g}; "
                "write one of them"
            )
        biases[token] = bias
    return biases


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ConfigError(f"--logit-bias must be ID=BIAS, e.g. 42=-1.5, got {text!r}") from None
