/* FEW with bf16 dot products in PV: rows of V are taken in pairs, P is rounded to bf16. Scores stay FP32 multiply-adds: a
 * bf16 query would move scores by 2^-9, and three bf16 parts of it cost more than widening K. */
#include "vec_avx512.h"
#include "body.h"

#ifndef HERALD_EMULATE
#define herald_dpbf16(c, a, b) _mm512_dpbf16_ps(c, (__m512bh)(a), (__m512bh)(b))
#define herald_pack_bf16(low, high) ((__m512i)_mm512_cvtne2ps_pbh(high, low))
#endif

static int64_t FN(peak_dot)(int64_t rounds) {
    vf acc[12];
    __m512i a = _mm512_set1_epi32(0x3f803f80), b = _mm512_set1_epi32(0x33803380);
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) acc[i] = vf_set1((float)i);
    for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) acc[i] = herald_dpbf16(acc[i], a, b);
    }
    float sum = 0;
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) sum += vf_hsum(acc[i]);
    volatile float keep = sum;
    (void)keep;
    return rounds * 12 * 2 * W * 2;
}

/* Whether a dot issues about as often as an FMA (Zen 4) or far less (Intel: four times the time): found once. The first
 * 200 us are not counted: a core that just met 512-bit registers runs them slowly for a while. */
static int FN(dot_pays)(void) {
    static int answer = -1;
    if (answer < 0) {
        double best_fma = 0, best_dot = 0;
        for (double until = herald_seconds() + 2e-4; herald_seconds() < until;) FN(peak_dot)(100);
        for (int i = 0; i < 8; i++) {
            double start = herald_seconds(), fma = (double)FN(peak_fma)(2000) / (herald_seconds() - start);
            start = herald_seconds();
            double dot = (double)FN(peak_dot)(2000) / (herald_seconds() - start);
            best_fma = fma > best_fma ? fma : best_fma;
            best_dot = dot > best_dot ? dot : best_dot;
        }
        answer = best_dot > 1.4 * best_fma;
    }
    return answer;
}

/* Two V rows at a time, `some` chunks of 32 d, `rows` query rows; pairs[row * 32 + j] = p of keys 2 j and 2 j + 1. */
INLINE void pv_dot_rows(const char *v, int64_t stride, int n, const uint32_t *pairs, int chunk, int chunks, int rows,
                        int some, float *o, const char *ahead) {
    vf acc[2 * 4 * 2];
#pragma GCC unroll 2
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int i = 0; i < 2 * some; i++)
            acc[row * 2 * some + i] = vf_load(o + (row * chunks + chunk) * CHUNK_FLOATS + i * W);
    for (int j = 0; j < n; j += 2, v += 2 * stride) {
        __m512i low[4], high[4];
        if (ahead) {
            prefetch_bytes(ahead + j * stride + chunk * 64, some * 64);
            prefetch_bytes(ahead + (j + 1) * stride + chunk * 64, some * 64);
        }
#pragma GCC unroll 4
        for (int i = 0; i < some; i++) {
            __m512i even = _mm512_loadu_si512(v + (chunk + i) * 64);
            __m512i odd = j + 1 < n ? _mm512_loadu_si512(v + stride + (chunk + i) * 64) : _mm512_setzero_si512();
            low[i] = _mm512_unpacklo_epi16(even, odd);
            high[i] = _mm512_unpackhi_epi16(even, odd);
        }
#pragma GCC unroll 2
        for (int row = 0; row < rows; row++) {
            __m512i p = _mm512_set1_epi32((int)pairs[row * 32 + j / 2]);
#pragma GCC unroll 4
            for (int i = 0; i < some; i++) {
                acc[(row * some + i) * 2] = herald_dpbf16(acc[(row * some + i) * 2], low[i], p);
                acc[(row * some + i) * 2 + 1] = herald_dpbf16(acc[(row * some + i) * 2 + 1], high[i], p);
            }
        }
    }
#pragma GCC unroll 2
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int i = 0; i < 2 * some; i++)
            vf_store(o + (row * chunks + chunk) * CHUNK_FLOATS + i * W, acc[row * 2 * some + i]);
}

