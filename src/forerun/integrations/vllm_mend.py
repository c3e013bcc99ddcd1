"""Mends vLLM 0.32 on CPUs without Triton, where drafts would be judged by another law.

It converts the tensor that should receive every row's temperature (and top-p) to integers and fills
the copy: the logits of drafted positions are then divided by memory that nobody wrote. All of its
own speculation suffers from that, too, so benchmarks mend it as well: bench/peers/workers/vllm.py
reads this file in an environment without forerun, hence no import of ours.
"""

from __future__ import annotations

from typing import Any


def mend() -> bool:
    """Replaces the function where it is wrong; False where nothing had to be done."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu():
        return False
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    asked = torch.tensor([0.7, 0.3]), torch.tensor([2, 3], dtype=torch.int32)
    if rejection_sampler.expand_batch_to_tokens(*asked, 3).tolist() == asked[0][[0, 0, 1]].tolist():
        return False
    rejection_sampler.expand_batch_to_tokens = expanded
    return True


def expanded(x: Any, ends: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """x [requests], repeated to [num_tokens]; the tokens of each request end at `ends`."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    x = x.masked_fill(x == replace_from, replace_to)
    return x.repeat_interleave(counts, output_size=num_tokens)
