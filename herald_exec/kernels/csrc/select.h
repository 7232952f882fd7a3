/* What select.c (units, scans, importance) and single_rows.c (weights and output of single rows) share. */
#ifndef HERALD_SELECT_H
#define HERALD_SELECT_H

#include "herald.h"
#include <pthread.h>
#include <stdatomic.h>

typedef struct {
    int64_t row, head, length, chunks, draft_length, draft_chunks, parts;
    int64_t first_task, groups;
    size_t bytes;
    int shared;   /* several threads may work on it */
    char *memory; /* then: from its first task to its last */
    _Atomic int64_t left;
} unit;

typedef struct job {
    const herald_select_args *args;
    unit *units;
    int64_t num_units;
    int64_t num_tasks;
    int rows, group, kind;
    _Atomic int failed; /* no task is begun then: its unit's memory might not be given back */
    int64_t chunk; /* tokens */
    size_t p_tile, p_max_tile; /* bytes, floats */
    pthread_mutex_t lock; /* of what follows, and of units' memory */
    char **vacant;        /* pieces of the workspace, the one used last on top */
    int64_t num_vacant;
    _Atomic int64_t phase_ns[HERALD_PHASES];
} job;

/* What one unit keeps until its last task: laid out in one piece of memory. */
typedef struct {
    char *p;
    float *p_max, *m, *l, *o;
} unit_memory;

static inline char *carve(char **from, size_t bytes) {
    char *here = *from;
    *from += herald_round_up(bytes, 64);
    return here;
}
static inline int64_t place_of(const job *job, const unit *unit) { /* in counts, status, rows of indices */
    return unit->row * job->args->kv->num_heads + unit->head;
}
/* Whether the output comes from single rows: those that were selected. */
static inline int from_single_rows(const job *job) { return job->args->key_only || job->args->keys8; }

/* A unit whose scan is done: what parts are merged into, and thread memory. */
typedef struct {
    job *job;
    const unit *unit;
    const unit_memory *memory;
    const float *q;       /* [rows][head_dim], scaled */
    float *m, *l, *o;     /* [rows], [rows], [rows][head_dim] */
    float *importance;    /* as it is ranked */
    int32_t *indices;     /* the caller's */
    float *weights;       /* [rows][count] of what was selected, by herald_select_with_weights() */
    char *topk, *scratch; /* of top-k; herald_single_rows_bytes() */
} ending;

herald_attend herald_attend_of(const job *job, const unit *unit, const unit_memory *memory, int64_t part, const float *q,
                               char *scratch);
/* The time since `since` goes to a phase; returns now. */
double herald_add_phase(job *job, int phase, double since);

/* single_rows.c. Thread memory that a unit needs for it. */
size_t herald_single_rows_bytes(const job *job, const unit *unit);
/* After importance: top-k with the weights of what is selected; with 8-bit keys after scoring again from K, which corrects
 * l and importance. Returns how many; time goes to phases from `start` on. */
int64_t herald_select_with_weights(ending *end, double *start);
/* Output from the `count` selected: their V into o, and l the sum of their weights and of what stands beside the prefix. */
void herald_sum_selected(const ending *end, int64_t count);

#endif
