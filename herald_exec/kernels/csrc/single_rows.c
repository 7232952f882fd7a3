/* Output from single rows: with keys alone the selected entries' V; with 8-bit keys candidates' K as well.
 *
 * Single rows are far apart, so they wait for memory, with nothing else asked for meanwhile. With `defer` they are asked for
 * by the next unit's scan, a few a tile, and worked on between its chunks; else all are worked on at once. Either way in the
 * same order and in the same groups: the same bits.
 */
#include "select.h"
#include <math.h>
#include <string.h>

#define GROUP_ROWS 128 /* of whose weights one sum is made */
/* With 8-bit keys one in so many of those that are sure is scored again: they hold most of the output. */
#define HEAVY_SHARE 8

static _Thread_local remains *remaining; /* of this thread; nothing is left of it where its unit is NULL */

/* Of the `wanted` best by 8-bit scores the best `sure` are selected, of which only those that weigh most are scored again;
 * the rest of the wanted is scored again and the best of it selected. */
static int64_t num_candidates(const herald_select_args *args, int64_t length, int64_t budget, int64_t *sure) {
    double wanted = ceil((double)budget * args->candidates);
    *sure = args->rescore_all ? 0 : (int64_t)((double)(budget < length ? budget : length) / args->candidates);
    return wanted < (double)length ? (int64_t)wanted : length;
}

remains *herald_remains_of(job *job, const unit *unit, const float *q) {
    const herald_select_args *args = job->args;
    size_t rows = (size_t)job->rows, dim = (size_t)args->kv->head_dim;
    int64_t sure, budget = args->budgets[unit->row], count = budget < unit->length ? budget : unit->length;
    size_t wanted = args->keys8 ? (size_t)num_candidates(args, unit->length, budget, &sure) : 0;
    size_t most = (wanted > (size_t)count ? wanted : (size_t)count) + 32, tier_bytes = args->tier->scratch_bytes(job->rows, (int)dim);
    size_t bytes = sizeof(float) * (3 * rows + 2 * rows * dim + 3 * rows * most + most) +
                   herald_topk_scratch_bytes(unit->length) + 4 * most * sizeof(int32_t) + tier_bytes + sizeof(remains) + 16 * 64;
    herald_finish_remaining();
    char *at = herald_thread_scratch(HERALD_BETWEEN_TASKS, bytes);
    if (!at) return remaining = NULL;
    remaining = (remains *)carve(&at, sizeof(remains));
    *remaining = (remains){.job = job, .unit = unit, .each = 0};
    remaining->m = (float *)carve(&at, sizeof(float) * rows);
    remaining->l = (float *)carve(&at, sizeof(float) * rows);
    remaining->o = (float *)carve(&at, sizeof(float) * rows * dim);
    remaining->q = memcpy(carve(&at, sizeof(float) * rows * dim), q, sizeof(float) * rows * dim);
    remaining->beside = (float *)carve(&at, sizeof(float) * rows);
    remaining->known = (float *)carve(&at, sizeof(float) * rows * most);
    remaining->scratch = carve(&at, tier_bytes);
    remaining->of_sure = (int32_t *)carve(&at, sizeof(int32_t) * most);
    remaining->of_border = (int32_t *)carve(&at, sizeof(int32_t) * most);
    remaining->weights = (float *)carve(&at, sizeof(float) * rows * most);
    remaining->again = (float *)carve(&at, sizeof(float) * rows * most);
    remaining->values = (float *)carve(&at, sizeof(float) * most);
    remaining->places = (int32_t *)carve(&at, sizeof(int32_t) * most);
    remaining->from = (int32_t *)carve(&at, sizeof(int32_t) * most);
    remaining->search = at;
    return remaining;
}

