/* Pieces of attention that threads take in turn: rows of a span that go together, one key-value
   head, a run of positions or all of them. */
#pragma once

typedef struct {
    int64_t span, from, to, head; /* rows [from, to) of the span */
    int64_t first, stop;          /* runs */
    int64_t low, top;             /* positions that any of the rows sees */
    int64_t window;               /* 0: none */
    int64_t before;               /* pieces of earlier rows */
    const void *keys, *values;    /* of the head: [cells][head_dim] */
} Piece;

/* The lowest position that a row sees. */
static inline int64_t lowest(int64_t position, int64_t window) {
    return window && position >= window ? position - window + 1 : 0;
}

/* Goes on from piece x to the one of this number; 0 if there are not so many. */
static int find_piece(const Model *m, const Pass *p, int64_t layer, int64_t number, Piece *x) {
    const int64_t fold = m->num_heads / m->num_kv, step = fold >= QUERIES ? 1 : QUERIES / fold;
    const int64_t width = m->cell_kind == F32 ? 4 : 2;
    x->window = m->layers[layer].window;
    for (; x->span < p->num_spans; x->span++, x->from = 0) {
        const Span *s = &p->spans[x->span];
        for (; x->from < s->num_rows; x->from += step) {
            x->to = x->from + step < s->num_rows ? x->from + step : s->num_rows;
            x->low = INT64_MAX, x->top = 0;
            for (int64_t r = x->from; r < x->to; r++) {
                const int64_t position = p->positions[s->first_row + r];
                const int64_t low = lowest(position, x->window);
                if (position > x->top) x->top = position;
                if (low < x->low) x->low = low;
            }
            const int64_t first = x->low / RUN, num = x->top / RUN + 1 - first;
            const int64_t pieces = p->is_split ? num : 1, at = number - x->before;
            if (at < pieces * m->num_kv) {
                const char *cells = (const char *)p->cells + width * (layer * p->layer_stride +
                                                                      s->slot * p->slot_stride);
                x->head = at / pieces;
                x->first = first + (p->is_split ? at % pieces : 0);
                x->stop = p->is_split ? x->first + 1 : first + num;
                x->keys = cells + width * x->head * p->head_stride;
                x->values = cells + width * (m->num_kv + x->head) * p->head_stride;
                return 1;
            }
            x->before += pieces * m->num_kv;
        }
    }
    return 0;
}

/* Where the first chunk of a run begins that the rows see, and the end of what they see of it. */
static inline int64_t first_chunk(const Piece *x, int64_t run) {
    return (x->low > run * RUN ? x->low : run * RUN) / CHUNK * CHUNK;
}

static inline int64_t run_end(const Piece *x, int64_t run) {
    return x->top + 1 < (run + 1) * RUN ? x->top + 1 : (run + 1) * RUN;
}
