/* Vectors of as many floats as a register holds, in GCC's extensions: each include compiles them for
   one ISA. Wider ones would live in memory. */

#if ISA_LEVEL >= 2
#define WIDTH 16
#define GATHERED 4 /* vectors whose sums are in registers at a time, for each of some queries */
#else
#define WIDTH 8
#define GATHERED 2
#endif
#define VECS (LANES / WIDTH) /* of one weight block */
typedef float FN(vec) __attribute__((vector_size(4 * WIDTH)));
typedef float FN(vecu) __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef int32_t FN(ivec) __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t FN(uvec) __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t FN(hvec) __attribute__((vector_size(2 * WIDTH)));
typedef uint16_t FN(hvecu) __attribute__((vector_size(2 * WIDTH), aligned(2)));
#define vec FN(vec)
#define ivec FN(ivec)
#define uvec FN(uvec)
#define hvec FN(hvec)
#define INLINE static inline __attribute__((always_inline))

INLINE vec FN(set)(float x) { return x - (vec){0}; }
INLINE vec FN(load)(const float *p) { return *(const FN(vecu) *)p; }
INLINE void FN(store)(float *p, vec v) { *(FN(vecu) *)p = v; }

/* 0, 1, 2, ... */
INLINE ivec FN(lanes)(void) {
    ivec lanes;
    for (int i = 0; i < WIDTH; i++) lanes[i] = i;
    return lanes;
}

INLINE vec FN(pick)(ivec mask, vec yes, vec no) {
    return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask));
}

INLINE vec FN(load_bf16)(const uint16_t *p) {
#if ISA_LEVEL >= 2
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#endif
}

INLINE vec FN(load_f16)(const uint16_t *p) {
#if ISA_LEVEL >= 2
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#endif
}

INLINE vec FN(load_int8)(const int8_t *p) {
#if ISA_LEVEL >= 2
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#else
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#endif
}

INLINE vec FN(load_as)(const void *p, int64_t at, int64_t kind) {
    if (kind == F32) return FN(load)((const float *)p + at);
    if (kind == BF16) return FN(load_bf16)((const uint16_t *)p + at);
    return FN(load_f16)((const uint16_t *)p + at);
}

/* Rounds to nearest even; NaN stays NaN; where the processor rounds, less than 2^-126 becomes 0. */
INLINE hvec FN(to_bf16)(vec v) {
#if ISA_LEVEL >= 3
    return (hvec)_mm512_cvtneps_pbh((__m512)v);
#else
    uvec bits = (uvec)v;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    ivec is_nan = v != v;
    rounded = (rounded & ~(uvec)is_nan) | ((uvec)is_nan & 0x7fc0);
    return __builtin_convertvector(rounded, hvec);
#endif
}

INLINE void FN(store_as)(void *p, int64_t at, vec v, int64_t kind) {
    if (kind == F32) {
        FN(store)((float *)p + at, v);
    } else if (kind == BF16) {
        *(FN(hvecu) *)((uint16_t *)p + at) = FN(to_bf16)(v);
    } else {
#if ISA_LEVEL >= 2
        _mm256_storeu_si256((__m256i *)((uint16_t *)p + at), _mm512_cvtps_ph((__m512)v, 0));
#else
        _mm_storeu_si128((__m128i *)((uint16_t *)p + at), _mm256_cvtps_ph((__m256)v, 0));
#endif
    }
}

INLINE float FN(sum)(vec v) {
    float f[WIDTH];
    memcpy(f, &v, sizeof f);
    for (int step = WIDTH / 2; step; step /= 2)
        for (int i = 0; i < step; i++) f[i] += f[i + step];
    return f[0];
}

INLINE float FN(max)(vec v) {
    float f[WIDTH];
    memcpy(f, &v, sizeof f);
    for (int step = WIDTH / 2; step; step /= 2)
        for (int i = 0; i < step; i++) f[i] = f[i] > f[i + step] ? f[i] : f[i + step];
    return f[0];
}

/* e^x within 2 ulp; 0 below -87.3, e^88 above 88; NaN stays NaN. */
INLINE vec FN(exp)(vec x) {
#if ISA_LEVEL >= 2
    const __m512 least = _mm512_set1_ps(-87.3f), most = _mm512_set1_ps(88.0f);
    const __mmask16 is_small = _mm512_cmp_ps_mask((__m512)x, least, _CMP_LT_OQ);
    x = (vec)_mm512_min_ps(most, _mm512_max_ps(least, (__m512)x)); /* NaN stays */
    const vec n = (vec)_mm512_roundscale_ps((__m512)(x * LOG2E), 0);
#else
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    ivec is_small = x < -87.3f;
    x = FN(pick)(x > 88.0f, FN(set)(88.0f), x);
    x = FN(pick)(is_small, FN(set)(-87.3f), x);
    vec shifted = x * LOG2E + magic;
    vec n = shifted - magic;
#endif
    vec f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec y = f * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * f + 8.3334519073e-3f;
    y = y * f + 4.1665795894e-2f;
    y = y * f + 1.6666665459e-1f;
    y = y * f + 5.0000001201e-1f;
    y = y * (f * f) + f + 1.0f;
#if ISA_LEVEL >= 2
    return (vec)_mm512_maskz_scalef_ps((__mmask16)~is_small, (__m512)y, (__m512)n);
#else
    vec scale = (vec)(((ivec)shifted << 23) + (127 << 23)); /* low bits of `shifted` are n */
    return FN(pick)(is_small, FN(set)(0.0f), y * scale);
#endif
}

/* 1 / (1 + e^-x), within 4 ulp. */
INLINE vec FN(sigmoid)(vec x) {
    const vec sum = 1.0f + FN(exp)(-x);
#if ISA_LEVEL >= 2
    const vec about = (vec)_mm512_rcp14_ps((__m512)sum);
    return about * (2.0f - sum * about);
#else
    return 1.0f / sum;
#endif
}

INLINE vec FN(activate)(vec x, int64_t kind) {
    if (kind == SILU) return x * FN(sigmoid)(x);
    if (kind == GELU_TANH)
        return x * FN(sigmoid)(1.5957691216f * (x + 0.044715f * x * x * x));
    if (kind == RELU) return FN(pick)(x < 0.0f, FN(set)(0.0f), x);
    float f[WIDTH];
    memcpy(f, &x, sizeof f);
    for (int i = 0; i < WIDTH; i++) f[i] = 0.5f * f[i] * (1.0f + erff(f[i] * 0.70710678f));
    return FN(load)(f);
}
