/* The kernels without Python and torch, on buffers that end where their contents end.

   heap: a checker sees what is read or written beside a buffer, and memcheck what was never written.
   pages: each buffer holds NaN at first and ends at a page that must not be touched, which the
   processor itself checks: so of tile loads too, which no compiler's checks cover.

   All instruction sets that the processor has take part; the one that valgrind plays has AVX2 at
   most. Sizes and contents are drawn from a seed. Products are compared with sums of integers, which
   floats hold exactly; passes with themselves: on other threads, in one piece, a row alone; the
   largest probabilities with a plain search.

   usage: native_memory heap|pages [passes for each instruction set] [seed] */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "types.h"

int64_t forerun_level(void);
int64_t forerun_read(int64_t, const int32_t *, int64_t, int64_t, int64_t);
void forerun_pass(int64_t, const Model *, const Pass *, const int64_t *, int64_t *);
void forerun_product(int64_t, const Linear *, const void *, int64_t, int64_t, float *, int64_t,
                     void *, int64_t, int64_t, int64_t);
void forerun_top_probs(int64_t, const float *const *, int64_t, int64_t, int64_t, float *, int32_t *,
                       float *, int64_t);

#define DENSITY 64.0f /* numbers are whole multiples of 1 / DENSITY: exact in every type */
#define MOST_BUFFERS 256
#define PAGE 4096
#define PICK(...)                                                                            \
    ((const int64_t[]){__VA_ARGS__})[draw(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t))]
