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
#include "select.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define SPLIT_BELOW 4                     /* units per thread under which chunks are spread */
#define SPLIT_TASKS 8                     /* tasks per thread then */
#define SPLIT_BYTES ((size_t)2 << 30)     /* but not if p would take more than this at once */
/* Whole units to the end leave every thread idle for half a unit: with 12 units a thread 4% of the time, more where virtual
 * CPUs differ by a factor of 2. Two units a thread, so that the slowest finds its last whole one done by then. */
#define TAIL_UNITS 2                      /* per thread, taken in pieces */
#define TAIL_PIECES 8                     /* of a unit; a piece has a chunk at least */
#define TAIL_BYTES ((size_t)256 << 20)    /* of p at once: fewer units where that is not enough */

static int64_t tiles_of(int64_t tokens) { return (tokens + HERALD_TILE - 1) / HERALD_TILE; }
/* Many rows make a chunk's output large (rows x head_dim, on matrix tiles 16 rows at least): longer chunks then, still a matter
 * of shape and tier alone. */
static int64_t chunk_tokens(int rows, int kind) { return rows < 16 && kind != HERALD_AMX ? 2048 : 8192; }

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

/* Thread memory beside a unit's own: queries, tier scratch, a p tile for drafts, and what finishing needs. */
static size_t task_bytes(const job *job, const unit *unit) {
    const herald_select_args *args = job->args;
    size_t rows = (size_t)job->rows, dim = (size_t)args->kv->head_dim;
    size_t padded = (size_t)tiles_of(unit->length) * HERALD_TILE;
    return 2 * rows * dim * sizeof(float) + args->tier->scratch_bytes(job->rows, args->kv->head_dim) + job->p_tile +
           2 * padded * sizeof(float) + herald_topk_scratch_bytes(unit->length) + 4 * rows * (dim + 64) * sizeof(float) +
           job->p_max_tile * sizeof(float) + 32 * 64 + (from_single_rows(job) ? herald_single_rows_bytes(job, unit) : 0);
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

herald_attend herald_attend_of(const job *job, const unit *unit, const unit_memory *memory, int64_t part, const float *q,
                               char *scratch) {
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
        herald_attend attend = herald_attend_of(job, unit, memory, unit->chunks + chunk, q, scratch);
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

double herald_add_phase(job *job, int phase, double since) {
    if (!job->args->phase_seconds) return since;
    double now = herald_seconds();
    atomic_fetch_add(&job->phase_ns[phase], (int64_t)((now - since) * 1e9));
    return now;
}

static void write_count(const job *job, const unit *unit, int64_t count) {
    const herald_select_args *args = job->args;
    int64_t at = place_of(job, unit);
    args->counts[at] = (int32_t)count;
    for (int64_t i = count; i < args->max_k; i++) args->indices[at * args->max_k + i] = -1;
}

static void write_output(const job *job, const unit *unit, const float *l, const float *o, int bad) {
    const herald_select_args *args = job->args;
    int dim = args->kv->head_dim;
    for (int row = 0; row < job->rows; row++) {
        float *to = args->output + ((unit->row * args->x + row / job->group) * args->num_heads +
                                    unit->head * job->group + row % job->group) * (int64_t)dim;
        float inverse = unit->parts ? 1.0f / l[row] : 0.0f;
        for (int c = 0; c < dim; c++) {
            to[c] = unit->parts ? o[row * dim + c] * inverse : 0.0f;
            bad |= !isfinite(to[c]);
        }
    }
    args->status[place_of(job, unit)] = (uint8_t)bad;
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

static void finish(job *job, const unit *unit, const unit_memory *memory, const float *q, char *scratch) {
    const herald_select_args *args = job->args;
    size_t rows = (size_t)job->rows, dim = (size_t)args->kv->head_dim;
    size_t padded = (size_t)tiles_of(unit->length) * HERALD_TILE;
    int single = from_single_rows(job), bad = 0;
    int64_t at = place_of(job, unit), budget = args->budgets[unit->row];
    ending end = {.job = job, .unit = unit, .memory = memory, .q = q, .indices = args->indices + at * args->max_k};
    end.m = (float *)carve(&scratch, sizeof(float) * rows);
    end.l = (float *)carve(&scratch, sizeof(float) * rows);
    end.o = (float *)carve(&scratch, sizeof(float) * rows * dim);
    float *inverse = (float *)carve(&scratch, sizeof(float) * rows);
    float *importance = end.importance = (float *)carve(&scratch, sizeof(float) * padded);
    float *smoothed = (float *)carve(&scratch, sizeof(float) * padded);
    end.topk = carve(&scratch, herald_topk_scratch_bytes(unit->length));
    end.scratch = scratch;
    double start = herald_seconds();
    merge(job, unit, memory, single ? unit->chunks : 0, end.m, end.l, end.o);
    for (size_t row = 0; row < rows; row++) inverse[row] = 1.0f / end.l[row];
    for (int64_t chunk = 0; chunk < unit->chunks; chunk++) {
        herald_attend attend = herald_attend_of(job, unit, memory, chunk, NULL, NULL);
        args->tier->importance[job->kind](&attend, end.m, inverse, importance + chunk * job->chunk);
    }
    if (args->smoothing > 1) smooth(importance, unit->length, args->smoothing, end.importance = smoothed);
    start = herald_add_phase(job, HERALD_IMPORTANCE, start);
    int64_t count = single ? herald_select_with_weights(&end, &start)
                    : args->paper_like ? herald_topk_heap(end.importance, unit->length, budget, end.topk, end.indices)
                                       : herald_topk(args->tier, end.importance, unit->length, budget, end.topk, end.indices);
    write_count(job, unit, count);
    if (args->importance)
        memcpy(args->importance + at * args->importance_stride, end.importance, sizeof(float) * (size_t)unit->length);
    start = herald_add_phase(job, HERALD_TOPK, start);
    if (args->gather) { /* while this unit's rows may still be in a cache */
        herald_gather_unit(args->gather, at);
        start = herald_add_phase(job, HERALD_GATHER, start);
    }
    for (size_t row = 0; row < rows; row++) bad |= unit->parts && !(isfinite(end.l[row]) && end.l[row] > 0.0f);
    if (single && unit->length) herald_sum_selected(&end, count);
    write_output(job, unit, end.l, end.o, bad);
    herald_add_phase(job, HERALD_OUTPUT, start);
}

/* Memory of a shared unit, which is taken by whichever of its tasks comes first: the piece used last, so that p, which is large
 * with many queries, comes to lie where a cache may still hold what was there. */
static char *take_memory(job *job, unit *unit) {
    pthread_mutex_lock(&job->lock);
    if (!unit->memory) unit->memory = job->vacant[--job->num_vacant];
    char *memory = unit->memory;
    pthread_mutex_unlock(&job->lock);
    return memory;
}
static void give_memory(job *job, const unit *unit) {
    pthread_mutex_lock(&job->lock);
    job->vacant[job->num_vacant++] = unit->memory;
    pthread_mutex_unlock(&job->lock);
}

static void run_task(void *context, int64_t task) {
    job *job = context;
    const herald_select_args *args = job->args;
    unit *unit = unit_of(job, task);
    if (job->failed) return;
    size_t own = unit->shared ? 0 : herald_round_up(unit->bytes, 64);
    char *scratch = herald_thread_scratch(own + task_bytes(job, unit));
    if (!scratch) {
        job->failed = 1;
        return;
    }
    unit_memory memory;
    lay_out(job, unit, unit->shared ? take_memory(job, unit) : carve(&scratch, own), &memory);
    float *q = (float *)carve(&scratch, sizeof(float) * (size_t)job->rows * (size_t)args->kv->head_dim);
    float *scan_q = args->keys8 ? (float *)carve(&scratch, sizeof(float) * (size_t)job->rows * (size_t)args->kv->head_dim) : q;
    char *tier_scratch = scratch;
    char *draft_p = tier_scratch + herald_round_up(args->tier->scratch_bytes(job->rows, args->kv->head_dim), 64);
    double start = herald_seconds();
    pack_queries(job, unit, q);
    if (args->keys8) pack_channels(job, unit, q, scan_q);
    int64_t group = task - unit->first_task, from = unit->chunks * group / unit->groups;
    int64_t to = unit->chunks * (group + 1) / unit->groups, end = to * job->chunk < unit->length ? to * job->chunk : unit->length;
    for (int64_t chunk = from; chunk < to; chunk++) {
        herald_attend attend = herald_attend_of(job, unit, &memory, chunk, scan_q, tier_scratch);
        attend.begins = chunk == 0;
        attend.follow = end - chunk * job->chunk - attend.num_keys;
        if (args->keys8) args->tier->scan_int8(&attend);
        else args->tier->attend[job->kind](&attend);
    }
    if (group == 0) {
        attend_draft(job, unit, &memory, q, tier_scratch, draft_p);
        if (args->self_k) attend_self(job, unit, &memory, q);
    }
    herald_add_phase(job, HERALD_SCAN, start);
    if (atomic_fetch_sub(&unit->left, 1) != 1) return;
    finish(job, unit, &memory, q, tier_scratch);
    if (unit->shared) give_memory(job, unit);
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

/* Pieces of memory that shared units need at once: tasks are taken in order, so of all units that are begun and not done at
 * most one has no task under way. */
static int64_t num_pieces(int64_t units, int threads) { return units < threads + 1 ? units : threads + 1; }

/* Bytes of a piece for the units from `first` on, and what they fill at once. */
static size_t piece_bytes(const job *job, int64_t first, int threads, size_t *filled) {
    size_t all = 0, most = 0;
    for (int64_t i = first; i < job->num_units; i++) {
        size_t bytes = herald_round_up(job->units[i].bytes, 64);
        all += bytes;
        if (bytes > most) most = bytes;
    }
    size_t pieces = most * (size_t)num_pieces(job->num_units - first, threads);
    *filled = all < pieces ? all : pieces;
    return most;
}

/* How many units, from the first, stay whole; the others are cut into at most `cuts`. */
static int64_t whole_units(const job *job, int threads, int64_t *cuts) {
    int64_t units = job->num_units, cut = units < TAIL_UNITS * (int64_t)threads ? units : TAIL_UNITS * (int64_t)threads;
    size_t filled;
    if (threads == 1) return units;
    piece_bytes(job, 0, threads, &filled);
    if (units < (int64_t)SPLIT_BELOW * threads && filled <= SPLIT_BYTES) {
        *cuts = ((int64_t)SPLIT_TASKS * threads + units - 1) / units;
        return 0;
    }
    *cuts = TAIL_PIECES;
    for (; cut > 0; cut--) {
        piece_bytes(job, units - cut, threads, &filled);
        if (filled <= TAIL_BYTES) break;
    }
    return units - cut;
}

/* Memory for the units from `whole` on. NULL: there is none, or none is needed; then they stay whole as well. */
static char *take_workspace(job *job, int64_t whole, int threads, size_t *got) {
    size_t filled, each = piece_bytes(job, whole, threads, &filled);
    int64_t pieces = num_pieces(job->num_units - whole, threads);
    job->vacant = each ? malloc((size_t)pieces * sizeof *job->vacant) : NULL;
    char *workspace = job->vacant ? herald_workspace_take((size_t)pieces * each, got) : NULL;
    for (int64_t i = 0; workspace && i < pieces; i++) job->vacant[job->num_vacant++] = workspace + (size_t)i * each;
    return workspace;
}

int herald_select(const herald_select_args *given) {
    herald_select_args args = *given;
    job job = {.args = &args, .rows = args.x * (args.num_heads / args.kv->num_heads)};
    job.num_units = args.rows * args.kv->num_heads;
    if (job.num_units == 0) return 0;
    job.group = args.num_heads / args.kv->num_heads;
    job.kind = args.keys8 ? HERALD_FEW
                          : herald_kind_for(args.tier, args.x, job.group, args.kv->dtype, args.kv->head_dim,
                                            args.paper_like ? HERALD_PV_F32 : args.pv);
    job.chunk = chunk_tokens(job.rows, job.kind);
    job.p_tile = herald_round_up(args.tier->p_tile_bytes[job.kind](job.rows), 64);
    job.p_max_tile = args.tier->p_max_floats[job.kind](job.rows);
    if (args.threads <= 0) args.threads = herald_default_threads();
    job.units = calloc((size_t)job.num_units, sizeof *job.units);
    if (!job.units) return -1;
    describe_units(&job);
    int64_t cuts = 1, whole = whole_units(&job, args.threads, &cuts);
    size_t got = 0;
    char *workspace = take_workspace(&job, whole, args.threads, &got);
    for (int64_t i = 0; i < job.num_units; i++) {
        unit *unit = &job.units[i];
        unit->shared = workspace && i >= whole;
        unit->groups = !unit->shared || !unit->chunks ? 1 : cuts < unit->chunks ? cuts : unit->chunks;
        unit->first_task = job.num_tasks;
        job.num_tasks += unit->groups;
        atomic_init(&unit->left, unit->groups);
    }
    pthread_mutex_init(&job.lock, NULL);
    herald_parallel(run_task, &job, job.num_tasks, args.threads);
    pthread_mutex_destroy(&job.lock);
    if (workspace) herald_workspace_give(workspace, got);
    free(job.vacant);
    free(job.units);
    for (int phase = 0; args.phase_seconds && phase < HERALD_PHASES; phase++)
        args.phase_seconds[phase] = 1e-9 * (double)job.phase_ns[phase];
    return job.failed ? -1 : 0;
}
