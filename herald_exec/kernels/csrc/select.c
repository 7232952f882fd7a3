/* Fused attention + importance + exact top-k for one layer of a ragged batch.
 *
 *   unit (row of the batch, KV head)  -> parts: chunks of the prefix | chunks of the draft | the query's own key
 *   task (unit, group of chunks)      -> attend each chunk into its part
 *   last task of a unit               -> merge parts in order -> output; importance; top-k
 *
 * Units are taken longest first from one queue. With few units their chunks are spread over the threads, with many each
 * unit stays on one thread, whose p buffer then stays in its cache, but for the last ones: they are taken in pieces, so that
 * all threads end at about the same time. Borders are fixed, so the bits do not depend on it.
 */
#include "herald.h"
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define SPLIT_BELOW 4                     /* units per thread under which chunks are spread */
#define SPLIT_TASKS 8                     /* tasks per thread then */
#define SPLIT_BYTES ((size_t)2 << 30)     /* but not if their p would take more than this */
/* Whole units to the end leave every thread idle for half a unit: with 12 units a thread 4% of the time, more where virtual
 * CPUs differ by a factor of 2. Two units a thread, so that the slowest finds its last whole one done by then. */
#define TAIL_UNITS 2                      /* per thread, taken in pieces */
#define TAIL_PIECES 8                     /* of a unit; a piece has a chunk at least */
#define TAIL_BYTES ((size_t)256 << 20)    /* of p: fewer units where that is not enough */

typedef struct {
    int64_t row, head, length, chunks, draft_length, draft_chunks, parts;
    int64_t first_task, groups;
    size_t bytes;
    char *memory; /* of a unit that several threads may work on; NULL: the thread's own */
    _Atomic int64_t left;
} unit;

typedef struct job {
    const herald_select_args *args;
    unit *units;
    int64_t num_units;
    int64_t num_tasks;
    int rows, group, kind, failed;
    int64_t chunk; /* tokens */
    size_t p_tile, p_max_tile; /* bytes, floats */
    _Atomic int64_t phase_ns[HERALD_PHASES];
} job;

/* What one unit keeps until its last task: laid out in one piece of memory. */
typedef struct {
    char *p;
    float *p_max, *m, *l, *o;
} unit_memory;

static int64_t tiles_of(int64_t tokens) { return (tokens + HERALD_TILE - 1) / HERALD_TILE; }
/* Many rows make a chunk's output large (rows x head_dim): longer chunks then, still a matter of the shape alone. */
static int64_t chunk_tokens(int rows) { return rows < 16 ? 2048 : 8192; }

static size_t lay_out(const job *job, const unit *unit, char *memory, unit_memory *out) {
    size_t at = 0, tiles = (size_t)tiles_of(unit->length), rows = (size_t)job->rows, parts = (size_t)unit->parts;
    size_t dim = (size_t)job->args->kv->head_dim;
#define PLACE(field, type, bytes) \
    do { \
        if (out) out->field = (type)(memory + at); \
        at += herald_round_up(bytes, 64); \
    } while (0)
    PLACE(p, char *, tiles * job->p_tile);
    PLACE(p_max, float *, tiles * job->p_max_tile * sizeof(float));
    PLACE(m, float *, parts * rows * sizeof(float));
    PLACE(l, float *, parts * rows * sizeof(float));
    PLACE(o, float *, parts * rows * dim * sizeof(float));
#undef PLACE
    return at;
}

static char *carve(char **from, size_t bytes) {
    char *here = *from;
    *from += herald_round_up(bytes, 64);
    return here;
}

/* Single rows whose weights are worked on at once: about as long as the rows that were asked for take to arrive. */
#define GROUP_ROWS 128

/* Weights of a group of single rows; with 8-bit keys five lists of candidates, their importance, and weights twice. A
 * budget may be the length. */
