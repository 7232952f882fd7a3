/* What the C files of the CPU kernels share: the layout of KV, one tier's table of functions, the workers.
 *
 * Memory. K and V of one (layer, slot, KV head) are a stream of tiles of 64 tokens. In a paged pool a page is one K tile
 * followed by one V tile (2 x 64 x d elements, contiguous), so attention reads one sequential stream and a row of K or V
 * stays contiguous for the gather. A flat [S, d] array is the same with two base addresses.
 *
 * Arithmetic. Queries arrive scaled by log2(e) / sqrt(d): softmax runs in base 2. A unit (request, KV head) is cut at fixed
 * borders; every chunk has its own running maximum m, sum l and output o, merged in order. So the
 * result has the same bits for any number of threads.
 */
#ifndef HERALD_H
#define HERALD_H

#include <stddef.h>
#include <stdint.h>

/* Every function of a tier is inlined into, or named as, a function of that tier: no other can hold its instructions. */
#define INLINE static inline __attribute__((always_inline))

#define HERALD_TILE 64
#define HERALD_MAX_HEAD_DIM 256
#define HERALD_INT8_ROW(head_dim) (((int64_t)(head_dim) + 31) / 32 * 32) /* bytes; 64 rows, then 64 float scales */
#define HERALD_ROUNDS_TO_ZERO 1e-30f /* a row of K or a query whose largest magnitude is below, in 8 or 16 bits */
#define HERALD_SCORE_MIN (-3.0e38f) /* start of a running maximum: finite, so that -inf - m is -inf and never NaN */

enum { HERALD_BF16 = 0, HERALD_FP16 = 1, HERALD_FP32 = 2 };
/* Kernel kinds: lanes along head_dim (few rows), lanes are query rows (many), matrix tiles. */
enum { HERALD_FEW = 0, HERALD_MANY = 1, HERALD_AMX = 2, HERALD_KINDS = 3 };
enum { HERALD_PEAK_FMA = 0, HERALD_PEAK_BF16_DOT = 1, HERALD_PEAK_AMX = 2, HERALD_PEAKS = 3 };
enum { HERALD_PV_AUTO = 0, HERALD_PV_F32 = 1, HERALD_PV_BF16 = 2 };

static inline int herald_element_bytes(int dtype) { return dtype == HERALD_FP32 ? 4 : 2; }
static inline size_t herald_round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* One (layer, slot, KV head): addresses of its first K tile and V tile, and the bytes from a tile to the next. */
typedef struct {
    const char *k, *v;
    int64_t tile_bytes;
} herald_stream;

/* A store of KV as seen by the kernels; strides in bytes. */
typedef struct {
    char *k, *v;
    int64_t tile_bytes, head_bytes, slot_bytes, layer_bytes;
    int64_t capacity; /* tokens per slot */
    int dtype, head_dim, num_heads, num_slots, num_layers;
} herald_kv;

static inline herald_stream herald_stream_of(const herald_kv *kv, int64_t layer, int64_t slot, int64_t head) {
    int64_t offset = layer * kv->layer_bytes + slot * kv->slot_bytes + head * kv->head_bytes;
    herald_stream stream = {kv->k + offset, kv->v + offset, kv->tile_bytes};
    return stream;
}

/* How a scan is laid over the memory system; results do not depend on it (only `tiles` changes roundings). Which values are
 * best is measured, not known: herald_exec/kernels/tuning.py. */
typedef struct {
    int distance; /* of software prefetch in half pages (a K tile or a V tile); 0: none */
    int streams;  /* 1: lines in order; more: several places of a tile at once, for several hardware prefetchers */
    int turned;   /* the tier's other shape of PV passes */
    int tiles;    /* scores of few rows on matrix tiles, where the tier has them */
    int rows_ahead; /* single rows (of candidates, of what was selected) asked for ahead of use */
    int bulk;     /* a tile is read in one run just before use, so that the hardware prefetches, in place of software */
    int even;     /* few rows: prefetches go on while scores become probabilities, instead of resting there */
} herald_tuning;

/* Attention of `rows` query rows over one chunk. p and p_max keep what importance needs (layout private to the kind);
 * m, l: [rows]; o: [rows][head_dim], not yet divided by l. */
