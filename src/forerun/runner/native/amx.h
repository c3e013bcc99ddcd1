/* Sums of products by AMX tiles: up to sixteen rows of inputs times the sixteen outputs of a block,
   over 32 inputs at a time. Packed bf16 pairs are such tiles already; bytes are widened to them.

   Law: a tile multiplies each of its rows for itself, and tiles follow each other in rising order
   of inputs; so a row's bits depend on nothing else. Within a tile even and odd inputs are summed
   apart; numbers below 2^-126 count as 0, of inputs as of sums. NaN and infinity spread as always.

   Registers: 0-3 sums, 4 and 5 inputs, 6 and 7 weights; with three tiles of rows 0-5 sums, 6 inputs,
   7 weights. One tile of rows goes with four blocks; of more rows two or three tiles go with two
   blocks, whose weights stay in the core's cache until all rows had them. Meanwhile the next two
   blocks are fetched, in several streams: a core has few places for lines that it waits for, so
   memory is read fast only where its prefetcher reads ahead, and that does so for every stream. */

#define INPUTS 32 /* of a tile */
#define TILE_ROWS 16
#define AMX_ROWS (3 * TILE_ROWS) /* of bytes, which are widened for every tile, two thirds */
#define FEW 2 /* most rows that vectors take instead of tiles; of bytes, which cost more, one */

/* Rows that go together, `most` or one less, as tiles of equal height: they overlap where rows are
   not enough, so that registers need one shape. */
static void FN(share_rows)(int64_t most, FN(Beside) *beside) {
    beside->tiles = (int)((most + TILE_ROWS - 1) / TILE_ROWS);
    beside->height = (int)((most + beside->tiles - 1) / beside->tiles);
}

/* Registers for T tiles of `height` rows and `pairs` pairs of inputs; all are cleared. */
INLINE void FN(shape_tiles)(const int T, int height, int64_t pairs) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16]; /* of a register's row */
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        const int is_input = T == 3 ? i == 6 : i == 4 || i == 5;
        const int is_weight = i == 7 || (T < 3 && i == 6);
        shape.bytes[i] = (uint16_t)(is_input ? 4 * pairs : 4 * LANES);
        shape.rows[i] = (uint8_t)(is_weight ? pairs : height);
    }
    __asm__ volatile("" ::"m"(shape)); /* the whole of it is read */
    _tile_loadconfig(&shape);
}

/* Registers for full tiles, with sums of 0; a new shape costs as much as eight tiles. */
INLINE void FN(begin_tiles)(const int T, FN(Beside) *beside) {
    if (!beside->is_shaped) {
        FN(shape_tiles)(T, beside->height, INPUTS / 2);
        beside->is_shaped = 1;
        return;
    }
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (T == 3) _tile_zero(4);
    if (T == 3) _tile_zero(5);
}

/* Adds the products of T tiles of rows, in registers, with a tile of weights of block b. */
INLINE void FN(multiply)(const int T, const int b, const char *weights) {
#define STEP(sums, more, reg)                                                                \
    do {                                                                                     \
        _tile_loadd(reg, weights, 64);                                                       \
        _tile_dpbf16ps(sums, 4, reg);                                                        \
        if (T == 2) _tile_dpbf16ps(more, 5, reg);                                            \
    } while (0)
    if (b == 0) STEP(0, 2, 6);
    else if (b == 1) STEP(1, 3, 7);
    else if (b == 2) STEP(2, 2, 6);
    else STEP(3, 3, 7);
#undef STEP
}

INLINE void FN(load_inputs)(const int T, const uint16_t *in, const int *top, int64_t stride) {
    _tile_loadd(4, in, 2 * stride);
    if (T == 2) _tile_loadd(5, in + top[1] * stride, 2 * stride);
}

/* Adds the products of T tiles of rows, whose first ones are `top`, with tiles of weights of two
   blocks, `step` bytes apart; in between weights are fetched. */
