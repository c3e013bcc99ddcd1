/* Products with packed weights: y [rows, n] = x [rows, k] W^T.

   Law: an output is summed over k in rising order, whatever else is in the pass, so a row's result
   does not depend on how many rows there are or how many threads work. */

#if ISA_LEVEL >= 3
/* 64 weights of 8 bits as two registers of bf16, exactly. A byte is a sign and seven bits of
   magnitude m. The low byte of its bf16 is 2 m and the high one 0x42 from m = 64 on; for less they
   are looked up. Every 16 bytes hold four outputs' pairs of inputs 2 i, 2 i + 1 and then the same
   outputs' pairs of the next two inputs. */
INLINE void FN(widen)(const uint8_t *p, const __m512i *table, __m512i *pair, __m512i *next) {
    const __m512i bytes = _mm512_loadu_si512(p), twice = _mm512_add_epi8(bytes, bytes);
    const __mmask64 is_small = ~_mm512_movepi8_mask(twice);
    const __m512i low = _mm512_mask_permutexvar_epi8(twice, is_small, bytes, table[0]);
    __m512i high = _mm512_set1_epi8(0x42);
    high = _mm512_mask_permutexvar_epi8(high, is_small, bytes, table[1]);
    high = _mm512_ternarylogic_epi64(high, bytes, _mm512_set1_epi8((char)0x80), 0xf8); /* its sign */
    *pair = _mm512_unpacklo_epi8(low, high);
    *next = _mm512_unpackhi_epi8(low, high);
}
#endif

#include "prefetch.h"

/* What becomes of a sum: stored, added to what is there, or activated as the next product's input. */
enum { FN(STORE), FN(ADD), FN(ACTIVATE), FN(GATE) };
typedef struct {
    int how;
    float *y;
    void *act;
    int64_t stride, act_kind, activation;
    float scale; /* of what is stored or added */
} FN(Sink);

/* Sums [rows][blocks][VECS] of the rows from `row` on, of which the first `done` are where they
   belong. */
typedef struct {
    const FN(Sink) *sink;
    const Linear *w;
    int64_t row, block;
    int rows, blocks, done;
    const vec *sums;
} FN(Late);

/* What goes on beside the multiplying. */
typedef struct {
    FN(Ahead) soon; /* weights that come next */
    FN(Late) late;  /* sums that came before: rows of them are finished between tiles */
    int64_t far[4]; /* or, without tiles: bytes that fetching runs ahead of each block's loads, or
                       for bf16 pairs what `pairs_reach` says */
    int tiles, height, is_shaped; /* of rows that go together; registers are of that shape */
} FN(Beside);

/* Puts vector v of block b of rows [from, to) where it belongs. */
INLINE void FN(put)(const FN(Late) *late, int b, int v, int from, int to) {
    const FN(Sink) *s = late->sink;
    const Linear *w = late->w;
    const int step = s->how == FN(GATE) ? 2 : 1;
    const float share = s->scale;
    const int64_t at = (late->block + b) * LANES + v * WIDTH;
    const int64_t column = (late->block + b) / step * LANES + v * WIDTH;
    vec scale[2] = {FN(set)(1.0f), FN(set)(1.0f)}, bias[2] = {{0}};
    for (int i = 0; i < step; i++) {
        if (w->num_scales == 1) scale[i] = FN(load)(w->scale + at + i * LANES);
        if (w->bias) bias[i] = FN(load)(w->bias + at + i * LANES);
    }
    for (int r = from; r < to; r++) {
        const int64_t y = (late->row + r) * s->stride + column;
        const vec *sums = late->sums + (r * late->blocks + b) * VECS + v;
        const vec sum = sums[0] * scale[0] + bias[0];
        if (s->how == FN(STORE)) {
            FN(store)(s->y + y, sum * share);
        } else if (s->how == FN(ADD)) {
            FN(store)(s->y + y, FN(load)(s->y + y) + sum * share);
        } else if (s->how == FN(ACTIVATE)) {
            FN(store_as)(s->act, y, FN(activate)(sum, s->activation), s->act_kind);
        } else {
            const vec up = sums[VECS] * scale[1] + bias[1];
            FN(store_as)(s->act, y, FN(activate)(sum, s->activation) * up, s->act_kind);
        }
    }
}

