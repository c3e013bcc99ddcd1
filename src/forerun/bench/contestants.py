"""Interface of what is measured: local methods in this process, peers in their own processes."""

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
    """Why a peer cannot run here, without its name."""


class PeerError(ForerunError):
    """A peer failed; the last lines of its output."""


@dataclass(frozen=True)
class CacheDemand:
    """The KV cache that a run needs."""

    num_seqs: int  # concurrent sequences
    num_tokens: int  # of the longest prompt with its answer


@dataclass(frozen=True)
class Setup:
    """Model, threads and environments of a peer."""

    model: Path  # folder of the checkpoint
    dtype: str  # bf16, fp16, fp32, or auto: the checkpoint's
    threads: int
    context: int | None = None  # limit per sequence; None: the model's
    environments: Path | None = None  # folder of the peers' virtual environments
    device: str = "cpu"


@dataclass(frozen=True)
class Outcome:
    """One prompt by one contestant."""

    seconds: float  # wall, all samples, prefill included
    samples: list[SampleRecord]  # by trajectory, not yet scored
    prefill_seconds: float | None = None  # of the passes that computed the prompt
    memory: dict[str, int] = field(default_factory=dict)  # bytes by part
    headroom: dict[str, float] | None = None  # of a second, untimed run; see theory.Headroom


class Contestant(Protocol):
    """Decodes prompts. Raises SkippedPeer when it cannot start, PeerError when it breaks."""

    name: str

    @property
    def host(self) -> Hashable:
        """Key of its process, which several may share; None for this process."""
        ...

    @property
    def is_batched(self) -> bool:
        """Whether it decodes the samples of a prompt concurrently."""
        ...

    @property
    def restarts(self) -> int:
        """How often it was restarted, with cold caches."""
        ...

    def versions(self) -> dict[str, str]:
        """Versions of the packages that matter."""
        ...

    def size_for(self, demand: CacheDemand) -> None:
        """Sets the size of its cache; call before `start`."""
        ...

    def memory_needed(self) -> int:
        """Bytes that it will allocate in addition to what it holds."""
        ...

    def memory_plan(self) -> dict[str, int]:
        """Its memory for the manifest; empty for this process."""
        ...

    def start(self) -> None:
        """Loads the model."""
        ...

    def warm_up(self, example: Example, sampling: Sampling) -> None:
        """A short run that is not counted."""
        ...

    def run(self, example: Example, sampling: Sampling) -> Outcome:
        """Decodes one prompt sampling.n times, prefill included."""
        ...

    def close(self) -> None:
        """Frees its resources."""
        ...


def warm_up_sampling(sampling: Sampling, batch: int = 1) -> Sampling:
    """A few short trajectories, to compile kernels and touch caches and pages."""
    tokens = min(64, sampling.max_new_tokens)
    low = min(sampling.min_new_tokens, tokens)
    return replace(
        sampling, n=max(2, min(batch, sampling.n)), max_new_tokens=tokens, min_new_tokens=low
    )