INLINE void FN(multiply_two)(const int T, const uint16_t *in, const int *top, int64_t stride,
                             const char *weights, int64_t step, FN(Ahead) *ahead) {
    if (T == 2) {
        FN(load_inputs)(T, in, top, stride);
        FN(fetch_ahead)(ahead);
        FN(multiply)(T, 0, weights);
        FN(fetch_ahead)(ahead);
        FN(fetch_ahead)(ahead);
        FN(multiply)(T, 1, weights + step);
        FN(fetch_ahead)(ahead);
        return;
    }
    FN(fetch_ahead)(ahead); /* to and fro, so that fewer tiles are loaded */
    _tile_loadd(6, in, 2 * stride);
    _tile_loadd(7, weights, 64);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(7, weights + step, 64);
    _tile_dpbf16ps(1, 6, 7);
    FN(fetch_ahead)(ahead);
    _tile_loadd(6, in + top[1] * stride, 2 * stride);
    _tile_dpbf16ps(3, 6, 7);
    _tile_loadd(7, weights, 64);
    _tile_dpbf16ps(2, 6, 7);
    FN(fetch_ahead)(ahead);
    _tile_loadd(6, in + top[2] * stride, 2 * stride);
    _tile_dpbf16ps(4, 6, 7);
    _tile_loadd(7, weights + step, 64);
    _tile_dpbf16ps(5, 6, 7);
    FN(fetch_ahead)(ahead);
}

/* MOVE: _tile_stored or _tile_loadd, between registers and sums [rows][B]. */
#define MOVE_SUMS(MOVE, T, B, top, sums)                                                     \
    do {                                                                                     \
        vec *other = (sums) + ((T) == 1 ? 2 : (B) * (top)[1]), *third = (sums) + (B) * (top)[2]; \
        MOVE(0, sums, (B) * sizeof(vec));                                                    \
        MOVE(1, (sums) + 1, (B) * sizeof(vec));                                              \
        MOVE(2, other, (B) * sizeof(vec));                                                   \
        MOVE(3, other + 1, (B) * sizeof(vec));                                               \
        if ((T) < 3) break;                                                                  \
        MOVE(4, third, (B) * sizeof(vec));                                                   \
        MOVE(5, third + 1, (B) * sizeof(vec));                                               \
    } while (0)

/* Bytes of 2 * pairs inputs of a block to bf16 pairs [pairs][16][2]. */
INLINE void FN(widen_tile)(const char *from, int64_t pairs, const __m512i *table, char *to) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < pairs; i += 2, from += 64, to += 128) {
        __m512i pair, next;
        __builtin_prefetch(from + AHEAD);
        FN(widen)((const uint8_t *)from, table, &pair, &next);
        _mm512_store_si512(to, pair);
        _mm512_store_si512(to + 64, next);
    }
}

/* Sums of the rows of T tiles with B blocks, to sums [rows][B]; T and B are 1 and 4, or 2 or 3 and 2.
   With two blocks weights are fetched meanwhile, and earlier sums are finished. */
