/* Attention by AMX tiles, where cells are bf16 and heads are whole tiles of 32 numbers.

   Scores: tiles of keys [16 cells][32 numbers], as they lie in the cache, times tiles of queries
   [16 pairs][16 queries][2], turned over so that a query's scores are a row. Values: tiles of
   weights [16 queries][32 positions] times tiles of values [16 pairs of positions][16 numbers][2].
   So up to sixteen queries share every reading of a cell.

   Law: as in attend.h, with blocks of 32 positions. The maximum of a query is that of its run so
   far; where a chunk raises it, sums are scaled down before the chunk is added. */

#define BLOCK 32                      /* positions of a tile of weights */
#define PART (4 * LANES)              /* numbers of values that are summed together: four tiles */
#define WEIGHT_STRIDE (CHUNK + BLOCK) /* an odd count of cache lines */
#define SCORE_STRIDE (CHUNK + LANES)
#define GATHERED 4 /* queries that are gathered out of a tile one by one */
#define QUARTERS(order, a, b) _mm512_shuffle_f32x4(a, b, order)

typedef struct {
    uint16_t queries[MOST_FOLD / LANES][MOST_DIM / BLOCK][LANES * BLOCK];
    uint16_t values[CHUNK / BLOCK][PART / LANES][LANES * BLOCK];
    uint16_t weights[MOST_FOLD * WEIGHT_STRIDE];
    uint16_t edge[BLOCK * MOST_DIM]; /* keys of a block that is not full */
    float products[4][LANES * LANES];
    float scores[MOST_FOLD * SCORE_STRIDE];
    float sums[MOST_FOLD * MOST_DIM]; /* [query][dim], see `in_order` */
    float top[MOST_FOLD], total[MOST_FOLD];
    int64_t cells[CHUNK + LANES];
} __attribute__((aligned(64))) FN(Tiles);

/* Queries of a piece as tiles; those of the last tile that are not there are zeros. */
static void FN(lay_queries)(FN(Tiles) *t, const Model *m, const Pass *p, const Piece *x,
                            int64_t num) {
    for (int64_t first = 0; first < num; first += LANES)
        for (int64_t d = 0; d < m->head_dim; d += BLOCK) {
            vec rows[LANES];
            for (int i = 0; i < LANES; i++) {
                rows[i] = (vec){0};
                if (first + i >= num) continue;
                const float *query = FN(query_of)(m, p, x, first + i) + d;
                rows[i] = (vec)_mm512_cvtne2ps_pbh((__m512)FN(load)(query + LANES),
                                                   (__m512)FN(load)(query));
            }
            FN(transpose)(rows);
            float *tile = (float *)t->queries[first / LANES][d / BLOCK];
            for (int i = 0; i < LANES; i++) FN(store)(tile + i * LANES, rows[i]);
        }
}

/* Products of the keys of a block with one or two tiles of queries, to products [2 tiles][2 halves
   of the block][cell][query]; in between cells are fetched. */
