"""Products of the C kernels against float64, and their law of independence: a row's result is
the same bits whatever else is in the product and however many threads work."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from forerun.errors import ConfigError
from forerun.models.layers import GatedMLP, Linear
from forerun.runner.native import LEVELS, kernels, layout
from forerun.runner.native.packing import (
    LARGE_PAGE,
    Arena,
    Packed,
    WeightFormat,
    can_pack,
    quantized_int8,
    row_stride,
)

pytestmark = pytest.mark.skipif(not kernels(), reason=f"native kernels: {kernels().why}")
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = [(64, 64), (70, 33), (256, 640), (1000, 96), (1, 2), (17, 1), (640, 257)]


@pytest.fixture(params=LEVELS[1 : kernels().level + 1])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """The name of an instruction set: the test runs on every one that the processor has."""
    monkeypatch.setenv("FORERUN_NATIVE", request.param)
    kernels.cache_clear()
    yield request.param
    kernels.cache_clear()


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("shape", SHAPES)
def test_product_matches_float64(level: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, k = shape
    weight, bias = random(n, k, dtype=dtype), random(n, dtype=torch.float32, seed=1)
    packed = Packed(weight)
    packed.set_bias(bias)
    assert torch.equal(packed.unpack(), weight)
    for rows in (1, 2, 3, 5, 6, 7, 12, 13, 16, 17, 31, 33, 70):
        x = random(rows, k, dtype=dtype, seed=rows)
        want = x.double() @ weight.double().T + bias
        assert close(packed.product(x), want, dtype)
    assert packed.product(x[:0]).shape == (0, n)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("act", layout.ACTIVATIONS)
def test_gated_product_matches_float64(level: str, act: str, dtype: torch.dtype) -> None:
    weight, bias = random(192, 48, dtype=dtype), random(192, dtype=torch.float32, seed=1)
    packed = Packed(weight, is_gated=True)
    packed.set_bias(bias)
    assert torch.equal(packed.unpack(), weight)
    functions = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
    }
    for rows in (1, 4, 8, 20):
        x = random(rows, 48, dtype=dtype, seed=rows)
        gate, up = (x.double() @ weight.double().T + bias).chunk(2, -1)
        assert close(packed.product(x, act), functions[act](gate) * up, dtype)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((got.double() - want).abs().max() <= ERROR[dtype] * want.abs().max())


def test_rows_of_a_packed_weight() -> None:
    weight = random(70, 33, dtype=torch.bfloat16)
    index = torch.tensor([0, 69, 16, 16])
    assert torch.equal(Packed(weight).rows(index), weight[index])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ERROR)
def test_strange_numbers_propagate_in_their_row_only(
    level: str, dtype: torch.dtype, bad: float
) -> None:
    """Wherever they stand: in whole tiles of inputs and in the narrower last one."""
    weight = random(64, 80, dtype=dtype, seed=1)
    for rows, row, column in ((3, 1, 5), (20, 0, 79), (20, 19, 64)):
        x = random(rows, 80, dtype=dtype)
        x[row, column] = bad
        for rounding in (WeightFormat(), WeightFormat(8), WeightFormat(8, 36)):
            y = Packed(weight, rounding=rounding).product(x)
            strange = torch.arange(rows) == row
            assert not torch.isfinite(y[strange]).any()
            assert torch.isfinite(y[~strange]).all()


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("k", [16, 32, 48, 80, 96])
def test_what_stands_beyond_the_inputs_is_not_read(level: str, k: int, bits: int) -> None:
    """The buffers of a pass hold leftovers of wider products there."""
    weight = random(64, k, dtype=torch.bfloat16)
    packed = Packed(weight, rounding=WeightFormat(bits))
    for rows in (1, 17, 33):
        x = torch.full((rows, row_stride(128)), float("nan"), dtype=torch.bfloat16)
        x[:, :k] = random(rows, k, dtype=torch.bfloat16, seed=rows)
        got, inside = torch.empty(rows, 64), torch.bfloat16 if packed.takes_bf16 else torch.float32
        source = x.to(inside)
        kernels().library.forerun_product(
            kernels().level, ctypes.byref(packed.record), source.data_ptr(), source.shape[1], rows,
            got.data_ptr(), 64, got.data_ptr(), layout.F32, 0, 1,
        )  # fmt: skip
        assert torch.equal(got, packed.product(x[:, :k].float()))


@pytest.mark.parametrize("rounding", ["auto", "int8", "int8:36"])
@pytest.mark.parametrize("k", [256, 91])
def test_a_row_of_a_product_does_not_depend_on_the_others(
    level: str, k: int, rounding: str, threads: None
) -> None:
    """Every number of rows, none included, has the bits of 200; so has a row alone, and so have
    weights that come from memory, whichever cache they are fetched into."""
    packed = Packed(random(192, k, dtype=torch.bfloat16), rounding=WeightFormat.parse(rounding))
    x = random(200, k, dtype=torch.bfloat16, seed=1).float()
    whole = packed.product(x)
    for is_streamed, level_of_cache in ((False, 1), (True, 1), (True, 2)):
        packed.record.is_streamed, packed.record.fetched = is_streamed, level_of_cache
        for rows in (*range(70), 96, 97, 128, 129, 161):
            assert torch.equal(packed.product(x[:rows]), whole[:rows])
            assert torch.equal(packed.product(x[rows : rows + 1])[0], whole[rows])
        for num in (1, 2, 3):
            torch.set_num_threads(num)
            assert torch.equal(packed.product(x), whole)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("n", [64, 1088])
def test_who_computes_an_output_does_not_matter(
    level: str, n: int, rows: int, threads: None
) -> None:
    """More threads than units, and units that are free for any thread."""
    packed = Packed(random(n, 96, dtype=torch.bfloat16))
    x = random(rows, 96, dtype=torch.bfloat16, seed=1)
    torch.set_num_threads(1)
    alone = packed.product(x)
    for num in (2, 3, 5):
        torch.set_num_threads(num)
        for _ in range(5):
            assert torch.equal(packed.product(x), alone)


@pytest.mark.parametrize("rounding", ["auto", "int8:36"])
@pytest.mark.parametrize("k", [96, 91])
def test_tiny_numbers_do_not_depend_on_the_others(level: str, k: int, rounding: str) -> None:
    """Where inputs or sums fall below 2^-126, few rows round and flush as many do."""
    weight = random(192, k, dtype=torch.float32)
    if rounding == "auto":
        weight *= torch.exp2(-random(192, 1, dtype=torch.float32, seed=2).abs() * 8 - 56)
    packed = Packed(weight.bfloat16(), rounding=WeightFormat.parse(rounding))
    tiny = 2.0**-127 if packed.is_rounded else 2.0**-66
    x = random(40, k, dtype=torch.float32, seed=1).mul(tiny).bfloat16().float()
    whole = packed.product(x)
    assert (whole != 0).any() and (not packed.takes_bf16 or packed.is_rounded or (whole == 0).any())
    for rows in (1, 2, 3, 4, 5, 17):
        assert torch.equal(packed.product(x[7 : 7 + rows]), whole[7 : 7 + rows])


@pytest.mark.parametrize("rows", [1, 512, 513])
def test_who_computes_products_of_many_rows(
    level: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels up to 512 rows, with AVX2 any number; beyond, torch, from unpacked weights."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> None:
        whole = getattr(Packed, name)

        def call(self: Packed, *given: Any) -> torch.Tensor:
            calls[name] += 1
            return whole(self, *given)

        monkeypatch.setattr(Packed, name, call)

    counted("product")
    counted("unpack")
    who = "unpack" if rows > 512 and level != "avx2" else "product"
    down = Linear(random(64, 32, dtype=torch.bfloat16))
    x = random(rows, 32, dtype=torch.bfloat16, seed=1)
    down(x)
    assert calls == {who: 1}
    gate_up = Linear(random(64, 64, dtype=torch.bfloat16, seed=2), is_gated=True)
    GatedMLP(gate_up, down, "silu")(down(x))
    assert calls == {who: 4}


def test_types_and_devices_without_kernels_run_on_torch() -> None:
    """Products of float64 and of weights elsewhere are torch's own."""
    weight = random(64, 32, dtype=torch.float64)
    plain = Linear(weight)
    assert plain.packed is None and not can_pack(weight)
    x = random(3, 32, dtype=torch.float64, seed=1)
    assert torch.equal(plain(x), torch.nn.functional.linear(x, weight))
    assert not can_pack(torch.empty(64, 32, dtype=torch.bfloat16, device="meta"))


