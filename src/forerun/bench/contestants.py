"""Who takes part in a run: our own methods in this process, peers in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from forerun import registry
from forerun.bench.metrics import PLAIN
from forerun.bench.results import SampleRecord
from forerun.errors import ConfigError, ForerunError, UnknownName
from forerun.sampling import Sampling

if TYPE_CHECKING:
    from forerun.bench.tasks.base import Example
    from forerun.engine.api import Model


class SkippedPeer(ForerunError):
    """Why a peer cannot take part here; whoever tells it names the peer."""


class PeerError(ForerunError):
    """A peer that failed: its last lines."""


@dataclass(frozen=True)
class Demand:
    """What a run asks of a contestant's key-value cache."""

    num_seqs: int  # at once
    num_tokens: int  # of the longest prompt and its answer


@dataclass(frozen=True)
class Setup:
    """What a peer needs to take part."""

    model: Path  # folder of the checkpoint
    dtype: str  # bf16, fp16, fp32, or auto: the checkpoint's
    threads: int
    context: int | None = None  # the most that a sequence may have; None: what the model can
    environments: Path | None = None  # where the peers' virtual environments are
    device: str = "cpu"


@dataclass(frozen=True)
class Outcome:
    """One prompt by one contestant."""

    seconds: float  # wall, all samples, prefill included
    samples: list[SampleRecord]  # by trajectory, not yet scored
    prefill_seconds: float | None = None  # of the passes that computed the prompt
    memory: dict[str, int] = field(default_factory=dict)  # bytes by part
    headroom: dict[str, float] | None = None  # of a second, untimed run: see theory.Headroom


class Contestant(Protocol):
    """Decodes prompts. Raises SkippedPeer when it cannot start, PeerError when it breaks."""

    name: str

    @property
    def host(self) -> Hashable:
        """The process that it runs in, which several may share; None for this one."""
        ...

    @property
    def is_batched(self) -> bool:
        """Whether it decodes the samples of a prompt at the same time."""
        ...

    @property
    def restarts(self) -> int:
        """How often it had to begin anew, with caches that are cold."""
        ...

    def versions(self) -> dict[str, str]:
        """Packages that matter, and their versions."""
        ...

    def size_for(self, demand: Demand) -> None:
        """Sets how large its cache will be. To be called before `start`."""
        ...

    def memory_needed(self) -> int:
        """Bytes that it will take beyond those that it holds now."""
        ...

    def memory_plan(self) -> dict[str, int]:
        """What the run's manifest says of its memory; empty for this process."""
        ...

    def start(self) -> None:
        """Loads the model."""
        ...

    def warm_up(self, example: Example, sampling: Sampling) -> None:
        """A short run that is not counted."""
        ...

    def run(self, example: Example, sampling: Sampling) -> Outcome:
        """Decodes one prompt sampling.n times, the prompt computed anew."""
        ...

    def first_tokens(self, prompt: str, sampling: Sampling, n: int) -> list[int]:
        """The first token of n samples: whether it follows the law that was asked for."""
        ...

    def close(self) -> None:
        """Frees what it holds."""
        ...


def short(sampling: Sampling, batch: int = 1) -> Sampling:
    """A few short trajectories: enough to touch kernels, caches and pages."""
    tokens = min(64, sampling.max_new_tokens)
    low = min(sampling.min_new_tokens, tokens)
    return replace(
        sampling, n=max(2, min(batch, sampling.n)), max_new_tokens=tokens, min_new_tokens=low
    )


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
            f"no {kind} is named, got {text!r}; give at least one, or several with commas between "
            "them"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{kind} {twice[0]!r} is named twice; name every {kind} once")
    return names


def make(name: str, model: Callable[[], Model], setup: Setup) -> Contestant:
    """The contestant of a name; nothing is loaded yet. Raises as `check_name` does."""
    from forerun.bench import own, peers

    return own.Own(name, model) if is_own(name) else peers.make(name, setup)


def check_name(name: str) -> None:
    """Raises UnknownName with the nearest methods and peers, or for an unknown option."""
    from forerun.bench import own, peers

    if is_own(name):
        own.parts_of(name)
    else:
        peers.parse(name)


def check_sampling(names: Sequence[str], sampling: Sampling) -> None:
    """Raises ConfigError for what is too large for a peer, if one of the names is a peer's."""
    from forerun.bench import peers

    if not all(map(is_own, names)):
        peers.check_sampling(sampling)


def is_own(name: str) -> bool:
    """Whether a name is that of a method of ours, not of a peer. Raises UnknownName."""
    from forerun import catalog
    from forerun.bench import peers

    head, methods = _head(name), [PLAIN, *registry.names("drafter")]
    if head not in methods and head not in peers.names():
        if catalog.find(head) or catalog.owner(f"drafters/{head}"):
            registry.get("drafter", head)  # says in which state it is
        listing = "`forerun methods` lists our methods"
        raise UnknownName.of("method", head, {*methods, *peers.names()}, listing)
    return head in methods


def _head(name: str) -> str:
    return name.partition(":")[0].strip().replace("-", "_")
