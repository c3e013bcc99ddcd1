"""Softmax of one row inside compiled code; equal to `sampling.softmax` up to rounding.

Numba calls the C library's exp once per entry. This exp is arithmetic that vectorises, with a
relative error below 2e-7. Weights below exp(-87), where float32 becomes subnormal, are 0.
"""

from __future__ import annotations

import numpy as np

from forerun.utils.jit import kernel

LOWEST = np.float32(-87.0)
LOG2E = np.float32(1.4426950408889634)
LN2, LN2_REST = np.float32(0.693359375), np.float32(-2.12194440e-4)  # their sum is ln 2
ROUND_SHIFT = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
C2, C3, C4 = np.float32(1 / 2), np.float32(1 / 6), np.float32(1 / 24)
C5, C6 = np.float32(1 / 120), np.float32(1 / 720)
ONE, ZERO = np.float32(1), np.float32(0)
ABS, INFINITE, SIGN = np.int32(0x7FFFFFFF), np.int32(0x7F800000), np.int32(31)
NEG_INF_BITS = np.int32(-0x00800000)
NEG_INF_KEY, ZERO_BITS = NEG_INF_BITS ^ ABS, np.int32(0)


@kernel
def softmax_into(logits: np.ndarray, inverse: float, out: np.ndarray, bits: np.ndarray) -> bool:
    """exp(inverse * logits), normalised, into `out`; all contiguous float32 [V].

    bits: int32 [V], working memory. Returns False if a logit is NaN or +inf, or all are -inf;
    `out` is then undefined.
    """
    top, is_law = _top(logits.view(np.int32))
    if not is_law:
        return False
    bits[0] = top
    highest = bits.view(np.float32)[0]
    _exps(logits, highest, np.float32(inverse), out, bits)
    total = _scaled(out, bits.view(np.float32))
    for i in range(len(out)):
        out[i] /= total
    return True


@kernel
def _top(bits: np.ndarray) -> tuple[np.int32, bool]:
    """The bits of the largest float32, and whether it is finite and none is NaN or +inf.

    Compares integers, so that NaN does not prevent vector instructions.
    """
    top, largest = bits[0] ^ ((bits[0] >> SIGN) & ABS), np.int32(0)
    for i in range(len(bits)):
        top = max(top, bits[i] ^ ((bits[i] >> SIGN) & ABS))  # a key in the order of the floats
        largest = max(largest, bits[i] & ABS if bits[i] != NEG_INF_BITS else ZERO_BITS)
    return top ^ ((top >> SIGN) & ABS), bool(top != NEG_INF_KEY and largest < INFINITE)


@kernel
def _exps(
    logits: np.ndarray, highest: np.float32, inverse: np.float32, out: np.ndarray, bits: np.ndarray
) -> None:
    """Splits exp: the mantissa part into `out`, the bits of the power of two into `bits`."""
    for i in range(len(logits)):
        x = (logits[i] - highest) * inverse
        within = x if x > LOWEST else LOWEST
        power = (within * LOG2E + ROUND_SHIFT) - ROUND_SHIFT
        r = (within - power * LN2) - power * LN2_REST
        value = ONE + r * (ONE + r * (C2 + r * (C3 + r * (C4 + r * (C5 + r * C6)))))
        out[i] = value if x > LOWEST else ZERO
        bits[i] = (np.int32(power) + np.int32(127)) << np.int32(23)


@kernel(fastmath={"reassoc", "nsz", "contract"})
def _scaled(values: np.ndarray, powers: np.ndarray) -> np.float32:
    """Multiplies by the powers in place; returns the sum."""
    total = ZERO
    for i in range(len(values)):
        values[i] *= powers[i]
        total += values[i]
    return total
