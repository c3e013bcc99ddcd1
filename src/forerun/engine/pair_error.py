"""The error for a drafter and a verifier that do not fit: what would fit, from declared roles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forerun import registry
from forerun.core.growing import Grower
from forerun.core.roles import Drafter, Verifier, name_of
from forerun.errors import ConfigError
from forerun.utils.text import joined

DRAWN = {  # label -> how the tokens of a draft are drawn
    "point": "picked tokens (point)",
    "iid": "tokens drawn independently (iid)",
    "swor": "tokens drawn without replacement (swor)",
    "lazy": "tokens drawn without a list of all probabilities (lazy)",
}


def pair_error(drafter: Drafter, verifier: Verifier) -> ConfigError:
    """The error for a verifier that does not support all labels of a drafter."""
    unsupported = sorted(drafter.labels - verifier.judges)
    drawn = joined([DRAWN.get(label, f"tokens drawn by {label}") for label in unsupported], "and")
    verifiers = joined(accepting(drafter.labels), "or")
    use = f"verifier {verifiers}" if verifiers else "another drafter"
    if growers := joined(growers_for(drafter, verifier), "or"):
        use += f", or grower {growers}"
    return ConfigError(
        f"verifier {name_of(verifier)!r} does not accept the drafts of drafter "
        f"{name_of(drafter)!r}: {drawn}; use {use}"
    )


def accepting(labels: frozenset[str]) -> list[str]:
    """The lossless verifiers that accept drafts with these labels, the default first."""
    found = [name for name, cls in _declared("verifier") if cls.lossless and labels <= cls.judges]
    return sorted(found, key=lambda name: (name != registry.DEFAULT_VERIFIER, name))


def growers_for(drafter: Drafter, verifier: Verifier) -> list[str]:
    """The growers with drafts that a verifier accepts, if the drafter's grower can be chosen."""
    own = getattr(drafter, "grower", None)
    if not isinstance(own, Grower) or own.labels != drafter.labels:  # another way makes its drafts
        return []
    growers = [(name, getattr(cls, "labels", None)) for name, cls in _declared("grower")]
    return [name for name, labels in growers if labels and labels <= verifier.judges]


def _declared(kind: str) -> Iterator[tuple[str, Any]]:
    """Methods with a role that is that of their class, not that of a method in their options."""
    for name in registry.names(kind):
        try:
            cls = registry.get(kind, name)
        except ConfigError:  # of another package, and cannot be loaded
            continue
        if not set(registry.reference_options(cls).values()) & {"VerifierName", "GrowerName"}:
            yield name, cls
