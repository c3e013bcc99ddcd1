/* Attention of few rows over long caches (flash decoding): softmax over chunks of CHUNK positions,
   merged in rising order within runs of RUN positions, and these in rising order at the end.

   Law: the cells that a row sees are, in rising order, the positions 0, 1, ... of its own text; they
   are taken in blocks of 16 positions. So a row's result depends on its text alone, not on the tree
   or batch around it. State of a query: maximum, sum of weights, weighted values [head_dim]. */

/* Scores to weights in place, 0 outside [low, high); sets the state's maximum and sum. Weights are
   floats, or pairs of bf16 in the first half of the place. */
static void FN(soften)(const Model *m, float *scores, int64_t low, int64_t high, float *state) {
    const int64_t end = (high + LANES - 1) / LANES * LANES;
    vec top = FN(set)(-INFINITY), total = {0};
    for (int64_t i = low / LANES * LANES; i < end; i += WIDTH) {
        vec s = FN(load)(scores + i);
        if (m->attn_cap != 0) { /* cap * tanh(s / cap) */
            const float cap = (float)m->attn_cap;
            s = cap * (1.0f - 2.0f / (FN(exp)(s * (2.0f / cap)) + 1.0f));
        }
        const ivec at = FN(lanes)() + (int32_t)i;
        s = FN(pick)((at >= (int32_t)low) & (at < (int32_t)high), s, FN(set)(-INFINITY));
        FN(store)(scores + i, s);
        top = FN(pick)(s > top, s, top);
    }
    const float most = FN(max)(top);
    for (int64_t i = 0; i < end; i += WIDTH) {
        vec w = {0};
        if (i >= low / LANES * LANES) {
            const ivec at = FN(lanes)() + (int32_t)i;
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

/* Asks for the keys or values of the cells [from, to) of a head. */
INLINE void FN(fetch)(const Model *m, const void *cells, int64_t from, int64_t to) {
    const int64_t size = m->head_dim * (m->cell_kind == F32 ? 4 : 2);
    for (const char *at = (const char *)cells + from * size; at < (const char *)cells + to * size;
         at += 64)
        __builtin_prefetch(at);
}

/* The positions [begin, begin + CHUNK) of a piece. */
static void FN(attend_chunk)(const Model *m, const Pass *p, const Piece *x, int64_t begin,
                             float *const *states) {
    const Span *s = &p->spans[x->span];
    const int64_t dim = m->head_dim, fold = m->num_heads / m->num_kv;
    const int64_t from = x->from, to = x->to, num = (to - from) * fold;
    const int64_t *positions = p->positions + s->first_row;
    const int64_t weight_size = IS_PAIRED(m) ? 2 : 4;
#define WEIGHTS_AT(query, position)                                                          \
    ((const float *)((const char *)(scores + (query) * CHUNK) + ((position) - begin) * weight_size))
    float keys[MOST_DIM * LANES] __attribute__((aligned(64)));
    float queries[MOST_FOLD * MOST_DIM] __attribute__((aligned(64)));
    float scores[MOST_FOLD * CHUNK] __attribute__((aligned(64)));
    int64_t index[CHUNK + LANES], own[CHUNK + LANES];

    const int64_t low = x->low < begin ? begin : x->low / LANES * LANES;
    for (int64_t q = 0; q < num; q++) {
        const float *query = FN(query_of)(m, p, x, q);
        if (IS_PAIRED(m))
            for (int64_t d = 0; d < dim; d += WIDTH)
                FN(store_as)(queries + q * MOST_DIM, d, FN(load)(query + d), BF16);
        else
            memcpy(queries + q * MOST_DIM, query, sizeof(float) * (size_t)dim);
    }

    /* up to `shared` a block of positions is the same cells for every row */
    int64_t shared = s->sees ? s->base / LANES * LANES : x->top + 1;
    shared = shared < begin ? begin : shared > begin + CHUNK ? begin + CHUNK : shared;
    for (int64_t i = 0; i < CHUNK + LANES; i++) index[i] = begin + i;
    for (int64_t at = low; at < shared; at += LANES) {
        const int64_t next = at + 2 * LANES, left = shared - next;
        FN(fetch)(m, x->keys, next, next + (left < LANES ? left : LANES));
        FN(fetch)(m, x->values, at, at + LANES < shared ? at + LANES : shared);
        FN(read_keys)(keys, m, x->keys, index + (at - begin), shared - at);
        FN(scores)(m, queries, num, keys, scores + (at - begin));
    }
    for (int64_t r = from; r < to; r++) {
        const int64_t high = positions[r] + 1 < begin + CHUNK ? positions[r] + 1 : begin + CHUNK;
        const int64_t first = lowest(positions[r], x->window);
        float *own_scores = scores + (r - from) * fold * CHUNK;
        const int64_t n = FN(own_cells)(s, r, shared, high, own);
        for (int64_t at = 0; at < n; at += LANES) {
            FN(read_keys)(keys, m, x->keys, own + at, n - at);
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
    FN(values)(m, x->values, index + (low - begin), shared - low, WEIGHTS_AT(0, low), num, states);
    for (int64_t r = from; r < to && s->sees; r++) {
        const int64_t high = positions[r] + 1 < begin + CHUNK ? positions[r] + 1 : begin + CHUNK;
        const int64_t n = FN(own_cells)(s, r, shared, high, own);
        if (n > 0)
            FN(values)(m, x->values, own, n, WEIGHTS_AT((r - from) * fold, shared), fold,
                       states + (r - from) * fold);
    }
#undef WEIGHTS_AT
}

/* A run of positions (or all of them) of a piece, chunk after chunk, to states. */
static void FN(attend_run)(const Model *m, const Pass *p, const Piece *x, int64_t run,
                           float *const *states) {
    const int64_t dim = m->head_dim, num = (x->to - x->from) * (m->num_heads / m->num_kv);
    float later[MOST_FOLD][STATE(MOST_DIM)], *laters[MOST_FOLD];
    const int64_t begin = first_chunk(x, run), end = run_end(x, run);
    for (int64_t q = 0; q < num; q++) laters[q] = later[q];
    for (int64_t at = begin; at < end; at += CHUNK) {
        for (int64_t q = 0; q < num; q++) FN(clear)(at == begin ? states[q] : later[q], dim);
        FN(attend_chunk)(m, p, x, at, at == begin ? states : laters);
        for (int64_t q = 0; q < num && at != begin; q++) FN(merge)(states[q], later[q], dim);
    }
}

INLINE float *FN(part_of)(const Model *m, const Pass *p, int64_t row, int64_t head, int64_t run) {
    return p->partial + ((row * m->num_heads + head) * p->max_runs + run) * STATE(m->head_dim);
}

/* One thread's share. is_split: every run is a piece of work, merged by `combine`; otherwise a piece
   goes over all runs and merges as it goes. Both add up in the same order. */
static void FN(attend)(const Model *m, const Pass *p, int64_t layer, int64_t *next) {
    const int64_t fold = m->num_heads / m->num_kv;
    float states[MOST_FOLD][STATE(MOST_DIM)];
#if ISA_LEVEL >= 4
    FN(Tiles) tiles;
    int is_first = 1;
    if (IS_PAIRED(m)) FN(shape_tiles)(1, TILE_ROWS, LANES);
#endif
    Piece now = {0}, then;
    int is_left = find_piece(m, p, layer, __atomic_fetch_add(next, 1, __ATOMIC_RELAXED), &now);
    for (; is_left; now = then) {
        then = now;
        is_left = find_piece(m, p, layer, __atomic_fetch_add(next, 1, __ATOMIC_RELAXED), &then);
        const int64_t num = (now.to - now.from) * fold;
        for (int64_t run = now.first; run < now.stop; run++) {
            float *into[MOST_FOLD], *own[MOST_FOLD];
            for (int64_t q = 0; q < num; q++) {
                own[q] = FN(part_of)(m, p, p->spans[now.span].first_row + now.from + q / fold,
                                     now.head * fold + q % fold, p->is_split ? run : 0);
                into[q] = run == now.first ? own[q] : states[q];
            }
#if ISA_LEVEL >= 4
            if (IS_PAIRED(m)) {
                const Piece *soon = run + 1 < now.stop ? &now : is_left ? &then : NULL;
                FN(tile_run)(&tiles, m, p, &now, run, is_first, soon,
                             soon == &now ? run + 1 : then.first, into);
                is_first = 0;
            } else
#endif
                FN(attend_run)(m, p, &now, run, into);
            for (int64_t q = 0; q < num && run != now.first; q++)
                FN(merge)(own[q], states[q], m->head_dim);
        }
    }
#if ISA_LEVEL >= 4
    if (IS_PAIRED(m)) _tile_release();
#endif
}
