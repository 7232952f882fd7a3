/* Four float lanes in plain GNU C: SSE2 on any x86-64, NEON on ARM, scalar elsewhere. */
#include "herald.h"
#include <string.h>

#define W 4
#define QK_KEYS 2
#define PV_ROWS 4
#define PV_CHUNKS 1
#define GEMM_LANES 1
#define PAIR_ITEMS 8
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));

/* Integer sums of 8-bit keys times 16-bit queries, 2 W elements a step; exact, so the same on every tier. */
INLINE vi vi_zero(void) { return (vi){0}; }
INLINE vf vf_from_int(vi x) { return __builtin_convertvector(x, vf); }
typedef vi wide_keys[2];
INLINE void load_keys(const int8_t *k, wide_keys to) {
    to[0] = (vi){k[0], k[1], k[2], k[3]};
    to[1] = (vi){k[4], k[5], k[6], k[7]};
}
INLINE vi dot_keys(vi sum, const wide_keys k, const int16_t *q) {
    return sum + k[0] * (vi){q[0], q[1], q[2], q[3]} + k[1] * (vi){q[4], q[5], q[6], q[7]};
}

INLINE vf vf_load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf vf_set1(float x) { return (vf){x, x, x, x}; }
INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf vf_mul(vf a, vf b) { return a * b; }
INLINE vf vf_add(vf a, vf b) { return a + b; }
INLINE vf vf_sub(vf a, vf b) { return a - b; }
INLINE vf vf_max(vf a, vf b) { return (vf)(((vi)a & (a > b)) | ((vi)b & ~(a > b))); } /* b when either is NaN */
INLINE float vf_hsum(vf v) { return (v[0] + v[1]) + (v[2] + v[3]); }
INLINE float vf_hmax(vf v) {
    float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
}
INLINE void vf_load2_bf16(const uint16_t *p, vf *even, vf *odd) {
    vu raw;
    memcpy(&raw, p, sizeof raw);
    *even = (vf)(raw << 16);
    *odd = (vf)(raw & 0xffff0000u);
}
INLINE vf vf_bf16(const uint16_t *p) { return (vf)((vu){p[0], p[1], p[2], p[3]} << 16); }
INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits;
    if (rest >= 0x7c00) bits = sign | 0x7f800000u | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) bits = sign | ((rest << 13) + (112u << 23));
    else {
        float small = (float)rest * 5.9604644775390625e-8f; /* 2^-24 */
        memcpy(&bits, &small, 4);
        bits |= sign;
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
INLINE vf vf_fp16(const uint16_t *p) {
    return (vf){half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
INLINE vf vf_exp2_scale(vf poly, vf x, vf n) {
    (void)x;
    vi exponent = __builtin_convertvector(n, vi);
    return poly * (vf)((exponent + 127) << 23);
}
INLINE vf vf_round(vf x) { return (x + vf_set1(12582912.0f)) - vf_set1(12582912.0f); }
INLINE vf vf_zero_below(vf value, vf x, float limit) { return (vf)((vi)value & ~(x < vf_set1(limit))); }

/* Sums of QK_KEYS x 4 accumulators (acc[key * 4 + row]) to s[row * HERALD_TILE + key]. */
INLINE void reduce_block(const vf *acc, int rows, float *s) {
    for (int row = 0; row < rows; row++)
        for (int key = 0; key < QK_KEYS; key++) s[row * HERALD_TILE + key] = vf_hsum(acc[key * 4 + row]);
}
INLINE int64_t collect_block(const float *values, uint32_t threshold, int32_t position, uint32_t *keys,
                                    int32_t *positions) {
    int64_t n = 0;
    for (int i = 0; i < W; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        uint32_t key = herald_key(bits);
        keys[n] = key;
        positions[n] = position + i;
        n += key >= threshold;
    }
    return n;
}
INLINE void copy_block(char *to, const char *from, int64_t bytes, int streaming) {
    (void)streaming;
    memcpy(to, from, (size_t)bytes);
}
INLINE void store_fence(void) {}
INLINE uint64_t read_bytes(const char *from, int64_t bytes) {
    vu a = {0}, b = {0}, x, y;
    for (int64_t i = 0; i + 32 <= bytes; i += 32) {
        memcpy(&x, from + i, 16);
        memcpy(&y, from + i + 16, 16);
        a ^= x;
        b ^= y;
    }
    a ^= b;
    return a[0] ^ a[1] ^ a[2] ^ a[3];
}
