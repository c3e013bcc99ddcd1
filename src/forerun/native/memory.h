/* Reads memory as fast as the cores can: the limit that a pass over weights is measured against. */

#define STREAMS 4

/* Sum of the int32 words [n]; n is a multiple of 16 * STREAMS * threads or a tail is left out. */
static int64_t FN(read)(const int32_t *words, int64_t n, int64_t num_threads) {
    int64_t total = 0;
#pragma omp parallel num_threads((int)num_threads) reduction(+ : total)
    {
        const Team team = join(NULL);
        const int64_t step = n / (LANES * STREAMS * team.num) * LANES;
        const int32_t *from = words + team.thread * step * STREAMS;
        i16 sums[STREAMS] = {{0}};
        for (int64_t i = 0; i < step; i += LANES)
#pragma GCC unroll 4
            for (int s = 0; s < STREAMS; s++) {
                const char *at = (const char *)(from + s * step + i);
                __builtin_prefetch(at + 512);
                sums[s] += (i16)FN(load)((const float *)at);
            }
        for (int s = 0; s < STREAMS; s++)
            for (int i = 0; i < LANES; i++) total += sums[s][i];
    }
    return total;
}
#undef STREAMS
