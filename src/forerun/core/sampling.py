"""Sampling parameters, and the only place where logits become probabilities.

The order is fixed: bias, bans and penalties; constraints; temperature, top-k, top-p, min-p. The
first two are shapers, which act on logits along a tree path (`core.logits`). This module does the
rest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from forerun.core.truncation import truncated
from forerun.errors import ConfigError, LawError

ID = re.compile("0|[1-9][0-9]{0,10}")  # a token id as a JSON key
MAX_SAMPLES = 1 << 16  # of a prompt, if all are kept in memory
MIN_TEMPERATURE = 1e-30  # a lower one is treated as this one where logits are divided by it


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; temperature 0 is greedy (ties: the lowest id).

    repetition_penalty applies to prompt and generated tokens: it divides positive logits and
    multiplies negative ones. Presence and frequency penalties count generated tokens only.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0  # relative to the largest probability
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None  # report the chosen token's and the top m log-probabilities
    constraint: Any = None  # of forerun.constraints, such as JsonSchema({...})
    constraint_sampling: str = "mask"  # how tokens are drawn under it: one of CONSTRAINT_SAMPLING
    constraint_start: str | None = None  # the constraint applies after this text
    allowed_mass: bool = False  # report the probability of the allowed tokens

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.generic):
                object.__setattr__(self, name, value.item())
        for name in ("stop", "stop_token_ids", "banned_tokens"):
            value = getattr(self, name)
            plain = (value,) if isinstance(value, str | int | float) else tuple(value or ())
            object.__setattr__(self, name, plain)
        for name, holds, expected in _CHECKS:
            value = getattr(self, name)
            if not _holds(holds, value):
                raise ConfigError(f"{name} must be {expected}, got {_shown(value)}")
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens="
                f"{self.max_new_tokens}; lower the first or raise the second"
            )
        overlap = sorted(set(self.banned_tokens) & {t for t, b in self.logit_bias.items() if b > 0})
        if overlap:
            raise ConfigError(
                f"tokens {_shown(tuple(overlap))} are banned and have a positive logit_bias; "
                "remove one of the two"
            )

    @cached_property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @cached_property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p is on."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @cached_property
    def is_softmax(self) -> bool:
        """Whether the distribution is softmax(logits / T): not greedy, not truncated."""
        return not self.is_greedy and not self.truncates

    @property
    def divisor(self) -> float:
        """The temperature, or MIN_TEMPERATURE if it is lower: for divisions."""
        return max(self.temperature, MIN_TEMPERATURE)

    @property
    def adjusts(self) -> bool:
        """Whether any parameter changes logits before the temperature."""
        return bool(
            self.logit_bias
            or self.banned_tokens
            or self.min_new_tokens
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )


def check_samples(samplings: Iterable[Sampling], fix: str) -> None:
    """Raises ConfigError for more samples of a prompt than are kept in memory."""
    for sampling in samplings:
        if sampling.n > MAX_SAMPLES:
            raise ConfigError(
                f"n must be at most {MAX_SAMPLES} samples per prompt, got {sampling.n}; {fix}"
            )


def _within(value: Any, low: float, high: float = math.inf) -> bool:
    """Whether `value` is a number in [low, high]; booleans are not numbers."""
    return not isinstance(value, bool | np.bool_) and bool(low <= value <= high)


def _whole(value: Any, low: int) -> bool:
    return isinstance(value, int) and _within(value, low)


def _ids(values: Iterable[Any]) -> bool:
    return all(_whole(value, 0) for value in values)


CONSTRAINT_SAMPLING = "mask", "asap", "awrs", "smc"
MAX_BIAS = 1e30  # of biases and penalties, which must fit float32 logits
MAX_LOGPROBS = 1000
_CHECKS = (
    (
        "temperature",
        lambda v: _within(v, 0) and math.isfinite(v),
        "a finite number >= 0 (0 is greedy)",
    ),
    ("top_k", lambda v: _whole(v, 0), "an integer >= 0 (0 turns it off)"),
    ("top_p", lambda v: _within(v, 0, 1) and v > 0, "in (0, 1] (1 turns it off)"),
    ("min_p", lambda v: _within(v, 0, 1), "in [0, 1] (0 turns it off)"),
    (
        "repetition_penalty",
        lambda v: _within(v, 1 / MAX_BIAS, MAX_BIAS),
        "in [1e-30, 1e30] (1 turns it off)",
    ),
    ("presence_penalty", lambda v: _within(v, -MAX_BIAS, MAX_BIAS), "a number within 1e30"),
    ("frequency_penalty", lambda v: _within(v, -MAX_BIAS, MAX_BIAS), "a number within 1e30"),
    (
        "logit_bias",
        lambda v: _ids(v) and all(_within(b, -MAX_BIAS, MAX_BIAS) for b in v.values()),
        "token id -> bias within 1e30",
    ),
    ("banned_tokens", _ids, "token ids"),
    ("stop_token_ids", _ids, "token ids"),
    ("min_new_tokens", lambda v: _whole(v, 0), "an integer >= 0"),
    ("max_new_tokens", lambda v: _whole(v, 1), "an integer >= 1"),
    (
        "stop",
        lambda v: all(isinstance(s, str) and s.encode() for s in v),
        "non-empty texts in UTF-8",
    ),
    ("ignore_eos", lambda v: isinstance(v, bool), "True or False"),
    ("seed", lambda v: v is None or _whole(v, 0), "an integer >= 0, or left out"),
    ("n", lambda v: _whole(v, 1), "an integer >= 1"),
    (
        "logprobs",
        lambda v: v is None or (_whole(v, 0) and v <= MAX_LOGPROBS),
        f"an integer in 0..{MAX_LOGPROBS}, or left out",
    ),
    (
        "constraint_sampling",
        lambda v: v in CONSTRAINT_SAMPLING,
        f"one of {', '.join(CONSTRAINT_SAMPLING)}",
    ),
    (
        "constraint_start",
        lambda v: v is None or (isinstance(v, str) and bool(v.encode())),
        "a non-empty text, or left out",
    ),
    ("allowed_mass", lambda v: isinstance(v, bool), "True or False"),
)


def _shown(value: Any) -> str:
    """A value as users write it: 5, 6 for ids; 5=-1.5 for biases."""
    if isinstance(value, tuple):
        return ", ".join(map(repr, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{token!r}={bias!r}" for token, bias in value.items())
    return "nothing" if value is None else repr(value)


def _holds(check: Any, value: Any) -> bool:
    try:
        return bool(check(value))
    except (TypeError, ValueError, AttributeError, OverflowError):
        return False


def from_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Sampling` from JSON, with integer keys in logit_bias. Raises ConfigError."""
    bias = values.get("logit_bias")
    if not isinstance(bias, Mapping):
        return dict(values)
    return {**values, "logit_bias": {token_id(key): value for key, value in bias.items()}}


