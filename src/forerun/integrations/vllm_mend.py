"""Fixes a bug of vLLM 0.32 on CPUs without Triton that changes the output distribution.

vLLM converts the output tensor for each row's temperature (and top-p) to integers and fills the
copy. The logits of drafted positions are then divided by uninitialised memory. The bug affects all
speculation in vLLM, so benchmarks apply the fix too: bench/peers/workers/vllm.py runs this file in
an environment without forerun, so it must not import forerun.
"""

from __future__ import annotations

from typing import Any


def mend() -> bool:
    """Replaces the function if it is wrong; returns whether it was."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu():
        return False
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    x, ends = torch.tensor([0.7, 0.3]), torch.tensor([2, 3], dtype=torch.int32)
    if rejection_sampler.expand_batch_to_tokens(x, ends, 3).tolist() == x[[0, 0, 1]].tolist():
        return False
    rejection_sampler.expand_batch_to_tokens = expanded
    return True


def expanded(x: Any, ends: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """x [requests], repeated to [num_tokens]; the tokens of each request end at `ends`."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    x = x.masked_fill(x == replace_from, replace_to)
    return x.repeat_interleave(counts, output_size=num_tokens)
