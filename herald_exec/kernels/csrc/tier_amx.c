/* AMX-BF16: scores and outputs of several queries on matrix tiles; a single one takes the AVX-512 kernels (herald_kind_for).
 *
 *   S^T[16 keys, 16 rows] = K (16 natural rows of 32 d, straight from the pool) . Q^T (tiles made once a chunk)
 *   O [16 rows, 16 d]    += P (16 rows, 32 keys)                              . V (row pairs interleaved in scratch)
 *
 * Scores start at -reference (a tile load with stride 0), so p = 2^score needs no subtraction. The reference of a row is
 * the maximum over its first 32 keys and is raised, with a redo of the block of keys, only when a score exceeds it by
 * more than 2^60. p is cut to bf16; the polynomial is scaled so that cutting is unbiased. P stays in its tile layout for
 * importance. The exponentials of one step run between the tile products of the next.
 */
#define TIER amx
#define HERALD_VNNI
#include "herald.h"
static char *herald_amx_start_tiles(const herald_attend *args, char **scratch);
#define START_TILES(args, scratch) herald_amx_start_tiles(args, scratch)
#define QK_TILES(args, tiles, k, n, p, lines) herald_amx_qk_tiles(args, tiles, k, n, p, lines)
#define QK_TILE_STEPS(args) (4 * (args)->head_dim / 32)
#define STOP_TILES() _tile_release()
static char *herald_amx_start_int8(const herald_attend *args, const int16_t *q, int dim, char **scratch);
#define START_INT8_TILES(args, q, dim, scratch) herald_amx_start_int8(args, q, dim, scratch)
#define INT8_TILES(args, tiles, k, unit, p, lines) herald_amx_int8_tiles(args, tiles, k, unit, p, lines)
#define INT8_TILE_STEPS(args) (4 * HERALD_INT8_ROW((args)->head_dim) / 64 + HERALD_TILE / 4)
#define DECLARE_TILES \
    static int herald_amx_qk_tiles(const herald_attend *, char *tiles, const char *k, int n, float *p, prefetch lines); \
    static void herald_amx_int8_tiles(const herald_attend *, const char *tiles, const char *k, const float *unit, \
                                      float *p, prefetch lines);
#include "bf16_dot.h"

#define BLOCK 256 /* keys between two passes over the output tiles, at most */
#define STEP 32   /* keys of one set of score tiles */
#define SPAN 64   /* keys that meet all queries in turn: K of a span stays in the first cache while Q, which does not, goes by */
#define TILE_BYTES 1024
#define P_AHEAD 8192 /* bytes of P that importance asks for ahead of use */
#define UNBIASED 1.002818f
#define TOO_LARGE 60.0f
/* gcc 12's tile loads do not tell the compiler that they read memory */
#define MEMORY_BARRIER() __asm__ volatile("" : : : "memory")

INLINE vf exp2_scaled(vf x) { /* 1.002818 * 2^x, relative error 7.5e-5 */
    vf f = _mm512_reduce_ps(x, 0x09);
    vf p = vf_fma(vf_set1(0.0780244888f * UNBIASED), f, vf_set1(0.2260675754f * UNBIASED));
    p = vf_fma(p, f, vf_set1(0.6958331794f * UNBIASED));
    p = vf_fma(p, f, vf_set1(0.9999252769f * UNBIASED));
    return _mm512_scalef_ps(p, x);
}