/* For a unit's single rows of K and V; `rows_ahead` of them are asked for ahead of use. */
static herald_attend single_rows(const remains *rest, int rows_ahead) {
    const herald_select_args *args = rest->job->args;
    herald_attend attend = {.dtype = args->kv->dtype, .head_dim = args->kv->head_dim, .rows = rest->job->rows, .q = rest->q,
                            .o = rest->o, .scratch = rest->scratch, .tuning = args->tuning};
    attend.stream = herald_stream_of(args->kv, args->layer, args->slots[rest->unit->row], rest->unit->head);
    attend.tuning.rows_ahead = rows_ahead;
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

static int32_t *indices_of(const remains *rest) {
    return rest->job->args->indices + place_of(rest->job, rest->unit) * rest->job->args->max_k;
}

/* The selection and the weights of it (`known`) are there: denominators become sums over what was seen. */
static void settle(remains *rest, int64_t count) {
    job *job = rest->job;
    rest->count = count;
    herald_write_count(job, rest->unit, count);
    for (int row = 0; row < job->rows; row++) rest->bad |= rest->unit->parts && !(isfinite(rest->l[row]) && rest->l[row] > 0.0f);
    if (!rest->unit->length) return; /* only a draft and the own key were seen */
    memcpy(rest->l, rest->beside, sizeof(float) * (size_t)job->rows);
    for (int64_t first = 0; first < count; first += GROUP_ROWS)
        for (int row = 0; row < job->rows; row++)
            rest->l[row] += sum_of(rest->known + row * count + first, count - first < GROUP_ROWS ? count - first : GROUP_ROWS);
}

/* Copy what was selected, where that is wanted, while a part of it may still be in a cache. */
static void copy_selected(const remains *rest, double start) {
    const herald_select_args *args = rest->job->args;
    if (!args->gather) return;
    herald_gather_unit(args->gather, place_of(rest->job, rest->unit));
    herald_add_phase(rest->job, HERALD_GATHER, start);
}

/* Two ascending lists as one: `a`, and of `b` those at `places`; from[n] = where it stands in both lists, one behind the
 * other. Without branches on positions, which no predictor guesses. */
static int64_t merge_positions(int32_t *a, int64_t a_count, const int32_t *b, const int32_t *places, int64_t b_count,
                               int32_t *to, int32_t *from) {
    int64_t i = 0, j = 0, count = a_count + b_count;
    a[a_count] = INT32_MAX;
    for (int64_t n = 0; n < count; n++) {
        int32_t place = j < b_count ? places[j] : 0, second = j < b_count ? b[place] : INT32_MAX;
        int first = a[i] < second;
        to[n] = first ? a[i] : second;
        from[n] = first ? (int32_t)i : (int32_t)a_count + place;
        i += first;
        j += !first;
    }
    return count;
}

/* All candidates at the border have exact scores: denominators are corrected by what that changed, so that only the part of
 * them that no candidate holds keeps 8-bit scores; the best of the border join those that are sure. */
static void select_of_border(remains *rest) {
    job *job = rest->job;
    const herald_select_args *args = job->args;
    int64_t both = rest->sure + rest->border, at = place_of(job, rest->unit), budget = args->budgets[rest->unit->row];
    float *values = rest->values;
    memset(values, 0, sizeof(float) * (size_t)rest->border);
    for (int row = 0; row < job->rows; row++) {
        float *scanned = rest->weights + row * both + rest->sure, *again = rest->again + row * rest->border;
        for (int64_t first = 0; first < rest->border; first += GROUP_ROWS) {
            int64_t some = rest->border - first < GROUP_ROWS ? rest->border - first : GROUP_ROWS;
            rest->l[row] += sum_of(again + first, some) - sum_of(scanned + first, some);
        }
        float inverse = 1.0f / rest->l[row];
        for (int64_t i = 0; i < rest->border; i++) values[i] += again[i] * inverse;
        memcpy(scanned, again, sizeof(float) * (size_t)rest->border);
    }
    int64_t best = herald_topk(args->tier, values, rest->border, budget - rest->sure, rest->search, NULL, rest->places);
    int64_t count = merge_positions(rest->of_sure, rest->sure, rest->of_border, rest->places, best, indices_of(rest), rest->from);
    for (int row = 0; row < job->rows; row++)
        for (int64_t i = 0; i < count; i++) rest->known[row * count + i] = rest->weights[row * both + rest->from[i]];
    for (int64_t i = 0; args->importance && i < rest->border; i++)
        args->importance[at * args->importance_stride + rest->of_border[i]] = values[i];
    settle(rest, count);
}

void herald_search(remains *rest, const unit_memory *memory, const float *importance, herald_asking *idle,
                   double *start) {
    job *job = rest->job;
    const herald_select_args *args = job->args;
    const unit *unit = rest->unit;
    int64_t rows = job->rows, budget = args->budgets[unit->row];
    herald_attend all = herald_attend_of(job, unit, memory, 0, NULL, NULL);
    memset(rest->beside, 0, sizeof(float) * (size_t)rows);
    for (int64_t part = unit->chunks; part < unit->parts; part++)
        for (int64_t row = 0; row < rows; row++)
            rest->beside[row] += memory->l[part * rows + row] * exp2f(memory->m[part * rows + row] - rest->m[row]);
    if (args->keys8) {
        int64_t sure, wanted = num_candidates(args, unit->length, budget, &sure);
        herald_topk_parts(args->tier, importance, unit->length, (sure + HEAVY_SHARE - 1) / HEAVY_SHARE, sure, wanted,
                          rest->search, idle, rest->of_sure, &rest->sure, rest->of_border, &rest->border);
        int64_t both = rest->sure + rest->border;
        args->tier->weights[job->kind](&all, rest->of_sure, (int)rest->sure, rest->weights, (int)both);
        args->tier->weights[job->kind](&all, rest->of_border, (int)rest->border, rest->weights + rest->sure, (int)both);
        if (!rest->border) select_of_border(rest);
    } else {
        int32_t *indices = indices_of(rest);
        int64_t count = herald_topk(args->tier, importance, unit->length, budget, rest->search, idle, indices);
        args->tier->weights[job->kind](&all, indices, (int)count, rest->known, (int)count);
        settle(rest, count);
    }
    int64_t chunks = unit->chunks > 1 ? unit->chunks - 1 : 1; /* done before the next unit ends */
    rest->each = (rest->border + (budget < unit->length ? budget : unit->length) + chunks - 1) / chunks;
    *start = herald_add_phase(job, HERALD_TOPK, *start);
    if (!rest->border) copy_selected(rest, *start);
}

/* The next rows to be done: of K while the border is not scored, then of V; at most `most`. */
static herald_rows next_rows(const remains *rest, int64_t most) {
    const herald_select_args *args = rest->job->args;
    int of_k = rest->scored < rest->border;
    int64_t left = of_k ? rest->border - rest->scored : rest->count - rest->summed;
    /* groups of whole tiles: an infinite key changes how the others of its tile are scored */
    if (of_k) most = (most + HERALD_TILE - 1) / HERALD_TILE * HERALD_TILE;
    return (herald_rows){.stream = herald_stream_of(args->kv, args->layer, args->slots[rest->unit->row], rest->unit->head),
                         .of_k = of_k,
                         .positions = of_k ? rest->of_border + rest->scored : indices_of(rest) + rest->summed,
                         .count = left < most ? left : most,
                         .row_bytes = (int64_t)args->kv->head_dim * herald_element_bytes(args->kv->dtype)};
}

/* Do those rows; `more` of the same kind follow, and `rows_ahead` are asked for ahead of use. */
static void do_rows(remains *rest, herald_rows rows, int rows_ahead) {
    job *job = rest->job;
    const herald_tier *tier = job->args->tier;
    herald_attend single = single_rows(rest, rows_ahead);
    double start = herald_seconds();
    if (rows.of_k) {
        tier->score(&single, rows.positions, rows.count, 0, rest->m, rest->again + rest->scored, rest->border);
        rest->scored += rows.count;
        start = herald_add_phase(job, HERALD_RESCORE, start);
        if (rest->scored == rest->border) {
            select_of_border(rest);
            copy_selected(rest, herald_add_phase(job, HERALD_TOPK, start));
        }
        return;
    }
    tier->accumulate(&single, rows.positions, rows.count, 0, rest->known + rest->summed, rest->count);
    rest->summed += rows.count;
    herald_add_phase(job, HERALD_OUTPUT, start);
}

int herald_remaining_rows(herald_rows *rows) {
    if (!remaining || !remaining->unit) return 0;
    *rows = next_rows(remaining, remaining->each);
    return rows->count > 0;
}

void herald_work_on_remaining(void) { do_rows(remaining, next_rows(remaining, remaining->each), 0); }

void herald_finish_remaining(void) {
    remains *rest = remaining;
    if (!rest || !rest->unit) return;
    job *job = rest->job;
    const herald_select_args *args = job->args;
    for (herald_rows rows = next_rows(rest, INT64_MAX / 2); rows.count > 0; rows = next_rows(rest, INT64_MAX / 2))
        do_rows(rest, rows, args->tuning.rows_ahead);
    if (rest->unit->length && rest->count == 0 && rest->unit->parts == rest->unit->chunks) {
        /* nothing selected, nothing else seen: zeros, as for no keys at all */
        memset(rest->o, 0, sizeof(float) * (size_t)job->rows * (size_t)args->kv->head_dim);
        for (int row = 0; row < job->rows; row++) rest->l[row] = 1.0f;
    }
    double start = herald_seconds();
    herald_write_output(job, rest->unit, rest->l, rest->o, rest->bad);
    herald_add_phase(job, HERALD_OUTPUT, start);
    rest->unit = NULL;
}
