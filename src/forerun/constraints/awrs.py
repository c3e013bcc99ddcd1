"""AWRS: draws a token under a yes-or-no constraint by testing only the tokens it draws.

"Fast Controlled Generation from Language Models with Adaptive Weighted Rejection Sampling", 2025.
Tokens are drawn without replacement until one is allowed. A second accepted token, or the count of
rejections, gives an estimate w of the allowed mass Z without a full mask.

Law: the token has the masked law, and E[w 1{x}] = p(x) ok(x), so E[w] = Z. The product of the
weights of a text corrects the masked law towards the model's law given that the text is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from forerun.constraints._urn import Urn
from forerun.constraints.base import Constraint
from forerun.core.dice import Dice
from forerun.core.records import Sequence
from forerun.errors import ConfigError, UnknownName

METHODS = ("auto", "recursive", "two_run", "geometric")
NO_TOKEN = -1  # no token is allowed, or `max_rejects` was reached
SHARE_FOR_GEOMETRIC = 2 / 3  # an allowed token with this share: at most 3 expected draws
TESTS_BEFORE_MASK = 64  # a mask of the vocabulary costs about as much as this many tests
MAX_BITS = 1024  # of a geometric count

Test = Callable[[int], bool]
Mask = Callable[[], np.ndarray | None]


class Awrs(Constraint):
    """The constraint `inner`, tested as tokens are drawn: see `verifiers/weighted.py`."""

    def __init__(self, inner: Constraint) -> None:
        self.inner, self.eos_ids = inner, inner.eos_ids
        self.has_cheap_mask = inner.has_cheap_mask

    def start(self, seq: Sequence) -> Any:
        return self.inner.start(seq)

    def advance(self, state: Any, token: int) -> Any:
        return self.inner.advance(state, token)

    def logits(self, state: Any, logits: np.ndarray) -> np.ndarray:
        return logits

    def tests(self, state: Any) -> bool:
        return True

    def allowed(self, state: Any) -> np.ndarray:
        return self.inner.allowed(state)

    def allows(self, state: Any, token: int) -> bool:
        return self.inner.allows(state, token)

    def forced(self, state: Any) -> Many[int]:
        return self.inner.forced(state)

    def is_complete(self, state: Any) -> bool:
        return self.inner.is_complete(state)

    def error(self, state: Any) -> str:
        return self.inner.error(state)

    def missing(self, state: Any) -> str:
        return self.inner.missing(state)

    def begin(self, text: bytes) -> Any:
        return self.inner.begin(text)


def draw(
    logp: np.ndarray,
    ok: Test,
    dice: Dice,
    *,
    method: str = "auto",
    max_accepts: int = 2,
    max_rejects: int | None = None,
    logq: np.ndarray | None = None,
    kept_mass: float | None = None,
    mask: Mask | None = None,
) -> tuple[int, float]:
    """A token x with ok(x), and log w with E[w 1{x}] = p(x) ok(x).

    logp: log-probabilities [V] up to a constant. logq: those of a proposal to draw from instead, up
    to a constant; positive where p is. kept_mass: share of the whole law that `logp` covers, if it
    is that of a part of the vocabulary. ok: whether a token is allowed; called at most once for
    each. method: "recursive", "two_run", "geometric", or "auto": "geometric" if one allowed token
    has 2/3 of the mass or max_accepts > 2, else "recursive". max_accepts: accepted draws of
    "geometric"; more lower the variance. max_rejects: rejections before it gives up with weight 0;
    the expectation stays exact. mask: the allowed tokens bool [V], or None if they are as expensive
    as V tests; asked by "recursive" after many rejections.
    Returns (NO_TOKEN, -inf) if no token is allowed.
    """
    check_options(method=method, max_accepts=max_accepts, max_rejects=max_rejects)
    log_kept = 0.0 if kept_mass is None else math.log(kept_mass)
    urn, test, most = Urn(logp if logq is None else logq), _cached(ok), max_rejects or math.inf
    if method == "auto":
        method = _best_method(urn, test, max_accepts)
    if method == "geometric":
        token, logw = _geometric(urn, test, dice, max_accepts, most)
    elif method == "two_run":
        token, logw = _two_run(urn, test, dice)
    else:
        token, logw = _recursive(urn, test, dice, most, mask)
    if token == NO_TOKEN:
        return NO_TOKEN, -math.inf
    if logq is not None:
        logw += float(logp[token]) - log_sum(logp) - (float(logq[token]) - urn.log_total)
    return token, logw + log_kept


def check_options(*, method: str, max_accepts: int, max_rejects: int | None) -> None:
    """Raises ConfigError, UnknownName for options of `draw` that it does not support."""
    if method not in METHODS:
        raise UnknownName.of("method of awrs", method, METHODS)
    if max_accepts < 2:
        raise ConfigError(f"max_accepts must be at least 2, got {max_accepts}; 2 is the default")
    if max_rejects is not None and max_rejects < 1:
        raise ConfigError(
            f"max_rejects must be at least 1, got {max_rejects}; leave it out for no limit"
        )
    if max_rejects is not None and method == "two_run":
        raise ConfigError(
            f"max_rejects={max_rejects} would bias method 'two_run'; use 'recursive' or 'geometric'"
        )


def _best_method(urn: Urn, ok: Test, max_accepts: int) -> str:
    """The method with the fewest expected tests; depends on no draw, so each stays unbiased."""
    if max_accepts > 2:
        return "geometric"
    top, share = urn.largest()
    return "geometric" if share >= SHARE_FOR_GEOMETRIC and ok(top) else "recursive"


def _recursive(
    urn: Urn, ok: Test, dice: Dice, max_rejects: float, mask: Mask | None
) -> tuple[int, float]:
    """One order without replacement: E f = c f(x) + (1 - c) E[f | not x], c = p(x) / left.

    The factors (1 - c) multiply to the mass that is left. After the first accepted token x, the
    next one y estimates the rest: w = left if y is allowed, else left c = p(x).
    """
    num_rejected = 0
    while not urn.is_empty:
        x = urn.draw(dice)
        left, share = urn.log_left, urn.log_share(x)
        if ok(x):
            if num_rejected + 1 == max_rejects:
                return x, left
            urn.remove(x)
            return x, left if urn.is_empty or ok(urn.draw(dice)) else share
        num_rejected += 1
        if num_rejected == max_rejects:
            break
        urn.remove(x)
        if mask is not None and num_rejected == TESTS_BEFORE_MASK:
            allowed = mask()
            if allowed is not None:
                return _masked(urn, allowed, dice)
    return NO_TOKEN, -math.inf


def _masked(urn: Urn, allowed: np.ndarray, dice: Dice) -> tuple[int, float]:
    """A token of what is left, by a mask; its weight is the allowed mass itself."""
    rest = Urn(np.where(allowed, urn.logp, -np.inf))
    if rest.is_empty:
        return NO_TOKEN, -math.inf
    return rest.draw(dice), rest.log_total - urn.log_total


def _two_run(urn: Urn, ok: Test, dice: Dice) -> tuple[int, float]:
    """Two orders without replacement, the second over what the first did not reject.

    w = left of the first run / (1 + rejections of both).
    """
    x, num_rejected = _until_accepted(urn, ok, dice)
    if x == NO_TOKEN:
        return NO_TOKEN, -math.inf
    left = urn.log_left
    _, more = _until_accepted(urn, ok, dice)
    return x, left - math.log(1 + num_rejected + more)


def _until_accepted(urn: Urn, ok: Test, dice: Dice) -> tuple[int, int]:
    """The first allowed token drawn and the number of rejected ones, which are removed."""
    num_rejected = 0
    while not urn.is_empty:
        x = urn.draw(dice)
        if ok(x):
            return x, num_rejected
        num_rejected += 1
        urn.remove(x)
    return NO_TOKEN, num_rejected


def _geometric(
    urn: Urn, ok: Test, dice: Dice, max_accepts: int, max_rejects: float
) -> tuple[int, float]:
    """Draws with replacement until `max_accepts` accepts, without repeating a rejected test.

    Between two draws a geometric number of rejected tokens would come again; only their number is
    drawn. w = min(A - 1, accepts) / (accepts + rejects - 1), by Rao-Blackwell.
    """
    first, num_accepted, num_rejected = NO_TOKEN, 0, 0
    while num_accepted < max_accepts and num_rejected < max_rejects and not urn.is_empty:
        num_rejected += _num_repeats(urn.log_left, dice)
        if num_rejected >= max_rejects:
            break
        x = urn.draw(dice)
        if ok(x):
            num_accepted += 1
            first = x if first == NO_TOKEN else first
        else:
            num_rejected += 1
            urn.remove(x)
    if first == NO_TOKEN:
        return NO_TOKEN, -math.inf
    num_draws = num_accepted + int(min(num_rejected, max_rejects))
    return first, math.log(min(max_accepts - 1, num_accepted)) - math.log(num_draws - 1)


def _num_repeats(log_left: float, dice: Dice) -> int:
    """A geometric count: P(N = n) = left (1 - left)^n.

    Its binary digits are independent: digit i is 1 with odds (1 - left)^(2^i).
    """
    if log_left >= 0.0:
        return 0
    log_repeat = math.log1p(-math.exp(log_left)) if log_left > -700.0 else 0.0
    found = 0
    for bit in range(MAX_BITS):
        odds = math.exp(log_repeat * 2.0**bit)
        if odds < 1e-18:
            break
        found += dice.coin(odds / (1.0 + odds)) << bit
    return found


def log_sum(logp: np.ndarray) -> float:
    """Log of the sum of exp(logp); -inf for an empty sum."""
    top = float(np.max(logp, initial=-np.inf))
    if top == -math.inf:
        return -math.inf
    return top + math.log(float(np.exp(np.asarray(logp, np.float64) - top).sum()))


def _cached(ok: Test) -> Test:
    """`ok` that asks once per token."""
    known: dict[int, bool] = {}

    def test(token: int) -> bool:
        if token not in known:
            known[token] = ok(token)
        return known[token]

    return test