static void FN(configure)(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = 16;
    /* gcc's intrinsic says that it reads eight bytes; the other stores may then be left out or come too late */
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

/* 16 x 16 words: tile[i] word j to tile[j] word i. */
INLINE void transpose(const __m512i *from, char *to) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(from[i], from[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(from[i], from[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    /* b[4 q + r]: part p = words of column 4 p + r, rows 4 q .. 4 q + 3 */
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        __m512i x = _mm512_shuffle_i32x4(b[r], b[4 + r], 0x88), y = _mm512_shuffle_i32x4(b[8 + r], b[12 + r], 0x88);
        __m512i z = _mm512_shuffle_i32x4(b[r], b[4 + r], 0xdd), w = _mm512_shuffle_i32x4(b[8 + r], b[12 + r], 0xdd);
        _mm512_storeu_si512(to + 64 * r, _mm512_shuffle_i32x4(x, y, 0x88));
        _mm512_storeu_si512(to + 64 * (8 + r), _mm512_shuffle_i32x4(x, y, 0xdd));
        _mm512_storeu_si512(to + 64 * (4 + r), _mm512_shuffle_i32x4(z, w, 0x88));
        _mm512_storeu_si512(to + 64 * (12 + r), _mm512_shuffle_i32x4(z, w, 0xdd));
    }
}

/* Q^T tiles [group of 16 rows][32 d]: row = pair of d, column = query row. */
static void FN(pack_queries)(const herald_attend *args, int groups, char *to) {
    int dim = args->head_dim, blocks = dim / 32;
    for (int group = 0; group < groups; group++)
        for (int block = 0; block < blocks; block++, to += TILE_BYTES) {
            __m512i pairs[16];
            for (int i = 0; i < 16; i++) {
                const float *from = args->q + (16 * group + i) * dim + block * 32;
                pairs[i] = 16 * group + i < args->rows ? herald_pack_bf16(vf_load(from), vf_load(from + 16))
                                                       : _mm512_setzero_si512();
            }
            transpose(pairs, to);
        }
}

/* ---- few rows: FP32 scores on bf16 tiles ----
 *
 * A query is the sum of three bf16 parts (8 + 8 + 8 bits of its 24), so products with bf16 keys are exact and the sums FP32:
 * as good as multiply-adds. One tile has 16 columns: four query rows x three parts, at the price of one part.
 */
#define PARTS 3
#define KEYS 64

/* Q tiles [four rows][32 d]: row = pair of d, column = part * 4 + query row; then room for scores and a tail of K. */
static char *herald_amx_start_tiles(const herald_attend *args, char **scratch) {
    int dim = args->head_dim, blocks = dim / 32, fours = (args->rows + 3) / 4;
    if (!args->tuning.tiles || args->dtype != HERALD_BF16 || dim % 32 || args->raw) return NULL;
    char *tiles = FN(take)(scratch, (size_t)fours * (size_t)blocks * TILE_BYTES + KEYS * 64 + KEYS * 2 * (size_t)dim);
    memset(tiles, 0, (size_t)fours * (size_t)blocks * TILE_BYTES);
    for (int row = 0; row < args->rows; row++)
        for (int block = 0; block < blocks; block++) {
            float left[32];
            memcpy(left, args->q + row * dim + block * 32, sizeof left);
            for (int part = 0; part < PARTS; part++) {
                uint16_t halves[32];
                _mm512_storeu_si512(halves, herald_pack_bf16(vf_load(left), vf_load(left + 16)));
                char *column = tiles + (row / 4 * blocks + block) * TILE_BYTES + (part * 4 + row % 4) * 4;
                for (int pair = 0; pair < 16; pair++) memcpy(column + pair * 64, halves + 2 * pair, 4);
                for (int i = 0; i < 32; i++) {
                    uint32_t bits = (uint32_t)halves[i] << 16;
                    float value;
                    memcpy(&value, &bits, 4);
                    left[i] -= value;
                }
            }
        }
    FN(configure)();
    return tiles;
}

/* Scores of a tile of keys; 0 when one is NaN: an infinite key makes one out of a zero part, so multiply-adds decide. */
static int herald_amx_qk_tiles(const herald_attend *args, char *tiles, const char *k, int n, float *p, prefetch lines) {
    int blocks = args->head_dim / 32, fours = (args->rows + 3) / 4;
    int64_t stride = 2 * (int64_t)args->head_dim;
    float *scores = (float *)(tiles + fours * blocks * TILE_BYTES);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    vf nan = vf_set1(0.0f);
    if (n < KEYS) {
        char *tail = (char *)scores + KEYS * 64;
        memset(tail, 0, (size_t)(KEYS * stride));
        k = memcpy(tail, k, (size_t)(n * stride));
    }
    for (int four = 0; four < fours; four++, lines.lines = 0, p += 4 * KEYS) {
        const char *q = tiles + four * blocks * TILE_BYTES;
        int rows = args->rows - 4 * four;
        MEMORY_BARRIER();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int block = 0; block < blocks; block++, q += TILE_BYTES) {
            const char *left = k + block * 64;
            _tile_loadd(4, q, 64);
            _tile_loadd(5, left, (size_t)stride);
            _tile_dpbf16ps(0, 5, 4);
            prefetch_step(lines, 4 * block);
            _tile_loadd(6, left + 16 * stride, (size_t)stride);
            _tile_dpbf16ps(1, 6, 4);
            prefetch_step(lines, 4 * block + 1);
            _tile_loadd(7, left + 32 * stride, (size_t)stride);
            _tile_dpbf16ps(2, 7, 4);
            prefetch_step(lines, 4 * block + 2);
            _tile_loadd(5, left + 48 * stride, (size_t)stride);
            _tile_dpbf16ps(3, 5, 4);
            prefetch_step(lines, 4 * block + 3);
        }
        _tile_stored(0, scores, 64);
        _tile_stored(1, scores + 256, 64);
        _tile_stored(2, scores + 512, 64);
        _tile_stored(3, scores + 768, 64);
        MEMORY_BARRIER();
        for (int key = 0; key < KEYS; key += 4) { /* 128-bit parts: the three summands of four rows */
            const float *s = scores + key * 16;
            vf a = vf_load(s), b = vf_load(s + 16), c = vf_load(s + 32), d = vf_load(s + 48);
            vf ab = _mm512_shuffle_f32x4(a, b, 0x44), cd = _mm512_shuffle_f32x4(c, d, 0x44);
            vf low = _mm512_shuffle_f32x4(_mm512_shuffle_f32x4(a, b, 0xee), _mm512_shuffle_f32x4(c, d, 0xee), 0x88);
            vf sum = vf_add(_mm512_shuffle_f32x4(ab, cd, 0x88), vf_add(_mm512_shuffle_f32x4(ab, cd, 0xdd), low));
            nan = vf_add(nan, vf_mul(sum, vf_set1(0.0f))); /* NaN and infinity stay */
            sum = _mm512_permutexvar_ps(order, sum);
            _mm_storeu_ps(p + key, _mm512_castps512_ps128(sum));
            if (rows > 1) _mm_storeu_ps(p + KEYS + key, _mm512_extractf32x4_ps(sum, 1));
            if (rows > 2) _mm_storeu_ps(p + 2 * KEYS + key, _mm512_extractf32x4_ps(sum, 2));
            if (rows > 3) _mm_storeu_ps(p + 3 * KEYS + key, _mm512_extractf32x4_ps(sum, 3));
        }
    }
    return vf_hsum(nan) == 0.0f;
}

/* ---- few rows: 8-bit keys ----
 *
 * A 16-bit query is 256 x high byte + low byte, both signed: integer sums, so the very scores of the vector path.
 */

/* Q tiles [four rows][64 d]: row = four of d, column = byte * 4 + query row; then room for scores. */
static char *herald_amx_start_int8(const herald_attend *args, const int16_t *q, int dim, char **scratch) {
    int blocks = dim / 64, fours = (args->rows + 3) / 4;
    if (!args->tuning.tiles || dim % 64) return NULL;
    char *tiles = FN(take)(scratch, (size_t)fours * (size_t)blocks * TILE_BYTES + KEYS * 64);
    memset(tiles, 0, (size_t)fours * (size_t)blocks * TILE_BYTES);
    for (int row = 0; row < args->rows; row++)
        for (int c = 0; c < dim; c++) {
            int8_t low = (int8_t)(q[row * dim + c] & 255), high = (int8_t)((q[row * dim + c] - low) >> 8);
            char *tile = tiles + (row / 4 * blocks + c / 64) * TILE_BYTES + c % 64 / 4 * 64 + c % 4;
            tile[row % 4 * 4] = (char)high;
            tile[(4 + row % 4) * 4] = (char)low;
        }
    FN(configure)();
    return tiles;
}

/* Scores of a whole tile of keys; those behind the last are masked later. */
static void herald_amx_int8_tiles(const herald_attend *args, const char *tiles, const char *k, const float *unit, float *p,
                                  prefetch lines) {
    int stride = HERALD_INT8_ROW(args->head_dim), blocks = stride / 64, fours = (args->rows + 3) / 4;
    const float *scale = (const float *)(k + KEYS * stride);
    char *scores = (char *)tiles + fours * blocks * TILE_BYTES;
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int four = 0; four < fours; four++, lines.lines = 0, p += 4 * KEYS) {
        const char *q = tiles + four * blocks * TILE_BYTES;
        int rows = args->rows - 4 * four, step = 0;
        MEMORY_BARRIER();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int block = 0; block < blocks; block++, q += TILE_BYTES) {
            const char *left = k + block * 64;
            _tile_loadd(4, q, 64);
            _tile_loadd(5, left, (size_t)stride);
            _tile_dpbssd(0, 5, 4);
            prefetch_step(lines, step++);
            _tile_loadd(6, left + 16 * stride, (size_t)stride);
            _tile_dpbssd(1, 6, 4);
            prefetch_step(lines, step++);
            _tile_loadd(7, left + 32 * stride, (size_t)stride);
            _tile_dpbssd(2, 7, 4);
            prefetch_step(lines, step++);
            _tile_loadd(5, left + 48 * stride, (size_t)stride);
            _tile_dpbssd(3, 5, 4);
            prefetch_step(lines, step++);
        }
        _tile_stored(0, scores, 64);
        _tile_stored(1, scores + TILE_BYTES, 64);
        _tile_stored(2, scores + 2 * TILE_BYTES, 64);
        _tile_stored(3, scores + 3 * TILE_BYTES, 64);
        MEMORY_BARRIER();
        for (int key = 0; key < KEYS; key += 16) {
            vf of_keys[4]; /* four keys each: part = query row, lane = key */
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) { /* 128-bit parts: high sums and low sums of four rows */
                const char *s = scores + (key + 4 * i) * 64;
                __m512i a = _mm512_loadu_si512(s), b = _mm512_loadu_si512(s + 64);
                __m512i c = _mm512_loadu_si512(s + 128), d = _mm512_loadu_si512(s + 192);
                __m512i ab = _mm512_shuffle_i32x4(a, b, 0x44), cd = _mm512_shuffle_i32x4(c, d, 0x44);
                __m512i high = _mm512_slli_epi32(_mm512_shuffle_i32x4(ab, cd, 0x88), 8);
                vf sum = vf_from_int(_mm512_add_epi32(high, _mm512_shuffle_i32x4(ab, cd, 0xdd)));
                of_keys[i] = _mm512_permutexvar_ps(order, sum);
                prefetch_step(lines, step++);
            }
            vf scales = vf_load(scale + key);
            vf a = _mm512_shuffle_f32x4(of_keys[0], of_keys[1], 0x44), b = _mm512_shuffle_f32x4(of_keys[2], of_keys[3], 0x44);
            vf c = _mm512_shuffle_f32x4(of_keys[0], of_keys[1], 0xee), d = _mm512_shuffle_f32x4(of_keys[2], of_keys[3], 0xee);
            vf row0 = _mm512_shuffle_f32x4(a, b, 0x88), row1 = _mm512_shuffle_f32x4(a, b, 0xdd);
            vf row2 = _mm512_shuffle_f32x4(c, d, 0x88), row3 = _mm512_shuffle_f32x4(c, d, 0xdd);
            const float *units = unit + 4 * four;
            vf_store(p + key, vf_mul(row0, vf_mul(scales, vf_set1(units[0]))));
            if (rows > 1) vf_store(p + KEYS + key, vf_mul(row1, vf_mul(scales, vf_set1(units[1]))));
            if (rows > 2) vf_store(p + 2 * KEYS + key, vf_mul(row2, vf_mul(scales, vf_set1(units[2]))));
            if (rows > 3) vf_store(p + 3 * KEYS + key, vf_mul(row3, vf_mul(scales, vf_set1(units[3]))));
        }
    }
}

