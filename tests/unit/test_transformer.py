"""Layers against their formulas, and a real trained model against the text in its card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from convert_stories260k import convert
from parity import forward, sequence
from torch import Tensor

from forerun.core.tree import EMPTY, chain
from forerun.models.layers import Experts, GatedMLP, Linear, RMSNorm
from forerun.models.load import load_target
from forerun.models.rope import Rope, roll_order
from forerun.models.tokenizer import Tokenizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 3])
def test_rms_norm(dtype: torch.dtype, offset: float, rows: int) -> None:
    torch.manual_seed(0)
    x, w = 3 * torch.randn(rows, 64).to(dtype), torch.randn(64).to(dtype)
    wide = x.double()
    want = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (w.double() + offset)
    got = RMSNorm(w, 1e-5, offset)(x)
    assert got.dtype == dtype
    step = torch.finfo(dtype).eps
    assert ((got.double() - want).abs() <= 2 * step * want.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_packed_or_not(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(5, 32), torch.randn(48, 32), torch.randn(48)
    want = x.to(dtype).double() @ w.to(dtype).double().T + b.to(dtype).double()
    for pack in (True, False):
        linear = Linear(w.to(dtype), b.to(dtype), pack=pack)
        assert linear.shape == (48, 32)
        assert torch.allclose(linear(x.to(dtype)).double(), want, rtol=0.01, atol=0.05)


def test_experts_equal_the_dense_sum() -> None:
    torch.manual_seed(0)

    def mlp() -> GatedMLP:
        return GatedMLP(Linear(torch.randn(16, 8)), Linear(torch.randn(8, 8)), "silu")

    gate, experts, x = Linear(torch.randn(4, 8)), [mlp() for _ in range(4)], torch.randn(6, 8)
    probs, chosen = gate(x).softmax(-1).topk(2)
    probs = probs / probs.sum(-1, keepdim=True)
    want = torch.stack(
        [
            sum(
                (probs[r, k] * experts[chosen[r, k]](x[r : r + 1])[0] for k in range(2)),
                Tensor([0]),
            )
            for r in range(6)
        ]
    )
    assert torch.allclose(Experts(gate, experts, 2, True)(x), want, atol=1e-4)


@pytest.mark.parametrize("rotary", [16, 8])
def test_one_roll_rotates(rotary: int) -> None:
    inv_freq = 1.0 / 100.0 ** (torch.arange(0, rotary, 2) / rotary)
    order = roll_order(16, rotary)
    x = torch.randn(3, 1, 16)
    cos, sin = Rope(inv_freq, 16, 1.0, torch.float32, torch.device("cpu")).rows(
        torch.tensor([0, 5, 300]), 300
    )
    y = x[..., order]
    got = torch.empty_like(x)
    got[..., order] = y * cos + y.roll(8, -1) * sin
    half = rotary // 2
    angles = torch.tensor([0.0, 5.0, 300.0])[:, None, None] * inv_freq
    a, b = x[..., :half], x[..., half:rotary]
    want = torch.cat(
        [
            a * angles.cos() - b * angles.sin(),
            b * angles.cos() + a * angles.sin(),
            x[..., rotary:],
        ],
        -1,
    )
    assert torch.allclose(got, want, atol=1e-5)


@pytest.fixture(scope="module")
def stories(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The converted model, and the greedy text of its card."""
    source = data_dir / "models" / "stories260K"
    if not (source / "stories260K.bin").is_file():
        pytest.skip(f"no stories260K.bin in {source}")
    folder = tmp_path_factory.mktemp("stories")
    convert(source / "stories260K.bin", source / "tok512.bin", folder)
    text = (source / "stories260K.md").read_text().partition("-t 0.0\n")[2].partition("\n```")[0]
    return folder, text.strip()


@pytest.mark.parametrize("with_drafts", [False, True])
def test_a_real_model_tells_its_story(stories: tuple[Path, str], with_drafts: bool) -> None:
    folder, text = stories
    target, tokenizer = load_target(folder), Tokenizer.load(folder)
    written = tokenizer.encode(text)
    seq = sequence([1], limit=300)
    while len(seq.tokens) < 250:
        at = len(seq.tokens)
        tree = chain([*written[at : at + 4], 5]) if with_drafts else EMPTY
        best = forward(target, [seq], [tree])[0].logits.argmax(-1).tolist()
        seq.tokens += [token for token, _ in accepted(tree.tokens.tolist(), best)]
    assert tokenizer.decode(seq.tokens) == text[: len(tokenizer.decode(seq.tokens))]
    assert len(tokenizer.decode(seq.tokens)) > 500


def accepted(draft: list[int], best: list[int]) -> list[tuple[int, int]]:
    """Greedy verification of a chain: drafted tokens that are best, then the best one."""
    count = 0
    while count < len(draft) and draft[count] == best[count]:
        count += 1
    return list(zip(best[: count + 1], range(count + 1), strict=True))
