/* One pass of a decoder over packed rows, all threads together: each function below does one
   thread's share, and `pass` puts barriers between them. The residual stream is fp32. */

INLINE float FN(mean_square)(const float *x, int64_t n) {
    vec total = {0};
    for (int64_t i = 0; i < n; i += WIDTH) total += FN(load)(x + i) * FN(load)(x + i);
    return FN(sum)(total) / (float)n;
}

/* out += share * norm(x) if `out` is given, else act = norm(x). */
static void FN(norm_row)(const Norm *norm, const float *x, int64_t n, float *out, float share,
                         void *act, int64_t at, int64_t act_kind) {
    float mean = 0, square;
    if (norm->is_layer) {
        vec total = {0};
        for (int64_t i = 0; i < n; i += WIDTH) total += FN(load)(x + i);
        mean = FN(sum)(total) / (float)n;
        total = (vec){0};
        for (int64_t i = 0; i < n; i += WIDTH) {
            vec c = FN(load)(x + i) - mean;
            total += c * c;
        }
        square = FN(sum)(total) / (float)n;
    } else {
        square = FN(mean_square)(x, n);
    }
    const float scale = 1.0f / sqrtf(square + (float)norm->eps);
    for (int64_t i = 0; i < n; i += WIDTH) {
        vec y = (FN(load)(x + i) - mean) * scale * FN(load)(norm->weight + i);
        if (norm->bias) y += FN(load)(norm->bias + i);
        if (out) FN(store)(out + i, FN(load)(out + i) + y * share);
        else FN(store_as)(act, at + i, y, act_kind);
    }
}

/* Residual rows to inputs of the next product; without a norm, as they are. */
static void FN(norm_rows)(const Model *m, const Pass *p, const Norm *norm, int64_t thread) {
    for (int64_t r = thread; r < p->num_rows; r += p->num_threads) {
        const float *x = p->x + r * m->hidden;
        if (norm->weight) {
            FN(norm_row)(norm, x, m->hidden, NULL, 0, p->act, r * p->act_stride, m->act_kind);
            continue;
        }
        for (int64_t i = 0; i < m->hidden; i += WIDTH)
            FN(store_as)(p->act, r * p->act_stride + i, FN(load)(x + i), m->act_kind);
    }
}

static void FN(add_norm_rows)(const Model *m, const Pass *p, const Norm *norm, int64_t thread) {
    for (int64_t r = thread; r < p->num_rows; r += p->num_threads)
        FN(norm_row)(norm, p->wide + r * p->wide_stride, m->hidden, p->x + r * m->hidden,
                     (float)m->residual_scale, NULL, 0, 0);
}

static void FN(embed_rows)(const Model *m, const Pass *p, int64_t thread) {
    const float scale = (float)m->embed_scale;
    for (int64_t r = thread; r < p->num_rows; r += p->num_threads) {
        float *x = p->x + r * m->hidden;
        const int64_t id = p->ids[r];
        if (m->embed) {
            for (int64_t i = 0; i < m->hidden; i += WIDTH)
                FN(store)(x + i, FN(load_as)(m->embed, id * m->hidden + i, m->cell_kind) * scale);
        } else { /* a column of the packed head */
            const Linear *h = &m->head;
            const int64_t at = id / LANES * h->k * LANES + id % LANES;
            const int64_t pair = id / LANES * h->k * LANES + id % LANES * 2;
            for (int64_t i = 0; i < m->hidden; i++) {
                const uint16_t *half = h->weight;
                if (h->kind == F32) {
                    x[i] = ((const float *)h->weight)[at + i * LANES] * scale;
                } else if (h->kind == F16) {
                    x[i] = _cvtsh_ss(half[at + i * LANES]) * scale;
                } else {
                    uint32_t bits = (uint32_t)(h->kind == BF16
                                                   ? half[at + i * LANES]
                                                   : half[pair + i / 2 * 2 * LANES + i % 2])
                                    << 16;
                    float value;
                    memcpy(&value, &bits, 4);
                    x[i] = value * scale;
                }
            }
        }
        if (m->places)
            for (int64_t i = 0; i < m->hidden; i += WIDTH)
                FN(store)(x + i, FN(load)(x + i) + FN(load_as)(m->places,
                                                              p->positions[r] * m->hidden + i,
                                                              m->cell_kind));
    }
}

