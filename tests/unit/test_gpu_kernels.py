"""Kernels of a GPU one by one against torch, where loops turn and edges lie: on a GPU if there is
one, elsewhere by Triton's interpreter."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton")

from forerun.runner.forward_batch import Work, packed  # noqa: E402
from forerun.runner.gpu import bodies, kernels  # noqa: E402
from forerun.runner.gpu.layout import describe, shape_of  # noqa: E402
from forerun.runner.slots import Slot  # noqa: E402

ACTS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def some(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Random numbers, fp16."""
    rng = np.random.default_rng(list(shape))
    return torch.from_numpy(scale * rng.standard_normal(shape)).to(DEVICE, torch.float16)


@pytest.mark.parametrize(
    ("act", "has_norm", "has_bias", "adds"),
    [("", 0, 1, 1), ("", 1, 0, 0), *((act, 1, has_bias, 0) for act in ACTS for has_bias in (0, 1))],
)
def test_products_of_one_row(act: str, has_norm: bool, has_bias: bool, adds: bool) -> None:
    """Weights of more columns than are read at once, no multiple of them; rows beyond the last."""
    num, inner, size = 21, 2 * 32 + 5, 2 if act else 1
    weight, bias, gain = some(size * num, inner, scale=0.1), some(size * num), some(inner).float()
    x, y = some(1, inner).float(), some(1, num).float()
    normed = F.rms_norm(x, (inner,), gain, 1e-6) if has_norm else x
    want = F.linear(normed, weight.float(), bias.float() if has_bias else None)
    if act:
        want = ACTS[act](want[:, :num]) * want[:, num:]
    want = want + y if adds else want
    kernels.project[(-(-num // 4),)](
        x, gain, weight, bias, y, num, inner, 1e-6, BN=4, BK=32, NORM=has_norm, BIAS=has_bias,
        ADD=adds, ACT=act, PDL=False,
    )  # fmt: skip
    torch.testing.assert_close(y, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


def test_gates_wider_than_a_program() -> None:
    both = some(3, 2 * (bodies.GATE_BLOCK + 77))
    y = torch.empty(3, bodies.GATE_BLOCK + 77, dtype=both.dtype, device=DEVICE)
    kernels.gate_and_up[3, 2](both, y, y.shape[1], BLOCK=bodies.GATE_BLOCK, ACT="silu", PDL=False)
    gate, up = both.float().chunk(2, -1)
    torch.testing.assert_close(y.float(), F.silu(gate) * up, rtol=2e-3, atol=2e-3)


WINDOWS_AND_CAPS = [(None, None), (300, None), (None, 5.0)]
LOOKS = [*itertools.product((torch.float16, torch.float32), WINDOWS_AND_CAPS, (1, 1000))]
QUICK_LOOKS = (0, 3, 5, 7)  # whole; split with a window, a cap, in fp32


@pytest.mark.parametrize(
    ("dtype", "window", "cap", "programs"),
    [
        pytest.param(dtype, *limits, programs, marks=() if n in QUICK_LOOKS else pytest.mark.slow)
        for n, (dtype, limits, programs) in enumerate(LOOKS)
    ],
)
def test_attention_over_long_texts_with_trees(
    programs: int,
    window: int | None,
    cap: float | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several texts, scores far from each other, the tree across a border of what is read at once;
    text, mask and softmax as torch has them."""
    monkeypatch.setattr(bodies, "PROGRAMS", programs)
    heads, kv, dim, cells = 6, 2, 16, 640
    works = []
    for index, (length, nodes) in enumerate([(500, 25), (3, 0), (630, 0)]):
        slot = Slot(index)
        slot.tokens = [1] * length
        parents = np.array([node - 1 if node % 3 else -1 for node in range(nodes)], np.int32)
        works.append(Work(slot, [5], [7] * nodes, parents))
    data = some(1, 3, 2, kv, cells, dim, scale=3).to(dtype).permute(0, 1, 4, 2, 3, 5)
    stored = SimpleNamespace(data=data)
    shape, strides = shape_of(works), (data.stride(1), data.stride(2))
    rows = packed(works, strides, 100, 1)
    num = sum(work.num_rows for work in works)
    given = torch.from_numpy(describe(shape, rows, num, strides[0])).to(DEVICE)
    config = SimpleNamespace(
        num_heads=heads, num_kv_heads=kv, head_dim=dim, attn_softcap=cap, attn_scale=0.25,
        window=lambda _: window,
    )  # fmt: skip
    model = SimpleNamespace(config=config, device=torch.device(DEVICE), dtype=dtype)
    one = bodies.Attention(model, stored, shape, given)  # type: ignore[arg-type]
    assert (one.splits == 1) == (programs == 1)
    q = some(shape.rows, heads, dim, scale=3).to(dtype)
    found, at = one.look(0, q)[:num].float(), 0
    for work in works:
        span = work.span
        sees = torch.from_numpy(span.mask(0, span.stop, window)).to(DEVICE)
        keys, values = data[0, span.slot, : span.stop].float().permute(1, 2, 0, 3).unbind(0)
        group = q[at : at + span.num_rows].float().view(-1, kv, heads // kv, dim)
        scores = torch.einsum("rkfd,knd->rkfn", group, keys) * 0.25
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~sees[:, None, None], -torch.inf)
        want = torch.einsum("rkfn,knd->rkfd", scores.softmax(-1), values).flatten(1)
        torch.testing.assert_close(
            found[at : at + span.num_rows], want, rtol=5e-3, atol=5e-3 * float(want.abs().max())
        )
        at += span.num_rows
