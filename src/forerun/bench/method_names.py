"""Names of methods and peers, and the contestants built from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from forerun import catalog, registry
from forerun.bench import local_runner, peers
from forerun.bench.contestants import Contestant, Setup
from forerun.bench.metrics import PLAIN
from forerun.core.sampling import Sampling
from forerun.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from forerun.api import Model


def split_methods(text: str) -> list[str]:
    """Method names of a comma-separated list, "none" as "plain". Raises as `split_names` does."""
    return split_names(text, "method", {"none": PLAIN})


def split_names(text: str, kind: str, known_as: Mapping[str, str] | None = None) -> list[str]:
    """Names of a comma-separated list; a piece "key=value" belongs to the name before it.

    Raises ConfigError for a list that names none, or one twice.
    """
    names: list[str] = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        key, equals, _ = piece.partition("=")
        if names and equals and ":" not in key:
            names[-1] += ("," if ":" in names[-1] else ":") + piece
        else:
            names.append((known_as or {}).get(piece, piece))
    if not names:
        raise ConfigError(
            f"no {kind} is named, got {text!r}; give one or more, separated by commas"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{kind} {twice[0]!r} is named twice; list it once")
    return names


def make(name: str, model: Callable[[], Model], setup: Setup) -> Contestant:
    """The contestant of a name, not yet loaded. Raises as `check_name` does."""
    return local_runner.LocalMethod(name, model) if is_local(name) else peers.make(name, setup)


def check_name(name: str) -> None:
    """Raises UnknownName for an unknown method, peer or option."""
    if is_local(name):
        local_runner.parts_of(name)
    else:
        peers.parse(name)


def check_sampling(names: Sequence[str], sampling: Sampling) -> None:
    """Raises ConfigError for sampling values that the named peers cannot represent."""
    if not all(map(is_local, names)):
        peers.check_sampling(sampling)


def is_local(name: str) -> bool:
    """Whether a name is a local method, not a peer. Raises UnknownName."""
    head, methods = _head(name), [PLAIN, *registry.names("drafter")]
    if head not in methods and head not in peers.names():
        if catalog.find(head) or catalog.owner(f"drafters/{head}"):
            registry.get("drafter", head)  # raises with the method's state
        listing = "`forerun methods` lists all methods"
        raise UnknownName.of("method", head, {*methods, *peers.names()}, listing)
    return head in methods


def _head(name: str) -> str:
    return name.partition(":")[0].strip().replace("-", "_")
