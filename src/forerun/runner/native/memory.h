/* Reads memory as fast as the cores can: the limit that a pass over weights is measured against. */

/* One thread's sum of the int32 words [n] in S streams; lines are asked for `ahead` bytes early. */
INLINE ivec FN(stream)(const int S, const int64_t ahead, const int32_t *words, int64_t n) {
    const int64_t step = n / S / LANES * LANES;
    ivec sums[4] = {{0}};
    for (int64_t i = 0; i < step; i += LANES)
#pragma GCC unroll 4
        for (int s = 0; s < S; s++) {
            const char *at = (const char *)(words + s * step + i);
            __builtin_prefetch(at + ahead, 0, S == 1 ? 2 : 3);
            for (int v = 0; v < VECS; v++)
                sums[s] += (ivec)FN(load)((const float *)at + v * WIDTH);
        }
    return sums[0] + sums[1] + sums[2] + sums[3];
}

/* Sum of the int32 words [n], in one stream per thread or in four: which is faster differs by
   machine. n is a multiple of 64 * threads or a tail is left out. */
static int64_t FN(read)(const int32_t *words, int64_t n, int64_t num_threads, int64_t streams) {
    int64_t total = 0, counters[2] = {0};
#pragma omp parallel num_threads((int)num_threads) reduction(+ : total)
    {
        const Team team = join(counters);
        const int64_t own = n / team.num / LANES * LANES;
        const int32_t *from = words + team.thread * own;
        ivec sums = streams == 1 ? FN(stream)(1, 8192, from, own) : FN(stream)(4, 512, from, own);
        for (int i = 0; i < WIDTH; i++) total += sums[i];
    }
    return total;
}
