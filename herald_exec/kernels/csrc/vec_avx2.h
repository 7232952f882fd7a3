/* Eight float lanes: AVX2 + FMA + F16C. */
#include "herald.h"
#include <immintrin.h>
#include <string.h>

#define W 8
#define QK_KEYS 2
#ifndef PV_ROWS
#define PV_ROWS 4
#define PV_CHUNKS 1
#endif
#define TURNED_ROWS 2
#define TURNED_CHUNKS 2
#define GEMM_LANES 2
#define PAIR_ITEMS 4
typedef __m256 vf;

/* Integer sums of 8-bit keys times 16-bit queries, 2 W elements a step; exact, so the same on every tier. */
typedef __m256i vi;
typedef vi wide_keys[1];
INLINE vi vi_zero(void) { return _mm256_setzero_si256(); }
INLINE vf vf_from_int(vi x) { return _mm256_cvtepi32_ps(x); }
INLINE void load_keys(const int8_t *k, wide_keys to) {
    to[0] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)k));
}
INLINE vi dot_keys(vi sum, const wide_keys k, const int16_t *q) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(k[0], _mm256_loadu_si256((const __m256i *)q)));
}

INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vf_store(float *p, vf v) { _mm256_storeu_ps(p, v); }
INLINE vf vf_set1(float x) { return _mm256_set1_ps(x); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); } /* b when either is NaN */
INLINE float vf_hsum(vf v) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
INLINE float vf_hmax(vf v) {
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}
INLINE void vf_load2_bf16(const uint16_t *p, vf *even, vf *odd) {
    __m256i raw = _mm256_loadu_si256((const __m256i *)p);
    *even = _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
    *odd = _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32((int)0xffff0000u)));
}
INLINE vf vf_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE vf vf_fp16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf vf_round(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf vf_exp2_scale(vf poly, vf x, vf n) {
    (void)x;
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(poly, _mm256_castsi256_ps(exponent));
}
INLINE vf vf_zero_below(vf value, vf x, float limit) {
    return _mm256_and_ps(value, _mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_NLT_UQ)); /* true for NaN */
}

/* Sums of 2 x 4 accumulators (acc[key * 4 + row]) to s[row * HERALD_TILE + key]. */
INLINE void reduce_block(const vf *acc, int rows, float *s) {
    __m256 k0 = _mm256_hadd_ps(_mm256_hadd_ps(acc[0], acc[1]), _mm256_hadd_ps(acc[2], acc[3]));
    __m256 k1 = _mm256_hadd_ps(_mm256_hadd_ps(acc[4], acc[5]), _mm256_hadd_ps(acc[6], acc[7]));
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(k0), _mm256_extractf128_ps(k0, 1)); /* rows of key 0 */
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(k1), _mm256_extractf128_ps(k1, 1));
    __m128 low = _mm_unpacklo_ps(a, b), high = _mm_unpackhi_ps(a, b);
    _mm_storel_pi((__m64 *)s, low);
    if (rows > 1) _mm_storeh_pi((__m64 *)(s + HERALD_TILE), low);
    if (rows > 2) _mm_storel_pi((__m64 *)(s + 2 * HERALD_TILE), high);
    if (rows > 3) _mm_storeh_pi((__m64 *)(s + 3 * HERALD_TILE), high);
}
INLINE int64_t collect_block(const float *values, uint32_t threshold, int32_t position, uint32_t *keys,
                                    int32_t *positions) {
    __m256i bits = _mm256_loadu_si256((const __m256i *)values);
    __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    bits = _mm256_andnot_si256(_mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256()), bits);
    __m256i flip = _mm256_or_si256(_mm256_srai_epi32(bits, 31), _mm256_set1_epi32((int)0x80000000u));
    __m256i key = _mm256_andnot_si256(nan, _mm256_xor_si256(bits, flip));
    __m256i reach = _mm256_cmpeq_epi32(_mm256_max_epu32(key, _mm256_set1_epi32((int)threshold)), key);
    unsigned mask = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(reach));
    if (!mask) return 0; /* nearly always: the threshold keeps a few percent */
    uint32_t key_of[W];
    _mm256_storeu_si256((__m256i *)key_of, key);
    int64_t n = 0;
    for (; mask; mask &= mask - 1, n++) {
        int lane = __builtin_ctz(mask);
        keys[n] = key_of[lane];
        positions[n] = position + lane;
    }
    return n;
}
INLINE void copy_block(char *to, const char *from, int64_t bytes, int streaming) {
    int64_t i = 0;
    if (streaming)
        for (; i + 32 <= bytes; i += 32)
            _mm256_stream_si256((__m256i *)(to + i), _mm256_loadu_si256((const __m256i *)(from + i)));
    else
        for (; i + 32 <= bytes; i += 32)
            _mm256_storeu_si256((__m256i *)(to + i), _mm256_loadu_si256((const __m256i *)(from + i)));
    if (i < bytes) memcpy(to + i, from + i, (size_t)(bytes - i));
}
INLINE void store_fence(void) { _mm_sfence(); }
INLINE uint64_t read_bytes(const char *from, int64_t bytes) {
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (int64_t i = 0; i + 128 <= bytes; i += 128) {
        a = _mm256_xor_si256(a, _mm256_loadu_si256((const __m256i *)(from + i)));
        b = _mm256_xor_si256(b, _mm256_loadu_si256((const __m256i *)(from + i + 32)));
        c = _mm256_xor_si256(c, _mm256_loadu_si256((const __m256i *)(from + i + 64)));
        d = _mm256_xor_si256(d, _mm256_loadu_si256((const __m256i *)(from + i + 96)));
    }
    a = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
    return (uint64_t)_mm256_extract_epi64(a, 0) ^ (uint64_t)_mm256_extract_epi64(a, 3);
}
