/* AVX-512 and AMX in plain C, for testing those tiers' logic on machines without them (CMake option HERALD_EMULATE).
 * Only what the kernels use; slow; never part of a normal build. Each function does what Intel's manual says of the
 * instruction, one lane after the other.
 */
#ifndef HERALD_EMULATE512_H
#define HERALD_EMULATE512_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    float f[16];
} em_ps;
typedef struct {
    uint32_t u[16];
} em_si;
typedef uint16_t em_mask;
#define __m512 em_ps
#define __m512i em_si
#define __mmask16 em_mask
#define EM static __attribute__((noinline, unused)) /* inlined, the kernels take minutes to compile */
#define LANES for (int i = 0; i < 16; i++)

EM em_ps em_loadu_ps(const void *p) { em_ps r; memcpy(&r, p, 64); return r; }
EM em_si em_loadu_si(const void *p) { em_si r; memcpy(&r, p, 64); return r; }
EM void em_storeu_ps(void *p, em_ps a) { memcpy(p, &a, 64); }
EM void em_storeu_si(void *p, em_si a) { memcpy(p, &a, 64); }
EM em_ps em_set1_ps(float x) { em_ps r; LANES r.f[i] = x; return r; }
EM em_si em_set1_epi32(int x) { em_si r; LANES r.u[i] = (uint32_t)x; return r; }
EM em_si em_castps(em_ps a) { em_si r; memcpy(&r, &a, 64); return r; }
EM em_ps em_castsi(em_si a) { em_ps r; memcpy(&r, &a, 64); return r; }
EM em_ps em_fmadd(em_ps a, em_ps b, em_ps c) { em_ps r; LANES r.f[i] = fmaf(a.f[i], b.f[i], c.f[i]); return r; }
EM em_ps em_mul(em_ps a, em_ps b) { em_ps r; LANES r.f[i] = a.f[i] * b.f[i]; return r; }
EM em_ps em_add(em_ps a, em_ps b) { em_ps r; LANES r.f[i] = a.f[i] + b.f[i]; return r; }
EM em_ps em_sub(em_ps a, em_ps b) { em_ps r; LANES r.f[i] = a.f[i] - b.f[i]; return r; }
EM em_ps em_max(em_ps a, em_ps b) { em_ps r; LANES r.f[i] = a.f[i] > b.f[i] ? a.f[i] : b.f[i]; return r; }
EM float em_reduce_add(em_ps a) { float s = 0; LANES s += a.f[i]; return s; }
EM float em_reduce_max(em_ps a) { float s = a.f[0]; LANES s = a.f[i] > s ? a.f[i] : s; return s; }
EM em_si em_slli(em_si a, int n) { em_si r; LANES r.u[i] = a.u[i] << n; return r; }
EM em_si em_srli(em_si a, int n) { em_si r; LANES r.u[i] = a.u[i] >> n; return r; }
EM em_si em_srai(em_si a, int n) { em_si r; LANES r.u[i] = (uint32_t)((int32_t)a.u[i] >> n); return r; }
EM em_si em_and(em_si a, em_si b) { em_si r; LANES r.u[i] = a.u[i] & b.u[i]; return r; }
EM em_si em_or(em_si a, em_si b) { em_si r; LANES r.u[i] = a.u[i] | b.u[i]; return r; }
EM em_si em_xor(em_si a, em_si b) { em_si r; LANES r.u[i] = a.u[i] ^ b.u[i]; return r; }
EM em_si em_add_epi32(em_si a, em_si b) { em_si r; LANES r.u[i] = a.u[i] + b.u[i]; return r; }
EM em_si em_cvtepu16(__m256i a) {
    uint16_t h[16];
    memcpy(h, &a, 32);
    em_si r;
    LANES r.u[i] = h[i];
    return r;
}
EM em_ps em_cvtph(__m256i a) {
    uint16_t h[16];
    memcpy(h, &a, 32);
    em_ps r;
    LANES r.f[i] = _cvtsh_ss(h[i]);
    return r;
}
EM em_si em_cvtepi8(__m256i a) { /* 32 x 8 to 16 bits */
    int8_t b[32];
    int16_t h[32];
    memcpy(b, &a, 32);
    for (int i = 0; i < 32; i++) h[i] = b[i];
    em_si r;
    memcpy(&r, h, 64);
    return r;
}
EM em_si em_madd(em_si a, em_si b) {
    int16_t x[32], y[32];
    memcpy(x, &a, 64);
    memcpy(y, &b, 64);
    em_si r;
    LANES r.u[i] = (uint32_t)(x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1]);
    return r;
}
EM em_ps em_cvtepi32(em_si a) { em_ps r; LANES r.f[i] = (float)(int32_t)a.u[i]; return r; }
EM em_ps em_round(em_ps a) { em_ps r; LANES r.f[i] = nearbyintf(a.f[i]); return r; }
EM em_ps em_reduce_floor(em_ps a) { em_ps r; LANES r.f[i] = isinf(a.f[i]) ? 0 : a.f[i] - floorf(a.f[i]); return r; }
EM em_ps em_scalef(em_ps a, em_ps b) { /* a * 2^floor(b) */
    em_ps r;
    LANES {
        float n = floorf(b.f[i]);
        if (n != n || a.f[i] != a.f[i]) r.f[i] = NAN;
        else if (n > 1000) r.f[i] = a.f[i] == 0 ? (isinf(n) ? NAN : 0) : copysignf(INFINITY, a.f[i]);
        else if (n < -1000) r.f[i] = isinf(a.f[i]) && isinf(n) ? NAN : copysignf(0, a.f[i]);
        else r.f[i] = ldexpf(a.f[i], (int)n);
    }
    return r;
}
EM em_ps em_maskz_mov_ps(em_mask m, em_ps a) { em_ps r; LANES r.f[i] = m >> i & 1 ? a.f[i] : 0; return r; }
EM em_si em_maskz_mov(em_mask m, em_si a) { em_si r; LANES r.u[i] = m >> i & 1 ? a.u[i] : 0; return r; }
EM em_mask em_cmp_ps(em_ps a, em_ps b, int how) {
    em_mask m = 0;
    LANES m |= (em_mask)((how == _CMP_NLT_UQ ? !(a.f[i] < b.f[i]) : a.f[i] > b.f[i]) << i);
    return m;
}
EM em_mask em_cmple(em_si a, em_si b) { em_mask m = 0; LANES m |= (em_mask)((a.u[i] <= b.u[i]) << i); return m; }
EM em_mask em_cmpge(em_si a, em_si b) { em_mask m = 0; LANES m |= (em_mask)((a.u[i] >= b.u[i]) << i); return m; }
EM em_mask em_test(em_si a, em_si b) { em_mask m = 0; LANES m |= (em_mask)(((a.u[i] & b.u[i]) != 0) << i); return m; }
EM em_si em_maskz_xor(em_mask m, em_si a, em_si b) { return em_maskz_mov(m, em_xor(a, b)); }
EM em_si em_maskz_compress(em_mask m, em_si a) {
    em_si r = {{0}};
    int n = 0;
    LANES if (m >> i & 1) r.u[n++] = a.u[i];
    return r;
}
EM uint64_t em_reduce_add_epi64(em_si a) {
    uint64_t q[8], s = 0;
    memcpy(q, &a, 64);
    for (int i = 0; i < 8; i++) s += q[i];
    return s;
}
EM em_si em_mask_blend_epi16(uint32_t m, em_si a, em_si b) {
    em_si r;
    uint16_t x[32], y[32];
    memcpy(x, &a, 64);
    memcpy(y, &b, 64);
    for (int i = 0; i < 32; i++) x[i] = m >> i & 1 ? y[i] : x[i];
    memcpy(&r, x, 64);
    return r;
}
EM em_si em_unpack16(em_si a, em_si b, int high) {
    uint16_t x[32], y[32], r[32];
    memcpy(x, &a, 64);
    memcpy(y, &b, 64);
    for (int part = 0; part < 4; part++)
        for (int i = 0; i < 4; i++) {
            r[part * 8 + 2 * i] = x[part * 8 + high * 4 + i];
            r[part * 8 + 2 * i + 1] = y[part * 8 + high * 4 + i];
        }
    em_si out;
    memcpy(&out, r, 64);
    return out;
}
EM em_si em_unpack32(em_si a, em_si b, int high) {
    em_si r;
    for (int part = 0; part < 4; part++)
        for (int i = 0; i < 2; i++) {
            r.u[part * 4 + 2 * i] = a.u[part * 4 + high * 2 + i];
            r.u[part * 4 + 2 * i + 1] = b.u[part * 4 + high * 2 + i];
        }
    return r;
}
EM em_si em_unpack64(em_si a, em_si b, int high) {
    em_si r;
    for (int part = 0; part < 4; part++)
        for (int i = 0; i < 2; i++) {
            r.u[part * 4 + i] = a.u[part * 4 + high * 2 + i];
            r.u[part * 4 + 2 + i] = b.u[part * 4 + high * 2 + i];
        }
    return r;
}
EM em_si em_shuffle_parts(em_si a, em_si b, int imm) { /* 128-bit parts: two of a, two of b */
    em_si r;
    for (int part = 0; part < 4; part++)
        for (int i = 0; i < 4; i++) r.u[part * 4 + i] = (part < 2 ? a : b).u[(imm >> 2 * part & 3) * 4 + i];
    return r;
}
EM em_si em_shuffle_lanes(em_si a, em_si b, int imm) {
    em_si r;
    for (int part = 0; part < 4; part++)
        for (int i = 0; i < 4; i++) r.u[part * 4 + i] = (i < 2 ? a : b).u[part * 4 + (imm >> 2 * i & 3)];
    return r;
}
EM em_si em_permutexvar(em_si at, em_si a) { em_si r; LANES r.u[i] = a.u[at.u[i] & 15]; return r; }
EM em_si em_setr(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t e, uint32_t f, uint32_t g, uint32_t h,
                 uint32_t i, uint32_t j, uint32_t k, uint32_t l, uint32_t m, uint32_t n, uint32_t o, uint32_t p) {
    return (em_si){{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p}};
}
EM __m128 em_part(em_ps a, int part) { __m128 r; memcpy(&r, a.f + 4 * part, 16); return r; }
EM float em_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
EM em_ps em_dpbf16(em_ps c, em_si a, em_si b) {
    uint16_t x[32], y[32];
    memcpy(x, &a, 64);
    memcpy(y, &b, 64);
    LANES {
        c.f[i] += em_bf16(x[2 * i + 1]) * em_bf16(y[2 * i + 1]);
        c.f[i] += em_bf16(x[2 * i]) * em_bf16(y[2 * i]);
    }
    return c;
}