#define CHECK(holds, ...)                                                                    \
    do {                                                                                     \
        if (!(holds)) {                                                                      \
            fprintf(stderr, __VA_ARGS__);                                                    \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

static uint64_t state;
static struct {
    void *start;
    size_t size; /* of its pages; 0: on the heap */
} buffers[MOST_BUFFERS];
static int num_buffers, has_pages;

/* A number in [0, most). */
static int64_t draw(int64_t most) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (int64_t)((state >> 11) % (uint64_t)most);
}

static int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* Memory until `drop_all`. */
static void *take(int64_t bytes) {
    CHECK(num_buffers < MOST_BUFFERS, "more than %d buffers\n", MOST_BUFFERS);
    const size_t used = (size_t)up_to(bytes, PAGE), size = has_pages ? used + PAGE : 0;
    void *start = has_pages ? mmap(NULL, size, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                            : malloc((size_t)bytes);
    CHECK(start != MAP_FAILED && (start || !bytes), "no memory\n");
    buffers[num_buffers].start = start, buffers[num_buffers++].size = size;
    if (!has_pages) return start;
    CHECK(!mprotect((char *)start + used, PAGE, PROT_NONE), "a page cannot be locked\n");
    return (char *)memset(start, 0xff, used) + used - bytes;
}

static void drop_all(void) {
    while (num_buffers--)
        if (buffers[num_buffers].size) munmap(buffers[num_buffers].start, buffers[num_buffers].size);
        else free(buffers[num_buffers].start);
    num_buffers = 0;
}

static int64_t size_of(int64_t kind) { return kind == F32 ? 4 : kind >= INT8 ? 1 : 2; }

/* Writes a float that the kind holds exactly. */
__attribute__((target("f16c"))) static void put(void *to, int64_t at, float value, int64_t kind) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (kind == F32) ((float *)to)[at] = value;
    else if (kind == F16) ((uint16_t *)to)[at] = _cvtss_sh(value, 0);
    else ((uint16_t *)to)[at] = (uint16_t)(bits >> 16);
}

/* `num` random numbers; those of `most` = DENSITY lie within -1 and 1. */
static void *numbers(int64_t num, int64_t kind, int64_t most) {
    void *made = take(num * size_of(kind));
    for (int64_t i = 0; i < num; i++)
        put(made, i, (float)(draw(2 * most + 1) - most) / DENSITY, kind);
    return made;
}

/* Where the weight of output o and input i lies: see `Linear`. */
static int64_t place_of(const Linear *w, int64_t o, int64_t i) {
    const int64_t half = w->n / 2, lane = o % LANES;
    int64_t block = o / LANES;
    if (w->is_gated) block = o < half ? 2 * block : 2 * ((o - half) / LANES) + 1;
    if (w->kind == BF16_PAIRS)
        return ((block * ((w->k + 1) / 2) + i / 2) * LANES + lane) * 2 + i % 2;
    if (w->kind == INT8_PAIRS)
        return (block * ((w->k + 3) / 4) + i / 4) * 64 + lane / 4 * 16 + i % 4 / 2 * 8 +
               lane % 4 * 2 + i % 2;
    return (block * w->k + i) * LANES + lane;
}

/* A random weight [n, k], packed. Into `whole`, if given, come its numbers times DENSITY; scales are
   powers of two. */
static Linear weight(int64_t n, int64_t k, int64_t kind, int is_gated, int64_t scaled, int *whole) {
    Linear w = {.n = n, .k = k, .groups = (n + GROUP - 1) / GROUP, .kind = kind,
                .is_gated = is_gated, .is_streamed = draw(2), .fetched = 1 + draw(2)};
    const int64_t wide = kind == BF16_PAIRS ? 2 : kind == INT8_PAIRS ? 4 : 1;
    const int64_t bytes = w.groups * GROUP * up_to(k, wide) * size_of(kind);
    void *packed = memset(take(bytes), 0, (size_t)bytes);
    float *scale = NULL;
    if (kind >= INT8) {
        w.scaled = scaled ? scaled : k;
        w.num_scales = (k + w.scaled - 1) / w.scaled;
        scale = take(4 * w.num_scales * w.groups * GROUP);
        for (int64_t i = 0; i < w.num_scales * w.groups * GROUP; i++)
            scale[i] = (float)(1 + draw(2)) / DENSITY;
    }
    for (int64_t o = 0; o < n; o++)
        for (int64_t i = 0; i < k; i++) {
            const int64_t at = place_of(&w, o, i);
            const int value = (int)draw(63) - 31;
            int times = 1;
            if (kind == INT8) ((int8_t *)packed)[at] = (int8_t)value;
            else if (kind == INT8_PAIRS)
                ((uint8_t *)packed)[at] = (uint8_t)(abs(value) | (value < 0 ? 128 : 0));
            else put(packed, at, (float)value / DENSITY, kind == BF16_PAIRS ? BF16 : kind);
            if (scale) {
                const Linear first = {.n = n, .k = 1, .is_gated = is_gated};
                times = (int)(DENSITY * scale[i / w.scaled * w.groups * GROUP +
                                              place_of(&first, o, 0)]);
            }
            if (whole) whole[o * k + i] = value * times;
        }
    w.weight = packed, w.scale = scale;
    return w;
}

/* The kind in which the kernels of a level want weights of a type. */
static int64_t packed_kind(int64_t level, int64_t type) {
    if (level >= 3 && type == BF16) return BF16_PAIRS;
    return level >= 3 && type == INT8 ? INT8_PAIRS : type;
}

static void check_product(int64_t level) {
    const int64_t kind = packed_kind(level, PICK(F32, BF16, F16, INT8));
    const int is_gated = (int)draw(2), has_bias = (int)draw(2);
    const int64_t n = is_gated ? 32 * (1 + draw(5)) : 1 + draw(180), k = 1 + draw(260);
    const int64_t rows = draw(70);
    const int64_t in = TAKES_PAIRS(kind) ? BF16 : F32, wide = in == BF16 ? 4 : 1;
    const int64_t stride = up_to(k, wide) + wide * draw(20);
    const int64_t width = is_gated ? n / 2 : up_to(n, LANES);
    int *whole = take(4 * n * k), *x = take(4 * rows * k);
    Linear w = weight(n, k, kind, is_gated, draw(2) ? 32 + 4 * draw(20) : 0, whole);
    if (has_bias) w.bias = numbers(w.groups * GROUP, F32, 4096);
    /* behind the last row's inputs, and nowhere else, the buffer ends */
    const int64_t num = rows ? (rows - 1) * stride + up_to(k, wide) : 0;
    void *inputs = memset(take(num * size_of(in)), 0, (size_t)(num * size_of(in)));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < k; i++) {
            x[r * k + i] = (int)draw(255) - 127;
            put(inputs, r * stride + i, (float)x[r * k + i] / DENSITY, in);
        }
    float *y = take(4 * rows * width);
    forerun_product(level, &w, inputs, stride, rows, y, width, y, F32, RELU, 1 + draw(3));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < (is_gated ? n / 2 : n); o++) {
            float sums[2];
            for (int j = 0; j <= is_gated; j++) {
                const int64_t own = o + j * n / 2;
                const Linear first = {.n = n, .k = 1, .is_gated = is_gated};
                int64_t sum = 0;
                for (int64_t i = 0; i < k; i++) sum += (int64_t)whole[own * k + i] * x[r * k + i];
                sums[j] = (float)sum / (DENSITY * DENSITY);
                if (has_bias) sums[j] += w.bias[place_of(&first, own, 0)];
            }
            const float want = is_gated ? (sums[0] > 0 ? sums[0] : 0) * sums[1] : sums[0];
            CHECK(y[r * width + o] == want,
                  "product %lld x %lld, kind %lld, row %lld of %lld, output %lld: %g, not %g\n",
                  (long long)n, (long long)k, (long long)kind, (long long)r, (long long)rows,
                  (long long)o, y[r * width + o], want);
        }
    drop_all();
}