/* ---- several queries: what is asked for ahead ----
 *
 * K and V a block ahead, in the order in which a page holds them: K's share between the products of scores, V's between
 * interleaving and the products of outputs. Asking after all work in proportion to its cycles, exponentials included, was
 * measured and is no faster with 4, 8 or 32 queries (docs/kernels.md).
 */
typedef struct {
    const char *at, *end, *now, *other; /* within a half page (K tile or V tile); where it and the next half page begin */
    int64_t half_bytes, hop;            /* of a half page; from one to the next but one */
    int64_t left, tile;                 /* lines that may still be asked for in this block; of a tile of keys, 0: none */
    int64_t times;                      /* lines are asked for so many times as fast: the next block is so much longer */
    int product, interleave, output;    /* lines after: a K tile's products, eight vectors of V, an output tile's products */
} asking;

INLINE void ask(asking *ahead, int64_t lines) {
    if (!ahead->left) return;
    int64_t some = (ahead->end - ahead->at) / 64;
    if (some > ahead->left) some = ahead->left;
    if (some > lines * ahead->times) some = lines * ahead->times;
    for (int64_t i = 0; i < some; i++) __builtin_prefetch(ahead->at + i * 64, 0, 2);
    ahead->at += some * 64;
    ahead->left -= some;
    if (ahead->at < ahead->end) return;
    const char *next = ahead->other;
    ahead->other = ahead->now + ahead->hop;
    ahead->now = ahead->at = next;
    ahead->end = next + ahead->half_bytes;
}