static size_t candidate_bytes(const job *job, int64_t length) {
    size_t rows = (size_t)job->rows, group = rows * GROUP_ROWS * sizeof(float) + 8 * 64;
    if (!job->args->keys8) return job->args->key_only ? group : 0;
    return ((size_t)length + 32) * (6 + 2 * rows) * 4 + group;
}

/* Thread memory beside a unit's own: queries, tier scratch, a p tile for drafts, and what finishing needs. */
static size_t task_bytes(const job *job, int64_t length) {
    const herald_select_args *args = job->args;
    size_t rows = (size_t)job->rows, dim = (size_t)args->kv->head_dim;
    size_t padded = (size_t)tiles_of(length) * HERALD_TILE;
    return 2 * rows * dim * sizeof(float) + args->tier->scratch_bytes(job->rows, args->kv->head_dim) + job->p_tile +
           2 * padded * sizeof(float) + herald_topk_scratch_bytes(length) + 4 * rows * (dim + 64) * sizeof(float) +
           job->p_max_tile * sizeof(float) + 32 * 64 + candidate_bytes(job, length);
}

static void pack_queries(const job *job, const unit *unit, float *q) {
    const herald_select_args *args = job->args;
    int dim = args->kv->head_dim, group = job->group;
    float scale = (float)(1.4426950408889634 / sqrt((double)dim));
    for (int i = 0; i < args->x; i++)
        for (int g = 0; g < group; g++) {
            const float *from =
                args->queries + ((unit->row * args->x + i) * args->num_heads + unit->head * group + g) * (int64_t)dim;
            for (int c = 0; c < dim; c++) *q++ = from[c] * scale;
        }
}

/* Queries for a scan of 8-bit keys: times the channel factors that the keys were divided by. */
static void pack_channels(const job *job, const unit *unit, const float *q, float *to) {
    const herald_select_args *args = job->args;
    const float *channels = (const float *)herald_stream_of(args->keys8, args->layer, args->slots[unit->row], unit->head).v;
    for (int row = 0; row < job->rows; row++)
        for (int c = 0; c < args->kv->head_dim; c++) *to++ = *q++ * channels[c];
}

static herald_attend attend_of(const job *job, const unit *unit, const unit_memory *memory, int64_t part,
                               const float *q, char *scratch) {
    const herald_select_args *args = job->args;
    herald_attend attend = {.dtype = args->kv->dtype, .head_dim = args->kv->head_dim, .rows = job->rows, .q = q,
                            .output = 1, .scratch = scratch, .pv = args->pv, .tuning = args->tuning};
    attend.m = memory->m + part * job->rows;
    attend.l = memory->l + part * job->rows;
    attend.o = memory->o + part * job->rows * (int64_t)args->kv->head_dim;
    if (part < unit->chunks) {
        int64_t first = part * job->chunk, tile = first / HERALD_TILE;
        attend.stream = herald_stream_of(args->keys8 ? args->keys8 : args->kv, args->layer, args->slots[unit->row],
                                         unit->head);
        attend.num_keys = unit->length - first < job->chunk ? unit->length - first : job->chunk;
        attend.stream.k += tile * attend.stream.tile_bytes;
        attend.stream.v += tile * attend.stream.tile_bytes;
        attend.keep_p = 1;
        attend.output = !args->key_only && !args->keys8;
        attend.raw = args->paper_like;
        attend.p = memory->p + (size_t)tile * job->p_tile;
        attend.p_max = memory->p_max + (size_t)tile * job->p_max_tile;
    }
    return attend;
}

static void attend_draft(const job *job, const unit *unit, const unit_memory *memory, const float *q, char *scratch,
                         char *p) {
    const herald_select_args *args = job->args;
    for (int64_t chunk = 0; chunk < unit->draft_chunks; chunk++) {
        herald_attend attend = attend_of(job, unit, memory, unit->chunks + chunk, q, scratch);
        int64_t first = chunk * job->chunk, tile = first / HERALD_TILE;
        attend.stream = herald_stream_of(args->draft, args->draft_layer, args->draft_slots[unit->row], unit->head);
        attend.num_keys = unit->draft_length - first < job->chunk ? unit->draft_length - first : job->chunk;
        attend.stream.k += tile * attend.stream.tile_bytes;
        attend.stream.v += tile * attend.stream.tile_bytes;
        attend.tuning.distance = 0;
        attend.p = p;
        attend.p_max = (float *)(p + herald_round_up(job->p_tile, 64));
        args->tier->attend[job->kind](&attend);
    }
}

