/* Sixteen floats at a time, in GCC's vector extensions: each include compiles them for one ISA. */

typedef float FN(v16) __attribute__((vector_size(64)));
typedef float FN(v16u) __attribute__((vector_size(64), aligned(4)));
typedef int32_t FN(i16) __attribute__((vector_size(64)));
typedef uint32_t FN(u16) __attribute__((vector_size(64)));
typedef uint16_t FN(h16) __attribute__((vector_size(32)));
typedef uint16_t FN(h16u) __attribute__((vector_size(32), aligned(2)));
typedef int8_t FN(b16u) __attribute__((vector_size(16), aligned(1)));
#define v16 FN(v16)
#define i16 FN(i16)
#define u16 FN(u16)
#define h16 FN(h16)
#define INLINE static inline __attribute__((always_inline))

INLINE v16 FN(set)(float x) { return x - (v16){0}; }
INLINE v16 FN(load)(const float *p) { return *(const FN(v16u) *)p; }
INLINE void FN(store)(float *p, v16 v) { *(FN(v16u) *)p = v; }

INLINE v16 FN(pick)(i16 mask, v16 yes, v16 no) {
    return (v16)(((i16)yes & mask) | ((i16)no & ~mask));
}

INLINE v16 FN(load_bf16)(const uint16_t *p) {
    h16 half = *(const FN(h16u) *)p;
    return (v16)(__builtin_convertvector(half, u16) << 16);
}

INLINE v16 FN(load_f16)(const uint16_t *p) {
#if ISA_LEVEL >= 2
    return (v16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    v16 v;
    __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    __m256 high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)));
    memcpy(&v, &low, 32);
    memcpy((char *)&v + 32, &high, 32);
    return v;
#endif
}

INLINE v16 FN(load_int8)(const int8_t *p) {
    FN(b16u) bytes = *(const FN(b16u) *)p;
    return __builtin_convertvector(__builtin_convertvector(bytes, i16), v16);
}

INLINE v16 FN(load_as)(const void *p, int64_t at, int64_t kind) {
    if (kind == F32) return FN(load)((const float *)p + at);
    if (kind == BF16) return FN(load_bf16)((const uint16_t *)p + at);
    return FN(load_f16)((const uint16_t *)p + at);
}

/* Rounds to nearest even; NaN stays NaN; where the processor rounds, less than 2^-126 becomes 0. */
INLINE h16 FN(to_bf16)(v16 v) {
#if ISA_LEVEL >= 3
    return (h16)_mm512_cvtneps_pbh((__m512)v);
#else
    u16 bits = (u16)v;
    u16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    i16 is_nan = v != v;
    rounded = (rounded & ~(u16)is_nan) | ((u16)is_nan & 0x7fc0);
    return __builtin_convertvector(rounded, h16);
#endif
}

INLINE void FN(store_as)(void *p, int64_t at, v16 v, int64_t kind) {
    if (kind == F32) {
        FN(store)((float *)p + at, v);
    } else if (kind == BF16) {
        *(FN(h16u) *)((uint16_t *)p + at) = FN(to_bf16)(v);
    } else {
#if ISA_LEVEL >= 2
        _mm256_storeu_si256((__m256i *)((uint16_t *)p + at), _mm512_cvtps_ph((__m512)v, 0));
#else
        __m256 parts[2];
        memcpy(parts, &v, 64);
        for (int i = 0; i < 2; i++)
            _mm_storeu_si128((__m128i *)((uint16_t *)p + at + 8 * i), _mm256_cvtps_ph(parts[i], 0));
#endif
    }
}

INLINE float FN(sum)(v16 v) {
    float f[16];
    memcpy(f, &v, 64);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) f[i] += f[i + step];
    return f[0];
}

INLINE float FN(max)(v16 v) {
    float f[16];
    memcpy(f, &v, 64);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) f[i] = f[i] > f[i + step] ? f[i] : f[i + step];
    return f[0];
}

/* e^x within 2 ulp; 0 below -87.3, e^88 above 88; NaN stays NaN. */
INLINE v16 FN(exp)(v16 x) {
#if ISA_LEVEL >= 2
    const __m512 least = _mm512_set1_ps(-87.3f), most = _mm512_set1_ps(88.0f);
    const __mmask16 is_small = _mm512_cmp_ps_mask((__m512)x, least, _CMP_LT_OQ);
    x = (v16)_mm512_min_ps(most, _mm512_max_ps(least, (__m512)x)); /* NaN stays */
    const v16 n = (v16)_mm512_roundscale_ps((__m512)(x * LOG2E), 0);
#else
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    i16 is_small = x < -87.3f;
    x = FN(pick)(x > 88.0f, FN(set)(88.0f), x);
    x = FN(pick)(is_small, FN(set)(-87.3f), x);
    v16 shifted = x * LOG2E + magic;
    v16 n = shifted - magic;
#endif
    v16 f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    v16 y = f * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * f + 8.3334519073e-3f;
    y = y * f + 4.1665795894e-2f;
    y = y * f + 1.6666665459e-1f;
    y = y * f + 5.0000001201e-1f;
    y = y * (f * f) + f + 1.0f;
#if ISA_LEVEL >= 2
    return (v16)_mm512_maskz_scalef_ps((__mmask16)~is_small, (__m512)y, (__m512)n);
#else
    v16 scale = (v16)(((i16)shifted << 23) + (127 << 23)); /* low bits of `shifted` are n */
    return FN(pick)(is_small, FN(set)(0.0f), y * scale);
#endif
}

/* 1 / (1 + e^-x), within 4 ulp. */
INLINE v16 FN(sigmoid)(v16 x) {
    const v16 sum = 1.0f + FN(exp)(-x);
#if ISA_LEVEL >= 2
    const v16 about = (v16)_mm512_rcp14_ps((__m512)sum);
    return about * (2.0f - sum * about);
#else
    return 1.0f / sum;
#endif
}

INLINE v16 FN(activate)(v16 x, int64_t kind) {
    if (kind == SILU) return x * FN(sigmoid)(x);
    if (kind == GELU_TANH)
        return x * FN(sigmoid)(1.5957691216f * (x + 0.044715f * x * x * x));
    if (kind == RELU) return FN(pick)(x < 0.0f, FN(set)(0.0f), x);
    float f[16];
    memcpy(f, &x, 64);
    for (int i = 0; i < 16; i++) f[i] = 0.5f * f[i] * (1.0f + erff(f[i] * 0.70710678f));
    return FN(load)(f);
}
