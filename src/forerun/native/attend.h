/* Attention of few rows over long caches (flash decoding): softmax over chunks of CHUNK positions,
   merged in rising order.

   Law: the cells that a row sees are, in rising order, the positions 0, 1, ... of its own text; they
   are taken in blocks of 16 positions. So a row's result depends on its text alone, not on the tree
   or batch around it. State of a query: maximum, sum of weights, weighted values [head_dim]. */

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

/* Keys of sixteen cells, transposed: [dim][16] floats, or [dim / 2][16] pairs of bf16. */
static void FN(read_keys)(float *keys, const Model *m, const void *cells, int64_t head,
                          const int64_t *index, int64_t num) {
    const int64_t dim = m->head_dim, cell = 2 * m->num_kv * dim;
    const int is_paired = IS_PAIRED(m);
    const int64_t step = is_paired ? 2 * LANES : LANES;
    for (int64_t d = 0; d < dim; d += step) {
        v16 rows[16];
        for (int j = 0; j < 16; j++) {
            const int64_t at = index[j] * cell + head * dim + d;
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
INLINE void FN(gather_pairs)(const int N, const Model *m, const uint16_t *cells, int64_t head,
                             const int64_t *index, int64_t num, const float *weights,
                             float *const *states) {
    const int64_t dim = m->head_dim, cell = 2 * m->num_kv * dim;
    const int64_t from = (m->num_kv + head) * dim;
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
            const __m512i a = _mm512_loadu_si512(cells + index[j] * cell + from + d);
            const __m512i b = _mm512_loadu_si512(cells + index[next] * cell + from + d);
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
INLINE void FN(gather)(const int N, const Model *m, const void *cells, int64_t head,
                       const int64_t *index, int64_t num, const float *weights,
                       float *const *states) {
    const int64_t dim = m->head_dim, cell = 2 * m->num_kv * dim;
    const int64_t from = (m->num_kv + head) * dim;
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
                value[v] = FN(load_as)(cells, index[j] * cell + from + d + v * LANES, m->cell_kind);
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
                       FN(load_as)(cells, index[j] * cell + from + d, m->cell_kind);
            FN(store)(states[i] + 2 + d, acc);
        }
}

static void FN(values)(const Model *m, const void *cells, int64_t head, const int64_t *index,
                       int64_t num_cells, const float *weights, int64_t num,
                       float *const *states) {
#if ISA_LEVEL >= 3
#define GATHER(N)                                                                            \
    do {                                                                                     \
        if (IS_PAIRED(m))                                                                    \
            FN(gather_pairs)(N, m, cells, head, index, num_cells, weights, states);          \
        else FN(gather)(N, m, cells, head, index, num_cells, weights, states);               \
    } while (0)
#else
#define GATHER(N) FN(gather)(N, m, cells, head, index, num_cells, weights, states)
#endif
    for (; num >= 4; num -= 4, weights += 4 * CHUNK, states += 4) GATHER(4);
    if (num == 3) GATHER(3);
    if (num == 2) GATHER(2);
    if (num == 1) GATHER(1);
#undef GATHER
}

/* Scores to weights in place, 0 outside [low, high); sets the state's maximum and sum. Weights are
   floats, or pairs of bf16 in the first half of the place. */
static void FN(soften)(const Model *m, float *scores, int64_t low, int64_t high, float *state) {
    const i16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t end = (high + LANES - 1) / LANES * LANES;
    v16 top = FN(set)(-INFINITY), total = {0};
    for (int64_t i = low / LANES * LANES; i < end; i += LANES) {
        v16 s = FN(load)(scores + i);
        if (m->attn_cap != 0) { /* cap * tanh(s / cap) */
            const float cap = (float)m->attn_cap;
            s = cap * (1.0f - 2.0f / (FN(exp)(s * (2.0f / cap)) + 1.0f));
        }
        const i16 at = lanes + (int32_t)i;
        s = FN(pick)((at >= (int32_t)low) & (at < (int32_t)high), s, FN(set)(-INFINITY));
        FN(store)(scores + i, s);
        top = FN(pick)(s > top, s, top);
    }
    const float most = FN(max)(top);
    for (int64_t i = 0; i < end; i += LANES) {
        v16 w = {0};
        if (i >= low / LANES * LANES) {
            const i16 at = lanes + (int32_t)i;
            w = FN(pick)((at >= (int32_t)low) & (at < (int32_t)high),
                         FN(exp)(FN(load)(scores + i) - most), w);
        }
        if (IS_PAIRED(m)) {
            FN(store_as)(scores, i, w, BF16);
            w = FN(load_bf16)((const uint16_t *)scores + i);
        } else {
            FN(store)(scores + i, w);
        }
        total += w;
    }
    state[0] = most;
    state[1] = FN(sum)(total);
}

/* Adds the state of a later chunk to an earlier one. */
static void FN(merge)(float *state, const float *later, int64_t dim) {
    if (later[1] == 0.0f && later[0] == -INFINITY) return;
    const float most = later[0] > state[0] ? later[0] : state[0];
    const float a = state[0] == most ? 1.0f : expf(state[0] - most);
    const float b = later[0] == most ? 1.0f : expf(later[0] - most);
    state[0] = most;
    for (int64_t i = 1; i < STATE(dim); i++) state[i] = state[i] * a + later[i] * b;
}

INLINE void FN(clear)(float *state, int64_t dim) {
    state[0] = -INFINITY;
    memset(state + 1, 0, sizeof(float) * (size_t)(dim + 1));
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

/* Asks for the keys or values (part 0, 1) of the cells [from, to), which lie too far apart for the
   processor to guess. */
INLINE void FN(fetch)(const Model *m, const void *cells, int64_t head, int64_t part, int64_t from,
                      int64_t to) {
    const int64_t width = m->cell_kind == F32 ? 4 : 2, size = m->head_dim * width;
    for (int64_t i = from; i < to; i++) {
        const char *at = (const char *)cells + ((2 * i + part) * m->num_kv + head) * size;
        for (int64_t d = 0; d < size; d += 64) __builtin_prefetch(at + d);
    }
}

/* Rows [from, to) of a span, one key-value head, the positions [begin, begin + CHUNK). */
static void FN(attend_chunk)(const Model *m, const Pass *p, const Span *s, const void *cells,
                             int64_t window, int64_t head, int64_t from, int64_t to, int64_t begin,
                             float *const *states) {
    const int64_t dim = m->head_dim, fold = m->num_heads / m->num_kv, num = (to - from) * fold;
    const int64_t lanes = m->num_heads + 2 * m->num_kv;
    const int64_t *positions = p->positions + s->first_row;
    const int64_t weight_size = IS_PAIRED(m) ? 2 : 4;
#define WEIGHTS_AT(query, position)                                                          \
    ((const float *)((const char *)(scores + (query) * CHUNK) + ((position) - begin) * weight_size))
    float keys[MOST_DIM * LANES] __attribute__((aligned(64)));
    float queries[MOST_FOLD * MOST_DIM] __attribute__((aligned(64)));
    float scores[MOST_FOLD * CHUNK] __attribute__((aligned(64)));
    int64_t index[CHUNK + LANES], own[CHUNK + LANES];

    int64_t top = 0, low = begin + CHUNK; /* positions that any of the rows sees in this chunk */
    for (int64_t r = from; r < to; r++) {
        if (positions[r] > top) top = positions[r];
        const int64_t first = window && positions[r] >= window ? positions[r] - window + 1 : 0;
        if (first < low) low = first;
    }
    low = low < begin ? begin : low / LANES * LANES;
    if (low >= begin + CHUNK || top < begin) return;
    for (int64_t q = 0; q < num; q++) {
        const float *x = p->qkv + ((s->first_row + from + q / fold) * lanes + head * fold +
                                   q % fold) * dim;
        if (IS_PAIRED(m))
            for (int64_t d = 0; d < dim; d += LANES)
                FN(store_as)(queries + q * MOST_DIM, d, FN(load)(x + d), BF16);
        else
            memcpy(queries + q * MOST_DIM, x, sizeof(float) * (size_t)dim);
    }

    /* up to `shared` a block of positions is the same cells for every row */
    int64_t shared = s->sees ? s->base / LANES * LANES : top + 1;
    shared = shared < begin ? begin : shared > begin + CHUNK ? begin + CHUNK : shared;
    for (int64_t i = 0; i < CHUNK + LANES; i++) index[i] = begin + i;
    for (int64_t at = low; at < shared; at += LANES) {
        const int64_t next = at + 2 * LANES, left = shared - next;
        FN(fetch)(m, cells, head, 0, next, next + (left < LANES ? left : LANES));
        FN(fetch)(m, cells, head, 1, at, at + LANES < shared ? at + LANES : shared);
        FN(read_keys)(keys, m, cells, head, index + (at - begin), shared - at);
        FN(scores)(m, queries, num, keys, scores + (at - begin));
    }
    for (int64_t r = from; r < to; r++) {
        const int64_t high = positions[r] + 1 < begin + CHUNK ? positions[r] + 1 : begin + CHUNK;
        const int64_t first = window && positions[r] >= window ? positions[r] - window + 1 : 0;
        float *own_scores = scores + (r - from) * fold * CHUNK;
        const int64_t n = FN(own_cells)(s, r, shared, high, own);
        for (int64_t at = 0; at < n; at += LANES) {
            FN(read_keys)(keys, m, cells, head, own + at, n - at);
            FN(scores)(m, queries + (r - from) * fold * MOST_DIM, fold, keys,
                       own_scores + (shared - begin) + at);
        }
        for (int64_t f = 0; f < fold; f++)
            FN(soften)(m, own_scores + f * CHUNK, first > begin ? first - begin : 0,
                       high > begin ? high - begin : 0, states[(r - from) * fold + f]);
        /* a row that ends early gives the rest of the shared cells no weight */
        if (high < shared)
            for (int64_t f = 0; f < fold; f++) {
                const int64_t end = high > begin ? (high - begin + LANES - 1) / LANES * LANES : 0;
                memset((char *)(own_scores + f * CHUNK) + end * weight_size, 0,
                       (size_t)((CHUNK - end) * weight_size));
            }
    }
    FN(values)(m, cells, head, index + (low - begin), shared - low, WEIGHTS_AT(0, low), num,
               states);
    for (int64_t r = from; r < to && s->sees; r++) {
        const int64_t high = positions[r] + 1 < begin + CHUNK ? positions[r] + 1 : begin + CHUNK;
        const int64_t n = FN(own_cells)(s, r, shared, high, own);
        if (n > 0)
            FN(values)(m, cells, head, own, n, WEIGHTS_AT((r - from) * fold, shared), fold,
                       states + (r - from) * fold);
    }
#undef WEIGHTS_AT
}

INLINE float *FN(part_of)(const Model *m, const Pass *p, int64_t row, int64_t head, int64_t chunk) {
    return p->partial + ((row * m->num_heads + head) * p->max_chunks + chunk) * STATE(m->head_dim);
}

INLINE int64_t FN(num_chunks)(int64_t position) { return position / CHUNK + 1; }

/* One thread's share. is_split: every chunk is a piece of work, merged by `combine`; otherwise a
   piece runs over all chunks and merges as it goes. Both add up in the same order. */
static void FN(attend)(const Model *m, const Pass *p, int64_t layer, int64_t *next) {
    const int64_t window = m->layers[layer].window, fold = m->num_heads / m->num_kv;
    const int64_t dim = m->head_dim;
    float chunk_states[MOST_FOLD][STATE(MOST_DIM)];
    int64_t piece = 0, mine = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
    for (int64_t i = 0; i < p->num_spans; i++) {
        const Span *s = &p->spans[i];
        const int64_t step = fold >= QUERIES ? 1 : QUERIES / fold;
        const char *cells = (const char *)p->cells +
                            (layer * p->layer_stride + s->slot * p->slot_stride) *
                                (m->cell_kind == F32 ? 4 : 2);
        for (int64_t from = 0; from < s->num_rows; from += step) {
            const int64_t to = from + step < s->num_rows ? from + step : s->num_rows;
            int64_t top = 0, low = INT64_MAX;
            for (int64_t r = from; r < to; r++) {
                const int64_t position = p->positions[s->first_row + r];
                if (position > top) top = position;
                if (position < low) low = position;
            }
            const int64_t first = window && low >= window ? (low - window + 1) / CHUNK : 0;
            const int64_t last = FN(num_chunks)(top);
            for (int64_t head = 0; head < m->num_kv; head++)
                for (int64_t chunk = first; chunk < last; chunk += p->is_split ? 1 : last - first) {
                    if (piece++ != mine) continue;
                    mine = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
                    const int64_t stop = p->is_split ? chunk + 1 : last;
                    for (int64_t c = chunk; c < stop; c++) {
                        float *states[MOST_FOLD];
                        const int64_t num = (to - from) * fold;
                        for (int64_t q = 0; q < num; q++) {
                            float *own = FN(part_of)(m, p, s->first_row + from + q / fold,
                                                     head * fold + q % fold, p->is_split ? c : 0);
                            const int is_first = p->is_split || c == first;
                            states[q] = is_first ? own : chunk_states[q];
                            FN(clear)(states[q], dim);
                        }
                        FN(attend_chunk)(m, p, s, cells, window, head, from, to, c * CHUNK,
                                         states);
                        if (!p->is_split && c != first)
                            for (int64_t q = 0; q < num; q++)
                                FN(merge)(FN(part_of)(m, p, s->first_row + from + q / fold,
                                                      head * fold + q % fold, 0),
                                          chunk_states[q], dim);
                    }
                }
        }
    }
}
