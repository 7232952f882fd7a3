/* The kernels of one vector tier, written once over `vf`; a tier's file includes its vec_*.h and then this.
 *
 * FEW (W lanes along head_dim): scores by dot products of a K row with up to four query rows at once, PV over sub-tiles of
 * 32 rows that stay in L1. K and V are touched strictly row after row, so hardware prefetchers stay trained.
 * MANY (W lanes are query rows): two small matrix products over a tile widened to fp32 in scratch.
 *
 * Both keep p = 2^(s - running maximum) and the running maximum of each tile. Importance follows later as
 * p * 2^(tile maximum - final maximum) / l: no second exponential per score.
 */
#define CAT_(a, b, c) a##b##_##c
#define CAT(a, b, c) CAT_(a, b, c)
#define FN(name) CAT(herald_, TIER, name)

#define CHUNK_FLOATS (2 * W) /* one load of bf16: W even and W odd elements */
#define SUB_TILE 32
#ifndef TURNED_ROWS /* the other shape of a PV pass */
#define TURNED_ROWS PV_ROWS
#define TURNED_CHUNKS PV_CHUNKS
#endif
/* A tier with matrix tiles may score few rows on them: START gives NULL where it does not, QK whether it did this tile. */
#ifndef START_TILES
#define START_TILES(args, scratch) NULL
#define QK_TILES(args, tiles, k, n, p, lines) 0
#define QK_TILE_STEPS(args) 0
#define STOP_TILES() ((void)0)
#define START_INT8_TILES(args, q, dim, scratch) NULL
#define INT8_TILES(args, tiles, k, unit, p, lines) ((void)0)
#define INT8_TILE_STEPS(args) 0
#endif

/* 2^x for x <= 0; below 2^-100 it is 0, so that no denormal slows the products. Relative error 2e-7; NaN stays. */
INLINE vf vf_exp2(vf x) {
    vf clamped = vf_max(vf_set1(-126.0f), x);
    vf n = vf_round(clamped), f = vf_sub(clamped, n);
    vf p = vf_set1(1.5403530393381609e-4f);
    p = vf_fma(p, f, vf_set1(1.3333558146428443e-3f));
    p = vf_fma(p, f, vf_set1(9.6181291076284772e-3f));
    p = vf_fma(p, f, vf_set1(5.5504108664821580e-2f));
    p = vf_fma(p, f, vf_set1(2.4022650695910072e-1f));
    p = vf_fma(p, f, vf_set1(6.9314718055994531e-1f));
    p = vf_fma(p, f, vf_set1(1.0f));
    return vf_zero_below(vf_exp2_scale(p, x, n), x, -100.0f);
}

INLINE void load_chunk(const char *row, int chunk, int bf16, vf *a, vf *b) {
    if (bf16)
        vf_load2_bf16((const uint16_t *)row + chunk * CHUNK_FLOATS, a, b);
    else {
        *a = vf_load((const float *)row + chunk * CHUNK_FLOATS);
        *b = vf_load((const float *)row + chunk * CHUNK_FLOATS + W);
    }
}

/* Into L2 (into L1 is slower by a twentieth), a few lines at a time between the arithmetic: a burst would fill the core's
 * miss buffers and hold up the loads behind it. On Emerald Rapids, of the read ceiling: bursts of 32 rows 0.66, spread 0.77;
 * one line in two, or only the start of each 4 KiB so that the hardware continues, 0.55 to 0.63. */
INLINE void prefetch_bytes(const char *from, int64_t bytes) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(from + i, 0, 2);
}
/* One load a line, in order and nothing else: hardware prefetchers run at their full rate, which software prefetches, held
 * in the first cache's miss buffers, do not reach. */
INLINE void read_in_bulk(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) (void)*(const volatile char *)(from + i);
}
#define CHUNK_BYTES(bf16) ((bf16) ? 4 * W : 8 * W)

/* What is asked for between two steps of arithmetic: `lines` cache lines, `apart` bytes from one to the next; a step later
 * the same `step` bytes on. Lines that follow each other are one stream; lines a page apart are several at once, of which
 * each has its own hardware prefetcher. No lines: nothing. */
typedef struct {
    const char *from;
    int64_t lines, apart, step;
    int every; /* one step in so many is left out, and made up for in the softmax; 0: none */
} prefetch;

#ifdef DECLARE_TILES
DECLARE_TILES
#endif

/* `bytes` from `from` on over `steps` steps. */
INLINE prefetch prefetch_of(const char *from, int64_t bytes, int64_t steps, const herald_tuning *tuning) {
    int64_t lines = steps ? (bytes / 64 + steps - 1) / steps : 0;
    prefetch found = {from, from ? lines : 0, 64, lines * 64, 0};
    if (tuning->streams > 1 && lines > 1) found.apart = bytes / lines, found.step = 64;
    return found;
}
INLINE void prefetch_step(prefetch ahead, int64_t step) {
    const char *at = ahead.from + step * ahead.step;
    for (int64_t line = 0; line < ahead.lines; line++, at += ahead.apart) __builtin_prefetch(at, 0, 2);
}

/* count rows of head_dim elements to fp32 rows of `stride` floats, zero beyond head_dim. */
static void FN(widen)(const char *from, int dtype, int head_dim, int count, float *to, int stride) {
    for (int i = 0; i < count; i++, to += stride, from += (int64_t)head_dim * herald_element_bytes(dtype)) {
        int c = 0;
        if (dtype == HERALD_BF16)
            for (; c + W <= head_dim; c += W) vf_store(to + c, vf_bf16((const uint16_t *)from + c));
        else if (dtype == HERALD_FP16)
            for (; c + W <= head_dim; c += W) vf_store(to + c, vf_fp16((const uint16_t *)from + c));
        else
            for (; c + W <= head_dim; c += W) vf_store(to + c, vf_load((const float *)from + c));
        if (c < head_dim) { /* head_dim is a multiple of 8, W may be 16: widen a copy with zeros behind */
            char rest[W * 4] = {0};
            memcpy(rest, from + (int64_t)c * herald_element_bytes(dtype),
                   (size_t)(head_dim - c) * (size_t)herald_element_bytes(dtype));
            vf v = dtype == HERALD_BF16   ? vf_bf16((const uint16_t *)rest)
                   : dtype == HERALD_FP16 ? vf_fp16((const uint16_t *)rest)
                                          : vf_load((const float *)rest);
            vf_store(to + c, v);
            c += W;
        }
        for (; c < stride; c += W) vf_store(to + c, vf_set1(0.0f));
    }
}