/* The query's own key: one score a row, weight 1 at its own maximum. */
static void attend_self(const job *job, const unit *unit, const unit_memory *memory, const float *q) {
    const herald_select_args *args = job->args;
    int dim = args->kv->head_dim;
    int64_t part = unit->parts - 1;
    for (int row = 0; row < job->rows; row++, q += dim) {
        int64_t at = ((unit->row * args->x + row / job->group) * args->kv->num_heads + unit->head) * (int64_t)dim;
        float score = 0.0f;
        for (int c = 0; c < dim; c++) score += q[c] * args->self_k[at + c];
        memory->m[part * job->rows + row] = score;
        memory->l[part * job->rows + row] = 1.0f;
        memcpy(memory->o + (part * job->rows + row) * dim, args->self_v + at, sizeof(float) * (size_t)dim);
    }
}

/* Merge parts in order; m, l: [rows] of the whole. skip: chunks whose o does not exist (key-only). */
static void merge(const job *job, const unit *unit, const unit_memory *memory, int64_t skip, float *m, float *l,
                  float *o) {
    int dim = job->args->kv->head_dim;
    for (int row = 0; row < job->rows; row++) {
        float top = HERALD_SCORE_MIN, sum = 0.0f;
        for (int64_t part = 0; part < unit->parts; part++) {
            float part_m = memory->m[part * job->rows + row];
            if (!(part_m <= top)) top = part_m; /* a NaN maximum is taken, so that it shows */
        }
        float *out = o + row * dim;
        memset(out, 0, sizeof(float) * (size_t)dim);
        for (int64_t part = 0; part < unit->parts; part++) {
            float factor = exp2f(memory->m[part * job->rows + row] - top);
            sum += memory->l[part * job->rows + row] * factor;
            if (part < skip) continue;
            const float *from = memory->o + (part * job->rows + row) * dim;
            for (int c = 0; c < dim; c++) out[c] += from[c] * factor;
        }
        m[row] = top;
        l[row] = sum;
    }
}

/* For a unit's single rows of K and V; `o` is added to. */
static herald_attend single_rows(const job *job, const unit *unit, const float *q, float *o, char *scratch) {
    const herald_select_args *args = job->args;
    herald_attend attend = {.dtype = args->kv->dtype, .head_dim = args->kv->head_dim, .rows = job->rows, .q = q, .o = o,
                            .scratch = scratch, .tuning = args->tuning};
    attend.stream = herald_stream_of(args->kv, args->layer, args->slots[unit->row], unit->head);
    return attend;
}

/* Sixteen sums side by side, so that no addition waits for the one before. */
static float sum_of(const float *x, int64_t n) {
    float part[16] = {0}, sum = 0.0f;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int lane = 0; lane < 16; lane++) part[lane] += x[i + lane];
    for (; i < n; i++) sum += x[i];
    for (int lane = 0; lane < 16; lane++) sum += part[lane];
    return sum;
}

/* Key-only: add the selected entries' V and renormalise over what was seen (selected, draft, own key). `known` weights
 * [row][i], or NULL: those of the scan. */