static Norm norm(int64_t size, int is_layer) {
    return (Norm){numbers(size, F32, 64), is_layer ? numbers(size, F32, 64) : NULL, is_layer, 1e-5};
}

/* A decoder of random sizes and kinds, with whatever a family may have. */
static Model decoder(int64_t level) {
    const int64_t type = PICK(F32, BF16, F16, INT8), kind = packed_kind(level, type);
    const int is_gated = (int)draw(2), is_layer = (int)draw(2), is_post = (int)draw(2);
    Model m = {
        .hidden = PICK(16, 48, 64, 80), .num_layers = 2, .num_kv = 1 + draw(3),
        .head_dim = PICK(16, 32, 48, 64, 64, 96, 128, 256), .inner = PICK(16, 96, 112),
        .activation = draw(4), .qk_norm = draw(3), .act_kind = TAKES_PAIRS(kind) ? BF16 : F32,
        .cell_kind = type == INT8 ? PICK(F32, BF16, F16) : type, .attn_cap = (double)PICK(0, 0, 9),
        .logit_cap = (double)PICK(0, 0, 9), .embed_scale = (double)PICK(1, 8),
        .logit_scale = 1.0 / (double)PICK(1, 8), .residual_scale = 1.0 / (double)PICK(1, 4),
    };
    m.num_heads = m.num_kv * PICK(1, 2, 3, 7, m.head_dim <= 32 ? 64 : 4);
    m.attn_scale = 1.0 / (double)m.head_dim;
    Layer *layers = take((int64_t)sizeof(Layer) * m.num_layers);
    for (int64_t l = 0; l < m.num_layers; l++) {
        const int64_t query = m.num_heads * m.head_dim, key = m.num_kv * m.head_dim;
        layers[l] = (Layer){
            .qkv = weight(query + 2 * key, m.hidden, kind, 0, 0, NULL),
            .out = weight(m.hidden, query, kind, 0, PICK(0, 32, 36), NULL),
            .up = weight(m.inner * (1 + is_gated), m.hidden, kind, is_gated, 0, NULL),
            .down = weight(m.hidden, m.inner, kind, 0, 0, NULL),
            .attn = norm(m.hidden, is_layer), .mlp = norm(m.hidden, is_layer),
            .window = PICK(0, 9, 300), .rope = PICK(0, 1, -1),
        };
        if (is_post) layers[l].post_attn = norm(m.hidden, 0), layers[l].post_mlp = norm(m.hidden, 0);
        if (m.qk_norm == NO_QK_NORM) continue;
        layers[l].q = norm(m.qk_norm == HEAD_QK_NORM ? m.head_dim : query, 0);
        layers[l].k = norm(m.qk_norm == HEAD_QK_NORM ? m.head_dim : key, 0);
    }
    m.layers = layers, m.norm = norm(m.hidden, is_layer);
    m.head = weight(PICK(1, 33, 64, 70), m.hidden, kind, 0, 0, NULL);
    /* embeddings of their own, or those of the head */
    if (type == INT8 || draw(2)) m.embed = numbers(m.head.n * m.hidden, m.cell_kind, 64);
    return m;
}

