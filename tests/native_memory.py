"""Runs the C kernels without torch, on buffers that end where their contents end: for valgrind.

    PYTHONMALLOC=malloc OMP_NUM_THREADS=1 valgrind --log-file=log \\
        python tests/native_memory.py --level avx2

valgrind knows no AVX-512. The interpreter has reports of its own: what counts is that no report
has a frame of ours (grep -c _avx2 log prints 0) and that the last line says "done".
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path
from typing import Any

import numpy as np

import forerun.native
from forerun.native import LEVELS, layout

ROWS = (1, 2, 3, 5, 13, 33)
SHAPES = [(70, 33), (17, 1), (64, 80), (130, 96)]
KINDS = {layout.F32: np.float32, layout.BF16: np.uint16, layout.F16: np.float16,
         layout.INT8: np.int8}  # fmt: skip
RNG = np.random.default_rng(0)


def library() -> ctypes.CDLL:
    """The kernels, beside GCC's threads."""
    ctypes.CDLL("libgomp.so.1", ctypes.RTLD_GLOBAL)
    (path,) = Path(forerun.native.__file__).parent.glob("_kernels*.so")
    found = ctypes.CDLL(str(path))
    for name, types in layout.SIGNATURES.items():
        getattr(found, name).argtypes, getattr(found, name).restype = types, None
    return found


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def stored(values: np.ndarray, kind: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers as a kind stores them, and the numbers that they stand for."""
    if kind == layout.BF16:
        bits = np.ascontiguousarray(values).view(np.uint32) >> 16
        return bits.astype(np.uint16), (bits << 16).view(np.float32)
    if kind == layout.INT8:
        values = (values * 30).clip(-127, 127)
    held = values.astype(KINDS[kind])
    return held, held.astype(np.float32)


class Weight:
    """A random weight [n, k] in the order of the kernels without pairs."""

    def __init__(self, n: int, k: int, kind: int, is_gated: bool = False) -> None:
        groups = -(-n // layout.GROUP)
        held, self.values = stored(normal(n, k) / k**0.5, kind)
        padded = np.zeros((groups * layout.GROUP, k), held.dtype)
        padded[:n] = held
        blocks = padded.reshape(-1, layout.LANES, k).transpose(0, 2, 1)
        self.data, self.bias = np.ascontiguousarray(blocks), np.zeros(len(padded), np.float32)
        self.record = layout.Linear(
            weight=self.data.ctypes.data, bias=self.bias.ctypes.data, n=n, k=k, groups=groups,
            kind=kind, is_gated=is_gated,
        )  # fmt: skip


def products(kernels: ctypes.CDLL, level: int) -> None:
    """Products of every kind against float64."""
    for kind in KINDS:
        for n, k in SHAPES:
            weight, width = Weight(n, k, kind), -(-n // layout.LANES) * layout.LANES
            for rows in ROWS:
                x, y = normal(rows, k), np.empty((rows, width), np.float32)
                kernels.forerun_product(
                    level, weight.record, x.ctypes.data, k, rows, y.ctypes.data, width,
                    y.ctypes.data, layout.F32, 0, 1,
                )  # fmt: skip
                want = x.astype(np.float64) @ weight.values.T
                assert abs(y[:, :n] - want).max() <= 1e-5 * abs(want).max(), (kind, n, k, rows)


def binary(rows: int) -> np.ndarray:
    """What the rows of a binary tree see of each other, [rows, rows]."""
    sees = np.eye(rows, dtype=np.uint8)
    for row in range(1, rows):
        sees[row] |= sees[(row - 1) // 2]
    return sees


class Decoder:
    """A random decoder of two layers, one with a window, and a cache that ends with its text."""

    HIDDEN, HEADS, KV, DIM, INNER, VOCAB = 64, 4, 2, 16, 96, 70

    def __init__(self, kind: int, cells: int) -> None:
        self.kept: list[Any] = []
        lanes = (self.HEADS + 2 * self.KV) * self.DIM
        layers = (layout.Layer * 2)(*(self._layer(kind, lanes, window) for window in (0, 40)))
        head = self._weight(self.VOCAB, self.HIDDEN, kind)
        self.embed = stored(normal(self.VOCAB, self.HIDDEN), kind)[0]
        self.rope = normal(cells, self.DIM)
        self.cells = stored(normal(2, 1, 2, self.KV, cells, self.DIM), kind)[0]
        self.model = layout.Model(
            hidden=self.HIDDEN, num_layers=2, num_heads=self.HEADS, num_kv=self.KV,
            head_dim=self.DIM, inner=self.INNER, activation=0, qk_norm=0, cell_kind=kind,
            act_kind=layout.F32, attn_scale=0.25, embed_scale=1, logit_cap=9,
            embed=self.embed.ctypes.data, layers=layers, norm=self._norm(), head=head,
        )  # fmt: skip

    def _weight(self, n: int, k: int, kind: int, is_gated: bool = False) -> Any:
        self.kept.append(Weight(n, k, kind, is_gated))
        return self.kept[-1].record

    def _norm(self) -> Any:
        self.kept.append(np.ones(self.HIDDEN, np.float32))
        return layout.Norm(weight=self.kept[-1].ctypes.data, eps=1e-5)

    def _layer(self, kind: int, lanes: int, window: int) -> Any:
        hidden, inner = self.HIDDEN, self.INNER
        return layout.Layer(
            qkv=self._weight(lanes, hidden, kind), out=self._weight(hidden, hidden, kind),
            up=self._weight(2 * inner, hidden, kind, True), attn=self._norm(), mlp=self._norm(),
            down=self._weight(hidden, inner, kind), window=window,
        )  # fmt: skip

    def __call__(
        self, kernels: ctypes.CDLL, level: int, base: int, sees: np.ndarray, split: bool
    ) -> np.ndarray:
        """Logits [rows, vocabulary] of a tree behind `base` cells."""
        rows, cells = len(sees), self.cells.shape[-2]
        places = np.arange(base, base + rows)
        positions = base - 1 + sees.sum(1, dtype=np.int64)
        ids, wanted, cell_of = places % self.VOCAB, np.arange(rows), places * self.DIM
        runs = int(positions.max()) // layout.RUN + 1 if split else 1
        lanes, width = (self.HEADS + 2 * self.KV) * self.DIM, 80
        sizes = {
            "x": self.HIDDEN, "wide": self.HIDDEN, "qkv": lanes, "act": self.INNER,
            "inner_act": self.INNER, "logits": width,
            "partial": self.HEADS * runs * (self.DIM + layout.STATE),
        }  # fmt: skip
        buffers = {name: np.empty(rows * size, np.float32) for name, size in sizes.items()}
        span = layout.Span(base=base, stop=base + rows, num_rows=rows, sees=sees.ctypes.data)
        work = layout.Pass(
            num_rows=rows, num_wanted=rows, num_spans=1, num_threads=1, is_split=split,
            ids=ids.ctypes.data, positions=positions.ctypes.data, wanted=wanted.ctypes.data,
            spans=(layout.Span * 1)(span), rope=self.rope.ctypes.data,
            cells=self.cells.ctypes.data, layer_stride=2 * self.KV * cells * self.DIM,
            head_stride=cells * self.DIM, wide_stride=self.HIDDEN, act_stride=self.INNER,
            max_runs=runs, logit_stride=width,
            **{name: buffer.ctypes.data for name, buffer in buffers.items()},
        )  # fmt: skip
        counters = np.zeros(3, np.int64)
        kernels.forerun_pass(level, self.model, work, cell_of.ctypes.data, counters.ctypes.data)
        return buffers["logits"].reshape(rows, width)[:, : self.VOCAB]


def passes(kernels: ctypes.CDLL, level: int) -> None:
    """Trees behind short and long texts; the first row has the bits of a plain step."""
    for kind in (layout.F32, layout.BF16, layout.F16):
        for base, rows in ((3, 1), (31, 6), (255, 18), (1020, 9)):
            decoder = Decoder(kind, base + rows)
            found = decoder(kernels, level, base, binary(rows), True)
            assert np.isfinite(found).all()
            assert np.array_equal(found, decoder(kernels, level, base, binary(rows), False))
            assert np.array_equal(found[:1], decoder(kernels, level, base, binary(1), True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--level", choices=LEVELS[1:3], default="avx2")
    level, kernels = LEVELS.index(parser.parse_args().level), library()
    products(kernels, level)
    passes(kernels, level)
    print("done")


if __name__ == "__main__":
    main()