/* Puts up to num rows more where they belong. */
INLINE void FN(finish)(FN(Late) *late, int num) {
    const int from = late->done, to = late->rows - from < num ? late->rows : from + num;
    if (from == to) return;
    for (int b = 0; b < late->blocks; b += late->sink->how == FN(GATE) ? 2 : 1) {
        if ((late->block + b) * LANES >= late->w->n) break; /* padding */
        for (int v = 0; v < VECS; v++) FN(put)(late, b, v, from, to);
    }
    late->done = to;
}

#if ISA_LEVEL >= 4
#include "amx.h"
#define IS_TILED(w) TAKES_PAIRS((w)->kind)
#define MOST_SUMS (2 * AMX_ROWS) /* of three tiles with two blocks */
#else
#define IS_TILED(w) 0
#if ISA_LEVEL == 3
#define MOST_SUMS (2 * TALL_ROWS)
#else
#define MOST_SUMS 24
#endif
#define AMX_ROWS 0
#endif

#include "sums.h"
#if ISA_LEVEL == 3
#include "pairs.h"
#endif

/* Sums [rows][blocks][VECS] over inputs [first, first + count). */
INLINE void FN(sums_over)(const Linear *w, const void *x, int64_t stride, int64_t block, int rows,
                          int blocks, int64_t first, int64_t count, FN(Beside) *beside,
                          vec *sums) {
#if ISA_LEVEL >= 4
    if (IS_TILED(w)) {
        FN(amx_sums)(w, x, stride, block, rows, blocks, first, count, beside, sums);
        return;
    }
#elif ISA_LEVEL == 3
    if (w->kind == BF16_PAIRS) {
        FN(pairs_tile)(w, rows)(w, x, stride, block, first, count, beside->far, sums);
        return;
    }
#endif
    FN(tiles)[rows](w, x, stride, block, first, count, beside->far, sums);
}

/* All of k: at once, or in one part for every scale of the outputs. */
INLINE void FN(sums_of)(const Linear *w, const void *x, int64_t stride, int64_t block, int rows,
                        int blocks, FN(Beside) *beside, vec *sums) {
    if (w->num_scales <= 1) {
        FN(sums_over)(w, x, stride, block, rows, blocks, 0, w->k, beside, sums);
        return;
    }
    for (int i = 0; i < rows * blocks * VECS; i++) sums[i] = (vec){0};
    for (int64_t s = 0; s < w->num_scales; s++) {
        const int64_t first = s * w->scaled, left = w->k - first;
        const float *scale = w->scale + s * w->groups * GROUP + block * LANES;
        vec part[MOST_SUMS * VECS];
        FN(sums_over)(w, x, stride, block, rows, blocks, first,
                      left < w->scaled ? left : w->scaled, beside, part);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < blocks * VECS; v++)
                sums[r * blocks * VECS + v] +=
                    part[r * blocks * VECS + v] * FN(load)(scale + v * WIDTH);
    }
}

/* Bytes of the weights of GROUP outputs. */
INLINE int64_t FN(group_bytes)(const Linear *w) {
    if (w->kind == BF16_PAIRS) return (w->k + 1) / 2 * 4 * GROUP;
    if (w->kind == INT8_PAIRS) return (w->k + 3) / 4 * 4 * GROUP;
    return w->k * GROUP * (w->kind == F32 ? 4 : w->kind == INT8 ? 1 : 2);
}

/* The `num` blocks from `block` on, to be fetched while `parts` groups of rows are multiplied. */
INLINE FN(Ahead) FN(blocks_ahead)(const Linear *w, int64_t block, int64_t num, int64_t parts) {
    const int64_t size = FN(group_bytes)(w) / 4, step = num * size / 8 / 64 * 64;
    return (FN(Ahead)){(const char *)w->weight + block * size, step, step / 64, parts, 0};
}

/* Most rows that go together. */
INLINE int64_t FN(most_rows)(const Linear *w, int64_t rows) {
#if ISA_LEVEL >= 4
    if (IS_TILED(w)) return w->kind == INT8_PAIRS ? AMX_ROWS / 3 * 2 : AMX_ROWS;
#elif ISA_LEVEL == 3
    if (w->kind == BF16_PAIRS) return rows <= TALL_ROWS ? TALL_ROWS : WIDE_ROWS;
#endif
    return VECTOR_ROWS;
}