static void output_from_selected(const job *job, const unit *unit, const unit_memory *memory, const int32_t *indices,
                                 int64_t count, const float *known, const float *m, float *l, float *o, char *scratch) {
    const herald_select_args *args = job->args;
    int rows = job->rows;
    float *weights = (float *)carve(&scratch, sizeof(float) * GROUP_ROWS * (size_t)rows);
    herald_attend all = attend_of(job, unit, memory, 0, NULL, NULL);
    herald_attend selected = single_rows(job, unit, NULL, o, scratch);
    memset(l, 0, sizeof(float) * (size_t)rows);
    for (int64_t part = unit->chunks; part < unit->parts; part++)
        for (int row = 0; row < rows; row++)
            l[row] += memory->l[part * rows + row] * exp2f(memory->m[part * rows + row] - m[row]);
    for (int64_t first = 0; first < count; first += GROUP_ROWS) {
        int64_t some = count - first < GROUP_ROWS ? count - first : GROUP_ROWS, stride = known ? count : GROUP_ROWS;
        const float *now = known ? known + first : weights;
        if (!known) args->tier->weights[job->kind](&all, m, indices + first, (int)some, weights, GROUP_ROWS);
        for (int row = 0; row < rows; row++) l[row] += sum_of(now + row * stride, some);
        args->tier->accumulate(&selected, indices + first, some, count - first - some, now, stride);
    }
}

/* After a scan of 8-bit keys: `candidates` (ascending) are scored again from K; weights[row][i] becomes 2^(score - m),
 * l is corrected by what that changes, importance[i] is the candidate's. So only the part of l that no candidate holds keeps
 * 8-bit scores. */
static void score_candidates(const job *job, const unit *unit, const unit_memory *memory, const float *q,
                             const int32_t *candidates, int64_t count, const float *m, float *l, float *weights,
                             float *importance, char *scratch) {
    int rows = job->rows;
    float *old = (float *)carve(&scratch, sizeof(float) * GROUP_ROWS * (size_t)rows);
    herald_attend all = attend_of(job, unit, memory, 0, NULL, NULL);
    herald_attend exact = single_rows(job, unit, q, NULL, scratch);
    job->args->tier->score(&exact, candidates, count, 0, m, weights, count);
    for (int64_t first = 0; first < count; first += GROUP_ROWS) {
        int some = (int)(count - first < GROUP_ROWS ? count - first : GROUP_ROWS);
        job->args->tier->weights[job->kind](&all, m, candidates + first, some, old, GROUP_ROWS);
        for (int row = 0; row < rows; row++)
            l[row] += sum_of(weights + row * count + first, some) - sum_of(old + row * GROUP_ROWS, some);
    }
    memset(importance, 0, sizeof(float) * (size_t)count);
    for (int row = 0; row < rows; row++) {
        float inverse = 1.0f / l[row];
        for (int64_t i = 0; i < count; i++) importance[i] += weights[row * count + i] * inverse;
    }
}

/* Mean over the positions within width / 2 of each that exist. */
static void smooth(const float *from, int64_t length, int width, float *to) {
    int64_t half = width / 2;
    for (int64_t i = 0; i < length; i++) {
        int64_t low = i < half ? 0 : i - half, high = i + half < length ? i + half : length - 1;
        float sum = 0.0f;
        for (int64_t j = low; j <= high; j++) sum += from[j];
        to[i] = sum / (float)(high - low + 1);
    }
}

/* The time since `since` goes to a phase; returns now. */
static double add_phase(const job *job, int phase, double since) {
    if (!job->args->phase_seconds) return since;
    double now = herald_seconds();
    atomic_fetch_add(&((struct job *)job)->phase_ns[phase], (int64_t)((now - since) * 1e9));
    return now;
}

/* Output of a unit in the caller's order; 1 when anything is not finite. */
static int write_output(const job *job, const unit *unit, const float *l, const float *o) {
    const herald_select_args *args = job->args;
    int dim = args->kv->head_dim, bad = 0;
    for (int row = 0; row < job->rows; row++) {
        float *to = args->output + ((unit->row * args->x + row / job->group) * args->num_heads +
                                    unit->head * job->group + row % job->group) * (int64_t)dim;
        float inverse = unit->parts ? 1.0f / l[row] : 0.0f;
        for (int c = 0; c < dim; c++) {
            to[c] = unit->parts ? o[row * dim + c] * inverse : 0.0f;
            bad |= !isfinite(to[c]);
        }
    }
    return bad;
}