typedef struct {
    herald_stream stream;
    int64_t num_keys;
    int begins;        /* the first of a unit: no chunk before it has asked for its first rows */
    int64_t follow;    /* keys behind it that the same thread scans next */
    int dtype, head_dim, rows;
    int keep_p;        /* 0: p is one tile, overwritten (draft rows: no importance wanted) */
    int output;        /* 0: K only, o is not computed */
    int raw;           /* keep scores, not p: the paper's second exponential, for the benchmark */
    int pv;            /* HERALD_PV_..: whether P may be rounded to bf16 */
    herald_tuning tuning;
    const float *q;    /* [rows][head_dim], scaled */
    char *p;
    float *p_max;
    float *m, *l, *o;
    char *scratch;     /* tier's own, scratch_bytes() of it, 64-byte aligned */
} herald_attend;

typedef struct herald_tier {
    const char *name;
    int kinds;                 /* bit mask of the kinds it has */
    int many_from;             /* rows from which MANY is faster than FEW */
    void (*attend[HERALD_KINDS])(const herald_attend *);
    /* out[key] = sum over rows of p * 2^(tile maximum - m[row]) * inv_l[row], for the chunk's keys. The powers take the
     * places of the maxima in p_max, for `weights`. */
    void (*importance[HERALD_KINDS])(const herald_attend *, const float *m, const float *inv_l, float *out);
    /* After importance: out[row * stride + i] = the row's own weight of key indices[i] (relative to m). */
    void (*weights[HERALD_KINDS])(const herald_attend *, const int32_t *indices, int count, float *out, int stride);
    size_t (*p_tile_bytes[HERALD_KINDS])(int rows);
    size_t (*p_max_floats[HERALD_KINDS])(int rows); /* per tile */
    size_t (*scratch_bytes)(int rows, int head_dim);
    /* The same scan of 8-bit keys (no output). */
    void (*scan_int8)(const herald_attend *);
    /* Single rows at ascending positions, `rows_ahead` asked for ahead of use.
     * score: weight[row * stride + i] = 2^(score - m[row]) from K; accumulate: args->o[row] += weight[row][i] * v[i]. */
    void (*score)(const herald_attend *, const int32_t *positions, int64_t count, const float *m, float *weight,
                  int64_t stride);
    void (*accumulate)(const herald_attend *, const int32_t *positions, int64_t count, const float *weight, int64_t stride);
    /* Positions with key >= threshold, ascending; returns how many. Room for `length` + 16 in both outputs. */
    int64_t (*collect)(const float *values, int64_t length, uint32_t threshold, uint32_t *keys, int32_t *positions);
    void (*widen)(const char *row, int dtype, int head_dim, float *to); /* one row; `to` holds 256 */
    void (*copy_row)(char *to, const char *from, int64_t bytes, int streaming);
    void (*fence)(void);
    uint64_t (*read)(const char *from, int64_t bytes);
    /* Arithmetic peaks: `rounds` rounds of independent instructions; returns the floating-point operations done. */
    int64_t (*peak[HERALD_PEAKS])(int64_t rounds);
} herald_tier;

/* cpu.c */
int herald_num_tiers(void);
const char *herald_tier_name(int index);
int herald_tier_built(int index);
int herald_tier_usable(int index);     /* built, the CPU has it, the operating system saves its registers */
const herald_tier *herald_tier_get(int index);
int herald_is_intel(void);
/* The kernel for `queries` a token whose heads come `group` to a KV head. */
int herald_kind_for(const herald_tier *tier, int queries, int group, int dtype, int head_dim, int pv);