/* Per head: norm, rotation; queries are scaled in place, keys and values go to their cells. */
static void FN(place_heads)(const Model *m, const Pass *p, int64_t l, const int64_t *cell_of,
                            int64_t thread) {
    const Layer *layer = &m->layers[l];
    const int64_t dim = m->head_dim, half = dim / 2;
    const int64_t lanes = m->num_heads + 2 * m->num_kv, turned = m->num_heads + m->num_kv;
    const int64_t width = m->cell_kind == F32 ? 4 : 2;
    const int64_t total = p->num_rows * lanes;
    for (int64_t at = total * thread / p->num_threads; at < total * (thread + 1) / p->num_threads;
         at++) {
        const int64_t r = at / lanes, head = at % lanes;
        const int is_query = head < m->num_heads;
        float *x = p->qkv + at * dim;
        if (head < turned && m->qk_norm != NO_QK_NORM) {
            const Norm *norm = is_query ? &layer->q : &layer->k;
            const float *weight = norm->weight;
            float scale;
            if (m->qk_norm == HEAD_QK_NORM) {
                scale = 1.0f / sqrtf(FN(mean_square)(x, dim) + (float)norm->eps);
            } else { /* over all heads of the row, before any of them is changed: see `squares` */
                scale = p->wide[r * p->wide_stride + !is_query];
                weight += (is_query ? head : head - m->num_heads) * dim;
            }
            for (int64_t i = 0; i < dim; i += WIDTH)
                FN(store)(x + i, FN(load)(x + i) * scale * FN(load)(weight + i));
        }
        if (head < turned && p->rope && layer->rope >= 0) {
            const float *cosine = p->rope + layer->rope * p->rope_stride + p->positions[r] * dim;
            const float *sine = cosine + half;
            for (int64_t i = 0; i < half; i++) {
                const float a = x[i], b = x[i + half];
                x[i] = a * cosine[i] - b * sine[i];
                x[i + half] = b * cosine[i] + a * sine[i];
            }
        }
        if (is_query) {
            for (int64_t i = 0; i < dim; i += WIDTH)
                FN(store)(x + i, FN(load)(x + i) * (float)m->attn_scale);
        } else {
            char *cells = (char *)p->cells + l * p->layer_stride * width;
            const int64_t to = cell_of[r] + (head - m->num_heads) * p->head_stride;
            for (int64_t i = 0; i < dim; i += WIDTH)
                FN(store_as)(cells, to + i, FN(load)(x + i), m->cell_kind);
        }
    }
}

/* 1 / rms of all query heads and of all key heads of a row. */
static void FN(squares)(const Model *m, const Pass *p, const Layer *layer, int64_t thread) {
    const int64_t lanes = m->num_heads + 2 * m->num_kv, dim = m->head_dim;
    for (int64_t r = thread; r < p->num_rows; r += p->num_threads) {
        const float *x = p->qkv + r * lanes * dim;
        float *out = p->wide + r * p->wide_stride;
        out[0] = 1.0f / sqrtf(FN(mean_square)(x, m->num_heads * dim) + (float)layer->q.eps);
        out[1] = 1.0f / sqrtf(FN(mean_square)(x + m->num_heads * dim, m->num_kv * dim) +
                              (float)layer->k.eps);
    }
}

/* Merges the runs of every query and divides by the sum of its weights. */
static void FN(combine)(const Model *m, const Pass *p, int64_t layer, int64_t thread) {
    const int64_t dim = m->head_dim, window = m->layers[layer].window;
    const int64_t total = p->num_rows * m->num_heads;
    for (int64_t at = total * thread / p->num_threads; at < total * (thread + 1) / p->num_threads;
         at++) {
        const int64_t r = at / m->num_heads, head = at % m->num_heads, position = p->positions[r];
        const int64_t first = lowest(position, window) / RUN;
        float *state = FN(part_of)(m, p, r, head, p->is_split ? first : 0);
        if (p->is_split)
            for (int64_t run = first + 1; run <= position / RUN; run++)
                FN(merge)(state, FN(part_of)(m, p, r, head, run), dim);
        const float scale = 1.0f / state[1];
        for (int64_t i = 0; i < dim; i += WIDTH)
            FN(store_as)(p->act, r * p->act_stride + head * dim + i,
                         FN(load)(state + 2 + i) * scale, m->act_kind);
    }
}

static void FN(wanted_rows)(const Model *m, const Pass *p, int64_t thread) {
    for (int64_t i = thread; i < p->num_wanted; i += p->num_threads) {
        const float *x = p->x + p->wanted[i] * m->hidden;
        FN(norm_row)(&m->norm, x, m->hidden, NULL, 0, p->act, i * p->act_stride, m->act_kind);
        if (p->hidden)
            FN(norm_row)(&m->norm, x, m->hidden, NULL, 0, p->hidden, i * m->hidden, F32);
    }
}

static void FN(cap_logits)(const Model *m, const Pass *p, int64_t thread) {
    const float cap = (float)m->logit_cap;
    const int64_t total = p->num_wanted * p->logit_stride / WIDTH;
    for (int64_t i = total * thread / p->num_threads; i < total * (thread + 1) / p->num_threads;
         i++) {
        float *at = p->logits + i * WIDTH;
        vec e = FN(exp)(FN(load)(at) * (2.0f / cap));
        FN(store)(at, cap * (1.0f - 2.0f / (e + 1.0f)));
    }
}

/* The product with these weights comes next: who waits may fetch the beginning of its share. */
static void FN(expect)(Team *team, const Linear *w, int64_t rows) {
    const int64_t size = FN(group_bytes)(w) / 4, num = FN(unit_blocks)(w, rows);
    const Share share = FN(share)(team, w, rows);
    const int64_t bytes = (share.last - share.at) * num * size;
    team->soon = (const char *)w->weight + share.at * num * size;
    team->soon_end = team->soon + (bytes < SOON ? bytes : SOON);
}