/* ---- FEW ------------------------------------------------------------------------------------------------------ */

/* Rows of fp32 (queries, outputs) to and from the order in which load_chunk yields elements. */
static void FN(pack)(const float *from, int rows, int head_dim, int padded, int bf16, float *to) {
    for (int row = 0; row < rows; row++, from += head_dim, to += padded) {
        if (!bf16) {
            memcpy(to, from, sizeof(float) * (size_t)head_dim);
            memset(to + head_dim, 0, sizeof(float) * (size_t)(padded - head_dim));
            continue;
        }
        for (int c = 0; c < padded; c += CHUNK_FLOATS) /* bf16 only where head_dim fills its chunks */
            for (int i = 0; i < W; i++) to[c + i] = from[c + 2 * i], to[c + W + i] = from[c + 2 * i + 1];
    }
}
static void FN(unpack)(const float *from, int rows, int head_dim, int padded, int bf16, float *to) {
    for (int row = 0; row < rows; row++, from += padded, to += head_dim) {
        if (!bf16) {
            memcpy(to, from, sizeof(float) * (size_t)head_dim);
            continue;
        }
        for (int c = 0; c < padded; c += CHUNK_FLOATS)
            for (int i = 0; i < W; i++) to[c + 2 * i] = from[c + i], to[c + 2 * i + 1] = from[c + W + i];
    }
}

INLINE void qk_rows(const char *k, int64_t stride, int n, const float *q, int chunks, int rows, int bf16, float *s,
                    prefetch ahead) {
    for (int j = 0, step = 0, left = ahead.every; j < n; j += QK_KEYS) {
        const char *key[QK_KEYS]; /* a tail repeats the last key: its extra scores are masked later */
        for (int i = 0; i < QK_KEYS; i++) key[i] = k + (j + i < n ? j + i : n - 1) * stride;
        vf acc[QK_KEYS * 4];
        for (int i = 0; i < QK_KEYS * 4; i++) acc[i] = vf_set1(0.0f);
        for (int c = 0; c < chunks; c++) {
            vf a[QK_KEYS], b[QK_KEYS];
            if (left && --left == 0) left = ahead.every;
            else prefetch_step(ahead, step++);
#pragma GCC unroll 8
            for (int i = 0; i < QK_KEYS; i++) load_chunk(key[i], c, bf16, &a[i], &b[i]);
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++) {
                const float *qr = q + (row * chunks + c) * CHUNK_FLOATS;
                vf qa = vf_load(qr), qb = vf_load(qr + W);
#pragma GCC unroll 8
                for (int i = 0; i < QK_KEYS; i++)
                    acc[i * 4 + row] = vf_fma(b[i], qb, vf_fma(a[i], qa, acc[i * 4 + row]));
            }
        }
        reduce_block(acc, rows, s + j);
    }
}

static void FN(qk_few)(const char *k, int64_t stride, int n, const float *q, int chunks, int rows, int bf16, float *s,
                       prefetch ahead) {
    for (int row = 0; row < rows; row += 4, ahead.lines = 0) {
        const float *qr = q + row * chunks * CHUNK_FLOATS;
        float *sr = s + row * HERALD_TILE;
        int some = rows - row < 4 ? rows - row : 4;
#define CASE(R) \
    case R: \
        if (bf16) qk_rows(k, stride, n, qr, chunks, R, 1, sr, ahead); \
        else qk_rows(k, stride, n, qr, chunks, R, 0, sr, ahead); \
        break;
        switch (some) { CASE(1) CASE(2) CASE(3) CASE(4) }
#undef CASE
    }
}

/* With `even`, the softmax takes over some of the prefetches of the scores before it, so that memory never rests: where
 * it goes on, or nothing. */
typedef struct {
    prefetch lines;
    int64_t step;
} going_on;
INLINE int softmax_steps(int rows) { return rows * (HERALD_TILE / W - 1); }
/* One step in so many of `steps` is left out for the softmax to make up within `more`. */
INLINE int left_out(int64_t steps, int more) { return more ? (int)((steps + more - 1) / more) : 0; }
INLINE going_on go_on(prefetch lines, int64_t steps, int even) {
    going_on rest = {lines, lines.every ? steps - steps / lines.every : steps};
    if (!even) rest.lines.lines = 0;
    return rest;
}

/* Scores of one tile to p in place; m, l updated; scale[row] = what o must be multiplied by. Returns whether any is not 1. */
static int FN(softmax_few)(float *s, int n, int rows, float *m, float *l, float *scale, going_on ahead) {
    int rescale = 0;
    for (int row = 0; row < rows; row++, s += HERALD_TILE) {
        for (int j = n; j < HERALD_TILE; j++) s[j] = -__builtin_inff();
        vf top = vf_load(s);
        for (int j = W; j < HERALD_TILE; j += W) top = vf_max(top, vf_load(s + j));
        float old = m[row], highest = vf_hmax(top), now = highest > old ? highest : old;
        vf sum = vf_set1(0.0f);
        for (int j = 0; j < HERALD_TILE; j += W) {
            vf p = vf_exp2(vf_sub(vf_load(s + j), vf_set1(now)));
            if (j) prefetch_step(ahead.lines, ahead.step++);
            vf_store(s + j, p);
            sum = vf_add(sum, p);
        }
        float factor = 1.0f;
        if (now != old) {
            float lanes[W];
            vf_store(lanes, vf_exp2(vf_set1(old - now)));
            factor = lanes[0];
            rescale = 1;
        }
        m[row] = now;
        l[row] = l[row] * factor + vf_hsum(sum);
        scale[row] = factor;
    }
    return rescale;
}

INLINE void pv_rows(const char *v, int64_t stride, int n, const float *p, int chunk, int chunks, int rows, int some,
                    int bf16, float *o, prefetch ahead) {
    vf acc[16]; /* rows x some x 2 <= 16 */
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int i = 0; i < 2 * some; i++)
            acc[row * 2 * some + i] = vf_load(o + (row * chunks + chunk) * CHUNK_FLOATS + i * W);
    for (int j = 0; j < n; j++, v += stride) {
        vf a[4], b[4];
        prefetch_step(ahead, j);
#pragma GCC unroll 4
        for (int i = 0; i < some; i++) load_chunk(v, chunk + i, bf16, &a[i], &b[i]);
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            vf weight = vf_set1(p[row * HERALD_TILE + j]);
#pragma GCC unroll 4
            for (int i = 0; i < some; i++) {
                acc[(row * some + i) * 2] = vf_fma(a[i], weight, acc[(row * some + i) * 2]);
                acc[(row * some + i) * 2 + 1] = vf_fma(b[i], weight, acc[(row * some + i) * 2 + 1]);
            }
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int i = 0; i < 2 * some; i++)
            vf_store(o + (row * chunks + chunk) * CHUNK_FLOATS + i * W, acc[row * 2 * some + i]);
}

