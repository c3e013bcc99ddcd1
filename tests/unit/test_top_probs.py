"""The largest probabilities of logits: the C kernel beside the plain version in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forerun.core.sampling import softmax
from forerun.ngrams.tables.logits.top_probs import largest, top_probs
from forerun.runner.native import kernels
from forerun.runner.native import top_probs as native
from forerun.runner.native.layout import TOP_BLOCK, TOP_SPAN

SIZES = (1, 5, 16, 63, TOP_BLOCK - 1, TOP_BLOCK + 1, TOP_SPAN, TOP_SPAN + 1, 5 * TOP_SPAN + 77)
needs_kernels = pytest.mark.skipif(not kernels(), reason=f"native kernels: {kernels().why}")


def logits(vocab: int, num: int = 4, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(num, vocab)) * 3).astype(np.float32)


def plain(rows: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(invalid="ignore"):
        return largest([softmax(row) for row in rows], num)


@needs_kernels
@pytest.mark.parametrize("level", range(1, 5))
@pytest.mark.parametrize("vocab", SIZES)
def test_kernel_equals_the_plain_version(
    vocab: int, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = kernels()
    if level > found.level:
        pytest.skip("this processor lacks the instructions")
    lower = type(found)(found.library, level, "")
    monkeypatch.setattr(native, "kernels", lambda: lower)
    for num in (1, 2, 10, 256):
        rows = logits(vocab, seed=num)
        (ids, probs), (best, right) = native.top_probs(list(rows), num), plain(rows, num)
        np.testing.assert_array_equal(ids, best)
        np.testing.assert_allclose(probs, right, rtol=5e-6)


@needs_kernels
def test_ties_go_to_the_lowest_ids() -> None:
    rows = np.round(logits(3 * TOP_BLOCK + 5)).astype(np.float32)
    ids, _ = top_probs(list(rows), 20)
    assert ids.tolist() == np.argsort(-rows, axis=1, kind="stable")[:, :20].tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_undefined_softmax_gives_zeros_and_leaves_others_alone(bad: float) -> None:
    rows = logits(TOP_SPAN + 100)
    expected = top_probs(list(rows), 3)
    for at in (0, 70, TOP_SPAN + 99):
        broken = rows.copy()
        broken[1, at] = bad
        broken[2] = -np.inf
        with np.errstate(invalid="ignore"):
            found = top_probs(list(broken), 3)
        for mine, right in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine[[0, 3]], right[[0, 3]])
            assert not mine[1:3].any()


def test_masked_logits_have_no_probability() -> None:
    rows = np.full((2, 2 * TOP_SPAN), -np.inf, np.float32)
    rows[0, [7, TOP_SPAN + 1]] = 1.0, 2.0
    rows[1, 3] = -5.0
    ids, probs = top_probs(list(rows), 4)
    assert ids.tolist() == [[TOP_SPAN + 1, 7, 0, 0], [3, 0, 0, 0]]
    np.testing.assert_allclose(probs, [[0.7310586, 0.2689414, 0, 0], [1, 0, 0, 0]], rtol=1e-6)


@needs_kernels
def test_a_row_does_not_depend_on_other_rows_or_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit; enough logits that threads share them."""
    rows = list(logits(60_000, num=7))
    assert 7 * 60_000 > native.MIN_SHARED > 60_000
    ids, probs = native.top_probs(rows, 10)
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # noqa: B023
        for found, all_rows in zip(native.top_probs(rows, 10), (ids, probs), strict=True):
            np.testing.assert_array_equal(found, all_rows)
    for i, row in enumerate(rows):
        for found, all_rows in zip(native.top_probs([row], 10), (ids, probs), strict=True):
            np.testing.assert_array_equal(found[0], all_rows[i])


def test_other_types_and_layouts_are_taken() -> None:
    rows = logits(TOP_BLOCK + 3)
    ids, probs = plain(rows, 5)
    strided = np.repeat(rows, 2, axis=1)[:, ::2]
    for given in (rows.astype(np.float64), strided):
        found = top_probs(list(given), 5)
        np.testing.assert_array_equal(found[0], ids)
        np.testing.assert_allclose(found[1], probs, rtol=5e-6)
    mixed = [rows[0], rows[1].astype(np.float64), strided[2], rows[3, :9]]
    np.testing.assert_array_equal(top_probs(mixed, 5)[0][:3], ids[:3])
    np.testing.assert_array_equal(top_probs(mixed, 5)[0][3], plain(rows[3:, :9], 5)[0][0])
    assert [part.shape for part in top_probs([], 5)] == [(0, 5), (0, 5)]


@needs_kernels
def test_scratch_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel writes nothing behind its arrays."""
    made: list[np.ndarray] = []

    def guarded(shape: int | tuple[int, int], dtype: type) -> np.ndarray:
        size = int(np.prod(shape))
        made.append(np.full(size + 64, 77, dtype))
        return made[-1][:size].reshape(shape)

    for vocab in SIZES:
        for num in (1, 300):
            rows = list(logits(vocab))
            monkeypatch.setattr(np, "empty", guarded)
            native.top_probs(rows, num)
            monkeypatch.undo()
    assert len(made) == 6 * len(SIZES) and all((array[-64:] == 77).all() for array in made)