/* Measured: half a block is 1.01 to 1.02 times as fast with one group of rows, 0.98 to 1.00 with more. */
static int64_t FN(block_size)(const herald_attend *args) { return args->rows > 16 ? BLOCK : BLOCK / 2; }

/* Keys of the block that begins at key `first`. Blocks grow where a unit begins: only the first, of one tile, is not asked for
 * ahead. No matter of which thread works: what a raised reference redoes is a block, and its borders show in the bits. */
static int64_t FN(keys_of_block)(const herald_attend *args, int64_t first) {
    int64_t most = FN(block_size)(args), left = args->num_keys - first;
    if (args->begins && first + HERALD_TILE < most) most = first + HERALD_TILE;
    return left < most ? left : most;
}

static void FN(plan_asking)(const herald_attend *args, int groups, int blocks, asking *to) {
    int64_t row_bytes = 64 * (int64_t)blocks, pages = args->begins ? 1 : FN(block_size)(args) / HERALD_TILE;
    int64_t hop = args->stream.tile_bytes, step_lines = STEP * row_bytes / 64;
    int wanted = args->tuning.distance && !args->tuning.bulk, pairs = (groups + 1) / 2, columns = args->output ? blocks : 0;
    const char *k = args->stream.k + pages * hop, *v = args->stream.v + pages * hop;
    *to = (asking){.at = k, .end = k + HERALD_TILE * row_bytes, .now = k, .other = args->output ? v : k + hop,
                   .half_bytes = HERALD_TILE * row_bytes, .hop = args->output ? hop : 2 * hop, .times = 1};
    if (!wanted) return;
    to->tile = HERALD_TILE / STEP * step_lines * (args->output ? 2 : 1);
    to->product = (int)((step_lines + pairs * blocks * 2 - 1) / (pairs * blocks * 2));
    to->interleave = 4;
    to->output = columns ? (int)((step_lines + 2 * pairs * columns - 1) / (2 * pairs * columns)) : 0;
}

/* ---- several queries: scores ---- */

/* Scores of one step that still wait for their exponentials: `groups` x [32 keys][16 rows], done in halves of 16 keys. */
typedef struct {
    const float *scores;
    int groups, keys; /* keys < 32 in a tail: the others weigh nothing */
    int next;         /* half to do, two a group */
    float *l, *top;   /* of the first group */
    char *p;          /* its tile; the next group's follows */
    int64_t next_p;   /* bytes to the tile of the step after it, whose lines are asked for; 0: they are not */
    __m512i pairs[16];
} pending;

/* Eight pairs of keys x 16 rows, all in registers: p of two keys side by side, sums and maxima down the keys. */
INLINE void half_group(const float *s, int keys, int masked, float *l, float *top, __m512i *pairs) {
    vf sum = vf_load(l), highest = vf_load(top), highest_odd = highest;
#pragma GCC unroll 8
    for (int pair = 0; pair < 8; pair++) {
        vf even = vf_load(s + pair * 32), odd = vf_load(s + pair * 32 + 16);
        vf p = exp2_scaled(even), q = exp2_scaled(odd);
        if (masked) { /* after the fact: rows behind the last key hold anything */
            if (2 * pair + 1 >= keys) q = odd = vf_set1(0.0f);
            if (2 * pair >= keys) p = even = vf_set1(0.0f);
        }
        highest = vf_max(even, highest);
        highest_odd = vf_max(odd, highest_odd);
        sum = vf_add(sum, vf_add(p, q));
        pairs[pair] = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(_mm512_castps_si512(p), 16),
                                              _mm512_castps_si512(q));
    }
    vf_store(l, sum);
    vf_store(top, vf_max(highest, highest_odd));
}

