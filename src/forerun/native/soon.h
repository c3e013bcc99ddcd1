/* Cells that come next: halves of their keys and of their values, fetched side by side, a line of each
   at a time and evenly over the steps until then. One stream alone, or many lines at once, would let
   memory rest. */
typedef struct {
    const char *at[4];
    int64_t lines, left; /* of each: all, and those that are not fetched yet */
    int64_t steps, due;  /* until then; parts of a line, in steps, that are owed */
} FN(Soon);

/* Keys and values of a piece's positions [from, to), in so many steps. */
static inline FN(Soon) FN(soon)(const Model *m, const Piece *x, int64_t from, int64_t to,
                                int64_t steps) {
    const int64_t size = 2 * m->head_dim, low = x->low > from ? x->low : from;
    const int64_t half = ((x->top + 1 < to ? x->top + 1 : to) - low + 1) / 2;
    const char *keys = (const char *)x->keys + low * size;
    const char *values = (const char *)x->values + low * size;
    const int64_t lines = half * size / 64;
    return (FN(Soon)){
        {keys, keys + half * size, values, values + half * size}, lines, lines, steps, 0};
}

/* One step. */
INLINE void FN(pull)(FN(Soon) *soon) {
    soon->due += soon->lines;
    while (soon->due >= soon->steps) {
        soon->due -= soon->steps;
        if (soon->left-- <= 0) return;
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __builtin_prefetch(soon->at[i], 0, 2);
            soon->at[i] += 64;
        }
    }
}

/* Weights that come next, fetched in eight streams while `parts` groups of rows are multiplied with
   as many weights before them: a line of each stream on every parts-th call, so that memory is busy
   all the time. Faster or slower costs a tenth. */
typedef struct {
    const char *at;
    int64_t step, left; /* bytes from stream to stream; lines of each */
    int64_t parts, calls;
} FN(Ahead);

INLINE void FN(fetch_ahead)(FN(Ahead) *ahead) {
    if (++ahead->calls < ahead->parts) return;
    ahead->calls = 0;
    if (ahead->left-- <= 0) return;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) __builtin_prefetch(ahead->at + i * ahead->step, 0, 2);
    ahead->at += 64;
}
