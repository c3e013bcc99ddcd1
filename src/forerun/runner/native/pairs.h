/* Sums of products with packed bf16 pairs, in vector registers: each holds 16 outputs of a row.

   Weights that do not fit into the processor's caches come fastest as one stream, asked for early.
   Two shapes of a tile ask so. A tall one takes one block after another, with a register for each of
   up to 28 rows. A wide one takes two or four blocks side by side, which loads inputs less often;
   while it multiplies them it asks for the blocks that come next, line by line in the order in which
   they lie. All is fetched into the first cache where that is roomy, else into the second. */

#define TALL_ROWS 28
#define WIDE_ROWS 14
#define FEW_ROWS 8   /* most that are tall where weights come from memory: they leave time to load */
#define STREAM 8192  /* bytes that fetching runs ahead of a tall tile */

/* `level` stays the same for all of a tile. */
INLINE void FN(ask)(const char *at, int64_t level) {
    if (level == 2) __builtin_prefetch(at, 0, 2);
    else __builtin_prefetch(at, 0, 3);
}

/* far: where fetching begins, in bytes from the tile's first weight, and its bytes for each pair. */
INLINE void FN(wide_tile)(const int R, const int B, const Linear *w, const void *x, int64_t stride,
                          int64_t block, int64_t first, int64_t count, const int64_t *far,
                          vec *out) {
    const int64_t pairs = (count + 1) / 2, step = (w->k + 1) / 2 * LANES;
    const uint32_t *from = (const uint32_t *)w->weight + block * step + first / 2 * LANES;
    const uint32_t *in = (const uint32_t *)x + first / 2;
    const char *soon = (const char *)from + far[0];
    const int64_t hop = far[1], level = w->fetched;
    vec acc[WIDE_ROWS][4];
#pragma GCC unroll 14
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) acc[r][b] = (vec){0};
    for (int64_t i = 0; i < pairs; i++, soon += hop) {
        __m512bh part[4];
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) {
            FN(ask)(soon + 64 * b, level);
            part[b] = (__m512bh)_mm512_loadu_si512(from + b * step + i * LANES);
        }
#pragma GCC unroll 14
        for (int r = 0; r < R; r++) {
            const __m512bh value = (__m512bh)_mm512_set1_epi32((int)in[r * stride / 2 + i]);
#pragma GCC unroll 4
            for (int b = 0; b < B; b++)
                acc[r][b] = (vec)_mm512_dpbf16_ps((__m512)acc[r][b], part[b], value);
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) out[r * B + b] = acc[r][b];
}

/* The same of two blocks; rows go in fours, so that general registers hold where all of them are. */
INLINE void FN(tall_tile)(const int R, const Linear *w, const void *x, int64_t stride,
                          int64_t block, int64_t first, int64_t count, const int64_t *far,
                          vec *out) {
    const int64_t pairs = (count + 1) / 2, step = (w->k + 1) / 2 * LANES, ahead = far[0];
    const int64_t level = w->fetched;
    int64_t next = 2 * stride, third = 6 * stride; /* bytes from the first row of four */
    __asm__("" : "+r"(next), "+r"(third));
    for (int b = 0; b < 2; b++) {
        const char *at = (const char *)((const uint32_t *)w->weight + (block + b) * step +
                                        first / 2 * LANES);
        const char *const end = at + pairs * 64, *fours[TALL_ROWS / 4];
        vec acc[TALL_ROWS];
#pragma GCC unroll 7
        for (int i = 0; i < (R + 3) / 4; i++)
            fours[i] = (const char *)x + 2 * (first + 4 * i * stride);
#pragma GCC unroll 28
        for (int r = 0; r < R; r++) acc[r] = (vec){0};
        for (; at < end; at += 64) {
            FN(ask)(at + ahead, level);
            const __m512bh part = (__m512bh)_mm512_loadu_si512(at);
#pragma GCC unroll 28
            for (int r = 0; r < R; r++) {
                const char *four = fours[r / 4];
                const char *row = r % 4 == 0   ? four
                                  : r % 4 == 1 ? four + next
                                  : r % 4 == 2 ? four + 2 * next
                                               : four + third;
                const __m512bh value = (__m512bh)_mm512_set1_epi32(*(const int *)row);
                acc[r] = (vec)_mm512_dpbf16_ps((__m512)acc[r], part, value);
            }
#pragma GCC unroll 7
            for (int i = 0; i < (R + 3) / 4; i++) {
                fours[i] += 4;
                __asm__("" : "+r"(fours[i])); /* not one register plus what would take another */
            }
        }
#pragma GCC unroll 28
        for (int r = 0; r < R; r++) out[2 * r + b] = acc[r];
    }
}