static __attribute__((noinline)) void FN(exponentials)(pending *step, int halves) {
    for (; halves > 0 && step->next < 2 * step->groups; halves--, step->next++) {
        int group = step->next / 2, half = step->next % 2, keys = step->keys - 16 * half;
        const float *s = step->scores + group * 512 + half * 256;
        float *l = step->l + group * 16, *top = step->top + group * 16;
        if (keys >= 16) half_group(s, 16, 0, l, top, step->pairs + 8 * half);
        else half_group(s, keys, 1, l, top, step->pairs + 8 * half);
        /* a store that misses holds up all stores behind it */
        if (step->next_p) prefetch_bytes(step->p + group * TILE_BYTES + half * TILE_BYTES / 2 + step->next_p, TILE_BYTES / 2);
        if (half) transpose(step->pairs, step->p + group * TILE_BYTES);
    }
}

/* Score tiles of 32 keys x 16 or 32 rows. After the products of each 32 elements of head_dim come some of the waiting
 * step's exponentials, which run while the matrix unit is busy. `k_soon`: rows that the next step is the first to load, asked
 * into the first cache, or NULL. */
INLINE void score_tiles(const char *k, int64_t stride, const char *q, int blocks, const float *start, int two,
                        float *scores, pending *waiting, asking *ahead, const char *k_soon) {
    int halves = 2 * waiting->groups;
    MEMORY_BARRIER();
    _tile_loadd(0, start, 0);
    _tile_loadd(1, start, 0);
    if (two) {
        _tile_loadd(2, start + 16, 0);
        _tile_loadd(3, start + 16, 0);
    }
    for (int block = 0; block < blocks; block++) {
        _tile_loadd(4, k + block * 64, (size_t)stride);
        _tile_loadd(6, q + block * TILE_BYTES, 64);
        _tile_dpbf16ps(0, 4, 6);
        ask(ahead, ahead->product);
        _tile_loadd(5, k + 16 * stride + block * 64, (size_t)stride);
        _tile_dpbf16ps(1, 5, 6);
        if (two) {
            _tile_loadd(7, q + (blocks + block) * TILE_BYTES, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        for (int line = 0; k_soon && line < STEP; line++)
            __builtin_prefetch(k_soon + (block * STEP + line) * 64, 0, 3);
        FN(exponentials)(waiting, halves * (block + 1) / blocks - halves * block / blocks);
        ask(ahead, ahead->product);
    }
    _tile_stored(0, scores, 64);
    _tile_stored(1, scores + 256, 64);
    if (two) {
        _tile_stored(2, scores + 512, 64);
        _tile_stored(3, scores + 768, 64);
    }
    MEMORY_BARRIER();
}

/* What one chunk works with. */
typedef struct {
    const herald_attend *args;
    int groups, blocks; /* of 16 query rows; of 32 elements of head_dim */
    int64_t row_bytes;
    char *q, *k_tail, *v_pairs, *p_block;
    float *o, *scores, *reference, *start, *l, *before, *top;
    asking *ahead;
} state;

/* At a block's begin: as many lines as the next block has, none behind the last key that this thread scans. */
static void FN(allow_asking)(const herald_attend *args, int64_t first, int64_t keys, asking *ahead) {
    if (!ahead->tile) return;
    int64_t most = FN(block_size)(args), end = first + keys, next = FN(keys_of_block)(args, end);
    if (end >= args->num_keys) next = args->follow < most ? args->follow : most;
    ahead->left = ahead->tile * ((next + HERALD_TILE - 1) / HERALD_TILE);
    ahead->times = next > keys ? (next + keys - 1) / keys : 1;
    if (first || !args->begins || !args->output) return;
    /* the first tile's V, while its K is waited for */
    ahead->at = ahead->now = args->stream.v;
    ahead->end = ahead->at + ahead->half_bytes;
    ahead->other = args->stream.k + args->stream.tile_bytes;
    ahead->left += ahead->half_bytes / 64;
    ahead->times++;
}

static const char *FN(rows_at)(const state *s, const char *first, int64_t key) {
    return first + key / HERALD_TILE * s->args->stream.tile_bytes + key % HERALD_TILE * s->row_bytes;
}

/* K rows of a step; a tail is copied, so that no load leaves the array. */
static const char *FN(k_step)(const state *s, int64_t key, int keys) {
    const char *k = FN(rows_at)(s, s->args->stream.k, key);
    if (keys == STEP) return k;
    memset(s->k_tail, 0, (size_t)(STEP * s->row_bytes));
    return memcpy(s->k_tail, k, (size_t)(keys * s->row_bytes));
}

/* First reference: the maximum over the first keys. */
static void FN(first_reference)(const state *s, int keys) {
    const char *k = FN(k_step)(s, 0, keys);
    memset(s->start, 0, sizeof(float) * 16 * (size_t)s->groups);
    for (int group = 0; group < s->groups; group++) {
        pending none = {.groups = 0};
        asking nothing = {0};
        score_tiles(k, s->row_bytes, s->q + group * s->blocks * TILE_BYTES, s->blocks, s->start + group * 16, 0,
                    s->scores, &none, &nothing, NULL);
        vf top = vf_set1(HERALD_SCORE_MIN);
        for (int key = 0; key < keys; key++) top = vf_max(vf_load(s->scores + key * 16), top);
        vf_store(s->reference + group * 16, top);
    }
}

/* K of the next step where all queries are one pair of groups: then each step loads K that no step before has loaded. More
 * pairs share that wait, and measuring found nothing to gain. */
static const char *FN(k_soon)(const state *s, int64_t first, int keys, int key) {
    if (s->groups > 2 || key + STEP >= keys) return NULL;
    return FN(rows_at)(s, s->args->stream.k, first + key + STEP);
}

static void FN(scores_of_block)(const state *s, int64_t first, int keys, char *p) {
    int buffer = 0;
    pending waiting = {.groups = 0, .next_p = s->args->keep_p ? s->groups * TILE_BYTES : 0};
    for (int span = 0; span < keys; span += SPAN)
        for (int group = 0; group < s->groups; group += 2)
            for (int key = span; key < keys && key < span + SPAN; key += STEP, buffer ^= 1) {
                int some = keys - key < STEP ? keys - key : STEP, two = group + 1 < s->groups;
                const char *k = FN(k_step)(s, first + key, some), *q = s->q + group * s->blocks * TILE_BYTES;
                const char *soon = FN(k_soon)(s, first, keys, key);
                float *scores = s->scores + buffer * 1024, *start = s->start + group * 16;
                if (two) score_tiles(k, s->row_bytes, q, s->blocks, start, 1, scores, &waiting, s->ahead, soon);
                else score_tiles(k, s->row_bytes, q, s->blocks, start, 0, scores, &waiting, s->ahead, soon);
                FN(exponentials)(&waiting, 4);
                waiting.scores = scores;
                waiting.groups = 1 + two;
                waiting.keys = some;
                waiting.next = 0;
                waiting.l = s->l + group * 16;
                waiting.top = s->top + group * 16;
                waiting.p = p + ((size_t)key / STEP * (size_t)s->groups + (size_t)group) * TILE_BYTES;
            }
    FN(exponentials)(&waiting, 4);
}

/* Raise references that a score left behind; returns whether the block must be done again. */
static int FN(raise)(const state *s) {
    int again = 0;
    for (int group = 0; group < s->groups; group++) {
        vf top = vf_load(s->top + group * 16);
        __mmask16 high = _mm512_cmp_ps_mask(top, vf_set1(TOO_LARGE), _CMP_GT_OQ);
        if (!high) continue;
        again = 1;
        vf raise = _mm512_maskz_mov_ps(high, top);
        vf_store(s->reference + group * 16, vf_add(vf_load(s->reference + group * 16), raise));
        vf factor = vf_exp2(vf_sub(vf_set1(0.0f), raise));
        vf_store(s->before + group * 16, vf_mul(vf_load(s->before + group * 16), factor));
        float of_row[16];
        vf_store(of_row, factor);
        for (int tile = 0; tile < 2 * s->blocks; tile++)
            for (int row = 0; row < 16; row++) {
                float *o = s->o + ((group * 2 * s->blocks + tile) * 16 + row) * 16;
                vf_store(o, vf_mul(vf_load(o), vf_set1(of_row[row])));
            }
    }
    return again;
}

/* Rows 2 i and 2 i + 1 of eight, 64 bytes of each, interleaved; behind the last of `rows` come zeros. */
INLINE void interleave_eight(const char *v, int64_t stride, int rows, char *to) {
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2, v += 2 * stride, to += 128) {
        __m512i even = i < rows ? _mm512_loadu_si512(v) : _mm512_setzero_si512();
        __m512i odd = i + 1 < rows ? _mm512_loadu_si512(v + stride) : _mm512_setzero_si512();
        _mm512_storeu_si512(to, _mm512_unpacklo_epi16(even, odd));
        _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi16(even, odd));
    }
}