EM em_si em_pack_bf16(em_ps low, em_ps high) {
    uint16_t h[32];
    for (int i = 0; i < 32; i++) {
        uint32_t bits;
        memcpy(&bits, i < 16 ? &low.f[i] : &high.f[i - 16], 4);
        h[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    em_si r;
    memcpy(&r, h, 64);
    return r;
}

#undef _mm512_roundscale_ps
#undef _mm512_cmp_ps_mask
#undef _mm512_slli_epi32
#undef _mm512_srli_epi32
#undef _mm512_srai_epi32
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_i32x4
#undef _mm512_shuffle_ps
#undef _mm512_extractf32x4_ps
#undef _mm512_reduce_ps
#undef _mm512_cmple_epu32_mask
#undef _mm512_cmpge_epu32_mask
#undef _mm512_setr_epi32
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _mm512_loadu_ps em_loadu_ps
#define _mm512_storeu_ps em_storeu_ps
#define _mm512_loadu_si512 em_loadu_si
#define _mm512_storeu_si512 em_storeu_si
#define _mm512_stream_si512 em_storeu_si
#define _mm512_set1_ps em_set1_ps
#define _mm512_setzero_ps() em_set1_ps(0)
#define _mm512_set1_epi32 em_set1_epi32
#define _mm512_setzero_si512() em_set1_epi32(0)
#define _mm512_castsi512_ps em_castsi
#define _mm512_castps_si512 em_castps
#define _mm512_fmadd_ps em_fmadd
#define _mm512_mul_ps em_mul
#define _mm512_add_ps em_add
#define _mm512_sub_ps em_sub
#define _mm512_max_ps em_max
#define _mm512_reduce_add_ps em_reduce_add
#define _mm512_reduce_max_ps em_reduce_max
#define _mm512_slli_epi32 em_slli
#define _mm512_srli_epi32 em_srli
#define _mm512_srai_epi32 em_srai
#define _mm512_and_si512 em_and
#define _mm512_or_si512 em_or
#define _mm512_xor_si512 em_xor
#define _mm512_add_epi32 em_add_epi32
#define _mm512_cvtepi8_epi16 em_cvtepi8
#define _mm512_madd_epi16 em_madd
#define _mm512_dpwssd_epi32(c, a, b) em_add_epi32(c, em_madd(a, b))
#define _mm512_cvtepi32_ps em_cvtepi32
#define _mm512_cvtepu16_epi32 em_cvtepu16
#define _mm512_cvtph_ps em_cvtph
#define _mm512_roundscale_ps(a, how) em_round(a)
#define _mm512_reduce_ps(a, how) em_reduce_floor(a)
#define _mm512_scalef_ps em_scalef
#define _mm512_maskz_mov_ps em_maskz_mov_ps
#define _mm512_maskz_mov_epi32 em_maskz_mov
#define _mm512_cmp_ps_mask em_cmp_ps
#define _mm512_cmple_epu32_mask em_cmple
#define _mm512_cmpge_epu32_mask em_cmpge
#define _mm512_test_epi32_mask em_test
#define _mm512_maskz_xor_epi32 em_maskz_xor
#define _mm512_maskz_compress_epi32 em_maskz_compress
#define _mm512_reduce_add_epi64 em_reduce_add_epi64
#define _mm512_mask_blend_epi16 em_mask_blend_epi16
#define _mm512_unpacklo_epi16(a, b) em_unpack16(a, b, 0)
#define _mm512_unpackhi_epi16(a, b) em_unpack16(a, b, 1)
#define _mm512_unpacklo_epi32(a, b) em_unpack32(a, b, 0)
#define _mm512_unpackhi_epi32(a, b) em_unpack32(a, b, 1)
#define _mm512_unpacklo_epi64(a, b) em_unpack64(a, b, 0)
#define _mm512_unpackhi_epi64(a, b) em_unpack64(a, b, 1)
#define _mm512_unpacklo_ps(a, b) em_castsi(em_unpack32(em_castps(a), em_castps(b), 0))
#define _mm512_unpackhi_ps(a, b) em_castsi(em_unpack32(em_castps(a), em_castps(b), 1))
#define _mm512_shuffle_i32x4 em_shuffle_parts
#define _mm512_shuffle_f32x4(a, b, imm) em_castsi(em_shuffle_parts(em_castps(a), em_castps(b), imm))
#define _mm512_shuffle_ps(a, b, imm) em_castsi(em_shuffle_lanes(em_castps(a), em_castps(b), imm))
#define _mm512_permutexvar_ps(at, a) em_castsi(em_permutexvar(at, em_castps(a)))
#define _mm512_setr_epi32 em_setr
#define _mm512_castps512_ps128(a) em_part(a, 0)
#define _mm512_extractf32x4_ps em_part
#define herald_dpbf16(c, a, b) em_dpbf16(c, a, b)
#define herald_pack_bf16(low, high) em_pack_bf16(low, high)

/* Matrix tiles: eight of 16 rows x 64 bytes, as the kernels configure them. */
static __thread struct {
    char row[16][64];
} em_tiles[8];
#define _tile_loadconfig(c) ((void)(c))
#define _tile_release() ((void)0)
#define _tile_zero(t) memset(&em_tiles[t], 0, sizeof em_tiles[t])
#define _tile_loadd(t, base, stride) em_tile_load(t, base, stride)
#define _tile_stored(t, base, stride) em_tile_store(t, base, stride)
#define _tile_dpbf16ps(c, a, b) em_tile_dp(c, a, b)
#define _tile_dpbssd(c, a, b) em_tile_dp_int8(c, a, b)
EM void em_tile_load(int t, const void *base, size_t stride) {
    LANES memcpy(em_tiles[t].row[i], (const char *)base + (size_t)i * stride, 64);
}
EM void em_tile_store(int t, void *base, size_t stride) {
    LANES memcpy((char *)base + (size_t)i * stride, em_tiles[t].row[i], 64);
}
EM void em_tile_dp(int c, int a, int b) {
    LANES {
        float sum[16];
        uint16_t left[32], right[32];
        memcpy(sum, em_tiles[c].row[i], 64);
        memcpy(left, em_tiles[a].row[i], 64);
        for (int k = 0; k < 16; k++) {
            memcpy(right, em_tiles[b].row[k], 64);
            for (int n = 0; n < 16; n++)
                sum[n] += em_bf16(left[2 * k]) * em_bf16(right[2 * n]) + em_bf16(left[2 * k + 1]) * em_bf16(right[2 * n + 1]);
        }
        memcpy(em_tiles[c].row[i], sum, 64);
    }
}
EM void em_tile_dp_int8(int c, int a, int b) {
    LANES {
        int32_t sum[16];
        memcpy(sum, em_tiles[c].row[i], 64);
        for (int k = 0; k < 64; k++)
            for (int n = 0; n < 16; n++)
                sum[n] += (int8_t)em_tiles[a].row[i][k] * (int8_t)em_tiles[b].row[k / 4][4 * n + k % 4];
        memcpy(em_tiles[c].row[i], sum, 64);
    }
}
#endif
