"""Copies to a device: on the CPU none, to CUDA from pinned memory and without waiting."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forerun.utils.device_copy import staged, to_device

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_on_the_cpu_memory_is_shared() -> None:
    array = np.arange(3)
    array[0] = 7
    assert to_device(array, CPU).data_ptr() == array.ctypes.data
    assert to_device(array, CPU).tolist() == [7, 1, 2]


def test_to_cuda_the_host_copy_is_pinned_and_the_move_is_non_blocking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("pinned")
        return tensor

    def move(tensor: torch.Tensor, *given: object, **how: object) -> torch.Tensor:
        calls.append((*given, how))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", move)
    assert to_device(np.arange(3), CUDA).tolist() == [0, 1, 2]
    assert calls == ["pinned", (CUDA, {"non_blocking": True})]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory takes a GPU")
def test_a_pinned_copy_arrives_though_its_source_is_dropped() -> None:
    busy = torch.randn(2048, 2048, device=CUDA)
    for _ in range(20):
        busy = busy @ busy / 2048
    sent = [to_device(np.full(1 << 16, i), CUDA) for i in range(8)]
    assert staged(np.arange(3), CUDA).is_pinned()
    assert [int(x.sum()) for x in sent] == [i << 16 for i in range(8)]
