/* Scores and weighted values of few cells at a time in vector registers; the cells of a key-value
   head are rows [dim], given by their indices. */

#if ISA_LEVEL >= 3 /* bf16 keys and queries are multiplied as pairs */
#define IS_PAIRED(m) ((m)->cell_kind == BF16 && (m)->head_dim % (2 * LANES) == 0)
#else
#define IS_PAIRED(m) 0
#endif

INLINE void FN(transpose)(v16 *rows) {
#define SWAP(A, B, ...)                                                                      \
    do {                                                                                     \
        v16 low = __builtin_shufflevector(A, B, __VA_ARGS__);                                \
        B = __builtin_shufflevector(A, B, OTHER_HALF);                                       \
        A = low;                                                                             \
    } while (0)
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        if (!(i & 8)) {
#define OTHER_HALF 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
            SWAP(rows[i], rows[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
#undef OTHER_HALF
        }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        if (!(i & 4)) {
#define OTHER_HALF 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
            SWAP(rows[i], rows[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
#undef OTHER_HALF
        }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        if (!(i & 2)) {
#define OTHER_HALF 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
            SWAP(rows[i], rows[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
#undef OTHER_HALF
        }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        if (!(i & 1)) {
#define OTHER_HALF 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
            SWAP(rows[i], rows[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
#undef OTHER_HALF
        }
#undef SWAP
}

/* Keys of sixteen cells of a head, transposed: [dim][16] floats, or [dim / 2][16] pairs of bf16. */
static void FN(read_keys)(float *keys, const Model *m, const void *cells, const int64_t *index,
                          int64_t num) {
    const int64_t dim = m->head_dim;
    const int is_paired = IS_PAIRED(m);
    const int64_t step = is_paired ? 2 * LANES : LANES;
    for (int64_t d = 0; d < dim; d += step) {
        v16 rows[16];
        for (int j = 0; j < 16; j++) {
            const int64_t at = index[j] * dim + d;
            if (j >= num) rows[j] = (v16){0};
            else if (is_paired) rows[j] = FN(load)((const float *)((const uint16_t *)cells + at));
            else rows[j] = FN(load_as)(cells, at, m->cell_kind);
        }
        FN(transpose)(rows);
        for (int j = 0; j < 16; j++) FN(store)(keys + (d / step * LANES + j) * LANES, rows[j]);
    }
}

/* Scores of N queries [dim] (or pairs of bf16 [dim / 2]) with sixteen cells. */
INLINE void FN(score)(const int N, const Model *m, const float *q, const float *keys,
                      float *scores) {
    const int64_t dim = m->head_dim, num = IS_PAIRED(m) ? dim / 2 : dim;
    v16 even[4], odd[4];
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) even[i] = odd[i] = (v16){0};
#if ISA_LEVEL >= 3
    if (IS_PAIRED(m)) {
        for (int64_t d = 0; d < num; d += 2) {
            const __m512bh a = (__m512bh)FN(load)(keys + d * LANES);
            const __m512bh b = (__m512bh)FN(load)(keys + (d + 1) * LANES);
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) {
                const int32_t *pair = (const int32_t *)(q + i * MOST_DIM + d);
                even[i] = (v16)_mm512_dpbf16_ps((__m512)even[i], a,
                                                (__m512bh)_mm512_set1_epi32(pair[0]));
                odd[i] = (v16)_mm512_dpbf16_ps((__m512)odd[i], b,
                                               (__m512bh)_mm512_set1_epi32(pair[1]));
            }
        }
    } else
#endif
        for (int64_t d = 0; d < num; d += 2) {
            const v16 a = FN(load)(keys + d * LANES), b = FN(load)(keys + (d + 1) * LANES);
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) {
                even[i] += q[i * MOST_DIM + d] * a;
                odd[i] += q[i * MOST_DIM + d + 1] * b;
            }
        }
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) FN(store)(scores + i * CHUNK, even[i] + odd[i]);
}

static void FN(scores)(const Model *m, const float *q, int64_t num, const float *keys,
                       float *scores) {
    for (; num >= 4; num -= 4, q += 4 * MOST_DIM, scores += 4 * CHUNK)
        FN(score)(4, m, q, keys, scores);
    if (num == 3) FN(score)(3, m, q, keys, scores);
    if (num == 2) FN(score)(2, m, q, keys, scores);
    if (num == 1) FN(score)(1, m, q, keys, scores);
}

#if ISA_LEVEL >= 3
/* Adds the weighted values of num cells to N states: two cells and 32 dimensions at a time, weights
   as pairs of bf16. Sums of dimensions 0-3, 8-11, ... and 4-7, 12-15, ... are kept apart. */
INLINE void FN(gather_pairs)(const int N, const Model *m, const uint16_t *cells,
                             const int64_t *index, int64_t num, const float *weights,
                             float *const *states) {
    const int64_t dim = m->head_dim;
    for (int64_t d = 0; d < dim; d += 2 * LANES) {
        __m512 low[4], high[4];
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
            const __m512 a = _mm512_loadu_ps(states[i] + 2 + d);
            const __m512 b = _mm512_loadu_ps(states[i] + 2 + d + LANES);
            low[i] = _mm512_shuffle_f32x4(a, b, 0x88);
            high[i] = _mm512_shuffle_f32x4(a, b, 0xdd);
        }
        for (int64_t j = 0; j < num; j += 2) {
            const int64_t next = j + 1 < num ? j + 1 : j; /* its weight is 0 then */
            const __m512i a = _mm512_loadu_si512(cells + index[j] * dim + d);
            const __m512i b = _mm512_loadu_si512(cells + index[next] * dim + d);
            const __m512bh first = (__m512bh)_mm512_unpacklo_epi16(a, b);
            const __m512bh second = (__m512bh)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) {
                const __m512bh pair = (__m512bh)_mm512_set1_epi32(
                    ((const int32_t *)(weights + i * CHUNK))[j / 2]);
                low[i] = _mm512_dpbf16_ps(low[i], first, pair);
                high[i] = _mm512_dpbf16_ps(high[i], second, pair);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) {
            const __m512 a = _mm512_shuffle_f32x4(low[i], high[i], 0x44);
            const __m512 b = _mm512_shuffle_f32x4(low[i], high[i], 0xee);
            _mm512_storeu_ps(states[i] + 2 + d, _mm512_shuffle_f32x4(a, a, 0xd8));
            _mm512_storeu_ps(states[i] + 2 + d + LANES, _mm512_shuffle_f32x4(b, b, 0xd8));
        }
    }
}
#endif

/* Adds the weighted values of num cells to N states, four vectors of the head at a time. */
INLINE void FN(gather)(const int N, const Model *m, const void *cells, const int64_t *index,
                       int64_t num, const float *weights, float *const *states) {
    const int64_t dim = m->head_dim;
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) {
        v16 acc[4][4];
#pragma GCC unroll 4
        for (int i = 0; i < N; i++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) acc[i][v] = FN(load)(states[i] + 2 + d + v * LANES);
        for (int64_t j = 0; j < num; j++) {
            v16 value[4];
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++)
                value[v] = FN(load_as)(cells, index[j] * dim + d + v * LANES, m->cell_kind);
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) {
                const v16 weight = FN(set)(weights[i * CHUNK + j]);
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) acc[i][v] += weight * value[v];
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < N; i++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) FN(store)(states[i] + 2 + d + v * LANES, acc[i][v]);
    }
    for (; d < dim; d += LANES)
        for (int i = 0; i < N; i++) {
            v16 acc = FN(load)(states[i] + 2 + d);
            for (int64_t j = 0; j < num; j++)
                acc += weights[i * CHUNK + j] *
                       FN(load_as)(cells, index[j] * dim + d, m->cell_kind);
            FN(store)(states[i] + 2 + d, acc);
        }
}