def token_id(key: Any) -> int:
    """The token id of a JSON key of logit_bias. Raises ConfigError."""
    if not isinstance(key, str) or not ID.fullmatch(key):
        raise ConfigError(
            f"logit_bias must map token ids to biases, got the id {repr(key)[:40]}; write ids as "
            'plain digits, such as "5"'
        )
    return int(key)


def to_probs(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Logits [V] -> probabilities [V] under the sampling parameters, same float type.

    A logit of -inf gives probability 0. Raises as `argmax` does.
    """
    best = argmax(logits)
    if sampling.is_greedy:
        probs = np.zeros_like(logits)
        probs[best] = 1
        return probs
    probs = softmax(logits, sampling.temperature, logits[best])
    if not sampling.truncates:
        return probs
    ids = truncated(probs, sampling.top_k, sampling.top_p, sampling.min_p)
    kept, total = probs[ids], np.add.reduce(probs[ids])
    probs = np.zeros_like(probs)
    probs[ids] = kept / total
    return probs


def argmax(logits: np.ndarray) -> int:
    """The token with the largest logit [V]; ties: the lowest id.

    Raises ConfigError if all tokens are forbidden, LawError if a logit is NaN or +inf.
    """
    best = int(logits.argmax())  # NaN counts as largest
    highest = float(logits[best])
    if highest == -math.inf:
        raise ConfigError(
            "no token is allowed: banned_tokens and constraints forbid all; relax one of them"
        )
    if not math.isfinite(highest):
        raise LawError(
            f"the target's logit of token {best} is {highest}, expected a finite number; "
            "half precision may have overflowed (load the model with dtype fp32), or the weights "
            "are damaged"
        )
    return best


def softmax(
    logits: np.ndarray, temperature: float = 1.0, highest: np.floating | None = None
) -> np.ndarray:
    """exp(logits / T), normalised; [V] -> [V]. T is at least MIN_TEMPERATURE.

    highest: the largest logit, if known.
    """
    probs = logits - (logits.max() if highest is None else highest)
    if temperature != 1.0:
        probs *= 1.0 / max(temperature, MIN_TEMPERATURE)
    np.exp(probs, out=probs)
    probs /= np.add.reduce(probs)
    return probs


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of logits [V] at temperature 1, float64."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
