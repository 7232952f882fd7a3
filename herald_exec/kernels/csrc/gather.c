/* Selected rows into contiguous buffers that a copy engine can take whole: rows ascending, some ahead prefetched, stores
 * past the cache (the next reader is the device, not this core).
 */
#include "herald.h"
#include <string.h>

#define PIECE 256 /* rows of one task */

typedef struct {
    const herald_gather_args *args;
    int64_t pieces;
} gather_job;

static inline const char *row_of(herald_stream stream, const char *first, int32_t position, int64_t row_bytes) {
    return first + position / HERALD_TILE * stream.tile_bytes + position % HERALD_TILE * row_bytes;
}

/* `level` is a constant of the compiler: 0 nearest cache, 1 second, 2 nearest and gone after use. Two neighbouring lines in
 * order make the hardware fetch on beyond the row, which is read for nothing: `scattered` asks for far ones first. */
INLINE void ask(const char *row, int64_t bytes, int level, int scattered) {
    for (int64_t i = 0; i < bytes; i += 64) {
        const char *line = row + (scattered ? (i * 3 + 64) % bytes : i);
        if (level == 0) __builtin_prefetch(line, 0, 3);
        else if (level == 1) __builtin_prefetch(line, 0, 2);
        else __builtin_prefetch(line, 0, 0);
    }
}

static void ask_for(const char *k, const char *v, int64_t bytes, const herald_gather_tuning *tuning) {
    int scattered = tuning->scattered && bytes % 64 == 0 && bytes % 192;
    switch (tuning->level) {
        case 0: ask(k, bytes, 0, scattered), ask(v, bytes, 0, scattered); break;
        case 1: ask(k, bytes, 1, scattered), ask(v, bytes, 1, scattered); break;
        default: ask(k, bytes, 2, scattered), ask(v, bytes, 2, scattered);
    }
}

static void copy_rows(const herald_gather_args *args, int64_t unit, int64_t from, int64_t to) {
    const herald_gather_tuning *tuning = &args->tuning;
    int64_t heads = args->kv->num_heads, count = args->counts[unit];
    herald_stream stream = herald_stream_of(args->kv, args->layer, args->slots[unit / heads], unit % heads);
    int64_t bytes = (int64_t)args->kv->head_dim * herald_element_bytes(args->kv->dtype);
    const int32_t *indices = args->indices + unit * args->max_k;
    char *out_k = args->out_k + (unit * args->max_k + from) * bytes;
    char *out_v = args->out_v + (unit * args->max_k + from) * bytes;
    int streaming = tuning->streaming && bytes % 64 == 0 && (uintptr_t)out_k % 64 == 0 && (uintptr_t)out_v % 64 == 0;
    int64_t valid = to < count ? to : count;
    for (int64_t i = from; i < from + tuning->ahead && i < valid; i++)
        ask_for(row_of(stream, stream.k, indices[i], bytes), row_of(stream, stream.v, indices[i], bytes), bytes, tuning);
    for (int64_t i = from; i < valid; i++, out_k += bytes, out_v += bytes) {
        if (tuning->ahead && i + tuning->ahead < count) /* beyond this piece too: most likely this thread's next */
            ask_for(row_of(stream, stream.k, indices[i + tuning->ahead], bytes),
                    row_of(stream, stream.v, indices[i + tuning->ahead], bytes), bytes, tuning);
        args->tier->copy_row(out_k, row_of(stream, stream.k, indices[i], bytes), bytes, streaming);
        args->tier->copy_row(out_v, row_of(stream, stream.v, indices[i], bytes), bytes, streaming);
    }
    int64_t filler = to - (valid > from ? valid : from);
    if (filler > 0) { /* rows beyond the count are zeros, never what an earlier block left */
        memset(out_k, 0, (size_t)(filler * bytes));
        memset(out_v, 0, (size_t)(filler * bytes));
    }
    if (streaming) args->tier->fence();
}

static void gather_piece(void *context, int64_t task) {
    const gather_job *job = context;
    int64_t from = task % job->pieces * PIECE, to = from + PIECE < job->args->max_k ? from + PIECE : job->args->max_k;
    copy_rows(job->args, task / job->pieces, from, to);
}

void herald_gather_unit(const herald_gather_args *args, int64_t unit) {
    if (args->max_k > 0) copy_rows(args, unit, 0, args->max_k);
}

void herald_gather(const herald_gather_args *args) {
    gather_job job = {args, (args->max_k + PIECE - 1) / PIECE};
    if (args->max_k > 0) herald_parallel(gather_piece, &job, args->rows * args->kv->num_heads * job.pieces, args->threads);
}