/* One pass of `rows` rows (at most `most`: 2 or 4) over `some` chunks of each V row. */
INLINE void pv_pass(const char *v, int64_t stride, int n, const float *p, int chunk, int chunks, int rows, int most,
                    int some, int bf16, float *o, prefetch ahead) {
    switch (rows) {
        case 1: pv_rows(v, stride, n, p, chunk, chunks, 1, some, bf16, o, ahead); break;
        case 2: pv_rows(v, stride, n, p, chunk, chunks, 2, some, bf16, o, ahead); break;
        case 3:
            if (most > 2) pv_rows(v, stride, n, p, chunk, chunks, 3, some, bf16, o, ahead);
            break;
        default:
            if (most > 2) pv_rows(v, stride, n, p, chunk, chunks, 4, some, bf16, o, ahead);
    }
}

/* What the PV loops ask for. */
typedef struct {
    const char *from;
    int64_t bytes;
    const herald_tuning *tuning;
} pv_prefetch;

static int FN(pv_passes)(int chunks, int rows, int most, int wide) {
    return (rows + most - 1) / most * (chunks / wide + chunks % wide);
}

/* o[row] += p[row][j] * v[j] over n rows of V; o in chunk order. `most` rows x `wide` chunks at a time: few rows over long
 * pieces of V read it once in long strides, more rows widen each piece fewer times. */
INLINE void pv_tile(const char *v, int64_t stride, int n, const float *p, int chunks, int rows, int bf16, float *o,
                    const pv_prefetch *ahead, int most, int wide) {
    int passes = FN(pv_passes)(chunks, rows, most, wide), pass = 0;
    prefetch lines = {0};
    for (int j = 0; j < n; j += SUB_TILE) {
        int count = n - j < SUB_TILE ? n - j : SUB_TILE;
        if (ahead && !j) lines = prefetch_of(ahead->from, ahead->bytes, 2 * SUB_TILE * passes, ahead->tuning);
        int chunk = 0;
        for (; chunk < chunks; chunk += chunk + wide <= chunks ? wide : 1)
            for (int row = 0; row < rows; row += most, pass++) {
                const char *vj = v + j * stride;
                const float *pj = p + j + row * HERALD_TILE;
                float *or = o + row * chunks * CHUNK_FLOATS;
                int left = rows - row < most ? rows - row : most;
                prefetch now = lines;
                now.from += pass * SUB_TILE * lines.step;
                if (chunk + wide <= chunks)
                    pv_pass(vj, stride, count, pj, chunk, chunks, left, most, wide, bf16, or, now);
                else pv_pass(vj, stride, count, pj, chunk, chunks, left, most, 1, bf16, or, now);
            }
    }
}

static void FN(pv_few)(const char *v, int64_t stride, int n, const float *p, int chunks, int rows, int bf16, float *o,
                       const pv_prefetch *ahead, int turned) {
    if (!bf16) pv_tile(v, stride, n, p, chunks, rows, 0, o, ahead, PV_ROWS, PV_CHUNKS);
    else if (!turned) pv_tile(v, stride, n, p, chunks, rows, 1, o, ahead, PV_ROWS, PV_CHUNKS);
    else pv_tile(v, stride, n, p, chunks, rows, 1, o, ahead, TURNED_ROWS, TURNED_CHUNKS);
}

static inline int FN(padded)(int head_dim) { return (int)herald_round_up((size_t)head_dim, CHUNK_FLOATS); }
static size_t FN(scratch_bytes)(int rows, int head_dim) {
    size_t lanes = herald_round_up((size_t)rows, W), dim = (size_t)FN(padded)(head_dim);
    /* queries, outputs (either order), taken rows and a widened tile, a tile of scores, scale, and a spare line each */
    return sizeof(float) * (2 * lanes * dim + HERALD_TILE * (2 * dim + lanes) + lanes) + 6 * 64;
}
static char *FN(take)(char **from, size_t bytes) {
    char *here = *from;
    *from += herald_round_up(bytes, 64);
    return here;
}

static size_t FN(p_tile_few)(int rows) { return sizeof(float) * HERALD_TILE * (size_t)rows; }
static size_t FN(p_max_few)(int rows) { return (size_t)rows; }

/* Tiles that this thread scans, counted from the chunk's first: those behind are not asked for. */
INLINE int64_t scanned_tiles(const herald_attend *args) {
    return (args->num_keys + args->follow + HERALD_TILE - 1) / HERALD_TILE;
}

/* As a unit begins, the tiles that no other tile's work asks for. */
static void FN(ask_first)(const herald_attend *args, int64_t tiles, int64_t k_bytes, int64_t v_bytes) {
    if (!args->begins) return;
    int64_t most = scanned_tiles(args);
    for (int64_t tile = 0; tile < tiles && tile < most; tile++) {
        prefetch_bytes(args->stream.k + tile * args->stream.tile_bytes, k_bytes);
        prefetch_bytes(args->stream.v + tile * args->stream.tile_bytes, v_bytes);
    }
}

/* What is asked for while tile `tile` is worked on. Distance counts half pages (a K tile, a V tile): 1 asks for the page's
 * V while its K is scored and for the next page's K while V is summed; 2 n asks for K during K and V during V, n pages on. */
static void FN(ahead_of)(const herald_attend *args, int64_t tile, const char **during_k, const char **during_v) {
    int64_t halves = args->tuning.distance, bytes = args->stream.tile_bytes;
    if (halves % 2 && args->output) {
        *during_k = args->stream.v + (tile + halves / 2) * bytes;
        *during_v = args->stream.k + (tile + halves / 2 + 1) * bytes;
    } else {
        *during_k = args->stream.k + (tile + (halves + 1) / 2) * bytes;
        *during_v = args->stream.v + (tile + (halves + 1) / 2) * bytes;
    }
    int64_t tiles = scanned_tiles(args);
    if (tile + (halves + 1) / 2 >= tiles) *during_v = NULL;
    if (tile + (halves % 2 && args->output ? halves / 2 : (halves + 1) / 2) >= tiles) *during_k = NULL;
}