/* What some sequences bring to a pass; rows follow each other. */
typedef struct {
    Span spans[3];
    int64_t num_spans, num_rows, cells; /* of a slot */
    int64_t *ids, *positions, *cell_of, *wanted;
} Batch;

/* A span in slot s: the last rows of a text, or of a random tree behind it. */
static void add_span(Batch *b, const Model *m, int64_t s) {
    Span *span = &b->spans[s];
    const int64_t tree = 1 + draw(40), rows = 1 + draw(tree);
    const int64_t base = PICK(0, 3, 15, 16, 31, 250, 256, 1010, 1030, 2500), stop = base + tree;
    *span = (Span){s, base, stop, rows, b->num_rows, NULL};
    if (draw(3)) {
        uint8_t *all = take(tree * tree), *sees = take(rows * tree);
        memset(all, 0, (size_t)(tree * tree));
        for (int64_t node = 0; node < tree; node++) {
            if (node) memcpy(all + node * tree, all + draw(node) * tree, (size_t)tree);
            all[node * tree + node] = 1;
        }
        span->sees = memcpy(sees, all + (tree - rows) * tree, (size_t)(rows * tree));
    } else span->base = stop - rows;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = b->num_rows++, cell = stop - rows + r;
        b->ids[at] = draw(m->head.n), b->wanted[at] = at;
        b->cell_of[at] = cell * m->head_dim; /* of a slot: `lay_out` knows where that is */
        b->positions[at] = span->sees ? base - 1 : cell;
        for (int64_t i = 0; span->sees && i < tree; i++)
            b->positions[at] += span->sees[r * tree + i];
    }
    if (stop > b->cells) b->cells = stop;
    b->num_spans = s + 1;
}

/* Cells of all slots, filled where earlier passes would have filled them; strides to p. */
static void *lay_out(Batch *b, const Model *m, Pass *p) {
    const int64_t dim = m->head_dim, size = dim * size_of(m->cell_kind);
    p->head_stride = b->cells * dim;
    p->slot_stride = 2 * m->num_kv * p->head_stride;
    p->layer_stride = b->num_spans * p->slot_stride;
    const int64_t heads = m->num_layers * b->num_spans * 2 * m->num_kv;
    char *cells = take(heads * b->cells * size), *some = numbers(997 * dim, m->cell_kind, 64);
    for (int64_t head = 0; head < heads; head++) {
        const Span *span = &b->spans[head / (2 * m->num_kv) % b->num_spans];
        for (int64_t cell = 0; cell < span->stop - span->num_rows; cell++)
            memcpy(cells + (head * b->cells + cell) * size, some + draw(997) * size, (size_t)size);
    }
    for (int64_t s = 0; s < b->num_spans; s++)
        for (int64_t r = 0; r < b->spans[s].num_rows; r++)
            b->cell_of[b->spans[s].first_row + r] += s * p->slot_stride;
    return cells;
}