static unit *unit_of(const job *job, int64_t task) { /* the unit whose tasks contain this one */
    int64_t low = 0, high = job->num_units;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (job->units[middle].first_task <= task) low = middle;
        else high = middle;
    }
    return &job->units[low];
}

/* Where the next unit begins, so that memory does not rest while importance is summed; NULL when there is none. */
static const char *next_unit(const job *job) {
    int64_t task = herald_next_task();
    if (!job->args->tuning.warm || task >= job->num_tasks) return NULL;
    const unit *next = unit_of(job, task);
    if (next->memory) return NULL; /* only a piece of it may be this thread's */
    const herald_kv *read = job->args->keys8 ? job->args->keys8 : job->args->kv;
    return herald_stream_of(read, job->args->layer, job->args->slots[next->row], next->head).k;
}

/* With 8-bit keys: of the `wanted` best by 8-bit scores the best `sure` are selected, of which only those that weigh most
 * are scored again; the rest of the wanted is scored again and the best of it selected. */
#define HEAVY_SHARE 8 /* one in so many of the sure: they hold most of the denominators and of the output */
static int64_t num_candidates(const herald_select_args *args, int64_t length, int64_t budget, int64_t *sure) {
    double wanted = ceil((double)budget * args->candidates);
    *sure = args->rescore_all ? 0 : (int64_t)((double)(budget < length ? budget : length) / args->candidates);
    return wanted < (double)length ? (int64_t)wanted : length;
}

/* Of the `sure` places those that are not among the heaviest, in place; returns how many. */
static int64_t without_heaviest(const herald_tier *tier, const float *values, int32_t *places, int64_t sure, char *topk,
                                float *of_sure, int32_t *heaviest) {
    for (int64_t i = 0; i < sure; i++) of_sure[i] = values[places[i]];
    int64_t heavy = herald_topk(tier, of_sure, sure, (sure + HEAVY_SHARE - 1) / HEAVY_SHARE, topk, heaviest), left = 0;
    heaviest[heavy] = -1;
    for (int64_t i = 0, at = 0; i < sure; i++) {
        int is_heavy = heaviest[at] == i;
        places[left] = places[i];
        left += !is_heavy;
        at += is_heavy;
    }
    return left;
}

/* Of `count` candidates the `sure` ones (ascending places among them) and the others. */
static int64_t split(const int32_t *candidates, int64_t count, int32_t *places, int64_t sure, int32_t *of_sure,
                     int32_t *others) {
    int64_t a = 0, b = 0;
    places[sure] = -1;
    for (int64_t i = 0; i < count; i++) {
        int is_sure = places[a] == i;
        of_sure[a] = others[b] = candidates[i];
        a += is_sure;
        b += !is_sure;
    }
    return b;
}

/* Two ascending lists as one; from[n] = the place in `b`, or -1. Without branches on positions, which no predictor guesses. */
static int64_t merge_positions(int32_t *a, int64_t a_count, const int32_t *b, const int32_t *places, int64_t b_count,
                               int32_t *to, int32_t *from) {
    int64_t i = 0, j = 0, count = a_count + b_count;
    a[a_count] = INT32_MAX;
    for (int64_t n = 0; n < count; n++) {
        int32_t second = j < b_count ? b[places[j]] : INT32_MAX;
        int first = a[i] < second;
        to[n] = first ? a[i] : second;
        from[n] = first ? -1 : places[j];
        i += first;
        j += !first;
    }
    return count;
}

/* Candidates by 8-bit scores. Those at the border of the budget and the heaviest are scored again from K, and the best of
 * them join those that are sure. Returns how many; known: weights [row][i], exact where K was read. */