static void FN(attend_few)(const herald_attend *args) {
    int rows = args->rows, dim = FN(padded)(args->head_dim), chunks = dim / CHUNK_FLOATS;
    int direct = dim == args->head_dim && args->dtype != HERALD_FP16, bf16 = direct && args->dtype == HERALD_BF16;
    int64_t row_bytes = (int64_t)args->head_dim * herald_element_bytes(args->dtype);
    int64_t stride = direct ? row_bytes : dim * (int64_t)sizeof(float), tile_half = row_bytes * HERALD_TILE;
    const herald_tuning *tuning = &args->tuning;
    char *scratch = args->scratch;
    float *q = (float *)FN(take)(&scratch, sizeof(float) * (size_t)(rows * dim));
    float *o = (float *)FN(take)(&scratch, sizeof(float) * (size_t)(rows * dim));
    float *wide = (float *)FN(take)(&scratch, sizeof(float) * (size_t)(HERALD_TILE * dim));
    float *scale = (float *)FN(take)(&scratch, sizeof(float) * (size_t)rows);
    float *apart = (float *)FN(take)(&scratch, FN(p_tile_few)(rows));
    FN(pack)(args->q, rows, args->head_dim, dim, bf16, q);
    memset(o, 0, sizeof(float) * (size_t)(rows * dim));
    for (int row = 0; row < rows; row++) args->m[row] = HERALD_SCORE_MIN, args->l[row] = 0.0f;
    int fetch = tuning->distance > 0 && direct && !tuning->bulk;
    int64_t qk_steps = (HERALD_TILE / QK_KEYS) * chunks, tile_steps = QK_TILE_STEPS(args);
    int even = fetch && tuning->even, more = even ? softmax_steps(rows) : 0;
    char *tiles = START_TILES(args, &scratch);
    if (fetch) FN(ask_first)(args, (tuning->distance + 1) / 2, tile_half, args->output ? tile_half : 0);
    for (int64_t first = 0, tile = 0; first < args->num_keys; first += HERALD_TILE, tile++) {
        int n = (int)(args->num_keys - first < HERALD_TILE ? args->num_keys - first : HERALD_TILE);
        const char *k = args->stream.k + tile * args->stream.tile_bytes;
        const char *v = args->stream.v + tile * args->stream.tile_bytes, *k_ahead = NULL, *v_ahead = NULL;
        float *p = (float *)(args->p + (args->keep_p ? (size_t)tile * FN(p_tile_few)(rows) : 0));
        if (fetch) FN(ahead_of)(args, tile, &k_ahead, &v_ahead);
        if (tuning->bulk) read_in_bulk(k, n * row_bytes);
        if (!direct) FN(widen)(k, args->dtype, args->head_dim, n, wide, dim), k = (const char *)wide;
        prefetch lines = prefetch_of(k_ahead, tile_half, tile_steps + more, tuning);
        if (!tiles || !QK_TILES(args, tiles, k, n, p, lines)) {
            lines = prefetch_of(k_ahead, tile_half, qk_steps, tuning);
            lines.every = left_out(qk_steps, more);
            FN(qk_few)(k, stride, n, q, chunks, rows, bf16, p, lines);
        }
        if (args->raw) p = memcpy(apart, p, FN(p_tile_few)(rows));
        int rescale = FN(softmax_few)(p, n, rows, args->m, args->l, scale,
                                      go_on(lines, lines.every || !tiles ? qk_steps : tile_steps, even));
        if (args->keep_p) memcpy(args->p_max + tile * rows, args->m, sizeof(float) * (size_t)rows);
        if (!args->output) continue;
        if (rescale)
            for (int row = 0; row < rows; row++)
                for (int c = 0; c < dim; c += W)
                    vf_store(o + row * dim + c, vf_mul(vf_load(o + row * dim + c), vf_set1(scale[row])));
        if (tuning->bulk) read_in_bulk(v, n * row_bytes);
        if (!direct) FN(widen)(v, args->dtype, args->head_dim, n, wide, dim), v = (const char *)wide;
        pv_prefetch ahead = {v_ahead, tile_half, tuning};
        FN(pv_few)(v, stride, n, p, chunks, rows, bf16, o, fetch ? &ahead : NULL, tuning->turned);
    }
    if (tiles) STOP_TILES();
    if (args->output) FN(unpack)(o, rows, args->head_dim, dim, bf16, args->o);
}

/* ---- FEW on 8-bit keys ---- */

/* 127 x 256 + 127: the most that splits into a high and a low signed byte. */
#define INT16_STEPS 32639.0f

/* Queries rounded to 16 bits, [rows][padded]; unit[row] is the size of one step, score = unit * scale of the key * sum. */
static void FN(pack_int16)(const float *from, int rows, int head_dim, int padded, int16_t *to, float *unit) {
    for (int row = 0; row < rows; row++, from += head_dim, to += padded) {
        float most = 0.0f;
        for (int c = 0; c < head_dim; c++) {
            float size = from[c] < 0 ? -from[c] : from[c];
            if (!(size <= most)) most = size; /* NaN is taken */
        }
        unit[row] = most / INT16_STEPS;
        float per = most >= HERALD_ROUNDS_TO_ZERO && most < __builtin_inff() ? INT16_STEPS / most : 0.0f;
        for (int c = 0; c < padded; c++) to[c] = c < head_dim ? (int16_t)__builtin_lrintf(from[c] * per) : 0;
    }
}

INLINE void qk_int8_rows(const char *k, int64_t stride, int n, const int16_t *q, int steps, int rows, float *s,
                         prefetch ahead) {
    for (int j = 0, at = 0, left = ahead.every; j < n; j += QK_KEYS) {
        const int8_t *key[QK_KEYS];
        for (int i = 0; i < QK_KEYS; i++) key[i] = (const int8_t *)k + (j + i < n ? j + i : n - 1) * stride;
        vi acc[QK_KEYS * 4];
        for (int i = 0; i < QK_KEYS * 4; i++) acc[i] = vi_zero();
        for (int c = 0; c < steps; c++) {
            wide_keys wide[QK_KEYS];
            if (left && --left == 0) left = ahead.every;
            else prefetch_step(ahead, at++);
#pragma GCC unroll 8
            for (int i = 0; i < QK_KEYS; i++) load_keys(key[i] + c * CHUNK_FLOATS, wide[i]);
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
                for (int i = 0; i < QK_KEYS; i++)
                    acc[i * 4 + row] = dot_keys(acc[i * 4 + row], wide[i], q + (row * steps + c) * CHUNK_FLOATS);
        }
        vf sums[QK_KEYS * 4];
#pragma GCC unroll 16
        for (int i = 0; i < QK_KEYS * 4; i++) sums[i] = vf_from_int(acc[i]);
        reduce_block(sums, rows, s + j);
    }
}