#define SHAPE(name, tile, ...)                                                               \
    static void FN(name)(const Linear *w, const void *x, int64_t stride, int64_t block,       \
                         int64_t first, int64_t count, const int64_t *far, vec *out) {       \
        FN(tile)(__VA_ARGS__, w, x, stride, block, first, count, far, out);                  \
    }
#define WIDE(R, B) SHAPE(wide_##R, wide_tile, R, B)
#define TALL(R) SHAPE(tall_##R, tall_tile, R)
WIDE(1, 4) WIDE(2, 4) WIDE(3, 4) WIDE(4, 4) WIDE(5, 4) WIDE(6, 4) WIDE(7, 2) WIDE(8, 2) WIDE(9, 2)
WIDE(10, 2) WIDE(11, 2) WIDE(12, 2) WIDE(13, 2) WIDE(14, 2)
TALL(1) TALL(2) TALL(3) TALL(4) TALL(5) TALL(6) TALL(7) TALL(8) TALL(15) TALL(16) TALL(17) TALL(18)
TALL(19) TALL(20) TALL(21) TALL(22) TALL(23) TALL(24) TALL(25) TALL(26) TALL(27) TALL(28)
#undef WIDE
#undef TALL
#undef SHAPE

static FN(tile_t) *const FN(wide)[] = {
    0, FN(wide_1), FN(wide_2), FN(wide_3), FN(wide_4), FN(wide_5), FN(wide_6), FN(wide_7),
    FN(wide_8), FN(wide_9), FN(wide_10), FN(wide_11), FN(wide_12), FN(wide_13), FN(wide_14)};
static FN(tile_t) *const FN(tall)[] = {
    0, FN(tall_1), FN(tall_2), FN(tall_3), FN(tall_4), FN(tall_5), FN(tall_6), FN(tall_7),
    FN(tall_8), 0, 0, 0, 0, 0, 0, FN(tall_15), FN(tall_16), FN(tall_17), FN(tall_18), FN(tall_19),
    FN(tall_20), FN(tall_21), FN(tall_22), FN(tall_23), FN(tall_24), FN(tall_25), FN(tall_26),
    FN(tall_27), FN(tall_28)};

/* Whether so many rows go as a tall tile. */
INLINE int FN(is_tall)(const Linear *w, int64_t rows) {
    return rows > WIDE_ROWS || (w->is_streamed && rows <= FEW_ROWS);
}

INLINE FN(tile_t) *FN(pairs_tile)(const Linear *w, int rows) {
    return FN(is_tall)(w, rows) ? FN(tall)[rows] : FN(wide)[rows];
}

INLINE int FN(pairs_blocks)(const Linear *w, int64_t rows) {
    return FN(is_tall)(w, rows) || rows > 6 ? 2 : 4;
}

/* Where tile number `tile` of a group of rows fetches, the `part`-th of `parts` groups. A single one
   fetches as it reads. Of several the first two fetch the unit that begins `next` bytes on, if any
   does, a quarter with each tile, so that memory is busy while weights are used again. */
INLINE void FN(pairs_reach)(const Linear *w, int64_t rows, int64_t part, int64_t parts,
                            int64_t tile, int64_t next, int64_t *far) {
    const int64_t block = (w->k + 1) / 2 * 64; /* bytes */
    if (parts == 1) {
        const int64_t blocks = FN(pairs_blocks)(w, rows);
        far[0] = FN(is_tall)(w, rows) ? STREAM : blocks * block, far[1] = 64 * blocks;
        return;
    }
    far[0] = next && part < 2 ? next + (2 * part - tile) * block : 0, far[1] = 64;
}