static int64_t select_among_candidates(const job *job, const unit *unit, const unit_memory *memory, const float *q,
                                       float *importance, const float *m, float *l, int32_t *indices, char *topk,
                                       float **known, char **scratch, double *start) {
    const herald_select_args *args = job->args;
    int64_t budget = args->budgets[unit->row], rows = job->rows, sure;
    int64_t wanted = num_candidates(args, unit->length, budget, &sure);
    size_t room = sizeof(int32_t) * (size_t)(wanted + 16);
    int32_t *candidates = (int32_t *)carve(scratch, room), *places = (int32_t *)carve(scratch, room);
    int32_t *of_sure = (int32_t *)carve(scratch, room), *border = (int32_t *)carve(scratch, room);
    int32_t *from = (int32_t *)carve(scratch, room);
    float *values = (float *)carve(scratch, room), *weights = (float *)carve(scratch, room * (size_t)rows);
    *known = (float *)carve(scratch, room * (size_t)rows);
    int64_t found = herald_topk(args->tier, importance, unit->length, wanted, topk, candidates);
    for (int64_t i = 0; sure && i < found; i++) values[i] = importance[candidates[i]];
    if (sure) {
        sure = herald_topk(args->tier, values, found, sure, topk, places);
        sure = without_heaviest(args->tier, values, places, sure, topk, *known, from);
    }
    int64_t others = split(candidates, found, places, sure, of_sure, border);
    *start = add_phase(job, HERALD_TOPK, *start);
    score_candidates(job, unit, memory, q, border, others, m, l, weights, values, *scratch);
    *start = add_phase(job, HERALD_RESCORE, *start);
    int64_t best = herald_topk(args->tier, values, others, budget - sure, topk, places);
    int64_t count = merge_positions(of_sure, sure, border, places, best, indices, from);
    herald_attend all = attend_of(job, unit, memory, 0, NULL, NULL);
    args->tier->weights[job->kind](&all, m, indices, (int)count, *known, (int)count);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < count; i++)
            if (from[i] >= 0) (*known)[row * count + i] = weights[row * others + from[i]];
    for (int64_t i = 0; i < others; i++) importance[border[i]] = values[i];
    return count;
}

static void finish(job *job, const unit *unit, const unit_memory *memory, const float *q, char *scratch) {
    const herald_select_args *args = job->args;
    const herald_tier *tier = args->tier;
    size_t rows = (size_t)job->rows, dim = (size_t)args->kv->head_dim;
    size_t padded = (size_t)tiles_of(unit->length) * HERALD_TILE;
    float *m = (float *)carve(&scratch, sizeof(float) * rows), *l = (float *)carve(&scratch, sizeof(float) * rows);
    float *inverse = (float *)carve(&scratch, sizeof(float) * rows);
    float *o = (float *)carve(&scratch, sizeof(float) * rows * dim);
    float *importance = (float *)carve(&scratch, sizeof(float) * padded), *ranked = importance;
    float *smoothed = (float *)carve(&scratch, sizeof(float) * padded);
    char *topk = carve(&scratch, herald_topk_scratch_bytes(unit->length));
    double start = herald_seconds();
    int key_only = args->key_only || args->keys8;
    merge(job, unit, memory, key_only ? unit->chunks : 0, m, l, o);
    for (size_t row = 0; row < rows; row++) inverse[row] = 1.0f / l[row];
    const char *warm = next_unit(job);
    int64_t warm_bytes = (int64_t)args->tuning.warm << 10, each = job->chunk / HERALD_TILE * HERALD_WARM_BYTES;
    for (int64_t chunk = 0; chunk < unit->chunks; chunk++) {
        herald_attend attend = attend_of(job, unit, memory, chunk, NULL, NULL);
        if (warm && (chunk + 1) * each <= warm_bytes) attend.warm = warm + chunk * each;
        tier->importance[job->kind](&attend, m, inverse, importance + chunk * job->chunk);
    }
    if (args->smoothing > 1) smooth(importance, unit->length, args->smoothing, ranked = smoothed);
    int64_t at = unit->row * args->kv->num_heads + unit->head;
    start = add_phase(job, HERALD_IMPORTANCE, start);
    int64_t budget = args->budgets[unit->row];
    int32_t *indices = args->indices + at * args->max_k;
    float *known = NULL;
    int64_t count = args->keys8 ? select_among_candidates(job, unit, memory, q, importance, m, l, indices, topk, &known,
                                                          &scratch, &start)
                    : args->paper_like ? herald_topk_heap(ranked, unit->length, budget, topk, indices)
                                       : herald_topk(tier, ranked, unit->length, budget, topk, indices);
    if (args->importance)
        memcpy(args->importance + at * args->importance_stride, ranked, sizeof(float) * (size_t)unit->length);
    args->counts[at] = (int32_t)count;
    for (int64_t i = count; i < args->max_k; i++) indices[i] = -1;
    start = add_phase(job, HERALD_TOPK, start);
    if (args->gather) { /* while this unit's rows may still be in a cache */
        herald_gather_unit(args->gather, at);
        start = add_phase(job, HERALD_GATHER, start);
    }
    int bad = 0;
    for (size_t row = 0; row < rows; row++) bad |= unit->parts && !(isfinite(l[row]) && l[row] > 0.0f);
    if (key_only && unit->length)
        output_from_selected(job, unit, memory, indices, count, known, m, l, o, scratch);
    if (key_only && unit->length && count == 0 && unit->parts == unit->chunks) {
        memset(o, 0, sizeof(float) * rows * dim); /* nothing selected, nothing else seen: zeros, as for no keys at all */
        for (size_t row = 0; row < rows; row++) l[row] = 1.0f;
    }
    bad |= write_output(job, unit, l, o);
    args->status[at] = (uint8_t)bad;
    add_phase(job, HERALD_OUTPUT, start);
}

