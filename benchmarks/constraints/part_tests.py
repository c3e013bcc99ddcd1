"""Constraint tests per token: AWRS against a full mask, with a checker that takes a fixed time.

Laws are synthetic: softmax of s z over a random order of the vocabulary, where z is a Zipf law and
s is set to an entropy that a language model has (0.5 to 3 nats). A share of the probability is
allowed; which tokens are allowed is drawn for each law. Tests are counted, not timed; a checker of
10 microseconds makes them seconds.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable

import numpy as np

from constraints.common import Row, Setting, refusal, table
from forerun.core.dice import SeededDice

VOCABULARIES = (800, 32_000, 128_000)
ENTROPIES = (0.5, 1.5, 3.0)  # nats
MASSES = (0.01, 0.1, 0.5, 0.9)  # of the allowed tokens
CHECKER_SECONDS = 1e-5
METHODS = ("auto", "recursive", "two_run", "geometric")


def run(setting: Setting) -> None:
    """Options that matter: samples (laws of each kind)."""
    if why := refusal("awrs"):
        setting.skip("tests", why)
        return
    draw = importlib.import_module("forerun.constraints.awrs").draw
    store = setting.store("tests", "samples")
    lines, by_method = [], []
    for size in VOCABULARIES:
        for mass in MASSES:
            row = store.row(f"{size} {mass}", lambda s=size, m=mass: tests_row(draw, s, m, setting))
            found = row["auto"]["tests"]
            lines.append(
                [f"{size:,}", mass, row["mass"], found, size / found, row["auto"]["mass"],
                 1e3 * CHECKER_SECONDS * found, 1e3 * CHECKER_SECONDS * size]
            )  # fmt: skip
            by_method.append([f"{size:,}", mass, *(row[name]["tests"] for name in METHODS)])
    head = ["vocabulary", "wanted mass", "allowed mass", "tests", "fewer by", "mean weight",
            "ms of tests", "ms of a mask"]  # fmt: skip
    setting.write(
        "tests",
        f"Tests for one token, mean of {setting.samples} laws of each of {len(ENTROPIES)} "
        "entropies; a mask tests the whole vocabulary; 10 microseconds for a test\n\n"
        + table(head, lines),
        "Tests by method\n\n" + table(["vocabulary", "wanted mass", *METHODS], by_method),
    )


def tests_row(draw: Callable[..., tuple[int, float]], size: int, mass: float, s: Setting) -> Row:
    """Tests and mean weight of each method, over the same laws; the mean allowed mass."""
    rng = np.random.default_rng([s.seed, size, int(1e6 * mass)])
    tests = {name: list[int]() for name in METHODS}
    weights = {name: list[float]() for name in METHODS}
    masses = []
    for entropy in ENTROPIES:
        law = zipf(size, entropy)
        for _ in range(s.samples):
            logp = law[rng.permutation(size)]
            allowed = allowed_tokens(logp, mass, rng)
            masses.append(float(np.exp(logp[allowed]).sum()))
            for name in METHODS:
                asked: set[int] = set()

                def ok(token: int, allowed: np.ndarray = allowed, asked: set = asked) -> bool:
                    asked.add(token)
                    return bool(allowed[token])

                dice = SeededDice(int(rng.integers(2**31)))
                _, logw = draw(logp, ok, dice, method=name)
                tests[name].append(len(asked))
                weights[name].append(math.exp(logw))
    means = {
        name: {"tests": float(np.mean(tests[name])), "mass": float(np.mean(weights[name]))}
        for name in METHODS
    }
    return {"mass": float(np.mean(masses)), **means}


def zipf(size: int, entropy: float) -> np.ndarray:
    """Log-probabilities [size] of a Zipf law with this entropy, largest first."""
    logs = -np.log(np.arange(1, size + 1))
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        logp = _normalised(middle * logs)
        if float(-(np.exp(logp) * logp).sum()) > entropy:
            low = middle
        else:
            high = middle
    return _normalised(high * logs)


def _normalised(logs: np.ndarray) -> np.ndarray:
    return logs - logs.max() - math.log(np.exp(logs - logs.max()).sum())


def allowed_tokens(logp: np.ndarray, mass: float, rng: np.random.Generator) -> np.ndarray:
    """Tokens bool [V] of about this mass: in a random order, those that still fit into it.

    One at least.
    """
    order, probs = rng.permutation(len(logp)), np.exp(logp)
    allowed, left = np.zeros(len(logp), dtype=bool), mass
    large = probs > mass / 100
    for token in order[large[order]]:
        if probs[token] <= left:
            allowed[token], left = True, left - probs[token]
    small = order[~large[order]]
    share = min(left / max(probs[small].sum(), 1e-300), 1.0)
    allowed[small[: math.ceil(share * len(small))]] = True
    if not allowed.any():
        allowed[order[0]] = True
    return allowed