/* 32 columns of a block's V, pairs of rows interleaved: 16 KiB, which stay in the first cache while all queries meet them.
 * Unpacking works in 128-bit parts, so columns come in the order of column_of(). */
static void FN(interleave)(const state *s, int64_t first, int keys, int column) {
    char *to = s->v_pairs;
    int64_t stride = s->row_bytes; /* a store could change it, for all the compiler knows */
    for (int key = 0; key < (keys + STEP - 1) / STEP * STEP; key += 8, to += 8 * 64) {
        const char *v = FN(rows_at)(s, s->args->stream.v, first + key) + column * 64;
        if (keys - key >= 8) interleave_eight(v, stride, 8, to);
        else interleave_eight(v, stride, keys - key, to);
        ask(s->ahead, s->ahead->interleave);
    }
}
static int FN(column_of)(int tile, int i) { return tile / 2 * 32 + i / 4 * 8 + tile % 2 * 4 + i % 4; }

/* Output tiles of 16 or 32 query rows x 32 d over a block. */
INLINE void output_tiles(const state *s, const char *p, int steps, int group, int column, int two) {
    float *o = s->o + (group * 2 * s->blocks + 2 * column) * 256, *below = o + 2 * s->blocks * 256;
    _tile_loadd(0, o, 64);
    _tile_loadd(1, o + 256, 64);
    if (two) {
        _tile_loadd(2, below, 64);
        _tile_loadd(3, below + 256, 64);
    }
    for (int step = 0; step < steps; step++) {
        const char *left = p + (step * s->groups + group) * TILE_BYTES, *right = s->v_pairs + step * 16 * 128;
        _tile_loadd(4, left, 64);
        _tile_loadd(6, right, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + 64, 128);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, left + TILE_BYTES, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        ask(s->ahead, s->ahead->output);
    }
    _tile_stored(0, o, 64);
    _tile_stored(1, o + 256, 64);
    if (two) {
        _tile_stored(2, below, 64);
        _tile_stored(3, below + 256, 64);
    }
}