static void run_task(void *context, int64_t task) {
    job *job = context;
    const herald_select_args *args = job->args;
    unit *unit = unit_of(job, task);
    size_t own = unit->memory ? 0 : herald_round_up(unit->bytes, 64);
    char *scratch = herald_thread_scratch(own + task_bytes(job, unit->length));
    if (!scratch) {
        job->failed = 1;
        return;
    }
    unit_memory memory;
    lay_out(job, unit, unit->memory ? unit->memory : carve(&scratch, own), &memory);
    float *q = (float *)carve(&scratch, sizeof(float) * (size_t)job->rows * (size_t)args->kv->head_dim);
    float *scan_q = args->keys8 ? (float *)carve(&scratch, sizeof(float) * (size_t)job->rows * (size_t)args->kv->head_dim) : q;
    char *tier_scratch = scratch;
    char *draft_p = tier_scratch + herald_round_up(args->tier->scratch_bytes(job->rows, args->kv->head_dim), 64);
    double start = herald_seconds();
    pack_queries(job, unit, q);
    if (args->keys8) pack_channels(job, unit, q, scan_q);
    int64_t group = task - unit->first_task, from = unit->chunks * group / unit->groups;
    for (int64_t chunk = from; chunk < unit->chunks * (group + 1) / unit->groups; chunk++) {
        herald_attend attend = attend_of(job, unit, &memory, chunk, scan_q, tier_scratch);
        if (args->keys8) args->tier->scan_int8(&attend);
        else args->tier->attend[job->kind](&attend);
    }
    if (group == 0) {
        attend_draft(job, unit, &memory, q, tier_scratch, draft_p);
        if (args->self_k) attend_self(job, unit, &memory, q);
    }
    add_phase(job, HERALD_SCAN, start);
    if (atomic_fetch_sub(&unit->left, 1) == 1) finish(job, unit, &memory, q, tier_scratch);
}

static int longest_first(const void *a, const void *b) {
    const unit *x = a, *y = b;
    if (x->length != y->length) return x->length < y->length ? 1 : -1;
    if (x->row != y->row) return x->row < y->row ? -1 : 1;
    return x->head < y->head ? -1 : 1;
}

