"""The methods of a server, built before it starts, so that requests compile and load nothing.

A method that learns keeps a separate memory per tenant. Every prompt with a seed has a separate
memory too (`Job.taught`), because other requests must not change the text of a seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from forerun import registry
from forerun.constraints.base import Constraint
from forerun.core.roles import Drafter, Shaper, Verifier
from forerun.engine.engine import check_pair
from forerun.errors import ConfigError
from forerun.serving.errors import ApiError, unknown
from forerun.serving.routing import Gate, MethodDispatcher

if TYPE_CHECKING:
    from forerun.api import Model

BUILT_IN = ("auto", "stand", "prompt_lookup", "none")  # if registered
DEFAULT = "auto"  # for requests without a method
SCOPES = "tenant", "group"  # of memories, preferred first


class Methods:
    """Method names of requests and their drafters.

    extra: name -> drafter spec, from the operator. Raises ConfigError, UnknownName.
    """

    def __init__(self, extra: Mapping[str, str], default: str | None, **build: Any) -> None:
        known = registry.names("drafter")
        self.specs = {name: name for name in BUILT_IN if name in known} | dict(extra)
        self.default = default or DEFAULT
        self.specs.setdefault(self.default, self.default)
        self._build = build

    def dispatcher(self, verifier: Verifier) -> MethodDispatcher:
        """A dispatcher over new drafters. Raises ConfigError if the verifier refuses one."""
        parts: dict[str, Drafter] = {}
        for name, spec in self.specs.items():
            parts[name] = self._make(spec)
            check_pair(parts[name], verifier)
        return MethodDispatcher(parts)

    def choose(self, name: str | None) -> str:
        """The name of a method; None: the default. Raises ApiError 400 for unknown names."""
        name = (self.default if name is None else name).replace("-", "_")
        if name not in self.specs:
            raise unknown(
                "speculation method",
                name,
                self.specs,
                param="speculation.method",
                code="unknown_method",
            )
        return name

    def _make(self, spec: str) -> Drafter:
        """The drafter with the first scope that it supports; a scope in the spec is kept."""
        for scope in SCOPES if registry.is_option_unset("drafter", spec, "scope") else ():
            try:
                return registry.make("drafter", spec, scope=scope, **self._build)
            except ConfigError:
                if scope == SCOPES[-1]:
                    raise
        return registry.make("drafter", spec, **self._build)


class Constraints:
    """Constraints for requests, built before the server starts.

    specs: name -> constraint spec. samplings: how requests may draw tokens under a constraint.
    Raises ConfigError, DataError, UnknownName.
    """

    def __init__(
        self, model: Model, specs: Mapping[str, str], samplings: tuple[str, ...] = ("mask",)
    ) -> None:
        self.samplings = samplings
        tokenizer, vocab_size = model.tokenizer, model.target.vocab_size
        self.shapers: dict[str, Shaper] = {
            name: model.constraint(spec).bind(tokenizer, vocab_size) for name, spec in specs.items()
        }

    def gates(self) -> tuple[Gate, ...]:
        """Shapers for a new engine, in the operator's order: those that are no `Constraint`."""
        return tuple(
            Gate(name, shaper)
            for name, shaper in self.shapers.items()
            if not isinstance(shaper, Constraint)
        )

    @property
    def hard_names(self) -> list[str]:
        """The names of constraints that only forbid tokens."""
        return [name for name, one in self.shapers.items() if isinstance(one, Constraint)]

    def hard(self, names: Iterable[str]) -> list[Constraint]:
        """The constraints among `names` that only forbid tokens."""
        found = [self.shapers[name] for name in dict.fromkeys(names)]
        return [one for one in found if isinstance(one, Constraint)]

    def choose(self, given: str | list[str] | None) -> tuple[str, ...]:
        """The constraint names of a request. Raises ApiError 400 for unknown names."""
        asked = [given] if isinstance(given, str) else given or []
        names = tuple(name.replace("-", "_") for name in asked)
        where: dict[str, Any] = {"param": "speculation.constraint", "code": "unknown_constraint"}
        for name in names:
            if not self.shapers:
                raise ApiError(400, "this server offers no constraint; leave it out", **where)
            if name not in self.shapers:
                raise unknown("constraint", name, self.shapers, **where)
        return names


def named(texts: Iterable[str], kind: str = "method") -> dict[str, str]:
    """Name -> spec, from texts NAME=SPEC or SPEC; "stand:context=3" has the name stand.

    Raises ConfigError for a name with two specs.
    """
    specs: dict[str, str] = {}
    for text in texts:
        name, equals, spec = text.partition("=")
        if not equals or ":" in name:
            name, spec = text.partition(":")[0], text
        name, spec = name.strip().replace("-", "_"), spec.strip()
        if (before := specs.setdefault(name, spec)) != spec:
            raise ConfigError(
                f"{kind} {name!r} is given twice, as {before} and as {spec}; give one another "
                "name: NAME=SPEC"
            )
    return specs


def make_verifier(spec: str, allow_lossy: bool, **build: Any) -> Verifier:
    """The verifier of a spec. Raises ConfigError for a lossy one, unless allowed."""
    verifier: Verifier = registry.make("verifier", spec, **build)
    return check_lossless(verifier, spec, allow_lossy)


def check_lossless(verifier: Verifier, name: str, allow_lossy: bool) -> Verifier:
    """The verifier itself. Raises ConfigError for a lossy one, unless allowed."""
    if not (verifier.lossless or allow_lossy):
        raise ConfigError(
            f"verifier {name!r} is lossy: it changes the model's distribution; use "
            "'speculative', or allow it with --allow-lossy"
        )
    return verifier
