"""The speed-up that follows from the acceptance and the cost of a draft model.

tau is the tokens per target pass with the correction or bonus token, gamma the length of a draft, c
the time of a draft step over that of a target step.
"""

from __future__ import annotations

GAMMAS = range(1, 100)  # draft lengths that are considered


def block_efficiency(alpha: float, gamma: int) -> float:
    """tau for independent acceptances: (1 - alpha^(gamma + 1)) / (1 - alpha)."""
    return float(sum(alpha**k for k in range(gamma + 1)))


def tau_of_ratio(accept_ratio: float, gamma: int) -> float:
    """tau = 1 + gamma r with r = accepted / proposed, if no draft is cut off by the end."""
    return 1 + gamma * accept_ratio


def speedup(tau: float, gamma: int, c: float) -> float:
    """Tokens per time over plain decoding: tau / (c gamma + 1).

    With the ratio of parameters as c it is the memory-bound speed-up (MBSU).
    """
    return tau / (c * gamma + 1)


def best_gamma(alpha: float, c: float) -> tuple[int, float]:
    """The draft length with the highest modelled speed-up, and that speed-up."""
    found = {gamma: speedup(block_efficiency(alpha, gamma), gamma, c) for gamma in GAMMAS}
    gamma = max(found, key=lambda gamma: found[gamma])
    return gamma, found[gamma]