static void FN(output_of_block)(const state *s, int64_t first, int keys, const char *p) {
    int steps = (keys + STEP - 1) / STEP;
    for (int column = 0; column < s->blocks; column++) {
        FN(interleave)(s, first, keys, column);
        MEMORY_BARRIER();
        for (int group = 0; group < s->groups; group += 2) {
            if (group + 1 < s->groups) output_tiles(s, p, steps, group, column, 1);
            else output_tiles(s, p, steps, group, column, 0);
        }
        MEMORY_BARRIER();
    }
}

static size_t FN(p_tile_amx)(int rows) { return herald_round_up((size_t)rows, 16) * HERALD_TILE * 2; }
static size_t FN(p_max_amx)(int rows) { return herald_round_up((size_t)rows, 16); }
static size_t FN(scratch_bytes_amx)(int rows, int head_dim) {
    size_t lanes = herald_round_up((size_t)rows, 16), dim = (size_t)head_dim, few = FN(scratch_bytes)(rows, head_dim);
    size_t own = lanes * dim * 2 + lanes * dim * 4 + 8192 + STEP * dim * 2 + BLOCK * 64 + lanes * BLOCK * 2 +
                 5 * lanes * 4 + 16 * 64;
    size_t scores = lanes / 4 * (dim / 32) * TILE_BYTES + KEYS * 64 + KEYS * 2 * dim + 64; /* few rows on tiles */
    return own > few + scores ? own : few + scores;
}

static void FN(attend_amx)(const herald_attend *args) {
    int groups = (args->rows + 15) / 16, blocks = args->head_dim / 32, dim = args->head_dim;
    size_t lanes = 16 * (size_t)groups;
    asking ahead;
    state s = {.args = args, .groups = groups, .blocks = blocks, .row_bytes = 2 * (int64_t)dim, .ahead = &ahead};
    FN(plan_asking)(args, groups, blocks, &ahead);
    char *scratch = args->scratch;
    s.q = FN(take)(&scratch, lanes * (size_t)dim * 2);
    s.o = (float *)FN(take)(&scratch, lanes * (size_t)dim * 4);
    s.scores = (float *)FN(take)(&scratch, 8192);
    s.k_tail = FN(take)(&scratch, (size_t)(STEP * s.row_bytes));
    s.v_pairs = FN(take)(&scratch, BLOCK / 2 * 128);
    s.p_block = FN(take)(&scratch, lanes * BLOCK * 2);
    s.reference = (float *)FN(take)(&scratch, lanes * 4);
    s.start = (float *)FN(take)(&scratch, lanes * 4);
    s.l = (float *)FN(take)(&scratch, lanes * 4);
    s.before = (float *)FN(take)(&scratch, lanes * 4);
    s.top = (float *)FN(take)(&scratch, lanes * 4);
    FN(pack_queries)(args, groups, s.q);
    memset(s.o, 0, lanes * (size_t)dim * 4);
    memset(s.before, 0, lanes * 4);
    FN(configure)();
    if (args->num_keys > 0) FN(first_reference)(&s, args->num_keys < STEP ? (int)args->num_keys : STEP);
    else for (size_t lane = 0; lane < lanes; lane++) s.reference[lane] = HERALD_SCORE_MIN;
    for (int64_t first = 0, next; first < args->num_keys; first = next) {
        int keys = (int)FN(keys_of_block)(args, first);
        int64_t tile = first / HERALD_TILE;
        char *p = args->keep_p ? args->p + (size_t)tile * FN(p_tile_amx)(args->rows) : s.p_block;
        next = first + keys;
        FN(allow_asking)(args, first, keys, &ahead);
        for (int key = 0; args->tuning.bulk && key < keys; key += HERALD_TILE)
            read_in_bulk(FN(rows_at)(&s, args->stream.k, first + key),
                         (keys - key < HERALD_TILE ? keys - key : HERALD_TILE) * s.row_bytes);
        do {
            memcpy(s.l, s.before, lanes * 4);
            for (size_t lane = 0; lane < lanes; lane++) s.start[lane] = -s.reference[lane], s.top[lane] = 0.0f;
            FN(scores_of_block)(&s, first, keys, p);
        } while (FN(raise)(&s));
        memcpy(s.before, s.l, lanes * 4);
        for (int64_t each = tile; args->keep_p && each * HERALD_TILE < first + keys; each++)
            memcpy(args->p_max + (size_t)each * lanes, s.reference, lanes * 4);
        if (args->output) FN(output_of_block)(&s, first, keys, p);
        while (ahead.left) ask(&ahead, ahead.left); /* what rounding left out */
    }
    _tile_release();
    for (int row = 0; row < args->rows; row++) {
        args->m[row] = s.reference[row];
        args->l[row] = s.before[row] * (1.0f / UNBIASED);
        if (!args->output) continue;
        const float *from = s.o + (row / 16 * 2 * blocks * 16 + row % 16) * 16;
        float *to = args->o + row * dim;
        for (int each = 0; each < 2 * blocks; each++, from += 256)
            for (int part = 0; part < 4; part++) memcpy(to + FN(column_of)(each, 4 * part), from + 4 * part, 16);
    }
}

