/* Cells that come next: halves of their keys and of their values, fetched side by side, a line of
   each at a time. One stream alone, or many lines at once, would let memory rest. */
typedef struct {
    const char *at[4];
    int64_t left;  /* lines of each */
    int64_t pulls; /* lines of each with every step */
} FN(Soon);

/* Keys and values of a piece in the chunk from begin on. */
static inline FN(Soon) FN(soon)(const Model *m, const Piece *x, int64_t begin) {
    const int64_t size = 2 * m->head_dim, low = x->low > begin ? x->low : begin;
    const int64_t end = x->top + 1 < begin + CHUNK ? x->top + 1 : begin + CHUNK;
    const int64_t half = (end - low + 1) / 2;
    const char *keys = (const char *)x->keys + low * size;
    const char *values = (const char *)x->values + low * size;
    return (FN(Soon)){{keys, keys + half * size, values, values + half * size}, half * size / 64,
                      1};
}

/* Asks for `lines` lines of each stream, few at a time and often: memory that gets many requests at
   once and then none waits as long as the work in between. */
INLINE void FN(pull)(FN(Soon) *soon, int64_t lines) {
    if (soon->left <= 0) return;
    soon->left -= lines;
    for (int64_t j = 0; j < lines; j++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) __builtin_prefetch(soon->at[i] + j * 64, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) soon->at[i] += lines * 64;
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
