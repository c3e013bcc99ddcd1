"""Attention in the kernels, one layer alone: float64, independence of rows, strange numbers."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from forerun.runner.attention import Span
from forerun.runner.native import LEVELS, kernels, layout
from forerun.runner.native.packing import KINDS

pytestmark = pytest.mark.skipif(not kernels(), reason=f"native kernels: {kernels().why}")
ERROR = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 5e-3}
LENGTHS = [1, 5, 31, 32, 33, 255, 256, 258, 1023, 1024, 1030, 2500]
LAW = [(64, 2, 0), (64, 3, 70), (64, 20, 0), (96, 1, 0), (96, 2, 70), (48, 3, 0), (48, 1, 70)]


@pytest.fixture(params=LEVELS[1 : kernels().level + 1])
def level(request: pytest.FixtureRequest) -> int:
    """Every instruction set that the processor has."""
    return LEVELS.index(request.param)


@dataclass
class Layer:
    """One layer's heads, and a cache of one slot [2, kv, cells, dim]."""

    dim: int = 64
    kv: int = 2
    fold: int = 2
    window: int = 0
    cap: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    cells: int = 3000
    data: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.data = normal(2, self.kv, self.cells, self.dim, seed=self.dim).to(self.dtype)

    def __call__(
        self,
        level: int,
        q: torch.Tensor,
        spans: list[Span],
        *,
        threads: int = 1,
        split: bool = True,
    ) -> torch.Tensor:
        """q [R, H, D] (scaled) to fp32 [R, H D]."""
        num, heads = len(q), self.kv * self.fold
        assert sum(span.num_rows for span in spans) == num
        layers = (layout.Layer * 1)(layout.Layer(window=self.window))
        model = layout.Model(
            num_layers=1, num_heads=heads, num_kv=self.kv, head_dim=self.dim,
            cell_kind=KINDS[self.dtype], act_kind=layout.F32, attn_cap=self.cap, layers=layers,
        )  # fmt: skip
        positions = np.concatenate([span.positions for span in spans])
        runs = int(positions.max()) // layout.RUN + 1 if split else 1
        qkv = torch.zeros(num, heads + 2 * self.kv, self.dim)
        qkv[:, :heads] = q
        out = torch.zeros(num, heads * self.dim)
        partial = torch.zeros(num * heads * runs * (self.dim + layout.STATE))
        made, kept = records(spans)
        work = layout.Pass(
            num_rows=num, num_spans=len(spans), num_threads=threads, is_split=split,
            positions=positions.ctypes.data, spans=ctypes.addressof(made),
            cells=self.data.data_ptr(),
            slot_stride=2 * self.kv * self.cells * self.dim, head_stride=self.cells * self.dim,
            qkv=qkv.data_ptr(), partial=partial.data_ptr(), act=out.data_ptr(),
            act_stride=heads * self.dim, max_runs=runs,
        )  # fmt: skip
        counters = np.zeros(3, dtype=np.int64)
        kernels().library.forerun_attention(level, model, work, counters.ctypes.data)
        del kept
        return out

    def expected(self, level: int, q: torch.Tensor, span: Span) -> torch.Tensor:
        """The same in float64."""
        keys, values = self.data[:, :, : span.stop].double().repeat_interleave(self.fold, 1)
        if level >= 3 and self.dtype == torch.bfloat16 and self.dim % 32 == 0:
            q = q.bfloat16()  # the kernels multiply pairs
        scores = torch.einsum("rhd,hnd->hrn", q.double(), keys)
        if self.cap:
            scores = self.cap * (scores / self.cap).tanh()
        mask = torch.from_numpy(span.mask(0, span.stop, self.window or None))
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        return torch.einsum("hrn,hnd->rhd", weights, values).flatten(1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def records(spans: list[Span]) -> tuple[ctypes.Array[layout.Span], list[np.ndarray]]:
    """The spans as the kernels read them, and what must live as long as they do."""
    made, kept, row = (layout.Span * len(spans))(), [], 0
    for record, s in zip(made, spans, strict=True):
        record.slot, record.base, record.stop = s.slot, s.base, s.stop
        record.num_rows, record.first_row = s.num_rows, row
        if s.sees is not None:
            kept.append(np.ascontiguousarray(s.sees))
            record.sees = kept[-1].ctypes.data
        row += s.num_rows
    return made, kept


def plain(stop: int, rows: int = 1) -> Span:
    """The last rows of a text."""
    return Span(0, stop - rows, np.arange(stop - rows, stop), rows)


def tree(base: int, nodes: int, pending: int = 1, old: int = 0) -> Span:
    """Pending tokens and a random tree behind them, of which `old` nodes were computed before."""
    dice = np.random.default_rng([base, nodes])
    parents = [int(dice.integers(-1, node)) for node in range(nodes)]
    sees = np.zeros((pending + nodes, pending + nodes), dtype=bool)
    sees[:pending, :pending] = np.tri(pending, dtype=bool)
    for node, parent in enumerate(parents):
        sees[pending + node, :pending] = True
        if parent >= 0:
            sees[pending + node] |= sees[pending + parent]
        sees[pending + node, pending + node] = True
    places = base - 1 + sees.sum(1)
    rows = pending + nodes - old
    return Span(0, base, places.astype(np.int64), rows, sees[old:])


def path(span: Span, row: int) -> list[int]:
    """The cells that a row of a tree sees, in the order of its text."""
    assert span.sees is not None
    return [*range(span.base), *(span.base + np.flatnonzero(span.sees[row])).tolist()]


def cases() -> Iterator[tuple[int, int, int, int, float]]:
    """Head sizes, heads per key head, lengths, windows and caps, drawn together."""
    dice = np.random.default_rng(0)
    for dim in (16, 32, 48, 64, 80, 96, 128, 160, 256):
        for _ in range(2):
            fold = int(dice.choice([1, 2, 3, 4, 7, 20]))
            window = int(dice.choice([0, 0, 9, 300]))
            yield dim, fold, int(dice.choice(LENGTHS)), window, float(dice.choice([0.0, 0.0, 2.0]))


@pytest.mark.parametrize("dtype", ERROR)
def test_attention_matches_float64(level: int, dtype: torch.dtype) -> None:
    for dim, fold, length, window, cap in cases():
        layer = Layer(dim, 2, fold, window, cap, dtype, cells=length + 45)
        for span in (plain(length), plain(length, min(length, 37)), tree(length, 40, 3)):
            q = normal(span.num_rows, 2 * fold, dim, seed=length) * dim**-0.5
            got, want = layer(level, q, [span]), layer.expected(level, q, span)
            error = (got - want).abs().max() / want.abs().max()
            assert error <= ERROR[dtype], (dim, fold, length, window, cap, span.num_rows, error)


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_sharp_and_flat_weights_match_float64(level: int, scale: float) -> None:
    """One cell takes nearly all, or the weights of a long text are nearly even."""
    layer = Layer(cells=2600)
    for span in (plain(2555), tree(2500, 20)):
        q = normal(span.num_rows, 4, 64, seed=1) * scale / 8
        want = layer.expected(level, q, span)
        assert (layer(level, q, [span]) - want).abs().max() <= 5e-3 * want.abs().max()


@pytest.mark.parametrize(("dim", "fold", "window"), LAW)
def test_a_row_has_the_same_bits_in_any_company(
    level: int, dim: int, fold: int, window: int
) -> None:
    """In a tree, among the rows of a prefill, on two threads, in pieces or in one: as alone."""
    for base in (1, 250, 1017):
        layer = Layer(dim, 2, fold, window, cells=base + 60)
        span = tree(base, 37, 2)
        q = normal(span.num_rows, 2 * fold, dim, seed=base)
        together = layer(level, q, [span])
        for threads, split in ((2, True), (1, False)):
            assert torch.equal(layer(level, q, [span], threads=threads, split=split), together)
        for row in range(0, span.num_rows, 8):
            cells = path(span, row)
            alone = Layer(dim, 2, fold, window, cells=len(cells))
            alone.data = layer.data[:, :, cells].contiguous()
            own = q[row : row + 1]
            assert torch.equal(alone(level, own, [plain(len(cells))])[0], together[row])
            rows = min(len(cells), 40)
            many = normal(rows, 2 * fold, dim, seed=row)
            many[-1] = q[row]
            assert torch.equal(alone(level, many, [plain(len(cells), rows)])[-1], together[row])


def test_nodes_computed_before_are_seen(level: int) -> None:
    layer, span = Layer(), tree(500, 30, 0, old=12)
    q = normal(span.num_rows, 4, 64)
    want = layer.expected(level, q, span)
    assert (layer(level, q, [span]) - want).abs().max() <= 5e-3 * want.abs().max()


def test_sequences_of_a_batch_do_not_mix(level: int) -> None:
    layer = Layer(cells=1400)
    layer.data = normal(3, 2, 2, 1400, 64).bfloat16()
    spans = [plain(1337), tree(290, 21), plain(70, 33)]
    counts = [span.num_rows for span in spans]
    q = normal(sum(counts), 4, 64, seed=3)
    placed = [replace(span, slot=slot) for slot, span in enumerate(spans)]
    got = layer(level, q, placed, threads=2).split(counts)
    for slot, own in enumerate(q.split(counts)):
        alone = Layer(cells=1400)
        alone.data = layer.data[slot]
        assert torch.equal(alone(level, own, [spans[slot]]), got[slot])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("what", ["key", "value", "query"])
@pytest.mark.parametrize("dim", [64, 48])
def test_strange_numbers_reach_the_rows_that_see_them(
    level: int, dim: int, what: str, bad: float
) -> None:
    """In a node's cell, or in a row's query; cells behind the last hold NaN and reach nobody."""
    base, span = 300, tree(300, 20)
    layer = Layer(dim, cells=base + 30)
    assert span.sees is not None
    layer.data[:, :, span.stop :] = math.nan
    q = normal(span.num_rows, 4, dim)
    assert torch.isfinite(layer(level, q, [span])).all()
    touched = torch.from_numpy(span.sees[:, 4].copy())
    if what == "query":
        q[4] = bad
        touched = torch.arange(span.num_rows) == 4
    else:
        layer.data[int(what == "value"), :, base + 4] = bad
    got = layer(level, q, [span])
    assert torch.isfinite(got[~touched]).all()
    assert not torch.isfinite(got[touched]).all(1).any()
    if what == "value" or math.isnan(bad):
        assert not torch.isfinite(got[touched]).any()


@pytest.mark.parametrize("dim", [64, 32])
def test_nothing_behind_the_last_cell_is_read(level: int, dim: int) -> None:
    """The cache ends where the text does, at the end of a page that nothing follows."""
    libc = ctypes.CDLL(None)
    page, length = 4096, 33
    size = 2 * 1 * length * dim * 2
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    pages = -(-size // page) * page
    at = libc.mmap(None, pages + page, 3, 0x22, -1, 0)
    assert libc.mprotect(ctypes.c_void_p(at + pages), ctypes.c_size_t(page), 0) == 0
    words = (ctypes.c_int16 * (size // 2)).from_address(at + pages - size)
    layer = Layer(dim, kv=1, cells=length)
    held = torch.frombuffer(words, dtype=torch.bfloat16).view_as(layer.data)
    layer.data = held.copy_(layer.data)
    span = tree(length - 4, 3)
    q = normal(span.num_rows, 2, dim)
    want = layer.expected(level, q, span)
    assert (layer(level, q, [span]) - want).abs().max() <= 5e-3 * want.abs().max()
    libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(pages + page))
