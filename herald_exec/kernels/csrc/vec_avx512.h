/* Sixteen float lanes: AVX-512 F, BW, VL, DQ. */
#include "herald.h"
#ifdef HERALD_EMULATE
#include "emulate512.h"
#else
#include <immintrin.h>
#endif
#include <string.h>

#define W 16
#define QK_KEYS 4
#ifndef PV_ROWS
#define PV_ROWS 2
#define PV_CHUNKS 4
#endif
#define TURNED_ROWS 4
#define TURNED_CHUNKS 2
#define GEMM_LANES 2
#define PAIR_ITEMS 8
typedef __m512 vf;

/* Integer sums of 8-bit keys times 16-bit queries, 2 W elements a step; exact, so the same on every tier. */
typedef __m512i vi;
typedef vi wide_keys[1];
INLINE vi vi_zero(void) { return _mm512_setzero_si512(); }
INLINE vf vf_from_int(vi x) { return _mm512_cvtepi32_ps(x); }
INLINE void load_keys(const int8_t *k, wide_keys to) {
    to[0] = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)k));
}
INLINE vi dot_keys(vi sum, const wide_keys k, const int16_t *q) {
#ifdef HERALD_VNNI
    return _mm512_dpwssd_epi32(sum, k[0], _mm512_loadu_si512(q));
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(k[0], _mm512_loadu_si512(q)));
#endif
}

INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); } /* b when either is NaN */
INLINE float vf_hsum(vf v) { return _mm512_reduce_add_ps(v); }
INLINE float vf_hmax(vf v) { return _mm512_reduce_max_ps(v); }
INLINE void vf_load2_bf16(const uint16_t *p, vf *even, vf *odd) {
    __m512i raw = _mm512_loadu_si512(p);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32((int)0xffff0000u)));
}
INLINE vf vf_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE vf vf_fp16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf vf_round(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE vf vf_exp2_scale(vf poly, vf x, vf n) {
    (void)x;
    return _mm512_scalef_ps(poly, n);
}
INLINE vf vf_zero_below(vf value, vf x, float limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ), value); /* true for NaN */
}

/* Sums of 4 x 4 accumulators (acc[key * 4 + row]) to s[row * HERALD_TILE + key]: a transposing tree, 45 operations
 * instead of the 16 x 8 of separate sums. */
INLINE vf fold_128(vf a, vf b) { /* low halves of a + high halves of a, then the same of b */
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
INLINE void reduce_block(const vf *acc, int rows, float *s) {
    vf of_row[4];
    for (int row = 0; row < 4; row++) {
        vf k01 = fold_128(acc[row], acc[4 + row]), k23 = fold_128(acc[8 + row], acc[12 + row]);
        /* k01: two 128-bit parts of key 0, two of key 1; fold again to one part per key */
        of_row[row] = _mm512_add_ps(_mm512_shuffle_f32x4(k01, k23, 0x88), _mm512_shuffle_f32x4(k01, k23, 0xdd));
    }
    /* of_row[row]: part `key` holds four partial sums. Transpose-add within parts: lane = row, part = key. */
    vf r01 = _mm512_add_ps(_mm512_unpacklo_ps(of_row[0], of_row[1]), _mm512_unpackhi_ps(of_row[0], of_row[1]));
    vf r23 = _mm512_add_ps(_mm512_unpacklo_ps(of_row[2], of_row[3]), _mm512_unpackhi_ps(of_row[2], of_row[3]));
    vf all = _mm512_add_ps(_mm512_shuffle_ps(r01, r23, 0x44), _mm512_shuffle_ps(r01, r23, 0xee));
    /* all: part = key, lane = row; transpose to part = row, lane = key */
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    all = _mm512_permutexvar_ps(order, all);
    _mm_storeu_ps(s, _mm512_castps512_ps128(all));
    if (rows > 1) _mm_storeu_ps(s + HERALD_TILE, _mm512_extractf32x4_ps(all, 1));
    if (rows > 2) _mm_storeu_ps(s + 2 * HERALD_TILE, _mm512_extractf32x4_ps(all, 2));
    if (rows > 3) _mm_storeu_ps(s + 3 * HERALD_TILE, _mm512_extractf32x4_ps(all, 3));
}
INLINE int64_t collect_block(const float *values, uint32_t threshold, int32_t position, uint32_t *keys,
                                    int32_t *positions) {
    __m512i bits = _mm512_loadu_si512(values);
    __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __mmask16 number = _mm512_cmple_epu32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
    bits = _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(magnitude, magnitude), bits);
    __m512i flip = _mm512_or_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32((int)0x80000000u));
    __m512i key = _mm512_maskz_xor_epi32(number, bits, flip);
    __mmask16 reach = _mm512_cmpge_epu32_mask(key, _mm512_set1_epi32((int)threshold));
    __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    /* Compress in a register, store whole: the memory form is slow on Zen 4. The outputs have 16 spare places. */
    _mm512_storeu_si512(keys, _mm512_maskz_compress_epi32(reach, key));
    _mm512_storeu_si512(positions,
                        _mm512_maskz_compress_epi32(reach, _mm512_add_epi32(lane, _mm512_set1_epi32(position))));
    return __builtin_popcount(reach);
}
INLINE void copy_block(char *to, const char *from, int64_t bytes, int streaming) {
    int64_t i = 0;
    if (streaming)
        for (; i + 64 <= bytes; i += 64) _mm512_stream_si512((__m512i *)(to + i), _mm512_loadu_si512(from + i));
    else
        for (; i + 64 <= bytes; i += 64) _mm512_storeu_si512(to + i, _mm512_loadu_si512(from + i));
    if (i < bytes) memcpy(to + i, from + i, (size_t)(bytes - i));
}
INLINE void store_fence(void) { _mm_sfence(); }
INLINE uint64_t read_bytes(const char *from, int64_t bytes) {
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (int64_t i = 0; i + 256 <= bytes; i += 256) {
        a = _mm512_xor_si512(a, _mm512_loadu_si512(from + i));
        b = _mm512_xor_si512(b, _mm512_loadu_si512(from + i + 64));
        c = _mm512_xor_si512(c, _mm512_loadu_si512(from + i + 128));
        d = _mm512_xor_si512(d, _mm512_loadu_si512(from + i + 192));
    }
    return (uint64_t)_mm512_reduce_add_epi64(_mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d)));
}