/* next: zeros [num_layers + 2], counters of the pieces of attention that threads take in turn, of
   arrivals, and of units of products. */
static void FN(pass)(const Model *m, const Pass *given, const int64_t *cell_of, int64_t *next) {
#pragma omp parallel num_threads((int)given->num_threads)
    {
        Team team = join(next + m->num_layers);
        const int64_t t = team.thread, n = team.num; /* perhaps fewer than were asked for */
        Pass own = *given;
        own.num_threads = n;
        const Pass *p = &own;
        const int64_t lanes = (m->num_heads + 2 * m->num_kv) * m->head_dim;
        FN(Sink) to_qkv = {FN(STORE), p->qkv, NULL, lanes, 0, 0, 1};
        FN(Sink) to_x = {FN(ADD), p->x, NULL, m->hidden, 0, 0, (float)m->residual_scale};
        FN(Sink) to_wide = {FN(STORE), p->wide, NULL, p->wide_stride, 0, 0, 1};
        FN(Sink) to_act = {0, NULL, p->act, p->act_stride, m->act_kind, m->activation, 1};
        FN(embed_rows)(m, p, t);
        for (int64_t l = 0; l < m->num_layers; l++) {
            const Layer *layer = &m->layers[l];
            meet(&team);
            FN(norm_rows)(m, p, &layer->attn, t);
            meet(&team);
            FN(linear)(&layer->qkv, p->act, p->act_stride, p->num_rows, &to_qkv, &team);
            FN(expect)(&team, &layer->out, p->num_rows);
            meet(&team);
            if (m->qk_norm == WIDTH_QK_NORM) {
                FN(squares)(m, p, layer, t);
                meet(&team);
            }
            FN(place_heads)(m, p, l, cell_of, t);
            meet(&team);
            FN(attend)(m, p, l, next + l);
            meet(&team);
            FN(combine)(m, p, l, t);
            meet(&team);
            const int is_post = layer->post_attn.weight != NULL;
            FN(linear)(&layer->out, p->act, p->act_stride, p->num_rows, is_post ? &to_wide : &to_x,
                       &team);
            FN(expect)(&team, &layer->up, p->num_rows);
            meet(&team);
            if (is_post) {
                FN(add_norm_rows)(m, p, &layer->post_attn, t);
                meet(&team);
            }
            FN(norm_rows)(m, p, &layer->mlp, t);
            meet(&team);
            to_act.how = layer->up.is_gated ? FN(GATE) : FN(ACTIVATE);
            to_act.act = p->inner;
            FN(linear)(&layer->up, p->act, p->act_stride, p->num_rows, &to_act, &team);
            FN(expect)(&team, &layer->down, p->num_rows);
            meet(&team);
            const int is_post_mlp = layer->post_mlp.weight != NULL;
            FN(linear)(&layer->down, p->inner, p->act_stride, p->num_rows,
                       is_post_mlp ? &to_wide : &to_x, &team);
            FN(expect)(&team, l + 1 < m->num_layers ? &layer[1].qkv : &m->head, p->num_rows);
            if (is_post_mlp) {
                meet(&team);
                FN(add_norm_rows)(m, p, &layer->post_mlp, t);
            }
        }
        meet(&team);
        FN(wanted_rows)(m, p, t);
        if (p->num_wanted) {
            FN(Sink) to_logits = {FN(STORE), p->logits, NULL, p->logit_stride, 0, 0,
                                  (float)m->logit_scale};
            meet(&team);
            FN(linear)(&m->head, p->act, p->act_stride, p->num_wanted, &to_logits, &team);
            if (m->logit_cap != 0) {
                meet(&team);
                FN(cap_logits)(m, p, t);
            }
        }
    }
}

/* Attention of the first layer alone, from qkv and cells to act; next: zeros [num_layers + 2]. */
static void FN(attention)(const Model *m, const Pass *given, int64_t *next) {
#pragma omp parallel num_threads((int)given->num_threads)
    {
        Team team = join(next + m->num_layers);
        Pass own = *given;
        own.num_threads = team.num;
        FN(attend)(m, &own, 0, next);
        meet(&team);
        FN(combine)(m, &own, 0, team.thread);
    }
}

static void FN(product)(const Linear *w, const void *x, int64_t stride, int64_t rows, float *y,
                        int64_t y_stride, void *act, int64_t act_kind, int64_t activation,
                        int64_t num_threads) {
    const FN(Sink) sink = {w->is_gated ? FN(GATE) : FN(STORE), y, act, y_stride, act_kind,
                           activation, 1};
    int64_t counters[2] = {0};
#pragma omp parallel num_threads((int)num_threads)
    {
        Team team = join(counters);
        FN(linear)(w, x, stride, rows, &sink, &team);
    }
}