/* Scores of 8-bit keys: p, its maxima, m and l of one chunk; no output. */
static void FN(scan_int8)(const herald_attend *args) {
    int rows = args->rows, dim = FN(padded)(args->head_dim), steps = dim / CHUNK_FLOATS;
    int64_t stride = HERALD_INT8_ROW(args->head_dim), ahead_tiles = (args->tuning.distance + 1) / 2;
    char *scratch = args->scratch;
    int16_t *q = (int16_t *)FN(take)(&scratch, sizeof(int16_t) * (size_t)(rows * dim));
    float *unit = (float *)FN(take)(&scratch, sizeof(float) * (size_t)rows);
    float *factor = (float *)FN(take)(&scratch, sizeof(float) * (size_t)rows);
    FN(pack_int16)(args->q, rows, args->head_dim, dim, q, unit);
    char *tiles = START_INT8_TILES(args, q, dim, &scratch);
    int fetch = ahead_tiles > 0 && !args->tuning.bulk, more = fetch && args->tuning.even ? softmax_steps(rows) : 0;
    int64_t at_once = tiles ? INT8_TILE_STEPS(args) : HERALD_TILE / QK_KEYS * steps; /* steps of the scores */
    for (int row = 0; row < rows; row++) args->m[row] = HERALD_SCORE_MIN, args->l[row] = 0.0f;
    if (fetch) FN(ask_first)(args, ahead_tiles, args->stream.tile_bytes, 0);
    for (int64_t first = 0, tile = 0; first < args->num_keys; first += HERALD_TILE, tile++) {
        int n = (int)(args->num_keys - first < HERALD_TILE ? args->num_keys - first : HERALD_TILE);
        const char *k = args->stream.k + tile * args->stream.tile_bytes;
        const float *scale = (const float *)(k + HERALD_TILE * stride);
        const char *next = fetch && tile + ahead_tiles < scanned_tiles(args) ? k + ahead_tiles * args->stream.tile_bytes : NULL;
        if (args->tuning.bulk) read_in_bulk(k, args->stream.tile_bytes);
        float *p = (float *)(args->p + (size_t)tile * FN(p_tile_few)(rows));
        prefetch ahead = prefetch_of(next, args->stream.tile_bytes, tiles ? at_once + more : at_once, &args->tuning);
        if (!tiles) ahead.every = left_out(at_once, more);
        going_on rest = go_on(ahead, at_once, more > 0);
        if (tiles) INT8_TILES(args, tiles, k, unit, p, ahead);
        for (int row = 0; row < rows && !tiles; row += 4, ahead.lines = 0) {
            const int16_t *qr = q + row * dim;
            float *sr = p + row * HERALD_TILE;
            switch (rows - row) {
                case 1: qk_int8_rows(k, stride, n, qr, steps, 1, sr, ahead); break;
                case 2: qk_int8_rows(k, stride, n, qr, steps, 2, sr, ahead); break;
                case 3: qk_int8_rows(k, stride, n, qr, steps, 3, sr, ahead); break;
                default: qk_int8_rows(k, stride, n, qr, steps, 4, sr, ahead);
            }
        }
        for (int row = 0; row < rows && !tiles; row++)
            for (int j = 0; j < HERALD_TILE; j += W) {
                float *s = p + row * HERALD_TILE + j;
                vf_store(s, vf_mul(vf_load(s), vf_mul(vf_load(scale + j), vf_set1(unit[row]))));
            }
        FN(softmax_few)(p, n, rows, args->m, args->l, factor, rest);
        memcpy(args->p_max + tile * rows, args->m, sizeof(float) * (size_t)rows);
    }
    if (tiles) STOP_TILES();
}

/* ---- single rows: candidates' K, selected entries' V ---- */

INLINE const char *row_at(const char *first, const herald_attend *args, int64_t position, int64_t bytes) {
    return first + position / HERALD_TILE * args->stream.tile_bytes + position % HERALD_TILE * bytes;
}

/* Lines out of order: two neighbours in order make the hardware fetch on behind the row. */
INLINE void ask_for_row(const char *row, int64_t bytes) {
    for (int64_t i = 64; i < bytes; i += 128) __builtin_prefetch(row + i, 0, 2);
    for (int64_t i = 0; i < bytes; i += 128) __builtin_prefetch(row + i, 0, 2);
}

/* Rows at positions [first, first + some) of `total`, contiguous; every row taken asks for one further on. */
static void FN(take_rows)(const herald_attend *args, const char *base, const int32_t *positions, int64_t first, int some,
                          int64_t total, char *to) {
    int64_t bytes = (int64_t)args->head_dim * herald_element_bytes(args->dtype), ahead = args->tuning.rows_ahead;
    for (int64_t i = 0; first == 0 && i < ahead && i < total; i++)
        ask_for_row(row_at(base, args, positions[i], bytes), bytes);
    for (int64_t i = first; i < first + some; i++, to += bytes) {
        if (ahead && i + ahead < total) ask_for_row(row_at(base, args, positions[i + ahead], bytes), bytes);
        copy_block(to, row_at(base, args, positions[i], bytes), bytes, 0);
    }
}

static void FN(score)(const herald_attend *args, const int32_t *positions, int64_t count, const float *m, float *weight,
                      int64_t stride) {
    int rows = args->rows, dim = FN(padded)(args->head_dim), chunks = dim / CHUNK_FLOATS;
    int direct = dim == args->head_dim && args->dtype != HERALD_FP16, bf16 = direct && args->dtype == HERALD_BF16;
    int64_t bytes = (int64_t)args->head_dim * herald_element_bytes(args->dtype);
    char *scratch = args->scratch;
    float *q = (float *)FN(take)(&scratch, sizeof(float) * (size_t)(rows * dim));
    char *taken = FN(take)(&scratch, sizeof(float) * (size_t)(HERALD_TILE * dim));
    float *wide = (float *)FN(take)(&scratch, sizeof(float) * (size_t)(HERALD_TILE * dim));
    float *s = (float *)FN(take)(&scratch, FN(p_tile_few)(rows));
    FN(pack)(args->q, rows, args->head_dim, dim, bf16, q);
    char *tiles = START_TILES(args, &scratch);
    for (int64_t first = 0; first < count; first += HERALD_TILE) {
        int n = (int)(count - first < HERALD_TILE ? count - first : HERALD_TILE);
        const char *k = taken;
        FN(take_rows)(args, args->stream.k, positions, first, n, count, taken);
        if (!direct) FN(widen)(k, args->dtype, args->head_dim, n, wide, dim), k = (const char *)wide;
        if (!tiles || !QK_TILES(args, tiles, k, n, s, (prefetch){0}))
            FN(qk_few)(k, direct ? bytes : dim * (int64_t)sizeof(float), n, q, chunks, rows, bf16, s, (prefetch){0});
        for (int row = 0; row < rows; row++) {
            float *p = s + row * HERALD_TILE;
            for (int j = n; j < HERALD_TILE; j++) p[j] = 0.0f;
            for (int j = 0; j < n; j += W) vf_store(p + j, vf_exp2(vf_sub(vf_load(p + j), vf_set1(m[row]))));
            memcpy(weight + row * stride + first, p, sizeof(float) * (size_t)n);
        }
    }
    if (tiles) STOP_TILES();
}

