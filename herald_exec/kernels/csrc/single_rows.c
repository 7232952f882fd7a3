/* Weights and output from single rows: with keys alone the selected entries' V; with 8-bit keys candidates' K as well. */
#include "select.h"
#include <math.h>
#include <string.h>

#define GROUP_ROWS 128 /* of whose weights one sum is made */
/* With 8-bit keys one in so many of those that are sure is scored again: they hold most of the output. */
#define HEAVY_SHARE 8

/* Of the `wanted` best by 8-bit scores the best `sure` are selected, of which only those that weigh most are scored again;
 * the rest of the wanted is scored again and the best of it selected. */
static int64_t num_candidates(const job *job, const unit *unit, int64_t *sure) {
    const herald_select_args *args = job->args;
    int64_t budget = args->budgets[unit->row], most = budget < unit->length ? budget : unit->length;
    double wanted = ceil((double)budget * args->candidates);
    *sure = args->rescore_all ? 0 : (int64_t)((double)most / args->candidates);
    return !args->keys8 ? most : wanted < (double)unit->length ? (int64_t)wanted : unit->length;
}

static size_t room_for(const job *job, const unit *unit) { /* 32-bit values for the candidates, and 16 more */
    int64_t sure;
    return sizeof(float) * (size_t)(num_candidates(job, unit, &sure) + 32);
}

size_t herald_single_rows_bytes(const job *job, const unit *unit) {
    size_t rows = (size_t)job->rows;
    return room_for(job, unit) * (3 * rows + 5) + job->args->tier->scratch_bytes(job->rows, job->args->kv->head_dim) + 16 * 64;
}

/* For a unit's single rows of K and V. */
static herald_attend single_rows(const ending *end) {
    const herald_select_args *args = end->job->args;
    herald_attend attend = {.dtype = args->kv->dtype, .head_dim = args->kv->head_dim, .rows = end->job->rows, .q = end->q,
                            .o = end->o, .scratch = end->scratch, .tuning = args->tuning};
    attend.stream = herald_stream_of(args->kv, args->layer, args->slots[end->unit->row], end->unit->head);
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

/* Candidates whose exact weights were found: denominators are corrected by what that changed, so that only the part of them
 * that no candidate holds keeps 8-bit scores. scanned: [rows][stride]; values: their importance. */
static void take_exact(const ending *end, const float *exact, int64_t count, float *scanned, int64_t stride, float *values) {
    memset(values, 0, sizeof(float) * (size_t)count);
    for (int row = 0; row < end->job->rows; row++, exact += count, scanned += stride) {
        for (int64_t first = 0; first < count; first += GROUP_ROWS) {
            int64_t some = count - first < GROUP_ROWS ? count - first : GROUP_ROWS;
            end->l[row] += sum_of(exact + first, some) - sum_of(scanned + first, some);
        }
        float inverse = 1.0f / end->l[row];
        for (int64_t i = 0; i < count; i++) values[i] += exact[i] * inverse;
        memcpy(scanned, exact, sizeof(float) * (size_t)count);
    }
}

/* Those at the border of the budget and the heaviest are scored again from K, and the best of them join those that are
 * sure. */
static int64_t select_among_candidates(ending *end, double *start) {
    job *job = end->job;
    const herald_tier *tier = job->args->tier;
    int64_t sure, border, best_sure, wanted = num_candidates(job, end->unit, &best_sure);
    size_t room = room_for(job, end->unit), rows = (size_t)job->rows;
    int32_t *of_sure = (int32_t *)carve(&end->scratch, room), *of_border = (int32_t *)carve(&end->scratch, room);
    int32_t *places = (int32_t *)carve(&end->scratch, room), *from = (int32_t *)carve(&end->scratch, room);
    float *values = (float *)carve(&end->scratch, room), *scanned = (float *)carve(&end->scratch, room * rows);
    float *exact = (float *)carve(&end->scratch, room * rows);
    herald_topk_parts(tier, end->importance, end->unit->length, (best_sure + HEAVY_SHARE - 1) / HEAVY_SHARE, best_sure, wanted,
                      end->topk, of_sure, &sure, of_border, &border);
    int64_t both = sure + border;
    herald_attend all = herald_attend_of(job, end->unit, end->memory, 0, NULL, NULL), single = single_rows(end);
    tier->weights[job->kind](&all, of_sure, (int)sure, scanned, (int)both);
    tier->weights[job->kind](&all, of_border, (int)border, scanned + sure, (int)both);
    *start = herald_add_phase(job, HERALD_TOPK, *start);
    tier->score(&single, of_border, border, end->m, exact, border);
    *start = herald_add_phase(job, HERALD_RESCORE, *start);
    take_exact(end, exact, border, scanned + sure, both, values);
    int64_t best = herald_topk(tier, values, border, job->args->budgets[end->unit->row] - sure, end->topk, places);
    int64_t count = merge_positions(of_sure, sure, of_border, places, best, end->indices, from);
    for (int64_t row = 0; row < job->rows; row++)
        for (int64_t i = 0; i < count; i++) end->weights[row * count + i] = scanned[row * both + from[i]];
    for (int64_t i = 0; i < border; i++) end->importance[of_border[i]] = values[i];
    return count;
}

int64_t herald_select_with_weights(ending *end, double *start) {
    job *job = end->job;
    const herald_select_args *args = job->args;
    end->weights = (float *)carve(&end->scratch, room_for(job, end->unit) * (size_t)job->rows);
    if (args->keys8) return select_among_candidates(end, start);
    int64_t count = herald_topk(args->tier, end->importance, end->unit->length, args->budgets[end->unit->row], end->topk,
                                end->indices);
    herald_attend all = herald_attend_of(job, end->unit, end->memory, 0, NULL, NULL);
    args->tier->weights[job->kind](&all, end->indices, (int)count, end->weights, (int)count);
    return count;
}

void herald_sum_selected(const ending *end, int64_t count) {
    const unit *unit = end->unit;
    int64_t rows = end->job->rows;
    memset(end->l, 0, sizeof(float) * (size_t)rows);
    for (int64_t part = unit->chunks; part < unit->parts; part++) /* a draft, the own key */
        for (int64_t row = 0; row < rows; row++)
            end->l[row] += end->memory->l[part * rows + row] * exp2f(end->memory->m[part * rows + row] - end->m[row]);
    for (int64_t first = 0; first < count; first += GROUP_ROWS)
        for (int64_t row = 0; row < rows; row++)
            end->l[row] += sum_of(end->weights + row * count + first, count - first < GROUP_ROWS ? count - first : GROUP_ROWS);
    herald_attend single = single_rows(end);
    end->job->args->tier->accumulate(&single, end->indices, count, end->weights, count);
    if (count || unit->parts > unit->chunks) return;
    /* nothing selected, nothing else seen: zeros, as for no keys at all */
    memset(end->o, 0, sizeof(float) * (size_t)(rows * single.head_dim));
    for (int64_t row = 0; row < rows; row++) end->l[row] = 1.0f;
}