static void FN(values)(const Model *m, const void *cells, const int64_t *index, int64_t num_cells,
                       const float *weights, int64_t num, float *const *states) {
#if ISA_LEVEL >= 3
#define GATHER(N)                                                                            \
    do {                                                                                     \
        if (IS_PAIRED(m))                                                                    \
            FN(gather_pairs)(N, m, cells, index, num_cells, weights, states);                \
        else FN(gather)(N, m, cells, index, num_cells, weights, states);                     \
    } while (0)
#else
#define GATHER(N) FN(gather)(N, m, cells, index, num_cells, weights, states)
#endif
    for (; num >= 4; num -= 4, weights += 4 * CHUNK, states += 4) GATHER(4);
    if (num == 3) GATHER(3);
    if (num == 2) GATHER(2);
    if (num == 1) GATHER(1);
#undef GATHER
}

/* Cells of the positions [from, to) of a row's own text; their number. */
static int64_t FN(own_cells)(const Span *s, int64_t row, int64_t from, int64_t to, int64_t *cells) {
    int64_t n = 0, skip = from > s->base ? from - s->base : 0;
    if (from >= to || !s->sees) return 0;
    const int64_t num = s->stop - s->base;
    const uint8_t *sees = s->sees + row * num;
    for (int64_t i = from; i < s->base && from + n < to; i++) cells[n++] = i;
    for (int64_t i = 0; i < num && from + n < to; i++)
        if (sees[i] && skip-- <= 0) cells[n++] = s->base + i;
    return n;
}

/* Query number q of a piece, [dim]. */
INLINE const float *FN(query_of)(const Model *m, const Pass *p, const Piece *x, int64_t q) {
    const int64_t fold = m->num_heads / m->num_kv, lanes = m->num_heads + 2 * m->num_kv;
    const int64_t row = p->spans[x->span].first_row + x->from + q / fold;
    return p->qkv + (row * lanes + x->head * fold + q % fold) * m->head_dim;
}
