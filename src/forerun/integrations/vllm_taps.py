"""Where our proposers reach into vLLM: target logits come out, the law of the drafts goes in.

vLLM's interface for drafters of others knows neither logits nor laws. `register`, an entry point of
the group vllm.general_plugins, permits two methods of its model runner to be wrapped; they are when
a proposer of ours is made, and runners with another drafter go their own way:

    _sample                       target logits of every judged position, before they are sampled
    _get_spec_decode_draft_probs  q of every drafted position, for its rejection sampler

Both names are private to vLLM, hence the list of tested releases.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from typing import Any

from forerun.errors import ConfigError

TESTED = ("0.32.0",)  # releases of vLLM
GROUP = "vllm.general_plugins"

log = logging.getLogger("forerun")
_permitted: set[str] = set()  # the group, once its entry point has run in this process


def register() -> None:
    """The entry point. Every process of vLLM calls it, so nothing may be imported here: vLLM 0.32
    on CPUs searches all modules for kernels before its worker starts, and fails at numba's."""
    _permitted.add(GROUP)


class Tap(ABC):
    """A drafter of vLLM that sees target logits and tells q."""

    is_full: bool  # False: it gets neither, and must draft deterministically

    @abstractmethod
    def see(self, runner: Any, logits: Any, metadata: Any) -> None:
        """Before sampling: logits [rows, V]; metadata is None where nothing was drafted."""

    @abstractmethod
    def draft_probs(self) -> Any:
        """q [drafted tokens of the batch, V], float32; None if all drafts are deterministic."""


def check_release() -> None:
    """Raises ConfigError unless this release of vLLM was tested."""
    import vllm

    release = vllm.__version__.partition("+")[0]
    if release not in TESTED:
        raise ConfigError(
            f"forerun drafts inside vLLM {', '.join(TESTED)}, which it was tested with, but this "
            f"is vLLM {release}; install such a release: pip install 'forerun[vllm]'"
        )


def open_taps(world_size: int) -> bool:
    """Wraps the runner if that is possible here; otherwise warns, and drafts are deterministic."""
    reason = ""
    if GROUP not in _permitted:
        reason = f"no plugin of {GROUP} named forerun was loaded (is it installed? VLLM_PLUGINS?)"
    elif world_size > 1:
        reason = f"{world_size} workers would have to draw alike, which was not tested"
    if reason:
        log.warning("vLLM gives forerun tokens only, so drafts are deterministic: %s", reason)
        return False
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap(GPUModelRunner)
    return True


def wrap(runner_class: Any) -> None:
    """Wraps the two methods of a model runner's class, once."""
    if getattr(runner_class, "_is_tapped_by_forerun", False):
        return
    sample, probs = runner_class._sample, runner_class._get_spec_decode_draft_probs

    @functools.wraps(sample)
    def tapped_sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        if (tap := tap_of(self)) is not None:
            tap.see(self, logits, spec_decode_metadata)
        return sample(self, logits, spec_decode_metadata)

    @functools.wraps(probs)
    def tapped_probs(self: Any, spec_decode_metadata: Any) -> Any:
        tap = tap_of(self)
        return probs(self, spec_decode_metadata) if tap is None else tap.draft_probs()

    runner_class._sample = tapped_sample
    runner_class._get_spec_decode_draft_probs = tapped_probs
    runner_class._is_tapped_by_forerun = True


def tap_of(runner: Any) -> Tap | None:
    """The runner's drafter if it is a tap that is open."""
    drafter = getattr(runner, "drafter", None)
    return drafter if isinstance(drafter, Tap) and drafter.is_full else None
