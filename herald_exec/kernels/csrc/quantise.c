/* 8-bit keys for scoring: every row of K divided by its own scale, the largest magnitude over 127. A tile holds 64 rows of
 * head_dim bytes (padded with zeros to 32) and then their 64 scales, so a scan stays one sequential stream. A row with a NaN
 * or an infinity gets a scale that makes all its scores NaN: it is never hidden.
 *
 * Channels that stand out would cost all others their precision: each is divided by a power of two of its own first, found
 * from the rows that begin a slot, and queries are multiplied by it (exact, both). They stand before a head's tiles.
 */
#include "herald.h"
#include <math.h>
#include <string.h>

typedef struct {
    const herald_kv *kv, *keys8;
    int64_t layer, slot, start, stop;
} quantise_job;

static void quantise_row(const float *k, int head_dim, int8_t *to, float *scale) {
    float most = 0.0f;
    int bad = 0;
    for (int c = 0; c < head_dim; c++) {
        float size = fabsf(k[c]);
        most = size > most ? size : most;
        bad |= !(size <= 3.4e38f);
    }
    *scale = bad ? NAN : most / 127.0f;
    float per = bad || most < HERALD_ROUNDS_TO_ZERO ? 0.0f : 127.0f / most;
    for (int c = 0; c < head_dim; c++) to[c] = (int8_t)lrintf(bad ? 0.0f : k[c] * per);
}

/* The power of two above the largest finite magnitude of each channel; 1 where there is none. */
static void find_channels(const herald_tier *tier, const quantise_job *job, herald_stream from, float *channels) {
    int dim = job->kv->head_dim;
    int64_t bytes = (int64_t)dim * herald_element_bytes(job->kv->dtype);
    float wide[HERALD_MAX_HEAD_DIM], most[HERALD_MAX_HEAD_DIM] = {0};
    for (int64_t at = job->start; at < job->stop; at++) {
        tier->widen(from.k + at / HERALD_TILE * from.tile_bytes + at % HERALD_TILE * bytes, job->kv->dtype, dim, wide);
        for (int c = 0; c < dim; c++) {
            float size = fabsf(wide[c]);
            if (size <= 3.4e38f && size > most[c]) most[c] = size;
        }
    }
    for (int c = 0; c < dim; c++) {
        int exponent = 0;
        frexpf(most[c], &exponent);
        channels[c] = most[c] < HERALD_ROUNDS_TO_ZERO ? 1.0f : ldexpf(1.0f, exponent < 60 ? exponent : 60);
    }
}

static void quantise_head(void *context, int64_t head) {
    const quantise_job *job = context;
    int dim = job->kv->head_dim;
    int64_t bytes = (int64_t)dim * herald_element_bytes(job->kv->dtype), row8 = HERALD_INT8_ROW(dim);
    herald_stream from = herald_stream_of(job->kv, job->layer, job->slot, head);
    herald_stream to = herald_stream_of(job->keys8, job->layer, job->slot, head);
    const herald_tier *tier = herald_tier_get(0);
    float wide[HERALD_MAX_HEAD_DIM], *channels = (float *)to.v;
    if (job->start == 0 || channels[0] == 0.0f) find_channels(tier, job, from, channels); /* 0: fresh memory */
    for (int64_t at = job->start; at < job->stop; at++) {
        char *tile = (char *)to.k + at / HERALD_TILE * to.tile_bytes;
        tier->widen(from.k + at / HERALD_TILE * from.tile_bytes + at % HERALD_TILE * bytes, job->kv->dtype, dim, wide);
        for (int c = 0; c < dim; c++) wide[c] /= channels[c];
        quantise_row(wide, dim, (int8_t *)tile + at % HERALD_TILE * row8,
                     (float *)(tile + HERALD_TILE * row8) + at % HERALD_TILE);
    }
}

void herald_quantise(const herald_kv *kv, const herald_kv *keys8, int64_t layer, int64_t slot, int64_t start,
                     int64_t stop, int threads) {
    quantise_job job = {kv, keys8, layer, slot, start, stop};
    herald_parallel(quantise_head, &job, kv->num_heads, threads);
}
