"""Hooks in vLLM's model runner: target logits for our drafters, q for its rejection sampler.

vLLM's interface for custom drafters passes neither logits nor q. The entry point `register` of the
group vllm.general_plugins permits two methods of the model runner to be wrapped. They are wrapped
when one of our proposers is created; runners with another drafter behave as before.

    _sample                       target logits of every verified position, before sampling
    _get_spec_decode_draft_probs  q of every drafted position

Both names are private to vLLM, so only tested releases are accepted.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from typing import Any

from forerun.errors import ConfigError, install_extra

TESTED_RELEASES = ("0.32.0",)  # of vLLM
GROUP = "vllm.general_plugins"

log = logging.getLogger("forerun")
_permitted: set[str] = set()  # GROUP, after its entry point has run in this process


def register() -> None:
    """The entry point, called in every process of vLLM.

    It must not import anything: vLLM 0.32 on CPUs searches all imported modules for kernels before
    its worker starts, and fails on numba's.
    """
    _permitted.add(GROUP)


class Tap(ABC):
    """A drafter in vLLM that receives target logits and returns q."""

    has_logits: bool  # False: no logits and no q, so drafts must be deterministic

    @abstractmethod
    def receive_logits(self, runner: Any, logits: Any, metadata: Any) -> None:
        """Called before sampling: logits [rows, V]; metadata is None if nothing was drafted."""

    @abstractmethod
    def draft_probs(self) -> Any:
        """q [drafted tokens of the batch, V], float32; None if all drafts are deterministic."""


def check_release() -> None:
    """Raises ConfigError unless this release of vLLM was tested."""
    import vllm

    release = vllm.__version__.partition("+")[0]
    if release not in TESTED_RELEASES:
        raise ConfigError(
            f"forerun was tested with vLLM {', '.join(TESTED_RELEASES)}, but this is vLLM "
            f"{release}; to install a tested release {install_extra('vllm')}"
        )


def open_taps(world_size: int) -> bool:
    """Wraps the model runner and returns True; otherwise warns: drafts are then deterministic."""
    reason = ""
    if GROUP not in _permitted:
        reason = f"the plugin forerun of {GROUP} was not loaded (is it installed? VLLM_PLUGINS?)"
    elif world_size > 1:
        reason = f"{world_size} workers would need equal random draws, which was not tested"
    if reason:
        log.warning("no target logits from vLLM, so drafts are deterministic: %s", reason)
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
            tap.receive_logits(self, logits, spec_decode_metadata)
        return sample(self, logits, spec_decode_metadata)

    @functools.wraps(probs)
    def tapped_probs(self: Any, spec_decode_metadata: Any) -> Any:
        tap = tap_of(self)
        return probs(self, spec_decode_metadata) if tap is None else tap.draft_probs()

    runner_class._sample = tapped_sample
    runner_class._get_spec_decode_draft_probs = tapped_probs
    runner_class._is_tapped_by_forerun = True


def tap_of(runner: Any) -> Tap | None:
    """The runner's drafter if it is a tap with logits."""
    drafter = getattr(runner, "drafter", None)
    return drafter if isinstance(drafter, Tap) and drafter.has_logits else None
