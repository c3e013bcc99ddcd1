"""Settings of a server, fixed before it starts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from forerun import registry
from forerun.controllers.fixed import MAX_NODES
from forerun.errors import ConfigError
from forerun.serving.origins import check_hosts, check_origins

TIMES = (
    "head_timeout",
    "body_timeout",
    "text_timeout",
    "grammar_timeout",
    "request_timeout",
    "stall",
)
METHOD = re.compile(r"[\w.]+")  # names of methods and constraints


@dataclass(frozen=True)
class Settings:
    """Limits and methods of one server. Errors start with the name of the field."""

    name: str = "model"  # model name for clients
    default_method: str | None = None  # None: auto
    methods: Mapping[str, str] = field(default_factory=dict)  # name -> drafter spec, additional
    constraints: Mapping[str, str] = field(default_factory=dict)  # name -> constraint spec
    verifier: str = registry.DEFAULT_VERIFIER
    controller: str = registry.DEFAULT_CONTROLLER
    allow_lossy: bool = False
    share_prefixes: bool = False  # whether all tenants reuse each other's KV cells
    operators: tuple[str, ...] = ()  # tenants that may read /metrics of a server with keys
    allowed_hosts: tuple[str, ...] = ()  # names of the server, for servers without keys
    allowed_origins: tuple[str, ...] = ()  # other sites that browsers may use it from
    max_seqs: int = 32  # sequences that run at once
    max_waiting: int = 256  # waiting requests per tenant
    max_samples: int = 256  # sequences per request: prompts times n
    max_nodes: int = 64  # largest draft tree of a request
    max_body: int = 4 * 2**20  # bytes of a request
    head_timeout: float = 10.0  # seconds to receive the headers of a request
    body_timeout: float = 30.0  # seconds to receive a request
    text_timeout: float = 10.0  # seconds to render and tokenise the texts of a request
    grammar_timeout: float = 5.0  # seconds to compile the constraint of a request
    request_timeout: float = 600.0  # seconds from arrival to the last token
    drain: float = 30.0  # seconds to finish requests after a shutdown signal
    learn: float = 0.0  # share of time for learning while requests run; 0: off
    learn_interval: int = 8  # finished requests per update of the draft
    learn_rate: float = 1e-4  # learning rate of the draft
    engine: int = 0  # number of this engine behind the port
    stall: float = 120.0  # seconds without a step until /health reports a stall

    def __post_init__(self) -> None:
        for name in ("max_seqs", "max_waiting", "max_samples", "max_body"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in TIMES:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0 seconds, got {getattr(self, name)}")
        if not 0 <= self.max_nodes <= MAX_NODES:
            raise ConfigError(f"max_nodes must be in 0..{MAX_NODES}, got {self.max_nodes}")
        if not self.name.strip():
            raise ConfigError("name must not be empty; give the model name for clients")
        try:
            self.name.encode()
        except UnicodeEncodeError:  # answers could not be written
            raise ConfigError(
                f"name must be text in UTF-8, got {self.name!r}; give another model name"
            ) from None
        if not 0 <= self.learn <= 1:
            raise ConfigError(f"learn must be a share of time from 0 to 1, got {self.learn}")
        if self.learn_interval < 1:
            raise ConfigError(f"learn_interval must be at least 1, got {self.learn_interval}")
        if not 0 < self.learn_rate < math.inf:
            raise ConfigError(f"learn_rate must be above 0, got {self.learn_rate}")
        if not 0 <= self.drain < math.inf:
            raise ConfigError(f"drain must be a number of seconds from 0 on, got {self.drain}")
        check_hosts(self.allowed_hosts)
        check_origins(self.allowed_origins)
        _check_names("methods", "drafter", self.methods)
        _check_names("constraints", "constraint", self.constraints)


def _check_names(field: str, kind: str, specs: Mapping[str, str]) -> None:
    """Raises ConfigError for an invalid name, or the name of another registered method."""
    known = registry.names(kind)
    for name, spec in specs.items():
        if not METHOD.fullmatch(name):
            raise ConfigError(f"{field} must be named by letters, digits, _ and ., got {name!r}")
        if name in known and registry.parse(spec)[0] != name:
            raise ConfigError(
                f"{field} must not use the name of another {kind}: {name!r} would be {spec}; "
                "choose a name that is not in `forerun methods`"
            )
