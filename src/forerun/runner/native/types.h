/* Records shared with Python (see layout.py): field order and sizes are one contract. */
#pragma once
#include <stdint.h>

enum { F32 = 0, BF16 = 1, F16 = 2, BF16_PAIRS = 3, INT8 = 4, INT8_PAIRS = 5 }; /* how numbers are stored */
enum { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3 };
enum { NO_QK_NORM = 0, HEAD_QK_NORM = 1, WIDTH_QK_NORM = 2 };

#define LANES 16                /* outputs of one weight block */
#define GROUP (4 * LANES)       /* outputs are padded to, and shared out between threads by, these */
#define STATE(dim) ((dim) + 2)  /* floats: maximum, sum of weights, weighted values */
#define MOST_DIM 256            /* head_dim */
#define MOST_FOLD 64            /* queries that share a key head */
#define QUERIES 64              /* that a piece of attention takes along, or all of one head */
#define CHUNK 256               /* positions that one softmax runs over before it is merged */
#define RUN (4 * CHUNK)         /* positions that are merged before they are merged with others */
#define TOP_BLOCK 1024          /* logits of which the largest is kept */
#define TOP_SPAN 8192           /* logits that a thread takes at a time: 32 KB */

#define LOG2E 1.44269504f
#define TAKES_PAIRS(kind) ((kind) == BF16_PAIRS || (kind) == INT8_PAIRS) /* inputs are bf16 */

/* weight [groups * 4][k][16], or [groups * 4][k / 2][16][2] for bf16 pairs, or for int8 pairs
   [groups * 4][k / 4][4][2][4][2]: quads of outputs, pairs of inputs, outputs, inputs, each a sign
   and a magnitude; bias and scale are padded.
   scale [num_scales][groups * 64]: one for every `scaled` inputs of an output; NULL: none.
   gated: blocks alternate between 16 gate rows and 16 up rows. streamed: the model's weights do not
   fit into the processor's caches. fetched: the cache, 1 or 2, that pairs are fetched into. */
typedef struct {
    const void *weight;
    const float *bias, *scale;
    int64_t n, k, groups, kind, is_gated, scaled, num_scales, is_streamed, fetched;
} Linear;

typedef struct { /* weight NULL: there is no such norm */
    const float *weight, *bias;
    int64_t is_layer;
    double eps;
} Norm;

typedef struct {
    Linear qkv, out, up, down;
    Norm attn, post_attn, mlp, post_mlp, q, k;
    int64_t window; /* 0: none */
    int64_t rope;   /* number of its rotary table; -1: heads are not rotated */
} Layer;

typedef struct {
    int64_t hidden, num_layers, num_heads, num_kv, head_dim, inner;
    int64_t activation, qk_norm;
    int64_t cell_kind; /* of cache cells, embeddings and learned positions */
    int64_t act_kind;  /* of the inputs of linears: F32 or BF16 */
    double attn_scale, attn_cap, logit_cap, embed_scale; /* cap 0: none */
    double logit_scale, residual_scale; /* before the cap; of what attention and MLP add */
    const void *embed; /* [V, hidden]; NULL: rows are read out of the packed head */
    const void *places; /* [context, hidden], learned positions, or NULL */
    const Layer *layers;
    Norm norm;
    Linear head;
} Model;

/* Rows of one sequence: the last num_rows of its cells [base, stop). All see the cells before base;
   of the others sees [num_rows, stop - base] tells; NULL: causal. Visible cells, in rising order,
   are the positions 0, 1, ... of the row's own text. */
typedef struct {
    int64_t slot, base, stop, num_rows, first_row;
    const uint8_t *sees;
} Span;

typedef struct {
    int64_t num_rows, num_wanted, num_spans, num_threads, is_split;
    const int64_t *ids, *positions, *wanted;
    const Span *spans;
    const float *rope;   /* [table][position][cos, sin][head_dim / 2], or NULL */
    int64_t rope_stride; /* numbers of a table */
    void *cells;       /* [layers, slots, 2, kv, cells, head_dim] */
    int64_t layer_stride, slot_stride, head_stride;
    /* buffers: see layout.py for their shapes */
    float *x, *wide, *qkv, *partial;
    void *act, *inner; 
    int64_t wide_stride, act_stride, max_runs;
    float *hidden, *logits; /* of the wanted rows */
    int64_t logit_stride;
} Pass;
