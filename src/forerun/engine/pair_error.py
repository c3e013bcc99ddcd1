"""The error for a drafter that a verifier does not accept, with methods that would work instead.

They follow from the labels that drafters, growers and verifiers declare.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forerun import registry
from forerun.core.growing import Grower
from forerun.core.roles import Drafter, Verifier, name_of
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError
from forerun.utils.text import joined

DRAWN_AS = {  # label -> how the tokens of a draft are drawn
    "point": "picked tokens (point)",
    "iid": "tokens drawn independently (iid)",
    "swor": "tokens drawn without replacement (swor)",
    "lazy": "tokens drawn without a list of all probabilities (lazy)",
}


def pair_error(drafter: Drafter, verifier: Verifier) -> ConfigError:
    """The error for a verifier that does not support all labels of a drafter."""
    unsupported = sorted(drafter.labels - verifier.judges)
    drawn = [DRAWN_AS.get(label, f"tokens drawn by {label}") for label in unsupported]
    verifiers = joined(verifiers_for(drafter.labels), "or")
    use = f"verifier {verifiers}" if verifiers else "another drafter"
    if growers := joined(growers_for(drafter, verifier), "or"):
        use += f", or grower {growers}"
    return ConfigError(
        f"verifier {name_of(verifier)!r} does not accept the drafts of drafter "
        f"{name_of(drafter)!r}: {joined(drawn, 'and')}; use {use}"
    )


def verifiers_for(labels: frozenset[str]) -> list[str]:
    """The lossless verifiers that accept drafts with these labels at any temperature.

    The default comes first.
    """
    known = [(name, cls) for name, cls in _declared("verifier") if cls.lossless]
    found = [name for name, cls in known if labels <= cls.judges and _can_sample(cls)]
    return sorted(found, key=lambda name: (name != registry.DEFAULT_VERIFIER, name))


def growers_for(drafter: Drafter, verifier: Verifier) -> list[str]:
    """The growers with drafts that a verifier accepts, if the drafter's grower can be chosen."""
    own = getattr(drafter, "grower", None)
    if not isinstance(own, Grower) or own.labels != drafter.labels:  # its grower does not decide
        return []
    growers = [(name, getattr(cls, "labels", None)) for name, cls in _declared("grower")]
    return [name for name, labels in growers if labels and labels <= verifier.judges]


def _can_sample(cls: type[Verifier]) -> bool:
    """Whether a verifier accepts requests with a temperature above 0."""
    try:
        cls().check(Sampling(temperature=1.0))
    except (ConfigError, TypeError):  # TypeError: it needs options
        return False
    return True


def _declared(kind: str) -> Iterator[tuple[str, Any]]:
    """Registered methods with labels of their class, not of a method that is one of its options."""
    for name in registry.names(kind):
        try:
            cls = registry.get(kind, name)
        except ConfigError:  # of another package, and cannot be loaded
            continue
        if not set(registry.reference_options(cls).values()) & {"VerifierName", "GrowerName"}:
            yield name, cls