static void describe_units(job *job) {
    const herald_select_args *args = job->args;
    int64_t heads = args->kv->num_heads;
    for (int64_t i = 0; i < job->num_units; i++) {
        unit *unit = &job->units[i];
        unit->row = i / heads;
        unit->head = i % heads;
        unit->length = args->lengths[unit->row];
        unit->chunks = (unit->length + job->chunk - 1) / job->chunk;
        unit->draft_length = args->draft ? args->draft_lengths[unit->row] : 0;
        unit->draft_chunks = (unit->draft_length + job->chunk - 1) / job->chunk;
        unit->parts = unit->chunks + unit->draft_chunks + (args->self_k != NULL);
        unit->bytes = lay_out(job, unit, NULL, NULL);
    }
    qsort(job->units, (size_t)job->num_units, sizeof *job->units, longest_first);
}

/* How many units, from the first, stay whole; the others are cut into at most `pieces`. */
static int64_t whole_units(const job *job, int threads, int64_t *pieces) {
    int64_t first = job->num_units, most = (int64_t)TAIL_UNITS * threads;
    size_t total = 0;
    if (threads == 1) return first;
    for (int64_t i = 0; i < job->num_units; i++) total += herald_round_up(job->units[i].bytes, 64);
    if (job->num_units < (int64_t)SPLIT_BELOW * threads && total <= SPLIT_BYTES) {
        *pieces = ((int64_t)SPLIT_TASKS * threads + job->num_units - 1) / job->num_units;
        return 0;
    }
    *pieces = TAIL_PIECES;
    for (total = 0; first > 0 && job->num_units - first < most; first--) {
        total += herald_round_up(job->units[first - 1].bytes, 64);
        if (total > TAIL_BYTES) break;
    }
    return first;
}

int herald_select(const herald_select_args *given) {
    herald_select_args args = *given;
    job job = {.args = &args, .rows = args.x * (args.num_heads / args.kv->num_heads)};
    job.num_units = args.rows * args.kv->num_heads;
    if (job.num_units == 0) return 0;
    job.group = args.num_heads / args.kv->num_heads;
    job.chunk = chunk_tokens(job.rows);
    job.kind = args.keys8 ? HERALD_FEW
                          : herald_kind_for(args.tier, job.rows, args.kv->dtype, args.kv->head_dim,
                                            args.paper_like ? HERALD_PV_F32 : args.pv);
    job.p_tile = herald_round_up(args.tier->p_tile_bytes[job.kind](job.rows), 64);
    job.p_max_tile = args.tier->p_max_floats[job.kind](job.rows);
    if (args.threads <= 0) args.threads = herald_default_threads();
    job.units = calloc((size_t)job.num_units, sizeof *job.units);
    if (!job.units) return -1;
    describe_units(&job);
    int64_t pieces = 1, whole = whole_units(&job, args.threads, &pieces);
    size_t total = 0, got = 0;
    for (int64_t i = whole; i < job.num_units; i++) total += herald_round_up(job.units[i].bytes, 64);
    char *workspace = total ? herald_workspace_take(total, &got) : NULL, *at = workspace;
    for (int64_t i = 0; i < job.num_units; i++) {
        unit *unit = &job.units[i];
        int shared = workspace && i >= whole;
        unit->groups = !shared || !unit->chunks ? 1 : pieces < unit->chunks ? pieces : unit->chunks;
        unit->first_task = job.num_tasks;
        job.num_tasks += unit->groups;
        atomic_init(&unit->left, unit->groups);
        if (shared) unit->memory = carve(&at, unit->bytes);
    }
    herald_parallel(run_task, &job, job.num_tasks, args.threads);
    if (workspace) herald_workspace_give(workspace, got);
    free(job.units);
    for (int phase = 0; args.phase_seconds && phase < HERALD_PHASES; phase++)
        args.phase_seconds[phase] = 1e-9 * (double)job.phase_ns[phase];
    return job.failed ? -1 : 0;
}