/* Logits [wanted, ...] of a batch, in buffers of its own. */
static float *logits_of(int64_t level, const Model *m, const Pass *given, const int64_t *cell_of) {
    const int64_t rows = given->num_rows, query = m->num_heads * m->head_dim;
    int64_t most = m->hidden > query ? m->hidden : query, *next = take(8 * (m->num_layers + 2));
    Pass p = *given;
    p.wide_stride = m->hidden, p.act_stride = up_to(most > m->inner ? most : m->inner, 32) + 32;
    p.x = take(4 * rows * m->hidden), p.wide = take(4 * rows * m->hidden);
    p.qkv = take(4 * rows * (query + 2 * m->num_kv * m->head_dim));
    p.partial = take(4 * rows * m->num_heads * p.max_runs * STATE(m->head_dim));
    p.act = take(((rows - 1) * p.act_stride + most) * size_of(m->act_kind));
    p.inner = take(((rows - 1) * p.act_stride + m->inner) * size_of(m->act_kind));
    p.logit_stride = up_to(m->head.n, LANES);
    p.logits = take(4 * p.num_wanted * p.logit_stride);
    p.hidden = draw(2) ? take(4 * p.num_wanted * m->hidden) : NULL;
    memset(next, 0, (size_t)(8 * (m->num_layers + 2)));
    forerun_pass(level, m, &p, cell_of, next);
    for (int64_t i = 0; i < p.num_wanted; i++)
        for (int64_t v = 0; v < m->head.n; v++)
            CHECK(isfinite(p.logits[i * p.logit_stride + v]), "a logit is no number\n");
    for (int64_t i = 0; p.hidden && i < p.num_wanted * m->hidden; i++)
        CHECK(isfinite(p.hidden[i]), "a hidden value is no number\n");
    return p.logits;
}

static void check_same(const Model *m, const float *a, const float *b, int64_t rows,
                       const char *what) {
    const int64_t stride = up_to(m->head.n, LANES);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t v = 0; v < m->head.n; v++)
            CHECK(a[r * stride + v] == b[r * stride + v], "%s: %.9g, not %.9g\n", what,
                  b[r * stride + v], a[r * stride + v]);
}

static void check_pass(int64_t level) {
    Model m = decoder(level);
    Batch b = {.ids = take(8 * 120), .positions = take(8 * 120), .cell_of = take(8 * 120),
               .wanted = take(8 * 120)};
    for (int64_t s = 0, num = 1 + draw(3); s < num; s++) add_span(&b, &m, s);
    int64_t top = 0;
    for (int64_t r = 0; r < b.num_rows; r++)
        if (b.positions[r] > top) top = b.positions[r];
    if (draw(2)) m.places = numbers((top + 1) * m.hidden, m.cell_kind, 64);
    int64_t *exact[] = {b.ids, b.positions, b.wanted};
    for (int i = 0; i < 3; i++) /* ends where the rows end */
        exact[i] = memcpy(take(8 * b.num_rows), exact[i], (size_t)(8 * b.num_rows));
    Pass p = {.num_rows = b.num_rows, .num_spans = b.num_spans, .num_threads = 1, .is_split = 1,
              .ids = exact[0], .positions = exact[1], .wanted = exact[2], .spans = b.spans,
              .num_wanted = b.num_rows, .max_runs = top / RUN + 1,
              .rope = draw(3) ? numbers(2 * (top + 1) * m.head_dim, F32, 64) : NULL,
              .rope_stride = (top + 1) * m.head_dim};
    p.cells = lay_out(&b, &m, &p);
    const float *found = logits_of(level, &m, &p, b.cell_of);
    Pass other = p;
    other.is_split = 0, other.max_runs = 1, other.num_threads = 1 + draw(3);
    other.num_wanted = 1 + draw(b.num_rows);
    check_same(&m, found, logits_of(level, &m, &other, b.cell_of), other.num_wanted,
               "other threads, runs in one piece");
    Span alone = b.spans[0]; /* its first row, without those behind it */
    if (!alone.sees || alone.stop - alone.base == alone.num_rows) {
        const uint8_t one = 1;
        alone.num_rows = 1, alone.stop = alone.base + 1, alone.sees = alone.sees ? &one : NULL;
        Pass single = p;
        single.num_rows = single.num_wanted = single.num_spans = 1, single.spans = &alone;
        check_same(&m, found, logits_of(level, &m, &single, b.cell_of), 1, "a row alone");
    }
    drop_all();
}