INLINE void FN(tile_sums)(const int T, const int B, const Linear *w, const uint16_t *in,
                          int64_t stride, int64_t block, int rows, int64_t first, int64_t count,
                          FN(Beside) *beside, vec *sums) {
    const int is_bytes = T < 3 && w->kind == INT8_PAIRS, last = rows - beside->height;
    const int top[3] = {0, T == 3 ? last / 2 : last, last};
    const int64_t num = count / INPUTS, pairs = (count % INPUTS + 1) / 2;
    const int64_t line = is_bytes ? 4 : 2; /* inputs in 64 bytes of a block */
    const int64_t step = (w->k + line - 1) / line * 64;
    const char *from = (const char *)w->weight + block * step + first / line * 64;
    const __m512i table[2] = {_mm512_loadu_si512(BF16_LOW), _mm512_loadu_si512(BF16_HIGH)};
    char wide[2][1024] __attribute__((aligned(64))); /* tiles of bytes, widened one ahead */
    FN(begin_tiles)(T, beside);
    if (is_bytes) {
        if (num) FN(widen_tile)(from, INPUTS / 2, table, wide[0]);
        for (int64_t i = 0; i < num; i++, from += 512) {
            FN(load_inputs)(T, in + i * INPUTS, top, stride);
#pragma GCC unroll 4
            for (int b = 0; b < B; b++) {
                const int is_last = b + 1 == B;
                const char *next = is_last ? from + 512 : from + (b + 1) * step;
                if (!is_last || i + 1 < num)
                    FN(widen_tile)(next, INPUTS / 2, table, wide[(b + 1) % 2]);
                __asm__ volatile("" ::: "memory"); /* `wide` is read by what follows */
                FN(multiply)(T, b, wide[b % 2]);
                __asm__ volatile("" ::: "memory"); /* and written again after it */
            }
        }
    } else if (B == 4) { /* all of the rows: weights pass once */
        for (int64_t i = 0; i < num; i++, from += 1024) {
            /* at a block's end the blocks after these come next */
            const int64_t far = AHEAD, ahead = (num - i) * 1024 > far ? far : far + 3 * step;
            FN(load_inputs)(T, in + i * INPUTS, top, stride);
#pragma GCC unroll 4
            for (int b = 0; b < B; b++) {
#pragma GCC unroll 16
                for (int j = 0; j < 16; j++) __builtin_prefetch(from + b * step + ahead + j * 64);
                FN(multiply)(T, b, from + b * step);
            }
        }
    } else {
        char unused[1024] __attribute__((aligned(64)));
        FN(Ahead) ahead = beside->soon;
        FN(Late) *late = &beside->late;
        const int each = num ? (int)((late->rows - late->done + num - 1) / num) : 0;
        for (int64_t i = 0; i < num; i++, from += 1024) {
            /* where no tile was stored for .4 us, the next store takes .3 us */
            if (i % 2) _tile_stored(6, unused, 64);
            FN(multiply_two)(T, in + i * INPUTS, top, stride, from, step, &ahead);
            FN(finish)(late, each);
        }
        beside->soon = ahead;
    }
    MOVE_SUMS(_tile_stored, T, B, top, sums);
    if (!pairs) return;
    /* the rest in narrower tiles: beyond the inputs anything may stand, and NaN times 0 is NaN */
    FN(shape_tiles)(T, beside->height, pairs);
    beside->is_shaped = 0;
    MOVE_SUMS(_tile_loadd, T, B, top, sums);
    if (B == 2 && !is_bytes) {
        FN(multiply_two)(T, in + num * INPUTS, top, stride, from, step, &(FN(Ahead)){0});
    } else {
        FN(load_inputs)(T, in + num * INPUTS, top, stride);
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) {
            const char *weights = from + b * step;
            if (is_bytes) FN(widen_tile)(weights, pairs, table, wide[0]);
            __asm__ volatile("" ::: "memory");
            FN(multiply)(T, b, is_bytes ? wide[0] : weights);
            __asm__ volatile("" ::: "memory");
        }
    }
    MOVE_SUMS(_tile_stored, T, B, top, sums);
}