static void FN(importance_amx)(const herald_attend *args, const float *m, const float *inv_l, float *out) {
    int lanes = (int)FN(p_max_amx)(args->rows);
    const __m512i odd = _mm512_set1_epi32((int)0xffff0000u);
    float weight[1024];
    for (int64_t key = 0; key < args->num_keys; key += STEP, out += STEP) {
        const char *p = args->p + key / STEP * lanes * 64;
        if (key % HERALD_TILE == 0)
            for (int row = 0; row < lanes; row += 16) {
                vf top = vf_set1(0.0f), scale = top; /* rows that are padding weigh nothing */
                if (row + 16 <= args->rows) {
                    top = vf_sub(vf_load(args->p_max + key / HERALD_TILE * lanes + row), vf_load(m + row));
                    scale = vf_load(inv_l + row);
                } else {
                    float tops[16] = {0}, scales[16] = {0};
                    for (int i = row; i < args->rows; i++) {
                        tops[i - row] = args->p_max[key / HERALD_TILE * lanes + i] - m[i];
                        scales[i - row] = inv_l[i];
                    }
                    top = vf_load(tops), scale = vf_load(scales);
                }
                vf power = vf_exp2(top);
                vf_store(args->p_max + key / HERALD_TILE * lanes + row, power);
                vf_store(weight + row, vf_mul(power, scale));
            }
        vf a = vf_set1(0.0f), b = a, c = a, d = a;
        for (int row = 0; row < lanes; row += 2, p += 128) {
            prefetch_bytes(p + P_AHEAD, 128);
            __m512i x = _mm512_loadu_si512(p), y = _mm512_loadu_si512(p + 64);
            vf wx = vf_set1(weight[row]), wy = vf_set1(weight[row + 1]);
            a = vf_fma(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), wx, a);
            b = vf_fma(_mm512_castsi512_ps(_mm512_and_si512(x, odd)), wx, b);
            c = vf_fma(_mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), wy, c);
            d = vf_fma(_mm512_castsi512_ps(_mm512_and_si512(y, odd)), wy, d);
        }
        float even[16], uneven[16];
        vf_store(even, vf_add(a, c));
        vf_store(uneven, vf_add(b, d));
        for (int i = 0; i < 16; i++) out[2 * i] = even[i], out[2 * i + 1] = uneven[i];
    }
}

static void FN(weights_amx)(const herald_attend *args, const int32_t *indices, int count, float *out, int stride) {
    int lanes = (int)FN(p_max_amx)(args->rows);
    for (int i = 0; i < count; i++) {
        int64_t tile = indices[i] / HERALD_TILE;
        const uint16_t *p = (const uint16_t *)args->p + indices[i] / STEP * (int64_t)lanes * STEP + indices[i] % STEP;
        const float *factor = args->p_max + tile * lanes;
        for (int row = 0; row < args->rows; row++) {
            uint32_t bits = (uint32_t)p[row * STEP] << 16;
            float value;
            memcpy(&value, &bits, 4);
            out[row * stride + i] = value * factor[row];
        }
    }
}

static int64_t FN(peak_amx)(int64_t rounds) {
    static const char zeros[TILE_BYTES];
    FN(configure)();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, zeros, 64);
    _tile_loadd(5, zeros, 64);
    _tile_loadd(6, zeros, 64);
    _tile_loadd(7, zeros, 64);
    for (int64_t round = 0; round < rounds; round++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return rounds * 4 * 16 * 16 * 32 * 2;
}

const herald_tier herald_tier_amx = {
    .name = "amx",
    .kinds = 1 << HERALD_FEW | 1 << HERALD_MANY | 1 << HERALD_AMX,
    .many_from = 16,
    .attend = {FN(attend_dot), FN(attend_many), FN(attend_amx)},
    .importance = {FN(importance_few), FN(importance_many), FN(importance_amx)},
    .weights = {FN(weights_few), FN(weights_many), FN(weights_amx)},
    .p_tile_bytes = {FN(p_tile_few), FN(p_tile_many), FN(p_tile_amx)},
    .p_max_floats = {FN(p_max_few), FN(p_max_many), FN(p_max_amx)},
    .scratch_bytes = FN(scratch_bytes_amx),
    .scan_int8 = FN(scan_int8),
    .score = FN(score),
    .accumulate = FN(accumulate),
    .collect = FN(collect),
    .widen = FN(widen_row),
    .copy_row = FN(copy_row),
    .fence = FN(fence),
    .read = FN(read),
    .peak = {FN(peak_fma), FN(peak_dot), FN(peak_amx)}};