/* 2^(a tile's maximum - the whole's) of each row. */
static void FN(tile_factors)(const float *p_max, const float *m, int rows, float *to) {
    int row = 0;
    for (; row + W <= rows; row += W) vf_store(to + row, vf_exp2(vf_sub(vf_load(p_max + row), vf_load(m + row))));
    if (row == rows) return;
    float tops[W] = {0}, lanes[W];
    for (int i = row; i < rows; i++) tops[i - row] = p_max[i] - m[i];
    vf_store(lanes, vf_exp2(vf_load(tops)));
    memcpy(to + row, lanes, sizeof(float) * (size_t)(rows - row));
}

static void FN(importance_few)(const herald_attend *args, const float *m, const float *inv_l, float *out) {
    int64_t tiles = (args->num_keys + HERALD_TILE - 1) / HERALD_TILE;
    for (int64_t tile = 0; tile < tiles; tile++, out += HERALD_TILE) {
        const float *p = (const float *)(args->p + (size_t)tile * FN(p_tile_few)(args->rows));
        float *factor = args->p_max + tile * args->rows;
        if (!args->raw) FN(tile_factors)(factor, m, args->rows, factor);
        vf sum[HERALD_TILE / W];
        for (int j = 0; j < HERALD_TILE / W; j++) sum[j] = vf_set1(0.0f);
        for (int row = 0; row < args->rows; row++, p += HERALD_TILE) {
            if (args->raw) {
                vf top = vf_set1(m[row]), inverse = vf_set1(inv_l[row]);
                for (int j = 0; j < HERALD_TILE / W; j++)
                    sum[j] = vf_fma(vf_exp2(vf_sub(vf_load(p + j * W), top)), inverse, sum[j]);
                continue;
            }
            vf weight = vf_set1(factor[row] * inv_l[row]);
            for (int j = 0; j < HERALD_TILE / W; j++) sum[j] = vf_fma(vf_load(p + j * W), weight, sum[j]);
        }
        for (int j = 0; j < HERALD_TILE / W; j++) vf_store(out + j * W, sum[j]);
    }
}

static void FN(weights_few)(const herald_attend *args, const int32_t *indices, int count, float *out, int stride) {
    for (int i = 0; i < count; i++) {
        int64_t tile = indices[i] / HERALD_TILE;
        const float *p = (const float *)(args->p + (size_t)tile * FN(p_tile_few)(args->rows)) + indices[i] % HERALD_TILE;
        const float *factor = args->p_max + tile * args->rows;
        for (int row = 0; row < args->rows; row++) out[row * stride + i] = p[row * HERALD_TILE] * factor[row];
    }
}

/* Rows of V that are taken at once: taking asks for as many further on, and only so few that the work on those taken goes on
 * while the miss buffers empty. */
#define TAKEN 16

static void FN(accumulate)(const herald_attend *args, const int32_t *positions, int64_t count, const float *weight,
                           int64_t stride) {
    int rows = args->rows, dim = FN(padded)(args->head_dim), chunks = dim / CHUNK_FLOATS;
    int direct = dim == args->head_dim && args->dtype != HERALD_FP16, bf16 = direct && args->dtype == HERALD_BF16;
    int64_t bytes = (int64_t)args->head_dim * herald_element_bytes(args->dtype);
    char *scratch = args->scratch;
    float *o = (float *)FN(take)(&scratch, sizeof(float) * (size_t)(rows * dim));
    char *taken = FN(take)(&scratch, sizeof(float) * (size_t)(HERALD_TILE * dim));
    float *wide = (float *)FN(take)(&scratch, sizeof(float) * (size_t)(HERALD_TILE * dim));
    float *p = (float *)FN(take)(&scratch, FN(p_tile_few)(rows));
    FN(pack)(args->o, rows, args->head_dim, dim, bf16, o);
    for (int64_t first = 0; first < count; first += TAKEN) {
        int n = (int)(count - first < TAKEN ? count - first : TAKEN);
        const char *v = taken;
        FN(take_rows)(args, args->stream.v, positions, first, n, count, taken);
        for (int row = 0; row < rows; row++)
            memcpy(p + row * HERALD_TILE, weight + row * stride + first, sizeof(float) * (size_t)n);
        if (!direct) FN(widen)(v, args->dtype, args->head_dim, n, wide, dim), v = (const char *)wide;
        FN(pv_few)(v, direct ? bytes : dim * (int64_t)sizeof(float), n, p, chunks, rows, bf16, o, NULL, 0);
    }
    FN(unpack)(o, rows, args->head_dim, dim, bf16, args->o);
}

/* ---- MANY -----------------------------------------------------------------------------------------------------
 *
 * Arrays of [items][query rows] lie in panels of PANEL query rows, each panel [items][its rows]: a panel of queries (16 KiB at
 * head_dim 128) stays in the first cache while every key of a tile meets it. Unbroken rows of 128 queries would be 64 KiB, of
 * which a column of panels uses half of the cache's sets.
 */
#define PANEL (GEMM_LANES >= 2 ? 2 * W : W)
INLINE int panel_width(int lanes, int first) { return lanes - first < PANEL ? lanes - first : PANEL; }
/* Where item `item` of the panel that begins at query row `first` lies. */
INLINE int64_t in_panel(int items, int first, int width, int item) {
    return (int64_t)first * items + (int64_t)item * width;
}

/* c[i][lane] = scale[lane] * c[i][lane] + sum over t of a(t, i) * b[t][lane], a(t, i) = a[t * at + i * ai]; rows of b and c
 * are lanes * W floats. */
