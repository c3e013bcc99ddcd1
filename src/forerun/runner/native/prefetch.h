/* Cells that come next, in the order in which they are read: keys of a chunk, its values, and so
   on, in units of a page. Eight units are fetched side by side, each an eighth behind the one before
   it: the processor reads ahead within pages only, and so never begins all of them at once. They go
   to the first cache, where a unit is whole when its turn comes; lines taken out of the second cache
   later would hold up those that are on their way. */
#define UNIT 4096
#define STREAMS 8
#define BEHIND (UNIT / STREAMS)
#define MOST_UNITS (4 * RUN * MOST_DIM / UNIT + 2 * RUN / CHUNK + STREAMS)

typedef struct {
    int64_t num, own;   /* units: all, and those of the run that is read */
    int64_t now;        /* the unit whose last part is fetched */
    int64_t done, owed; /* bytes of each part that are; lines that should be, too */
    const char *units[MOST_UNITS];
} FN(Soon);

/* Appends the cells of a run of a piece, up to `most` units in all. */
static inline void FN(append_run)(FN(Soon) *soon, const Model *m, const Piece *x, int64_t run,
                                  int64_t most) {
    const int64_t size = 2 * m->head_dim, end = run_end(x, run);
    for (int64_t begin = first_chunk(x, run); begin < end; begin += CHUNK) {
        const int64_t low = x->low > begin ? x->low : begin;
        const int64_t bytes = ((begin + CHUNK < end ? begin + CHUNK : end) - low) * size;
        for (int is_value = 0; is_value < 2; is_value++) {
            const char *cells = (const char *)(is_value ? x->values : x->keys) + low * size;
            for (int64_t at = 0; at < bytes && soon->num < most; at += UNIT)
                soon->units[soon->num++] = /* the last one rather begins early than ends late */
                    cells + (at + UNIT > bytes && bytes > UNIT ? bytes - UNIT : at);
        }
    }
}

/* What is read in a run of piece x and, if given, at the beginning of run `next_run` of `next`. */
static inline void FN(begin_soon)(FN(Soon) *soon, const Model *m, const Piece *x, int64_t run,
                                  const Piece *next, int64_t next_run) {
    soon->num = soon->done = soon->owed = 0;
    soon->now = 1; /* the first one was fetched before */
    FN(append_run)(soon, m, x, run, MOST_UNITS - STREAMS);
    soon->own = soon->num;
    const int64_t most = soon->own + STREAMS;
    if (next) FN(append_run)(soon, m, next, next_run, most);
    for (; soon->num < most; soon->num++) soon->units[soon->num] = soon->units[soon->num - 1];
}

/* While so many lines are read, as many are fetched. */
INLINE void FN(pull)(FN(Soon) *soon, int64_t lines) {
    soon->owed += lines;
    for (; soon->owed >= STREAMS; soon->owed -= STREAMS) {
        if (soon->now + STREAMS > soon->num) return;
        const char **units = soon->units + soon->now;
#pragma GCC unroll 8
        for (int i = 0; i < STREAMS; i++)
            __builtin_prefetch(units[i] + (STREAMS - 1 - i) * BEHIND + soon->done);
        soon->done += 64;
        if (soon->done == BEHIND) soon->done = 0, soon->now++;
    }
}

/* The run has been read: what is left until its successor may begin. */
static inline void FN(end_soon)(FN(Soon) *soon) {
    while (soon->now <= soon->own) FN(pull)(soon, STREAMS);
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