def test_strided_and_misaligned_tensors_are_taken_as_they_are() -> None:
    """Weights and inputs that are views: transposed, every second row, beginning anywhere."""
    wide = random(2 * 70 * 34 + 1, dtype=torch.bfloat16)
    flat = wide[1:].view(2 * 70, 34)  # begins two bytes after a boundary
    for weight in (flat[:70], flat[::2], flat[:, 1:], flat[:34].T, flat[:1].expand(70, -1)):
        same, k = weight.clone(memory_format=torch.contiguous_format), weight.shape[1]
        packed = Packed(weight)
        assert torch.equal(packed.unpack(), same)
        x = random(2 * k * 5 + 1, dtype=torch.bfloat16, seed=1)[1:].view(5, 2 * k)
        for rows in (x[:, :k], x[:, ::2], x[::2, k:]):
            assert torch.equal(packed.product(rows), Packed(same).product(rows.contiguous()))


@pytest.mark.parametrize("shape", [(3, 31), (3, 33), (32,), (1, 3, 32), (3, 0)])
def test_inputs_of_another_width_are_refused(shape: tuple[int, ...]) -> None:
    packed = Packed(random(64, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"rows of 32 numbers.*" + re.escape(str(shape))):
        packed.product(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(32,), (2, 32, 3)])