static void FN(pv_dot)(const char *v, int64_t stride, int n, const float *p, int chunks, int rows, uint32_t *pairs,
                       float *o, const char *ahead) {
    for (int row = 0; row < rows; row++)
        for (int j = 0; j < HERALD_TILE; j += 32)
            _mm512_storeu_si512(pairs + row * 32 + j / 2, herald_pack_bf16(vf_load(p + row * HERALD_TILE + j),
                                                                           vf_load(p + row * HERALD_TILE + j + 16)));
    for (int j = 0; j < n; j += SUB_TILE) {
        int count = n - j < SUB_TILE ? n - j : SUB_TILE;
        for (int chunk = 0; chunk < chunks; chunk += chunk + 4 <= chunks ? 4 : 1)
            for (int row = 0; row < rows; row += 2) {
                const uint32_t *pr = pairs + row * 32 + j / 2;
                float *or = o + row * chunks * CHUNK_FLOATS;
                const char *vj = v + j * stride;
                const char *next = ahead && row == 0 ? ahead + j * stride : NULL;
                int four = chunk + 4 <= chunks, two = row + 1 < rows;
                if (four && two) pv_dot_rows(vj, stride, count, pr, chunk, chunks, 2, 4, or, next);
                else if (four) pv_dot_rows(vj, stride, count, pr, chunk, chunks, 1, 4, or, next);
                else if (two) pv_dot_rows(vj, stride, count, pr, chunk, chunks, 2, 1, or, next);
                else pv_dot_rows(vj, stride, count, pr, chunk, chunks, 1, 1, or, next);
            }
    }
}

/* Outputs lie as unpacking leaves them: low halves of each 128-bit part, then the high halves. */
static int FN(dot_column)(int c) { return c / 32 * 32 + c % 16 / 4 * 8 + c % 32 / 16 * 4 + c % 4; }

static void FN(attend_dot)(const herald_attend *args) {
    int rows = args->rows, dim = args->head_dim, chunks = dim / CHUNK_FLOATS;
    int wanted = args->pv == HERALD_PV_BF16 || (args->pv == HERALD_PV_AUTO && FN(dot_pays)());
    if (!wanted || !args->output || args->dtype != HERALD_BF16 || dim % CHUNK_FLOATS || args->raw) {
        FN(attend_few)(args);
        return;
    }
    int64_t stride = 2 * (int64_t)dim, ahead_bytes = (args->tuning.distance + 1) / 2 * args->stream.tile_bytes;
    char *scratch = args->scratch;
    float *q = (float *)FN(take)(&scratch, sizeof(float) * (size_t)(rows * dim));
    float *o = (float *)FN(take)(&scratch, sizeof(float) * (size_t)(rows * dim));
    uint32_t *pairs = (uint32_t *)FN(take)(&scratch, sizeof(float) * (size_t)(rows * HERALD_TILE));
    float *scale = (float *)FN(take)(&scratch, sizeof(float) * (size_t)rows);
    FN(pack)(args->q, rows, dim, dim, 1, q);
    memset(o, 0, sizeof(float) * (size_t)(rows * dim));
    for (int row = 0; row < rows; row++) args->m[row] = HERALD_SCORE_MIN, args->l[row] = 0.0f;
    for (int64_t first = 0, tile = 0; first < args->num_keys; first += HERALD_TILE, tile++) {
        int n = (int)(args->num_keys - first < HERALD_TILE ? args->num_keys - first : HERALD_TILE);
        const char *k = args->stream.k + tile * args->stream.tile_bytes;
        const char *v = args->stream.v + tile * args->stream.tile_bytes;
        float *p = (float *)(args->p + (args->keep_p ? (size_t)tile * FN(p_tile_few)(rows) : 0));
        int64_t steps = HERALD_TILE / QK_KEYS * chunks;
        prefetch lines = prefetch_of(ahead_bytes ? k + ahead_bytes : NULL, HERALD_TILE * stride, steps, &args->tuning);
        lines.every = left_out(steps, args->tuning.even ? softmax_steps(rows) : 0);
        FN(qk_few)(k, stride, n, q, chunks, rows, 1, p, lines);
        int rescale = FN(softmax_few)(p, n, rows, args->m, args->l, scale, go_on(lines, steps, args->tuning.even));
        if (args->keep_p) memcpy(args->p_max + tile * rows, args->m, sizeof(float) * (size_t)rows);
        if (!args->output) continue;
        if (rescale)
            for (int row = 0; row < rows; row++)
                for (int c = 0; c < dim; c += W)
                    vf_store(o + row * dim + c, vf_mul(vf_load(o + row * dim + c), vf_set1(scale[row])));
        FN(pv_dot)(v, stride, n, p, chunks, rows, pairs, o, ahead_bytes ? v + ahead_bytes : NULL);
    }
    for (int row = 0; args->output && row < rows; row++)
        for (int c = 0; c < dim; c++) args->o[row * dim + FN(dot_column)(c)] = o[row * dim + c];
}
