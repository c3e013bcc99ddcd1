"""The result of a constraint for one text: validity, weight, and the particles behind it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Particle:
    """One particle at its end. weight: its share; those of all particles sum to 1, or are all 0."""

    text: str
    weight: float
    logw: float
    valid: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"logw": finite_or_none(self.logw)}


@dataclass(frozen=True)
class Report:
    """What a constraint did to a text.

    valid: whether the text is an allowed one. logw: with constraint_sampling "mask" and "asap" 0,
    also of a text that is not valid; with "awrs" the log importance weight of the text for the
    model's law given that the text is allowed, -inf if it is not; with "smc" the log of the
    estimated probability that the model's text is allowed.
    num_masks, num_tests: masks computed, and tokens tested without a mask. allowed_mass: if
    requested, the probability of the allowed tokens at each token. error: why the constraint gave
    up, if it did. missing: what the text lacks before the constraint applies, such as the marker.
    particles: with "smc", those that the text was drawn from.
    """

    valid: bool
    logw: float = 0.0
    num_masks: int = 0
    num_tests: int = 0
    allowed_mass: list[float] | None = None
    error: str = ""
    missing: str = ""
    particles: tuple[Particle, ...] | None = None

    @property
    def log_evidence(self) -> float | None:
        """With "smc": log of the estimated probability that the model's text is allowed."""
        return None if self.particles is None else self.logw

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without those that were not requested."""
        given = {name: value for name, value in asdict(self).items() if value not in (None, "")}
        found = given | {"logw": finite_or_none(self.logw)}
        if self.particles is not None:
            found["log_evidence"] = found["logw"]
            found["particles"] = [particle.to_dict() for particle in self.particles]
        return found


def by_text(particles: Iterable[Particle]) -> dict[str, float]:
    """Text -> the weight of its particles, largest first; without particles of weight 0."""
    found: dict[str, float] = {}
    for one in particles:
        if one.weight > 0.0:
            found[one.text] = found.get(one.text, 0.0) + one.weight
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def finite_or_none(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
