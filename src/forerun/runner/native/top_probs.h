/* The largest probabilities of rows of logits.

   A row is cut into spans, which threads share. Partial sums are added in a fixed order, so a row's
   result is bit-identical for any number of rows and of threads. */

/* WIDTH logits, or those that are left; the rest is -inf. */
INLINE vec FN(load_logits)(const float *x, int64_t left) {
    if (left >= WIDTH) return FN(load)(x);
    float f[WIDTH];
    for (int i = 0; i < WIDTH; i++) f[i] = i < left ? x[i] : -INFINITY;
    return FN(load)(f);
}

/* The largest of n logits; NaN is skipped. */
INLINE float FN(largest)(const float *x, int64_t n) {
    vec most[4];
    for (int j = 0; j < 4; j++) most[j] = FN(set)(-INFINITY);
    for (int64_t i = 0; i < n; i += 4 * WIDTH)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const int64_t at = i + j * WIDTH;
            if (at >= n) break;
            const vec v = FN(load_logits)(x + at, n - at);
            most[j] = FN(pick)(v > most[j], v, most[j]);
        }
    for (int j = 1; j < 4; j++) most[0] = FN(pick)(most[j] > most[0], most[j], most[0]);
    return FN(max)(most[0]);
}

/* The sum of e^(x - shift) over n logits. */
INLINE float FN(sum_of_exps)(const float *x, int64_t n, float shift) {
    vec sums[4] = {{0}};
    for (int64_t i = 0; i < n; i += 4 * WIDTH)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const int64_t at = i + j * WIDTH;
            if (at >= n) break;
            sums[j] += FN(exp)(FN(load_logits)(x + at, n - at) - shift);
        }
    return FN(sum)(sums[0] + sums[1] + sums[2] + sums[3]);
}

/* Inserts a value into `found` falling ones, after equal ones; of more than num the last drops out.
   Returns the new number. If there are num, `value` must exceed the last. */
INLINE int64_t FN(insert)(float *values, int32_t *ids, int64_t found, int64_t num, float value,
                          int64_t id) {
    int64_t at = found < num ? found : num - 1;
    for (; at && values[at - 1] < value; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
    values[at] = value, ids[at] = (int32_t)id;
    return found < num ? found + 1 : num;
}

/* The `num` largest of n logits, falling, and their ids; ties: lowest ids. tops: the largest of each
   block. Only blocks that reach the num-th largest of these are searched. Returns how many were
   found: at most num, none of them -inf. */
static int64_t FN(select_top)(const float *x, int64_t n, const float *tops, int64_t num,
                              int32_t *ids, float *values) {
    const int64_t blocks = (n + TOP_BLOCK - 1) / TOP_BLOCK;
    int64_t found = 0;
#define LEAST (found == num ? values[num - 1] : -INFINITY)
    for (int64_t b = 0; b < blocks; b++)
        if (tops[b] > LEAST) found = FN(insert)(values, ids, found, num, tops[b], b);
    const float bound = LEAST;
    found = 0;
    for (int64_t b = 0; b < blocks; b++) {
        if (tops[b] < bound) continue;
        const int64_t stop = b * TOP_BLOCK + TOP_BLOCK < n ? b * TOP_BLOCK + TOP_BLOCK : n;
        for (int64_t i = b * TOP_BLOCK; i < stop; i += WIDTH) {
            const ivec above = FN(load_logits)(x + i, stop - i) > LEAST;
            int32_t any = 0;
            for (int j = 0; j < WIDTH; j++) any |= above[j];
            if (!any) continue;
            for (int64_t k = i; k < stop && k < i + WIDTH; k++)
                if (x[k] > LEAST) found = FN(insert)(values, ids, found, num, x[k], k);
        }
    }
#undef LEAST
    return found;
}

/* ids and probs [n, num] of the softmax of rows [n][vocab], falling, then zeros; only zeros for a row
   with NaN or +inf, or without a finite logit. scratch: for each row one float a block and two a
   span. */
static void FN(top_probs)(const float *const *rows, int64_t n, int64_t vocab, int64_t num,
                          float *scratch, int32_t *ids, float *probs, int64_t num_threads) {
    const int64_t blocks = (vocab + TOP_BLOCK - 1) / TOP_BLOCK;
    const int64_t spans = (vocab + TOP_SPAN - 1) / TOP_SPAN;
    float *tops = scratch, *highest = tops + n * blocks, *sums = highest + n * spans;
    int64_t counters[2] = {0};
#pragma omp parallel num_threads((int)num_threads)
    {
        Team team = join(counters);
        Share s = share_of(&team, n * spans, n * spans);
        for (int64_t unit = next_unit(&team, &s); unit < s.all; unit = next_unit(&team, &s)) {
            const int64_t row = unit / spans, from = unit % spans * TOP_SPAN;
            const int64_t stop = from + TOP_SPAN < vocab ? from + TOP_SPAN : vocab;
            float most = -INFINITY;
            for (int64_t at = from; at < stop; at += TOP_BLOCK) {
                const int64_t left = stop - at < TOP_BLOCK ? stop - at : TOP_BLOCK;
                const float top = FN(largest)(rows[row] + at, left);
                tops[row * blocks + at / TOP_BLOCK] = top;
                most = top > most ? top : most;
            }
            highest[unit] = most;
            const float shift = most > -INFINITY ? most : 0.0f; /* -inf minus -inf is NaN */
            sums[unit] = FN(sum_of_exps)(rows[row] + from, stop - from, shift);
        }
        meet(&team);
        s = share_of(&team, n, n);
        for (int64_t row = next_unit(&team, &s); row < n; row = next_unit(&team, &s)) {
            float most = -INFINITY;
            for (int64_t i = row * spans; i < (row + 1) * spans; i++)
                most = highest[i] > most ? highest[i] : most;
            double total = 0.0;
            for (int64_t i = row * spans; i < (row + 1) * spans; i++)
                total += sums[i] * (highest[i] > -INFINITY ? exp(highest[i] - most) : 1.0);
            float *own = probs + row * num;
            int64_t found = 0;
            if (total > 0.0 && total < INFINITY)
                found = FN(select_top)(rows[row], vocab, tops + row * blocks, num, ids + row * num, own);
            for (int64_t i = 0; i < found; i++) own[i] = (float)(exp(own[i] - most) / total);
            for (int64_t i = 0; i < num; i++)
                if (i >= found || own[i] == 0.0f) own[i] = 0.0f, ids[row * num + i] = 0;
        }
    }
}
