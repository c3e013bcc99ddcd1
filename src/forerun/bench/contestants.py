"""Who takes part in a run: our own methods in this process, peers in processes of their own."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from forerun.bench.results import SampleRecord
from forerun.core.sampling import Sampling
from forerun.errors import ForerunError

if TYPE_CHECKING:
    from forerun.tasks.base import Example


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
