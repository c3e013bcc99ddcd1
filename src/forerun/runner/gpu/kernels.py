"""Triton kernels of a pass over few rows.

They compute matrix products of one row (bound by reading the weights), attention split along the
context, and the operations between torch's products of several rows. Sums are fp32.

Kernels overlap if the GPU supports PDL (programmatic dependent launch): each starts while the
previous one runs, loads inputs that do not depend on it, and waits for it in `_wait`.

`described` is the array of `layout.py` for R rows; its first number is the number of real rows.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from forerun.runner.gpu import layout

HEAD, PER_ROW = tl.constexpr(layout.HEAD), tl.constexpr(layout.PER_ROW)
TILE, WORDS, BITS = (tl.constexpr(n) for n in (layout.TILE, layout.WORDS, layout.BITS))


@triton.jit
def _wait(PDL: tl.constexpr):
    """Waits for the outputs of the previous kernel; lets the next one start."""
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def _weights(w, at, K):
    """Elements `at` of the rows w [N] with K elements each, read once."""
    return tl.load(w[:, None] + at[None, :], (at < K)[None, :], 0.0, eviction_policy="evict_first")


@triton.jit
def _products(
    x, gain, w_a, w_b, start, K, eps,
    BK: tl.constexpr, NORM: tl.constexpr, TWO: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """start + W_a x and W_b x, fp32 [N]; x [K]; w_a and w_b: pointers to the N rows of the weights.

    NORM: x / rms(x) * gain replaces x; the division comes after the sum. ADD: `start` is loaded
    from these pointers [N], otherwise 0.
    """
    k = tl.arange(0, BK)
    N: tl.constexpr = w_a.shape[0]
    sums_a = tl.zeros([N, BK], tl.float32)
    sums_b = tl.zeros([N, BK], tl.float32)
    squares = tl.zeros([BK], tl.float32)
    a = _weights(w_a, k, K)
    if TWO:
        b = _weights(w_b, k, K)
    _wait(PDL)
    held = tl.zeros([N], tl.float32)
    if ADD:
        held = tl.load(start)
    for low in range(0, K, BK):
        at, ahead = low + k, low + BK + k
        part = tl.load(x + at, at < K, 0.0).to(tl.float32)
        if NORM:
            squares += part * part
            part *= tl.load(gain + at, at < K, 0.0).to(tl.float32)
        sums_a += part[None, :] * a.to(tl.float32)
        a = _weights(w_a, ahead, K)
        if TWO:
            sums_b += part[None, :] * b.to(tl.float32)
            b = _weights(w_b, ahead, K)
    found_a, found_b = tl.sum(sums_a, 1), tl.sum(sums_b, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        found_a *= scale
        found_b *= scale
    return held + found_a, found_b


@triton.jit
def _gate(x, ACT: tl.constexpr):
    """The activation of fp32 values."""
    if ACT == "silu":
        x = x * tl.sigmoid(x)
    elif ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        x = tl.maximum(x, 0.0)
    return x


@triton.jit
def project(
    x, gain, weight, bias, y, N, K, eps,
    BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    ACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [N] = W x + bias, added to y with ADD.

    ACT, without ADD: weight [2 N, K] has gate rows, then up rows; y = act(gate x) * up x.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    held = tl.minimum(n, N - 1)  # rows beyond the last one read the last one
    w = weight + held.to(tl.int64) * K
    up = w + N.to(tl.int64) * K
    found, second = _products(x, gain, w, up, y + held, K, eps, BK, NORM, ACT != "", ADD, PDL)
    if BIAS:
        found += tl.load(bias + held).to(tl.float32)
    if ACT != "":
        if BIAS:
            second += tl.load(bias + N + held).to(tl.float32)
        found = _gate(found, ACT) * second
    tl.store(y + n, found.to(y.dtype.element_ty), n < N)


@triton.jit
def _turn(rope, place, at, turns, D: tl.constexpr):
    """cos and sin for elements `at` of both halves of a head; 1 and 0 without rotation."""
    turn = rope + place * (2 * D) + at
    inside = at < tl.where(turns, D, 0)
    cos_a, cos_b = tl.load(turn, inside, 1.0), tl.load(turn + D // 2, inside, 1.0)
    sin_a, sin_b = tl.load(turn + D, inside, 0.0), tl.load(turn + D + D // 2, inside, 0.0)
    return cos_a.to(tl.float32), cos_b.to(tl.float32), sin_a.to(tl.float32), sin_b.to(tl.float32)


@triton.jit
def _head(
    q, cells, row, cell, lane, heads, kv_heads, two_stride, head_stride, D: tl.constexpr
):  # fmt: skip
    """Address of a head of a row: in q [R, heads, D], or in a cell."""
    other = tl.maximum(lane - heads, 0)
    two, head = other // kv_heads, other % kv_heads
    return q + (row * heads + lane) * D, cells + cell + two * two_stride + head * head_stride


@triton.jit
def _keep_head(q, cells, a, b, at, is_query, D: tl.constexpr):
    """Writes both halves of a head to q or to cells."""
    if is_query:
        tl.store(q + at, a.to(q.dtype.element_ty))
        tl.store(q + D // 2 + at, b.to(q.dtype.element_ty))
    else:
        tl.store(cells + at, a.to(cells.dtype.element_ty))
        tl.store(cells + D // 2 + at, b.to(cells.dtype.element_ty))


@triton.jit
def project_heads(
    x, gain, weight, bias, rope, described, q, cells, K, eps, heads, kv_heads, two_stride,
    head_stride,
    D: tl.constexpr, P: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotated query [heads, D], key and value of the normed row x [K]; key and value to cells.

    weight [(heads + 2 kv_heads) D, K]; rope [context, 2, D]. A program computes P elements of the
    first half of a head and the P of the second half that rotate with them.
    """
    BLOCKS: tl.constexpr = D // 2 // P
    lane, at = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * P + tl.arange(0, P)
    place, cell = tl.load(described + HEAD + 1), tl.load(described + HEAD + 2)
    cos_a, cos_b, sin_a, sin_b = _turn(rope, place, at, lane < heads + kv_heads, D)
    low = lane * D + at
    w = weight + low.to(tl.int64) * K
    w_b = w + (D // 2) * K.to(tl.int64)
    a, b = _products(x, gain, w, w_b, x, K, eps, BK, True, True, False, PDL)
    if BIAS:
        a += tl.load(bias + low).to(tl.float32)
        b += tl.load(bias + low + D // 2).to(tl.float32)
    q, cells = _head(q, cells, 0, cell, lane, heads, kv_heads, two_stride, head_stride, D)
    _keep_head(q, cells, a * cos_a + b * sin_a, b * cos_b + a * sin_b, at, lane < heads, D)


@triton.jit(do_not_specialize=["R"])
def turn_heads(
    qkv, rope, described, q, cells, R, heads, kv_heads, two_stride, head_stride,
    D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for computed qkv [R, heads + 2 kv_heads, D]; a program per head."""
    row, lane, at = tl.program_id(0), tl.program_id(1), tl.arange(0, D // 2)
    is_row = row < tl.load(described)
    given = described + HEAD + row
    place, cell = tl.load(given + R), tl.load(given + 2 * R)
    cos_a, cos_b, sin_a, sin_b = _turn(rope, place, at, lane < heads + kv_heads, D)
    _wait(PDL)
    if is_row:
        found = qkv + (row * (heads + 2 * kv_heads) + lane) * D + at
        a, b = tl.load(found).to(tl.float32), tl.load(found + D // 2).to(tl.float32)
        q, cells = _head(q, cells, row, cell, lane, heads, kv_heads, two_stride, head_stride, D)
        _keep_head(q, cells, a * cos_a + b * sin_a, b * cos_b + a * sin_b, at, lane < heads, D)


@triton.jit(do_not_specialize=["R"])
def write_cells(
    qkv, described, cells, R, heads, kv_heads, two_stride, head_stride, D: tl.constexpr
):  # fmt: skip
    """Keys and values of qkv [R, heads + 2 kv_heads, D] to cells; a program per row and head."""
    row, lane, d = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    if row < tl.load(described):
        found = tl.load(qkv + (row * (heads + 2 * kv_heads) + heads + lane) * D + d)
        two, head = lane // kv_heads, lane % kv_heads
        cell = tl.load(described + HEAD + 2 * R + row)
        tl.store(cells + cell + two * two_stride + head * head_stride + d, found)


@triton.jit
def embed(table, described, x, d, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """x [R, d] fp32: the rows of the table [V, d] for the ids; a program per row."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    token = tl.load(described + HEAD + row)
    found = tl.load(table + token * d + at, at < d, 0.0).to(tl.float32)
    _wait(PDL)
    tl.store(x + row * d + at, found, at < d)


@triton.jit
def add_and_norm(
    x, delta, gain, y, d, eps, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """x += delta, with ADD; y = x / rms(x) * gain. All [R, d], x fp32; a program per row."""
    at = tl.arange(0, BLOCK)
    here, inside = tl.program_id(0) * d + at, at < d
    scale = tl.load(gain + at, inside, 0.0).to(tl.float32)
    _wait(PDL)
    row = tl.load(x + here, inside, 0.0)
    if ADD:
        row += tl.load(delta + here, inside, 0.0).to(tl.float32)
        tl.store(x + here, row, inside)
    row *= tl.rsqrt(tl.sum(row * row, 0) / d + eps)
    tl.store(y + here, (row * scale).to(y.dtype.element_ty), inside)


@triton.jit
def gate_and_up(both, y, N, BLOCK: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr):
    """y [R, N] = act(gate) * up of both [R, 2 N]; a program per row and block."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _wait(PDL)
    gate = tl.load(both + row * 2 * N + at, at < N, 0.0).to(tl.float32)
    up = tl.load(both + row * 2 * N + N + at, at < N, 0.0).to(tl.float32)
    tl.store(y + row * N + at, (_gate(gate, ACT) * up).to(y.dtype.element_ty), at < N)


@triton.jit
def _sees_own(described, R, row, is_row, own, inside):
    """Visibility of the cells `own` [N] after the base for rows [M], from their bits."""
    words = described + HEAD + PER_ROW * R + row * WORDS
    at = tl.maximum(own, 0)
    there = is_row[:, None] & (inside & (own >= 0))[None, :]
    word = tl.load(words[:, None] + (at // BITS)[None, :], there, 0)
    return ((word >> (at % BITS)[None, :]) & 1) != 0


@triton.jit(do_not_specialize=["R", "splits"])
def attend(
    q, q_stride, cells, described, out, partial, states, R, splits, scale, cap, window, two_stride,
    head_stride, heads,
    D: tl.constexpr, ROWS: tl.constexpr, FOLD: tl.constexpr, FP: tl.constexpr, BN: tl.constexpr,
    IS_SPLIT: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, IEEE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """softmax(scale q k + mask) v of a tile of rows, a key head, one of `splits` parts of cells.

    q [R, heads, D] with stride q_stride; out [R, heads, D]. A row sees cells before the base, or
    the last `window`, and later ones with their bit set. IS_SPLIT: undivided sums go to partial
    [R, heads, splits, D], maxima and totals to states [R, heads, splits, 2]."""
    tile, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = described + HEAD + (PER_ROW + WORDS) * R + tile * TILE
    first, num = tl.load(entry).to(tl.int32), tl.load(entry + 1).to(tl.int32)
    slot = tl.multiple_of(tl.load(entry + 2), 16)  # for wide loads
    base, stop = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
    m, d, n = tl.arange(0, ROWS * FP), tl.arange(0, D), tl.arange(0, BN)
    row, head = first + m // FP, kv * FOLD + m % FP
    is_row = (m // FP < num) & (m % FP < FOLD)
    place = tl.load(described + HEAD + R + row, is_row, 0)
    part = tl.cdiv(tl.cdiv(stop, splits), BN) * BN
    low, high = split * part, tl.minimum(split * part + part, stop)
    top = tl.full([ROWS * FP], -float("inf"), tl.float32)
    total = tl.zeros([ROWS * FP], tl.float32)
    sums = tl.zeros([ROWS * FP, D], tl.float32)
    keys = cells + slot + kv * head_stride + n[:, None] * D + d[None, :]
    # cells before the base do not depend on the previous kernel
    old_k = tl.load(keys + low * D, (low + n < tl.minimum(base, high))[:, None], 0.0)
    old_v = tl.load(keys + two_stride + low * D, (low + n < tl.minimum(base, high))[:, None], 0.0)
    _wait(PDL)
    if tile >= tl.load(described + 1):
        return
    queries = tl.load(
        q + row[:, None] * q_stride + head[:, None] * D + d[None, :], is_row[:, None], 0.0
    )
    for start in range(low, high, BN):
        cell = start + n
        known = tl.where(start == low, tl.minimum(base, high), start)
        is_new = ((cell >= known) & (cell < high))[:, None]
        k = tl.load(keys + start * D, is_new, 0.0)
        v = tl.load(keys + two_stride + start * D, is_new, 0.0)
        k = tl.where((cell < known)[:, None], old_k, k)
        v = tl.where((cell < known)[:, None], old_v, v)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee" if IEEE else None) * scale
        if CAP:
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
        sees = (cell < base)[None, :] & is_row[:, None]
        if WINDOW:
            sees = sees & (place[:, None] - cell[None, :] < window)
        if start + BN > base:
            sees = sees | _sees_own(described, R, row, is_row, cell - base, cell < high)
        scores = tl.where(sees & (cell < high)[None, :], scores, -float("inf"))
        peak = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(peak == -float("inf"), 0.0, peak)  # a row that sees nothing in this part
        weights = tl.exp(scores - safe[:, None])
        fade = tl.exp(top - safe)
        total = total * fade + tl.sum(weights, 1)
        sums = sums * fade[:, None]
        sums = tl.dot(weights.to(v.dtype), v, sums, input_precision="ieee" if IEEE else None)
        top = peak
    at = row * heads + head
    if IS_SPLIT:
        at = at * splits + split
        tl.store(partial + at[:, None] * D + d[None, :], sums, is_row[:, None])
        tl.store(states + at * 2, top, is_row)
        tl.store(states + at * 2 + 1, total, is_row)
    else:
        sums /= tl.where(total > 0, total, 1.0)[:, None]  # 0 for padding rows
        tl.store(out + at[:, None] * D + d[None, :], sums.to(out.dtype.element_ty), is_row[:, None])


@triton.jit(do_not_specialize=["splits"])
def combine(
    partial, states, out, splits, D: tl.constexpr, MAX_SPLITS: tl.constexpr, PDL: tl.constexpr
):
    """A head of a row of `attend`, merged from at most MAX_SPLITS parts."""
    at, d, s = tl.program_id(0), tl.arange(0, D), tl.arange(0, MAX_SPLITS)
    _wait(PDL)
    own = at * splits + s
    top = tl.load(states + own * 2, s < splits, -float("inf"))
    total = tl.load(states + own * 2 + 1, s < splits, 0.0)
    sums = tl.load(partial + own[:, None] * D + d[None, :], (s < splits)[:, None], 0.0)
    weights = tl.exp(top - tl.max(top, 0))
    whole = tl.sum(weights * total, 0)
    whole = tl.where(whole > 0, whole, 1.0)  # padding row
    tl.store(
        out + at * D + d, (tl.sum(weights[:, None] * sums, 0) / whole).to(out.dtype.element_ty)
    )