/* Blocks that so many rows take at a time. */
INLINE int FN(num_blocks)(const Linear *w, int64_t rows, int64_t unit) {
    if (IS_TILED(w)) return (int)unit;
#if ISA_LEVEL == 3
    if (w->kind == BF16_PAIRS) return FN(pairs_blocks)(w, rows);
#endif
    return VECTOR_BLOCKS(rows);
}

/* How far a group of rows, the `part`-th of `parts`, fetches ahead where it takes `blocks` at a
   time. Few rows wait for memory, and the processor reads ahead by itself: a little. More wait for
   the multiplying of two blocks: the next two. Of several groups the first two fetch every other
   block of the unit that begins `next` bytes on, if any does, so that memory is busy while weights
   are used again. */
INLINE void FN(reach)(const Linear *w, int64_t part, int64_t parts, int blocks, int64_t next,
                      int64_t *far) {
    const int64_t one = blocks == 2 ? FN(group_bytes)(w) / 2 : AHEAD / 2;
    for (int b = 0; b < 4; b++)
        far[b] = parts == 1 ? one : next && b % 2 == part ? next : AHEAD;
}

/* Blocks that all rows take before the next ones: a unit of work. */
INLINE int64_t FN(unit_blocks)(const Linear *w, int64_t rows) {
    return IS_TILED(w) && rows > AMX_ROWS / 3 ? 2 : 4;
}

/* With few rows, whose weights stream, neighbours are fetched: nearly all units have an owner. */
INLINE Share FN(share)(const Team *team, const Linear *w, int64_t rows) {
    const int64_t num = FN(unit_blocks)(w, rows), all = 4 * w->groups / num;
    return share_of(team, all, num == 2 ? all / 8 : 0);
}

/* One thread's part of the outputs, every row: its own share, the same in every pass so that it stays
   in that core's cache, then blocks that nobody has taken. x has `stride` numbers per row. */
static void FN(linear)(const Linear *w, const void *x, int64_t stride, int64_t rows,
                       const FN(Sink) *sink, Team *team) {
    if (!rows) return;
    const int64_t most = FN(most_rows)(w, rows);
    const int64_t parts = (rows + most - 1) / most, width = TAKES_PAIRS(w->kind) ? 2 : 4;
    const int64_t num = FN(unit_blocks)(w, rows);
    vec sums[2][MOST_SUMS * VECS];
    int turn = 0;
    FN(Beside) beside = {0};
#if ISA_LEVEL >= 4
    FN(share_rows)((rows + parts - 1) / parts, &beside);
#endif
    Share share = FN(share)(team, w, rows);
    for (int64_t unit = next_unit(team, &share), next; unit < share.all; unit = next) {
        next = next_unit(team, &share);
        beside.soon = FN(blocks_ahead)(w, next * num, num, parts);
        if (next >= share.all) beside.soon.left = 0;
        const int64_t step = next < share.all ? (next - unit) * num * (FN(group_bytes)(w) / 4) : 0;
        for (int64_t part = 0; part < parts; part++) {
            const int64_t row = rows * part / parts, n = rows * (part + 1) / parts - row;
            const int blocks = FN(num_blocks)(w, n, num);
            const void *in = (const char *)x + row * stride * width;
            if (!IS_TILED(w)) FN(reach)(w, part, parts, blocks, step, beside.far);
            for (int64_t b = unit * num; b < (unit + 1) * num; b += blocks) {
#if ISA_LEVEL == 3
                if (w->kind == BF16_PAIRS)
                    FN(pairs_reach)(w, n, part, parts, (b - unit * num) / blocks, step, beside.far);
#endif
                vec *own = sums[turn ^= 1];
                FN(sums_of)(w, in, stride, b, (int)n, blocks, &beside, own);
                FN(finish)(&beside.late, MOST_SUMS);
                beside.late = (FN(Late)){sink, w, row, b, (int)n, blocks, 0, own};
                /* one tile of rows leaves no time for it: memory is what it waits for */
                if (num == 4) FN(finish)(&beside.late, MOST_SUMS);
            }
        }
    }
    FN(finish)(&beside.late, MOST_SUMS);
#if ISA_LEVEL >= 4
    if (IS_TILED(w)) _tile_release();
#endif
}