/* topk.c: order-preserving key of a float; NaN is 0 and ranks last, -0 equals +0. */
static inline uint32_t herald_key(uint32_t bits) {
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;
    if (bits == 0x80000000u) bits = 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
size_t herald_topk_scratch_bytes(int64_t length);
int64_t herald_topk(const herald_tier *tier, const float *values, int64_t length, int64_t k, char *scratch, int32_t *out);
/* Of the `wanted` largest: positions beyond the `heavy` largest and within the `sure` largest (heavy <= sure <= wanted), and
 * all others, both ascending. One search for all three borders. Room for 16 more in both. */
void herald_topk_parts(const herald_tier *tier, const float *values, int64_t length, int64_t heavy, int64_t sure,
                       int64_t wanted, char *scratch, int32_t *middle, int64_t *num_middle, int32_t *others,
                       int64_t *num_others);
int64_t herald_topk_heap(const float *values, int64_t length, int64_t k, char *scratch, int32_t *out);

/* workers.c: a job is `tasks` calls of run(context, task); the caller works too, so a job always ends. */
typedef void (*herald_run)(void *context, int64_t task);
int herald_default_threads(void);
void herald_parallel(herald_run run, void *context, int64_t tasks, int threads);
char *herald_thread_scratch(size_t bytes); /* this thread's own, 64-byte aligned, kept between tasks */
void *herald_workspace_take(size_t bytes, size_t *got);
void herald_workspace_give(void *memory, size_t got);
void *herald_map(size_t bytes); /* 2 MiB aligned, huge pages advised, untouched; NULL when there is none */
void herald_unmap(void *memory, size_t bytes);
double herald_seconds(void);

/* select.c. Where time goes: the scan of K and V (or of K, or of 8-bit keys), importance of every position, top-k, exact
 * scores of candidates, output (from selected entries where the scan made none), copy of what was selected. */
enum { HERALD_SCAN, HERALD_IMPORTANCE, HERALD_TOPK, HERALD_RESCORE, HERALD_OUTPUT, HERALD_GATHER, HERALD_PHASES };
typedef struct {
    const herald_tier *tier;
    const herald_kv *kv, *draft;          /* draft may be NULL */
    const herald_kv *keys8;               /* 8-bit keys of the same shape, or NULL; its v: a head's channel factors */
    double candidates;                    /* with keys8: times the budget that may be selected; see select.c */
    int64_t layer, draft_layer, rows;     /* rows: of the batch */
    const int64_t *slots, *lengths, *budgets, *draft_slots, *draft_lengths;
    const float *queries;                 /* [rows][x][num_heads][d] */
    const float *self_k, *self_v;         /* [rows][x][kv_heads][d] or NULL */
    const struct herald_gather_args *gather; /* copy what a unit selected right behind its top-k, or NULL */
    int x, num_heads;
    int pv, key_only, smoothing, paper_like, rescore_all;
    herald_tuning tuning;
    int64_t max_k;
    float *output;                        /* [rows][x][num_heads][d] */
    int32_t *indices, *counts;            /* [rows][kv_heads][max_k], [rows][kv_heads] */
    uint8_t *status;                      /* [rows][kv_heads] */
    float *importance;                    /* [rows][kv_heads][importance_stride] or NULL */
    int64_t importance_stride;
    int threads;
    double *phase_seconds;                /* [HERALD_PHASES] summed over threads, or NULL */
} herald_select_args;
int herald_select(const herald_select_args *args); /* 0, or -1 when memory is short */

/* quantise.c: 8-bit keys of positions [start, stop) of one slot, from K. */
void herald_quantise(const herald_kv *kv, const herald_kv *keys8, int64_t layer, int64_t slot, int64_t start,
                     int64_t stop, int threads);

/* gather.c */
typedef struct {
    int ahead;     /* rows */
    int level;     /* 0: first cache, 1: second, 2: first, not kept */
    int scattered; /* lines of a row in an order that hardware prefetchers do not follow */
    int streaming; /* stores past the cache, where addresses allow */
} herald_gather_tuning;
typedef struct herald_gather_args {
    const herald_tier *tier;
    const herald_kv *kv;
    int64_t layer, rows, max_k;
    const int64_t *slots;
    const int32_t *indices, *counts;
    char *out_k, *out_v;                  /* [rows][kv_heads][max_k][d] */
    herald_gather_tuning tuning;
    int threads;
} herald_gather_args;
void herald_gather(const herald_gather_args *args);
/* The rows of one unit (row x heads + head) alone, by this thread: its counts and indices are there. */
void herald_gather_unit(const herald_gather_args *args, int64_t unit);

/* memory.c */
double herald_read_seconds(const herald_tier *tier, const char *from, int64_t bytes, int threads);
/* With a tier: its stores past the cache, `to` aligned to 64 bytes; NULL: memcpy. */
double herald_copy_seconds(const herald_tier *tier, char *to, const char *from, int64_t bytes, int threads);
double herald_peak_flops(const herald_tier *tier, int which, int threads); /* per second; 0: the tier has none */
void herald_touch(char *memory, int64_t bytes, int threads);
void herald_fill_normal(char *memory, int64_t elements, int dtype, uint64_t seed, int threads);

#endif
