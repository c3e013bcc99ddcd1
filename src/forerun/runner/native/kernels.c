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
#include "pieces.h"
#include "team.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
/* The low and the high byte of 0, 1, ... 63 in bf16. */
static const uint8_t BF16_LOW[64] = {
    0x00, 0x80, 0x00, 0x40, 0x80, 0xa0, 0xc0, 0xe0, 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70,
    0x80, 0x88, 0x90, 0x98, 0xa0, 0xa8, 0xb0, 0xb8, 0xc0, 0xc8, 0xd0, 0xd8, 0xe0, 0xe8, 0xf0, 0xf8,
    0x00, 0x04, 0x08, 0x0c, 0x10, 0x14, 0x18, 0x1c, 0x20, 0x24, 0x28, 0x2c, 0x30, 0x34, 0x38, 0x3c,
    0x40, 0x44, 0x48, 0x4c, 0x50, 0x54, 0x58, 0x5c, 0x60, 0x64, 0x68, 0x6c, 0x70, 0x74, 0x78, 0x7c};
static const uint8_t BF16_HIGH[64] = {
    0x00, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41,
    0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41,
    0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42,
    0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42};
#define SOON (256 << 10) /* bytes of the next weights that a thread fetches while it waits */
#define AHEAD 2048 /* bytes that fetching runs ahead, or half of it */

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
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,fma,f16c,prefer-vector-width=512")
#define ISA_LEVEL 3
#define FN(name) name##_avx512bf16
#include "isa.h"
#pragma GCC pop_options

#if defined(__linux__) && __has_include(<amxbf16intrin.h>)
#define HAS_AMX 1 /* the compiler; of the processor `can_tile` tells */
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,fma,f16c,prefer-vector-width=512")
#define ISA_LEVEL 4
#define FN(name) name##_amx
#include "isa.h"
#pragma GCC pop_options
#define CALL_AMX(level, name, ...) (level) >= 4 ? name##_amx(__VA_ARGS__) :
#else
#define HAS_AMX 0
#define CALL_AMX(level, name, ...)
#endif

#define CALL(level, name, ...)                                                               \
    (CALL_AMX(level, name, __VA_ARGS__)                                                      \
     (level) >= 3   ? name##_avx512bf16(__VA_ARGS__)                                         \
     : (level) == 2 ? name##_avx512(__VA_ARGS__)                                             \
                    : name##_avx2(__VA_ARGS__))

/* Whether the processor has tiles of bf16 and the system lets this process use them: it keeps 8 KB
   of them for every thread, and asks to be asked. */
static int can_tile(void) {
#if HAS_AMX
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!(d & bit_AMX_TILE) || !(d & bit_AMX_BF16)) return 0;
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#else
    return 0;
#endif
}

int64_t forerun_level(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return 1;
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vbmi")) return 2;
    return can_tile() ? 4 : 3;
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

void forerun_attention(int64_t level, const Model *m, const Pass *p, int64_t *next) {
    CALL(level, attention, m, p, next);
}

void forerun_product(int64_t level, const Linear *w, const void *x, int64_t stride, int64_t rows,
                     float *y, int64_t y_stride, void *act, int64_t act_kind, int64_t activation,
                     int64_t num_threads) {
    CALL(level, product, w, x, stride, rows, y, y_stride, act, act_kind, activation, num_threads);
}

int64_t forerun_read(int64_t level, const int32_t *words, int64_t n, int64_t num_threads,
                     int64_t streams) {
#if defined(__x86_64__)
    return CALL(level, read, words, n, num_threads, streams);
#else
    (void)level, (void)words, (void)n, (void)num_threads, (void)streams;
    return 0;
#endif
}

void forerun_top_probs(int64_t level, const float *const *rows, int64_t n, int64_t vocab,
                       int64_t num, float *scratch, int32_t *ids, float *probs,
                       int64_t num_threads) {
    CALL(level, top_probs, rows, n, vocab, num, scratch, ids, probs, num_threads);
}
