/* Sums of products in vector registers, of weights of every kind but bf16 pairs (see pairs.h). */

/* Weights of a block for one input. */
#define LOAD_BLOCK(TYPE, KIND)                                                               \
    INLINE void FN(block##KIND)(const TYPE *at, vec *part) {                                 \
        for (int v = 0; v < VECS; v++) part[v] = FN(load##KIND)(at + v * WIDTH);             \
    }
LOAD_BLOCK(float, ) LOAD_BLOCK(uint16_t, _f16) LOAD_BLOCK(int8_t, _int8)
#if VECS == 1
LOAD_BLOCK(uint16_t, _bf16)
#else
/* Of bf16 the even outputs, then the odd ones, in half the instructions: sums are sorted at last. */
INLINE void FN(block_bf16)(const uint16_t *at, vec *part) {
    const uvec pairs = (uvec)_mm256_loadu_si256((const __m256i *)at);
    part[0] = (vec)(pairs << 16);
    part[1] = (vec)(pairs & 0xffff0000);
}

INLINE void FN(sort)(vec *sums) {
    const __m256 low = _mm256_unpacklo_ps((__m256)sums[0], (__m256)sums[1]); /* 0-3, 8-11 */
    const __m256 high = _mm256_unpackhi_ps((__m256)sums[0], (__m256)sums[1]);
    sums[0] = (vec)_mm256_permute2f128_ps(low, high, 0x20);
    sums[1] = (vec)_mm256_permute2f128_ps(low, high, 0x31);
}
#endif
#undef LOAD_BLOCK

/* One tile: R rows times B blocks of 16 outputs over inputs [first, first + count); sums in
   registers, weights streamed once. `first` is a multiple of four. far: bytes by block that
   fetching runs ahead, into the second cache. Sums of a row are `apart` vectors from the next. */
INLINE void FN(tile)(const int R, const int B, const Linear *w, const void *x, int64_t stride,
                     int64_t block, int64_t first, int64_t count, const int64_t *far, int apart,
                     vec *out) {
    vec acc[12][8];
    const int V = B * VECS;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) acc[r][v] = (vec){0};
    const int64_t k = w->k;
#if ISA_LEVEL >= 3
    if (w->kind == INT8_PAIRS) {
        const int64_t fours = (count + 3) / 4, step = (k + 3) / 4 * 64;
        const uint8_t *from = (const uint8_t *)w->weight + block * step + first / 4 * 64;
        const uint32_t *in = (const uint32_t *)x + first / 2;
        __m512i table[2] = {_mm512_loadu_si512(BF16_LOW), _mm512_loadu_si512(BF16_HIGH)};
        for (int j = 0; j < 2; j++)
            __asm__("" : "+v"(table[j])); /* kept in a register, not read again every time */
        for (int64_t i = 0; i < fours; i++)
#pragma GCC unroll 4
            for (int b = 0; b < B; b++) {
                const uint8_t *at = from + b * step + i * 64;
                __m512i part[2];
                __builtin_prefetch(at + far[b], 0, 2);
                FN(widen)(at, table, &part[0], &part[1]);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                    for (int j = 0; j < 2; j++) {
                        __m512i value = _mm512_set1_epi32((int)in[r * stride / 2 + 2 * i + j]);
                        acc[r][b] = (vec)_mm512_dpbf16_ps((__m512)acc[r][b], (__m512bh)part[j],
                                                          (__m512bh)value);
                    }
            }
    } else
#endif
    {
#define SUM_OVER_K(TYPE, LOAD)                                                               \
    do {                                                                                     \
        const TYPE *from = (const TYPE *)w->weight + (block * k + first) * LANES;            \
        const float *in = (const float *)x + first;                                          \
        for (int64_t i = 0; i < count; i++) {                                                \
            vec part[8];                                                                     \
            _Pragma("GCC unroll 4") for (int b = 0; b < B; b++) {                            \
                const TYPE *at = from + (b * k + i) * LANES;                                 \
                __builtin_prefetch((const char *)at + far[b], 0, 2);                         \
                LOAD(at, part + b * VECS);                                                   \
            }                                                                                \
            _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {                           \
                vec value = FN(set)(in[r * stride + i]);                                     \
                _Pragma("GCC unroll 8") for (int v = 0; v < V; v++)                          \
                    acc[r][v] += part[v] * value;                                            \
            }                                                                                \
        }                                                                                    \
    } while (0)
        if (w->kind == F32) SUM_OVER_K(float, FN(block));
        else if (w->kind == BF16) SUM_OVER_K(uint16_t, FN(block_bf16));
        else if (w->kind == F16) SUM_OVER_K(uint16_t, FN(block_f16));
        else SUM_OVER_K(int8_t, FN(block_int8));
#undef SUM_OVER_K
#if VECS == 2
        if (w->kind == BF16)
#pragma GCC unroll 12
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int b = 0; b < B; b++) FN(sort)(&acc[r][b * VECS]);
#endif
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) out[r * apart + v] = acc[r][v];
}

typedef void FN(tile_t)(const Linear *, const void *, int64_t, int64_t, int64_t, int64_t,
                        const int64_t *, vec *);
/* R rows times B blocks, of which `once` fit into the registers. */
#define TILE(R, B, once)                                                                      \
    static void FN(tile_##R)(const Linear *w, const void *x, int64_t stride, int64_t block,   \
                             int64_t first, int64_t count, const int64_t *far, vec *out) {    \
        for (int b = 0; b < B; b += once)                                                     \
            FN(tile)(R, once, w, x, stride, block + b, first, count, far + b, B * VECS,       \
                     out + b * VECS);                                                         \
    }
#if ISA_LEVEL >= 2
TILE(1, 4, 4) TILE(2, 4, 4) TILE(3, 4, 4) TILE(4, 4, 4) TILE(5, 4, 4) TILE(6, 4, 4)
TILE(7, 2, 2) TILE(8, 2, 2) TILE(9, 2, 2) TILE(10, 2, 2) TILE(11, 2, 2) TILE(12, 2, 2)
#define VECTOR_ROWS 12
#define VECTOR_BLOCKS(rows) ((rows) <= 6 ? 4 : 2)
static FN(tile_t) *const FN(tiles)[] = {
    0, FN(tile_1), FN(tile_2), FN(tile_3), FN(tile_4), FN(tile_5), FN(tile_6),
    FN(tile_7), FN(tile_8), FN(tile_9), FN(tile_10), FN(tile_11), FN(tile_12)};
#else
TILE(1, 4, 4) TILE(2, 2, 2) TILE(3, 2, 2) TILE(4, 2, 1) TILE(5, 2, 1) TILE(6, 2, 1)
#define VECTOR_ROWS 6
#define VECTOR_BLOCKS(rows) ((rows) == 1 ? 4 : 2)
static FN(tile_t) *const FN(tiles)[] = {
    0, FN(tile_1), FN(tile_2), FN(tile_3), FN(tile_4), FN(tile_5), FN(tile_6)};
#endif