/* Adds to acc [R][4] the products of R rows, inputs `in`, with `pairs` pairs of inputs of block b. */
INLINE void FN(add_pairs)(const int R, const int b, const int is_bytes, const char *from,
                          int64_t ahead, int64_t pairs, const float (*in)[2][16],
                          const __m512i *table, __m512 (*acc)[4]) {
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    __m512 even[FEW], odd[FEW];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) even[r] = odd[r] = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int64_t i = 0; i < pairs; i += is_bytes ? 2 : 1) {
        const char *at = from + (is_bytes ? i / 2 : i) * 64;
        __m512i part[2];
        __builtin_prefetch(at + ahead);
        if (is_bytes) FN(widen)((const uint8_t *)at, table, &part[0], &part[1]);
        else part[0] = _mm512_loadu_si512(at);
        for (int j = 0; j < 1 + is_bytes && i + j < pairs; j++) {
            const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(part[j], 16));
            const __m512 second = _mm512_castsi512_ps(_mm512_and_si512(part[j], high));
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                even[r] = _mm512_fmadd_ps(first, _mm512_set1_ps(in[r][0][i + j]), even[r]);
                odd[r] = _mm512_fmadd_ps(second, _mm512_set1_ps(in[r][1][i + j]), odd[r]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
        acc[r][b] = _mm512_add_ps(acc[r][b], _mm512_add_ps(even[r], odd[r]));
}

/* The sums of R rows with four blocks on vectors, which stream memory a tenth faster than tiles.

   Law: bit for bit what tiles compute. A tile sums the products of 16 even inputs by fused multiply
   and add in rising order, those of the 16 odd ones likewise, adds the two and then the whole to its
   sums; numbers below 2^-126 count as 0, which the caller asks of the processor. */
INLINE void FN(vector_sums)(const int R, const int is_bytes, const Linear *w, const uint16_t *in,
                            int64_t stride, int64_t block, int64_t first, int64_t count,
                            vec *sums) {
    const int64_t line = is_bytes ? 4 : 2, size = is_bytes ? 512 : 1024; /* of 32 inputs */
    const int64_t step = (w->k + line - 1) / line * 64;
    const int64_t far = (is_bytes ? 2 : 1) * AHEAD; /* bytes, which take work, need more */
    const __m512i table[2] = {_mm512_loadu_si512(BF16_LOW), _mm512_loadu_si512(BF16_HIGH)};
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    const char *from = (const char *)w->weight + block * step + first / line * 64;
    __m512 acc[FEW][4];
    float wide[FEW][2][16] __attribute__((aligned(64)));
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++) acc[r][b] = _mm512_setzero_ps();
    for (int64_t at = 0; at < count; at += INPUTS, from += size) {
        const int64_t pairs = count - at < INPUTS ? (count - at + 1) / 2 : INPUTS / 2;
        const int64_t left = (count - at) / INPUTS * size;
        /* at a block's end the blocks after these come next */
        const int64_t ahead = left > far ? far : far + 3 * step;
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m512i x = _mm512_maskz_loadu_epi32((__mmask16)((1u << pairs) - 1),
                                                       in + r * stride + at);
            _mm512_store_si512(wide[r][0], _mm512_slli_epi32(x, 16));
            _mm512_store_si512(wide[r][1], _mm512_and_si512(x, high));
        }
#define ADD(pairs)                                                                           \
    _Pragma("GCC unroll 4") for (int b = 0; b < 4; b++)                                      \
        FN(add_pairs)(R, b, is_bytes, from + b * step, ahead, pairs, wide, table, acc)
        if (pairs == INPUTS / 2) ADD(INPUTS / 2);
        else ADD(pairs);
#undef ADD
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++) sums[4 * r + b] = (vec)acc[r][b];
}

typedef void FN(few_t)(const Linear *, const uint16_t *, int64_t, int64_t, int64_t, int64_t, vec *);
#define SOME(R)                                                                              \
    __attribute__((noinline)) static void FN(some_##R)(                                      \
        const Linear *w, const uint16_t *in, int64_t stride, int64_t block, int64_t first,   \
        int64_t count, vec *sums) {                                                          \
        if (R == 1 && w->kind == INT8_PAIRS)                                                 \
            FN(vector_sums)(R, 1, w, in, stride, block, first, count, sums);                 \
        else FN(vector_sums)(R, 0, w, in, stride, block, first, count, sums);                \
    }
SOME(1) SOME(2)
#undef SOME
static FN(few_t) *const FN(some)[] = {0, FN(some_1), FN(some_2)};

/* Sums [rows][blocks] of up to AMX_ROWS rows over inputs [first, first + count); `first` is a
   multiple of four. More rows than TILE_ROWS go with two blocks. */
static void FN(amx_sums)(const Linear *w, const void *x, int64_t stride, int64_t block, int rows,
                         int blocks, int64_t first, int64_t count, FN(Beside) *beside,
                         vec *sums) {
    const uint16_t *in = (const uint16_t *)x + first;
    if (blocks == 4 && rows <= (w->kind == INT8_PAIRS ? 1 : FEW)) {
        const unsigned mode = _mm_getcsr();
        _mm_setcsr(mode | 0x8040); /* small numbers are 0, of inputs as of results */
        FN(some)[rows](w, in, stride, block, first, count, sums);
        _mm_setcsr(mode);
    } else if (blocks == 4) {
        FN(tile_sums)(1, 4, w, in, stride, block, rows, first, count, beside, sums);
    } else if (beside->tiles == 2) {
        FN(tile_sums)(2, 2, w, in, stride, block, rows, first, count, beside, sums);
    } else {
        FN(tile_sums)(3, 2, w, in, stride, block, rows, first, count, beside, sums);
    }
}