def test_weights_that_are_no_matrix_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(str(shape))):
        Packed(torch.zeros(shape))


def test_arenas_hold_weights_apart_and_aligned() -> None:
    arena = Arena(block=LARGE_PAGE)
    parts = [arena.take(size) for size in (0, 1, 100, 64, LARGE_PAGE - 400, 3 * LARGE_PAGE + 1, 70)]
    for number, part in enumerate(parts):
        assert part.data_ptr() % 64 == 0
        part.fill_(number)
    assert all((part == number).all() for number, part in enumerate(parts))


def test_large_packed_weights_keep_their_numbers() -> None:
    """Those that get large pages."""
    weight = random(2048, 1024, dtype=torch.bfloat16)
    packed = Packed(weight)
    assert np.prod(packed.data.shape) == weight.numel()
    assert torch.equal(packed.unpack(), weight)


# weights in 8 bits


@pytest.mark.parametrize("scaled", [0, 32, 52])
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("shape", [*SHAPES, (192, 130)])
def test_a_rounded_product_is_that_of_the_rounded_weight(
    level: str, shape: tuple[int, int], dtype: torch.dtype, scaled: int
) -> None:
    n, k = shape
    weight, bias = random(n, k, dtype=dtype), random(n, dtype=torch.float32, seed=1)
    whole, scales = quantized_int8(weight, scaled)
    assert whole.abs().max() <= 127
    held = whole.double() * scales.double().repeat_interleave(scaled or k, 1)[:, :k]
    step = scales.repeat_interleave(scaled or k, 1)[:, :k]
    assert ((held - weight.double()).abs() <= 0.5001 * step).all()
    for is_gated in (False, True) if n % 32 == 0 else (False,):
        packed = Packed(weight, is_gated, WeightFormat(8, scaled))
        packed.set_bias(bias)
        assert packed.is_rounded and packed.nbytes < 0.8 * Packed(weight).nbytes or k < 96
        assert torch.equal(packed.unpack(), held.float().to(dtype))
        inside = torch.bfloat16 if packed.takes_bf16 else torch.float32
        for rows in (1, 3, 7, 12, 25, 40):
            x = random(rows, k, dtype=dtype, seed=rows)
            want = x.to(inside).double() @ held.T + bias
            if is_gated:
                gate, up = want.chunk(2, -1)
                want = torch.nn.functional.silu(gate) * up
            assert close(packed.product(x), want, dtype)


@pytest.mark.parametrize("text", ["int3", "int8:7", "int8:33", "int8:x", "int4:7", "fp8:128"])
def test_unknown_weights_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        WeightFormat.parse(text)
