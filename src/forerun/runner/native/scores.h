/* Scores and weighted values of few cells at a time in vector registers; the cells of a key-value
   head are rows [dim], given by their indices. */

#if ISA_LEVEL >= 3 /* bf16 keys and queries are multiplied as pairs */
#define IS_PAIRED(m) ((m)->cell_kind == BF16 && (m)->head_dim % (2 * LANES) == 0)
#else
#define IS_PAIRED(m) 0
#endif

/* Rows [WIDTH][WIDTH] become columns: for every bit, rows that differ in it alone exchange the lanes
   that differ in it. */
INLINE void FN(transpose)(vec *rows) {
#define LOW(J, BIT) ((J) & (BIT) ? WIDTH + (J) - (BIT) : (J))
#define HIGH(J, BIT) ((J) & (BIT) ? WIDTH + (J) : (J) + (BIT))
#define EIGHT(F, J, BIT)                                                                     \
    F(J, BIT), F(J + 1, BIT), F(J + 2, BIT), F(J + 3, BIT), F(J + 4, BIT), F(J + 5, BIT),    \
        F(J + 6, BIT), F(J + 7, BIT)
#if ISA_LEVEL >= 2
#define LANES_OF(F, BIT) EIGHT(F, 0, BIT), EIGHT(F, 8, BIT)
#else
#define LANES_OF(F, BIT) EIGHT(F, 0, BIT)
#endif
#define EXCHANGE(BIT)                                                                        \
    _Pragma("GCC unroll 16") for (int i = 0; i < WIDTH; i++) if (!(i & (BIT))) {             \
        const vec a = rows[i], b = rows[i + (BIT)];                                          \
        rows[i] = __builtin_shufflevector(a, b, LANES_OF(LOW, BIT));                         \
        rows[i + (BIT)] = __builtin_shufflevector(a, b, LANES_OF(HIGH, BIT));                \
    }
#if ISA_LEVEL >= 2
    EXCHANGE(8)
#endif
    EXCHANGE(4)
    EXCHANGE(2)
    EXCHANGE(1)
#undef LOW
#undef HIGH
#undef EIGHT
#undef LANES_OF
#undef EXCHANGE
}

/* Keys of sixteen cells of a head, transposed: [dim][16] floats, or [dim / 2][16] pairs of bf16. */
static void FN(read_keys)(float *keys, const Model *m, const void *cells, const int64_t *index,
                          int64_t num) {
    const int64_t dim = m->head_dim;
    const int is_paired = IS_PAIRED(m), many = is_paired ? 2 : 1; /* numbers in a lane */
    for (int64_t d = 0; d < dim; d += many * WIDTH)
        for (int64_t first = 0; first < LANES; first += WIDTH) {
            vec rows[WIDTH];
            for (int j = 0; j < WIDTH; j++) {
                if (first + j >= num) {
                    rows[j] = (vec){0};
                    continue;
                }
                const int64_t at = index[first + j] * dim + d;
                rows[j] = is_paired ? FN(load)((const float *)((const uint16_t *)cells + at))
                                    : FN(load_as)(cells, at, m->cell_kind);
            }
            FN(transpose)(rows);
            for (int j = 0; j < WIDTH; j++)
                FN(store)(keys + (d / many + j) * LANES + first, rows[j]);
        }
}

/* Scores of N queries [dim] (or pairs of bf16 [dim / 2]) with WIDTH of the sixteen cells. */
INLINE void FN(score)(const int N, const Model *m, const float *q, const float *keys,
                      float *scores) {
    const int64_t dim = m->head_dim, num = IS_PAIRED(m) ? dim / 2 : dim;
    vec even[4], odd[4];
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) even[i] = odd[i] = (vec){0};
#if ISA_LEVEL >= 3
    if (IS_PAIRED(m)) {
        for (int64_t d = 0; d < num; d += 2) {
            const __m512bh a = (__m512bh)FN(load)(keys + d * LANES);
            const __m512bh b = (__m512bh)FN(load)(keys + (d + 1) * LANES);
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) {
                const int32_t *pair = (const int32_t *)(q + i * MOST_DIM + d);
                even[i] = (vec)_mm512_dpbf16_ps((__m512)even[i], a,
                                                (__m512bh)_mm512_set1_epi32(pair[0]));
                odd[i] = (vec)_mm512_dpbf16_ps((__m512)odd[i], b,
                                               (__m512bh)_mm512_set1_epi32(pair[1]));
            }
        }
    } else
#endif
        for (int64_t d = 0; d < num; d += 2) {
            const vec a = FN(load)(keys + d * LANES), b = FN(load)(keys + (d + 1) * LANES);
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
#define SCORE(N)                                                                             \
    for (int64_t at = 0; at < LANES; at += WIDTH) FN(score)(N, m, q, keys + at, scores + at)
    for (; num >= 4; num -= 4, q += 4 * MOST_DIM, scores += 4 * CHUNK) SCORE(4);
    if (num == 3) SCORE(3);
    if (num == 2) SCORE(2);
    if (num == 1) SCORE(1);
#undef SCORE
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

/* Adds the weighted values of num cells to N states, V vectors of the head at a time, from d on;
   where that ends. */
INLINE int64_t FN(gather_some)(const int N, const int V, const Model *m, const void *cells,
                               const int64_t *index, int64_t num, const float *weights,
                               float *const *states, int64_t d) {
    const int64_t dim = m->head_dim;
    for (; d + V * WIDTH <= dim; d += V * WIDTH) {
        vec acc[4][4];
#pragma GCC unroll 4
        for (int i = 0; i < N; i++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[i][v] = FN(load)(states[i] + 2 + d + v * WIDTH);
        for (int64_t j = 0; j < num; j++) {
            vec value[4];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++)
                value[v] = FN(load_as)(cells, index[j] * dim + d + v * WIDTH, m->cell_kind);
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) {
                const vec weight = FN(set)(weights[i * CHUNK + j]);
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) acc[i][v] += weight * value[v];
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < N; i++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) FN(store)(states[i] + 2 + d + v * WIDTH, acc[i][v]);
    }
    return d;
}

/* All of the head: some vectors at a time, then, where the head is no multiple, one by one. */
INLINE void FN(gather)(const int N, const Model *m, const void *cells, const int64_t *index,
                       int64_t num, const float *weights, float *const *states) {
    const int64_t d = FN(gather_some)(N, GATHERED, m, cells, index, num, weights, states, 0);
    FN(gather_some)(N, 1, m, cells, index, num, weights, states, d);
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