INLINE void FN(multiply_keys)(const int N, FN(Tiles) *t, int64_t dim, const uint16_t *keys,
                              int64_t first, FN(Soon) *soon) {
    __asm__ volatile("" ::: "memory"); /* what was stored is read by tiles */
    _tile_zero(0);
    _tile_zero(1);
    if (N == 2) _tile_zero(2);
    if (N == 2) _tile_zero(3);
    for (int64_t d = 0; d < dim / BLOCK; d++) {
        if (!first) FN(pull)(soon, 8);
        _tile_loadd(4, keys + d * BLOCK, 2 * dim);
        if (!first) FN(pull)(soon, 8);
        _tile_loadd(5, keys + d * BLOCK + LANES * dim, 2 * dim);
        if (!first) FN(pull)(soon, 8);
        _tile_loadd(6, t->queries[first][d], 64);
        _tile_dpbf16ps(0, 4, 6);
        if (!first) FN(pull)(soon, 8);
        _tile_dpbf16ps(1, 5, 6);
        if (N == 1) continue;
        _tile_loadd(7, t->queries[first + 1][d], 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, t->products[0], 64);
    _tile_stored(1, t->products[1], 64);
    if (N == 2) _tile_stored(2, t->products[2], 64);
    if (N == 2) _tile_stored(3, t->products[3], 64);
}

/* Products [cell][query] to the scores [query] of sixteen cells, of the first num queries. */
INLINE void FN(turn)(const float *products, int64_t num, vec *scores) {
    if (num > GATHERED) {
        for (int i = 0; i < LANES; i++) scores[i] = FN(load)(products + i * LANES);
        FN(transpose)(scores);
        return;
    }
    const ivec lanes = {0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240};
    for (int64_t i = 0; i < num; i++)
        scores[i] = (vec)_mm512_i32gather_ps((__m512i)lanes, products + i, 4);
}

/* Which of the cells [cell, cell + BLOCK) a row sees, as bits. */
INLINE uint32_t FN(seen)(const Span *s, int64_t row, int64_t cell) {
    const int64_t num = s->stop - s->base, lead = s->base > cell ? s->base - cell : 0;
    const int64_t from = cell + lead - s->base, left = num - from;
    const uint32_t all = left >= BLOCK ? ~0u : (1u << left) - 1;
    const __m256i bytes = _mm256_maskz_loadu_epi8(all, s->sees + row * num + from);
    return (_mm256_test_epi8_mask(bytes, bytes) << lead) | ((1u << lead) - 1);
}

/* Scores of the cells that a row sees among a block: positions from `at` on of its text; those of
   the chunk are kept. */
INLINE void FN(keep_seen)(float *scores, uint32_t seen, int64_t at, int64_t begin, vec low,
                          vec high) {
    const int num = __builtin_popcount(seen);
    if (at >= begin && at + num <= begin + CHUNK) {
        scores += at - begin;
        _mm512_storeu_ps(scores, _mm512_maskz_compress_ps((__mmask16)seen, (__m512)low));
        scores += __builtin_popcount(seen & 0xffff);
        _mm512_storeu_ps(scores, _mm512_maskz_compress_ps((__mmask16)(seen >> 16), (__m512)high));
        return;
    }
    for (int i = 0; i < BLOCK; i++)
        if (seen >> i & 1) {
            if (at >= begin && at < begin + CHUNK)
                scores[at - begin] = i < LANES ? low[i] : high[i - LANES];
            at++;
        }
}

/* Scores of all queries with the cells [cell, cell + num), num <= BLOCK. seen NULL: they are those
   positions; else bits by row, and at: positions by row. */
static void FN(score_block)(FN(Tiles) *t, const Model *m, const Piece *x, int64_t cell,
                            int64_t num_cells, int64_t begin, const uint32_t *seen,
                            const int64_t *at, FN(Soon) *soon) {
    const int64_t dim = m->head_dim, fold = m->num_heads / m->num_kv;
    const int64_t num = (x->to - x->from) * fold;
    const uint16_t *keys = (const uint16_t *)x->keys + cell * dim;
    if (num_cells < BLOCK) { /* beyond them memory may end */
        memcpy(t->edge, keys, 2 * (size_t)(num_cells * dim));
        memset(t->edge + num_cells * dim, 0, 2 * (size_t)((BLOCK - num_cells) * dim));
        keys = t->edge;
    }
    for (int64_t first = 0; first < num; first += 2 * LANES) {
        if (num - first > LANES) FN(multiply_keys)(2, t, dim, keys, first / LANES, soon);
        else FN(multiply_keys)(1, t, dim, keys, first / LANES, soon);
        for (int64_t q = first, half = 0; q < num && half < 2; q += LANES, half++) {
            const int64_t n = num - q < LANES ? num - q : LANES;
            vec low[LANES], high[LANES];
            FN(turn)(t->products[2 * half], n, low);
            FN(turn)(t->products[2 * half + 1], n, high);
            for (int64_t i = 0; i < n; i++) {
                float *scores = t->scores + (q + i) * SCORE_STRIDE;
                if (seen) {
                    const int64_t row = (q + i) / fold;
                    FN(keep_seen)(scores, seen[row], at[row], begin, low[i], high[i]);
                } else {
                    FN(store)(scores + cell - begin, low[i]);
                    FN(store)(scores + cell - begin + LANES, high[i]);
                }
            }
        }
    }
}

/* Scores with the cells from `shared` on, of which rows see their own choice. */
static void FN(score_own)(FN(Tiles) *t, const Model *m, const Piece *x, const Span *s,
                          int64_t begin, FN(Soon) *soon) {
    uint32_t seen[MOST_FOLD];
    int64_t at[MOST_FOLD];
    const int64_t num = x->to - x->from, first = s->base / BLOCK * BLOCK;
    for (int64_t r = 0; r < num; r++) at[r] = first;
    for (int64_t cell = first; cell < s->stop; cell += BLOCK) {
        for (int64_t r = 0; r < num; r++) seen[r] = FN(seen)(s, x->from + r, cell);
        FN(score_block)(t, m, x, cell, s->stop - cell < BLOCK ? s->stop - cell : BLOCK, begin, seen,
                        at, soon);
        for (int64_t r = 0; r < num; r++) at[r] += __builtin_popcount(seen[r]);
    }
}

/* e^s / 2^top, to 3e-6 of itself, which is more than bf16 holds; about 0 below 2^-127. */
INLINE __m512 FN(power)(__m512 s, __m512 top) {
    s = _mm512_max_ps(_mm512_set1_ps(-127.0f), _mm512_fmsub_ps(s, _mm512_set1_ps(LOG2E), top));
    const __m512 whole = _mm512_roundscale_ps(s, 0), f = _mm512_sub_ps(s, whole);
    __m512 y = _mm512_fmadd_ps(f, _mm512_set1_ps(9.57010025e-3f), _mm512_set1_ps(5.59178602e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.40247449e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.93121815e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.999999261f));
    return _mm512_scalef_ps(y, whole);
}

/* cap * tanh(s / cap) */
INLINE vec FN(capped)(vec s, float cap) {
    return cap * (1.0f - 2.0f / (FN(exp)(s * (2.0f / cap)) + 1.0f));
}

/* Lanes of the positions [low, high) among sixteen from i on. */
INLINE __mmask16 FN(within)(int64_t i, int64_t low, int64_t high) {
    const int64_t first = low > i ? low - i : 0, last = high - i < LANES ? high - i : LANES;
    return first < last ? (__mmask16)((1u << last) - (1u << first)) : 0;
}

/* Scores of a query's chunk to weights in bf16, 0 outside [low, high); brings its maximum, its sum
   of weights and its sums of values up to date. */
static void FN(weigh)(FN(Tiles) *t, const Model *m, int64_t q, int64_t low, int64_t high) {
    float *scores = t->scores + q * SCORE_STRIDE, *sums = t->sums + q * m->head_dim;
    uint16_t *weights = t->weights + q * WEIGHT_STRIDE;
    const int64_t begin = low / BLOCK * BLOCK, end = high > low ? high : begin;
    const float cap = (float)m->attn_cap;
    __m512 most = _mm512_set1_ps(-INFINITY), more = most, total = _mm512_setzero_ps();
    for (int64_t i = begin; i < end; i += BLOCK) {
        vec a = FN(load)(scores + i), b = FN(load)(scores + i + LANES);
        if (cap != 0) {
            FN(store)(scores + i, a = FN(capped)(a, cap));
            FN(store)(scores + i + LANES, b = FN(capped)(b, cap));
        }
        if (i >= low && i + BLOCK <= high) {
            most = _mm512_max_ps((__m512)a, most);
            more = _mm512_max_ps((__m512)b, more);
        } else {
            most = _mm512_mask_max_ps(most, FN(within)(i, low, high), (__m512)a, most);
            more = _mm512_mask_max_ps(more, FN(within)(i + LANES, low, high), (__m512)b, more);
        }
    }
    const float before = t->top[q], now = _mm512_reduce_max_ps(_mm512_max_ps(most, more));
    const float top = now > before ? now : before;
    const float scale = top == before ? 1.0f : FN(exp)(FN(set)(before - top))[0];
    if (scale != 1.0f)
        for (int64_t d = 0; d < m->head_dim; d += LANES)
            FN(store)(sums + d, FN(load)(sums + d) * scale);
    const __m512 level = _mm512_set1_ps(top * LOG2E);
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    for (int64_t i = 0; i < CHUNK; i += BLOCK) {
        __m512bh pair = (__m512bh)_mm512_setzero_si512();
        if (i >= begin && i < end) {
            __m512 a = FN(power)((__m512)FN(load)(scores + i), level);
            __m512 b = FN(power)((__m512)FN(load)(scores + i + LANES), level);
            if (i < low || i + BLOCK > high) {
                a = _mm512_maskz_mov_ps(FN(within)(i, low, high), a);
                b = _mm512_maskz_mov_ps(FN(within)(i + LANES, low, high), b);
            }
            pair = _mm512_cvtne2ps_pbh(b, a);
            total = _mm512_dpbf16_ps(total, pair, ones);
        }
        _mm512_store_si512(weights + i, (__m512i)pair);
    }
    t->top[q] = top;
    t->total[q] = t->total[q] * scale + _mm512_reduce_add_ps(total);
}

/* Values of up to BLOCK cells, numbers [d, d + PART) of them, as tiles; zeros where there are none.
   In a tile numbers are in the order of `unpack`. cells NULL: neighbours, from `values` on. */
INLINE void FN(lay_values)(FN(Tiles) *t, const Model *m, const uint16_t *values,
                           const int64_t *cells, int64_t num, int64_t d, int64_t block,
                           FN(Soon) *soon) {
    const int64_t dim = m->head_dim, end = d + PART < dim ? d + PART : dim;
    for (int64_t j = 0; j < LANES; j++) {
        FN(pull)(soon, (end - d) / LANES);
        const uint16_t *even = values + (cells ? cells[2 * j] : 2 * j) * dim;
        const uint16_t *odd = values + (cells ? cells[2 * j + 1] : 2 * j + 1) * dim;
        for (int64_t from = d; from < end; from += BLOCK) {
            __m512i a = _mm512_setzero_si512(), b = a;
            if (2 * j < num) a = _mm512_loadu_si512(even + from);
            if (2 * j + 1 < num) b = _mm512_loadu_si512(odd + from);
            uint16_t(*tiles)[LANES * BLOCK] = t->values[block] + (from - d) / LANES;
            _mm512_store_si512(tiles[0] + j * BLOCK, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(tiles[1] + j * BLOCK, _mm512_unpackhi_epi16(a, b));
        }
    }
}

/* Adds the weighted values of num blocks, blocks `at` and on of weights, to the sums [d, d + PART)
   of the queries from q on. */
INLINE void FN(add_values)(FN(Tiles) *t, const Model *m, int64_t q, int64_t at, int64_t num,
                           int64_t d) {
    const int64_t stride = m->head_dim * 4;
    const int is_whole = m->head_dim - d >= PART;
    float *sums = t->sums + q * m->head_dim + d;
    const uint16_t *weights = t->weights + q * WEIGHT_STRIDE + at * BLOCK;
    __asm__ volatile("" ::: "memory"); /* what was stored is read by tiles */
    _tile_loadd(0, sums, stride);
    _tile_loadd(1, sums + LANES, stride);
    if (is_whole) _tile_loadd(2, sums + 2 * LANES, stride);
    if (is_whole) _tile_loadd(3, sums + 3 * LANES, stride);
    for (int64_t b = 0; b < num; b++, weights += BLOCK) {
        _tile_loadd(4, weights, 2 * WEIGHT_STRIDE);
        _tile_loadd(6, t->values[b][0], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, t->values[b][1], 64);
        _tile_dpbf16ps(1, 4, 7);
        if (!is_whole) continue;
        _tile_loadd(6, t->values[b][2], 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, t->values[b][3], 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + LANES, stride);
    if (is_whole) _tile_stored(2, sums + 2 * LANES, stride);
    if (is_whole) _tile_stored(3, sums + 3 * LANES, stride);
}

/* Adds the values of the positions from `shared` on, which are other cells for every row. */
static void FN(add_own)(FN(Tiles) *t, const Model *m, const Pass *p, const Piece *x, int64_t shared,
                        int64_t begin, FN(Soon) *soon) {
    const Span *s = &p->spans[x->span];
    const int64_t fold = m->num_heads / m->num_kv;
    int64_t shaped = TILE_ROWS;
    for (int64_t r = x->from; r < x->to; r++) {
        const int64_t end = p->positions[s->first_row + r] + 1;
        const int64_t high = end < begin + CHUNK ? end : begin + CHUNK;
        const int64_t n = FN(own_cells)(s, r, shared, high, t->cells);
        const int64_t blocks = (n + BLOCK - 1) / BLOCK;
        for (int64_t i = n; i < blocks * BLOCK; i++) t->cells[i] = 0; /* not read */
        for (int64_t d = 0; d < m->head_dim && n > 0; d += PART) {
            for (int64_t b = 0; b < blocks; b++)
                FN(lay_values)(t, m, x->values, t->cells + b * BLOCK, n - b * BLOCK, d, b, soon);
            for (int64_t f = 0; f < fold; f += TILE_ROWS) {
                const int64_t rows = fold - f < TILE_ROWS ? fold - f : TILE_ROWS;
                if (rows != shaped) FN(shape_tiles)(1, (int)rows, LANES);
                shaped = rows;
                FN(add_values)(t, m, (r - x->from) * fold + f, (shared - begin) / BLOCK, blocks, d);
            }
        }
    }
    if (shaped != TILE_ROWS) FN(shape_tiles)(1, TILE_ROWS, LANES);
}

/* The positions [begin, begin + CHUNK) of a piece. */
static void FN(tile_chunk)(FN(Tiles) *t, const Model *m, const Pass *p, const Piece *x,
                           int64_t begin, FN(Soon) *soon) {
    const Span *s = &p->spans[x->span];
    const int64_t dim = m->head_dim, fold = m->num_heads / m->num_kv;
    const int64_t num = (x->to - x->from) * fold;
    const int64_t low = x->low < begin ? begin : x->low / BLOCK * BLOCK, end = begin + CHUNK;
    /* up to `shared` a block of positions is the same cells for every row */
    int64_t shared = s->sees ? s->base / BLOCK * BLOCK : x->top + 1;
    shared = shared < begin ? begin : shared > end ? end : shared;
    const uint16_t *values = x->values;
    const int64_t first = (low - begin) / BLOCK, blocks = (shared - begin + BLOCK - 1) / BLOCK;
    for (int64_t at = low; at < shared; at += BLOCK)
        FN(score_block)(t, m, x, at, shared - at < BLOCK ? shared - at : BLOCK, begin, NULL, NULL,
                        soon);
    if (s->sees && shared < end) FN(score_own)(t, m, x, s, begin, soon);
    for (int64_t q = 0; q < num; q++) {
        const int64_t position = p->positions[s->first_row + x->from + q / fold];
        const int64_t start = lowest(position, x->window), last = position + 1;
        FN(weigh)(t, m, q, start > begin ? start - begin : 0, (last < end ? last : end) - begin);
    }
    for (int64_t d = 0; d < dim; d += PART)
        for (int64_t b = first; b < blocks; b++) { /* one by one, to stay in the first cache */
            const int64_t at = begin + b * BLOCK;
            FN(lay_values)(t, m, values + at * dim, NULL, shared - at, d, 0, soon);
            for (int64_t q = 0; q < num; q += TILE_ROWS) FN(add_values)(t, m, q, b, 1, d);
        }
    if (s->sees && shared < end) FN(add_own)(t, m, p, x, shared, begin, soon);
}

/* Sums of a query in the order of its numbers. */
INLINE void FN(in_order)(const float *sums, int64_t dim, float *out) {
    for (int64_t d = 0; d < dim; d += BLOCK) {
        const __m512 low = _mm512_load_ps(sums + d), high = _mm512_load_ps(sums + d + LANES);
        const __m512 a = QUARTERS(0x44, low, high), b = QUARTERS(0xee, low, high);
        _mm512_storeu_ps(out + d, QUARTERS(0xd8, a, a));
        _mm512_storeu_ps(out + d + LANES, QUARTERS(0xd8, b, b));
    }
}

/* A run of positions of a piece, to states. After it comes run `next_run` of piece `next`, if any,
   whose first cells are fetched meanwhile. is_first: those of this one were not. */
static void FN(tile_run)(FN(Tiles) *t, const Model *m, const Pass *p, const Piece *x, int64_t run,
                         int is_first, const Piece *next, int64_t next_run, float *const *states) {
    const int64_t dim = m->head_dim, num = (x->to - x->from) * (m->num_heads / m->num_kv);
    const int64_t padded = (num + LANES - 1) / LANES * LANES, end = run_end(x, run);
    FN(lay_queries)(t, m, p, x, num);
    memset(t->sums, 0, sizeof(float) * (size_t)(padded * dim));
    memset(t->weights + num * WEIGHT_STRIDE, 0, 2 * (size_t)((padded - num) * WEIGHT_STRIDE));
    for (int64_t q = 0; q < num; q++) t->top[q] = -INFINITY, t->total[q] = 0;
    FN(Soon) soon;
    FN(begin_soon)(&soon, m, x, run, next, next_run);
    if (is_first)
        for (int64_t i = 0; i < UNIT; i += 64) __builtin_prefetch(soon.units[0] + i);
    for (int64_t at = first_chunk(x, run); at < end; at += CHUNK)
        FN(tile_chunk)(t, m, p, x, at, &soon);
    FN(end_soon)(&soon);
    for (int64_t q = 0; q < num; q++) {
        states[q][0] = t->top[q];
        states[q][1] = t->total[q];
        FN(in_order)(t->sums + q * dim, dim, states[q] + 2);
    }
}
