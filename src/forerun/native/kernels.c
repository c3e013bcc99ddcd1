/* Decoder passes over few rows on a CPU, at the speed at which weights can be read.

   Every include of isa.h compiles the same source for one instruction set; the best one that the
   processor has is chosen at run time. No Python and no torch in here: plain pointers, called
   through ctypes, which releases the interpreter's lock. */

#include <math.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "types.h"
#include "team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define AHEAD 32 /* weight loads that a prefetch runs ahead: 2 KB */

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define ISA_LEVEL 1
#define FN(name) name##_avx2
#include "isa.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,prefer-vector-width=512")
#define ISA_LEVEL 2
#define FN(name) name##_avx512
#include "isa.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,prefer-vector-width=512")
#define ISA_LEVEL 3
#define FN(name) name##_avx512bf16
#include "isa.h"
#pragma GCC pop_options

#define CALL(level, name, ...)                                                               \
    ((level) >= 3   ? name##_avx512bf16(__VA_ARGS__)                                         \
     : (level) == 2 ? name##_avx512(__VA_ARGS__)                                             \
                    : name##_avx2(__VA_ARGS__))

int64_t forerun_level(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return 1;
    return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
}
#else
#define CALL(level, name, ...) ((void)(level)) /* other processors: not written yet */
int64_t forerun_level(void) { return 0; }
#endif

/* Sizes of the shared records, so that a library of another version is not trusted. */
int64_t forerun_layout(void) {
    return (int64_t)(sizeof(Linear) + 1000 * (sizeof(Layer) + 1000 * (sizeof(Model) +
                     1000 * (sizeof(Span) + 1000 * sizeof(Pass)))));
}

void forerun_pass(int64_t level, const Model *m, const Pass *p, const int64_t *cell_of,
                  int64_t *next) {
    CALL(level, pass, m, p, cell_of, next);
}

void forerun_product(int64_t level, const Linear *w, const void *x, int64_t stride, int64_t rows,
                     float *y, int64_t y_stride, void *act, int64_t act_kind, int64_t activation,
                     int64_t num_threads) {
    CALL(level, product, w, x, stride, rows, y, y_stride, act, act_kind, activation, num_threads);
}

int64_t forerun_read(int64_t level, const int32_t *words, int64_t n, int64_t num_threads) {
#if defined(__x86_64__)
    return CALL(level, read, words, n, num_threads);
#else
    (void)level, (void)words, (void)n, (void)num_threads;
    return 0;
#endif
}