static void check_read(int64_t level) {
    const int64_t num = 64 * (1 + draw(300)), threads = 1 + draw(3);
    int32_t *words = take(4 * num);
    for (int64_t i = 0; i < num; i++) words[i] = 1;
    const int64_t sum = forerun_read(level, words, num, threads, draw(2) ? 1 : 4);
    CHECK(sum > num - 64 * threads * 3 && sum <= num, "read %lld words of %lld\n", (long long)sum,
          (long long)num);
    drop_all();
}

/* Rows with many ties: the right ids in their order, and probabilities that a plain sum gives. */
static void check_top_probs(int64_t level) {
    const int64_t n = 1 + draw(3), num = 1 + draw(12);
    const int64_t vocab = PICK(1 + draw(100), TOP_BLOCK, 1 + draw(4000), TOP_SPAN + draw(20000));
    const float **rows = take(n * (int64_t)sizeof(float *));
    for (int64_t r = 0; r < n; r++) rows[r] = numbers(vocab, F32, 9 * DENSITY);
    const int64_t blocks = up_to(vocab, TOP_BLOCK) / TOP_BLOCK;
    const int64_t spans = up_to(vocab, TOP_SPAN) / TOP_SPAN;
    float *probs = take(4 * n * num), *scratch = take(4 * n * (blocks + 2 * spans));
    int32_t *ids = take(4 * n * num);
    forerun_top_probs(level, rows, n, vocab, num, scratch, ids, probs, 1 + draw(3));
    for (int64_t r = 0; r < n; r++) {
        const float *x = rows[r];
        double total = 0;
        for (int64_t i = 0; i < vocab; i++) total += exp(x[i]);
        for (int64_t k = 0, last = -1; k < num; k++) {
            int64_t best = -1; /* the next one in the order: largest first, then by id */
            for (int64_t i = 0; i < vocab; i++) {
                const int is_later = last < 0 || x[i] < x[last] || (x[i] == x[last] && i > last);
                if (is_later && (best < 0 || x[i] > x[best])) best = i;
            }
            const double want = k < vocab ? exp(x[best]) / total : 0, got = probs[r * num + k];
            CHECK(ids[r * num + k] == (k < vocab ? best : 0) && fabs(got - want) <= 1e-5 * want,
                  "entry %lld of %lld is token %d, %g instead of %lld, %g\n", (long long)k,
                  (long long)vocab, ids[r * num + k], got, (long long)best, want);
            last = best;
        }
    }
    drop_all();
}

int main(int count, char **given) {
    has_pages = count > 1 && !strcmp(given[1], "pages");
    CHECK(has_pages || (count > 1 && !strcmp(given[1], "heap")),
          "usage: native_memory heap|pages [passes] [seed]\n");
    const int64_t passes = count > 2 ? atoll(given[2]) : 60;
    const char *names[] = {"", "avx2", "avx512", "avx512bf16", "amx"};
    for (int64_t level = 1; level <= forerun_level(); level++) {
        state = 88172645463325252u + (count > 3 ? strtoull(given[3], NULL, 10) : 0);
        for (int64_t i = 0; i < 4 * passes; i++) check_product(level);
        for (int64_t i = 0; i < passes; i++) check_pass(level);
        for (int64_t i = 0; i < 8; i++) check_read(level);
        for (int64_t i = 0; i < passes; i++) check_top_probs(level);
        printf("%s: %lld products and %lld decoders right, on %s\n", names[level],
               (long long)(4 * passes), (long long)passes, given[1]);
        fflush(stdout);
    }
    return 0;
}