INLINE void gemm_block(const float *a, int64_t at, int64_t ai, int items, const float *b, int steps, float *c, int lanes,
                       const float *scale) {
    vf acc[16]; /* items x lanes <= 16 */
#pragma GCC unroll 8
    for (int i = 0; i < items; i++)
#pragma GCC unroll 2
        for (int x = 0; x < lanes; x++)
            acc[i * lanes + x] =
                scale ? vf_mul(vf_load(c + (i * lanes + x) * W), vf_load(scale + x * W)) : vf_set1(0.0f);
    for (int t = 0; t < steps; t++) {
        vf right[2];
#pragma GCC unroll 2
        for (int x = 0; x < lanes; x++) right[x] = vf_load(b + (t * lanes + x) * W);
#pragma GCC unroll 8
        for (int i = 0; i < items; i++) {
            vf left = vf_set1(a[t * at + i * ai]);
#pragma GCC unroll 2
            for (int x = 0; x < lanes; x++) acc[i * lanes + x] = vf_fma(left, right[x], acc[i * lanes + x]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < items; i++)
#pragma GCC unroll 2
        for (int x = 0; x < lanes; x++) vf_store(c + (i * lanes + x) * W, acc[i * lanes + x]);
}

/* `items` (a multiple of 8: keys of a tile, or head_dim; c has room for `room` of them) x `lanes` query rows (a multiple of
 * W). Sixteen independent sums (eight where registers are few) hide the latency of multiply-adds; a panel's two vectors are
 * loaded once for all items of a block. `bytes` from `next` on are prefetched evenly: a burst would hold up the loads. */
static void FN(gemm)(const float *a, int64_t at, int64_t ai, int items, const float *b, int b_items, int lanes, int steps,
                     float *c, int room, const float *scale, const char *next, int64_t bytes, const herald_tuning *tuning) {
    int single = lanes % PANEL != 0, step = 0;
    prefetch ahead = prefetch_of(next, bytes, lanes / PANEL * (items / PAIR_ITEMS) + single * (items / 8), tuning);
    for (int first = 0; first < lanes; first += PANEL) {
        int width = panel_width(lanes, first);
        const float *right = b + in_panel(b_items, first, width, 0), *by = scale ? scale + first : NULL;
        float *to = c + in_panel(room, first, width, 0);
        if (width == W)
            for (int i = 0; i < items; i += 8, to += 8 * W) {
                prefetch_step(ahead, step++);
                gemm_block(a + i * ai, at, ai, 8, right, steps, to, 1, by);
            }
        else
            for (int i = 0; i < items; i += PAIR_ITEMS, to += PAIR_ITEMS * 2 * W) {
                prefetch_step(ahead, step++);
                gemm_block(a + i * ai, at, ai, PAIR_ITEMS, right, steps, to, 2, by);
            }
    }
}

static size_t FN(p_tile_many)(int rows) { return sizeof(float) * HERALD_TILE * herald_round_up((size_t)rows, W); }
static size_t FN(p_max_many)(int rows) { return herald_round_up((size_t)rows, W); }

/* s: [panels][HERALD_TILE][rows of a panel]; m, l, scale: [lanes]. */
static void FN(softmax_many)(float *s, int n, int lanes, float *m, float *l, float *scale) {
    for (int lane = 0; lane < lanes; lane += W) {
        int first = lane / PANEL * PANEL, width = panel_width(lanes, first);
        float *column = s + in_panel(HERALD_TILE, first, width, 0) + lane - first;
        vf old = vf_load(m + lane), now = old, sum = vf_set1(0.0f);
        vf top[4] = {old, old, old, old}; /* four chains: one would wait for every comparison */
        for (int j = 0; j + 4 <= n; j += 4)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) top[i] = vf_max(vf_load(column + (j + i) * width), top[i]);
        for (int j = n / 4 * 4; j < n; j++) now = vf_max(vf_load(column + j * width), now);
        now = vf_max(vf_max(top[0], top[1]), vf_max(vf_max(top[2], top[3]), now));
        for (int j = 0; j < n; j++) {
            vf p = vf_exp2(vf_sub(vf_load(column + j * width), now));
            vf_store(column + j * width, p);
            sum = vf_add(sum, p);
        }
        for (int j = n; j < HERALD_TILE; j++) vf_store(column + j * width, vf_set1(0.0f));
        vf factor = vf_exp2(vf_sub(old, now));
        vf_store(scale + lane, factor);
        vf_store(l + lane, vf_fma(vf_load(l + lane), factor, sum));
        vf_store(m + lane, now);
    }
}

static void FN(attend_many)(const herald_attend *args) {
    int rows = args->rows, lanes = (int)herald_round_up((size_t)rows, W), dim = args->head_dim;
    float m[1024], l[1024], scale[1024];
    char *scratch = args->scratch;
    float *q = (float *)FN(take)(&scratch, sizeof(float) * (size_t)(lanes * dim)); /* items: head_dim */
    float *o = (float *)FN(take)(&scratch, sizeof(float) * (size_t)(lanes * dim)); /* items: head_dim */
    float *wide = (float *)FN(take)(&scratch, sizeof(float) * (size_t)(HERALD_TILE * FN(padded)(dim)));
    float *apart = (float *)FN(take)(&scratch, FN(p_tile_many)(rows));
    for (int row = 0; row < lanes; row++) {
        int first = row / PANEL * PANEL, width = panel_width(lanes, first);
        for (int c = 0; c < dim; c++)
            q[in_panel(dim, first, width, c) + row - first] = row < rows ? args->q[row * dim + c] : 0.0f;
    }
    memset(o, 0, sizeof(float) * (size_t)(lanes * dim));
    for (int row = 0; row < lanes; row++) m[row] = HERALD_SCORE_MIN, l[row] = 0.0f;
    int64_t ahead_bytes = (args->tuning.distance + 1) / 2 * args->stream.tile_bytes;
    int64_t tile_half = (int64_t)HERALD_TILE * dim * herald_element_bytes(args->dtype);
    for (int64_t first = 0, tile = 0; first < args->num_keys; first += HERALD_TILE, tile++) {
        int n = (int)(args->num_keys - first < HERALD_TILE ? args->num_keys - first : HERALD_TILE);
        int items = (int)herald_round_up((size_t)n, 8);
        const char *k = args->stream.k + tile * args->stream.tile_bytes;
        const char *v = args->stream.v + tile * args->stream.tile_bytes;
        const char *k_next = ahead_bytes ? k + ahead_bytes : NULL, *v_next = ahead_bytes ? v + ahead_bytes : NULL;
        float *p = (float *)(args->p + (args->keep_p ? (size_t)tile * FN(p_tile_many)(rows) : 0));
        FN(widen)(k, args->dtype, dim, n, wide, dim);
        if (n < items) memset(wide + (int64_t)n * dim, 0, sizeof(float) * (size_t)((items - n) * dim));
        FN(gemm)(wide, 1, dim, items, q, dim, lanes, dim, p, HERALD_TILE, NULL, k_next, tile_half, &args->tuning);
        if (args->raw) p = memcpy(apart, p, FN(p_tile_many)(rows));
        FN(softmax_many)(p, n, lanes, m, l, scale);
        if (args->keep_p) memcpy(args->p_max + tile * lanes, m, sizeof(float) * (size_t)lanes);
        if (!args->output) continue;
        FN(widen)(v, args->dtype, dim, n, wide, dim);
        FN(gemm)(wide, dim, 1, dim, p, HERALD_TILE, lanes, n, o, dim, scale, v_next, tile_half, &args->tuning);
    }
    memcpy(args->m, m, sizeof(float) * (size_t)rows);
    memcpy(args->l, l, sizeof(float) * (size_t)rows);
    for (int row = 0; args->output && row < rows; row++) {
        int first = row / PANEL * PANEL, width = panel_width(lanes, first);
        for (int c = 0; c < dim; c++) args->o[row * dim + c] = o[in_panel(dim, first, width, c) + row - first];
    }
}

static void FN(importance_many)(const herald_attend *args, const float *m, const float *inv_l, float *out) {
    int lanes = (int)herald_round_up((size_t)args->rows, W);
    int64_t tiles = (args->num_keys + HERALD_TILE - 1) / HERALD_TILE;
    float weight[1024], top[1024] = {0}, inverse[1024] = {0};
    memcpy(top, m, sizeof(float) * (size_t)args->rows);
    memcpy(inverse, inv_l, sizeof(float) * (size_t)args->rows);
    if (args->raw) memcpy(weight, inverse, sizeof(float) * (size_t)lanes);
    for (int64_t tile = 0; tile < tiles; tile++, out += HERALD_TILE) {
        const float *p = (const float *)(args->p + (size_t)tile * FN(p_tile_many)(args->rows));
        float *powers = args->p_max + tile * lanes;
        if (!args->raw) FN(tile_factors)(powers, top, lanes, powers);
        for (int lane = 0; lane < lanes && !args->raw; lane += W) {
            vf factor = vf_mul(vf_load(powers + lane), vf_load(inverse + lane)); /* 0 in lanes that are padding */
            vf_store(weight + lane, factor);
        }
        vf sum[HERALD_TILE]; /* p is read panel after panel, as it lies: one stream, which the hardware asks for ahead */
        for (int first = 0; first < lanes; first += PANEL) {
            int width = panel_width(lanes, first);
            const float *at = p + in_panel(HERALD_TILE, first, width, 0);
            for (int j = 0; j < HERALD_TILE; j++, at += width) {
                vf so_far = first ? sum[j] : vf_set1(0.0f);
                for (int lane = 0; lane < width; lane += W) {
                    vf value = vf_load(at + lane);
                    if (args->raw) value = vf_exp2(vf_sub(value, vf_load(top + first + lane)));
                    so_far = vf_fma(value, vf_load(weight + first + lane), so_far);
                }
                sum[j] = so_far;
            }
        }
        for (int j = 0; j < HERALD_TILE; j++) out[j] = vf_hsum(sum[j]);
    }
}

static void FN(weights_many)(const herald_attend *args, const int32_t *indices, int count, float *out, int stride) {
    int lanes = (int)herald_round_up((size_t)args->rows, W);
    for (int i = 0; i < count; i++) {
        int64_t tile = indices[i] / HERALD_TILE;
        const float *p = (const float *)(args->p + (size_t)tile * FN(p_tile_many)(args->rows));
        const float *factor = args->p_max + tile * lanes;
        for (int first = 0; first < args->rows; first += PANEL) {
            int width = panel_width(lanes, first);
            const float *at = p + in_panel(HERALD_TILE, first, width, indices[i] % HERALD_TILE);
            for (int row = 0; row < width && first + row < args->rows; row++)
                out[(first + row) * stride + i] = at[row] * factor[first + row];
        }
    }
}

/* ---- selection, gather, bandwidth ----------------------------------------------------------------------------- */

static int64_t FN(collect)(const float *values, int64_t length, uint32_t threshold, uint32_t *keys,
                           int32_t *positions) {
    int64_t n = 0, i = 0;
    for (; i + W <= length; i += W) n += collect_block(values + i, threshold, (int32_t)i, keys + n, positions + n);
    for (; i < length; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        uint32_t key = herald_key(bits);
        if (key >= threshold) keys[n] = key, positions[n++] = (int32_t)i;
    }
    return n;
}
static void FN(widen_row)(const char *row, int dtype, int head_dim, float *to) {
    FN(widen)(row, dtype, head_dim, 1, to, (int)herald_round_up((size_t)head_dim, W));
}
static void FN(copy_row)(char *to, const char *from, int64_t bytes, int streaming) {
    copy_block(to, from, bytes, streaming);
}
static void FN(fence)(void) { store_fence(); }
static uint64_t FN(read)(const char *from, int64_t bytes) { return read_bytes(from, bytes); }

/* Twelve chains, more than latency x ports; every loop is unrolled, so that they stay in registers. */
static int64_t FN(peak_fma)(int64_t rounds) {
    vf acc[12], a = vf_set1(0.999f), b = vf_set1(1e-3f);
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) acc[i] = vf_set1((float)i);
    for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) acc[i] = vf_fma(acc[i], a, b);
    }
    float sum = 0;
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) sum += vf_hsum(acc[i]);
    volatile float keep = sum;
    (void)keep;
    return rounds * 12 * W * 2;
}

#define TABLE_FIELDS \
    .scratch_bytes = FN(scratch_bytes), .scan_int8 = FN(scan_int8), .score = FN(score), .accumulate = FN(accumulate), .collect = FN(collect), \
    .widen = FN(widen_row), .copy_row = FN(copy_row), .fence = FN(fence), .read = FN(read), .peak = {FN(peak_fma)}
#define FEW_AND_MANY \
    .attend = {FN(attend_few), FN(attend_many)}, .importance = {FN(importance_few), FN(importance_many)}, \
    .weights = {FN(weights_few), FN(weights_many)}, .p_tile_bytes = {FN(p_tile_few), FN(p_tile_many)}, \
    .p_max_floats = {FN(p_max_few), FN(p_max_many)}
