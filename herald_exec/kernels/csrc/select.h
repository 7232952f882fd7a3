/* What select.c (units, scans, top-k) and single_rows.c (output from what was selected, now or later) share. */
#ifndef HERALD_SELECT_H
#define HERALD_SELECT_H

#include "herald.h"
#include <stdatomic.h>

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

herald_attend herald_attend_of(const job *job, const unit *unit, const unit_memory *memory, int64_t part, const float *q,
                               char *scratch);
/* The time since `since` goes to a phase; returns now. */
double herald_add_phase(job *job, int phase, double since);
/* Count, and -1 behind the indices. */
void herald_write_count(const job *job, const unit *unit, int64_t count);
/* Output of a unit in the caller's order, and its status. */
void herald_write_output(const job *job, const unit *unit, const float *l, const float *o, int bad);

/* What is left of a unit after its search: rows of K to score again, rows of V to sum. It keeps all it needs, so that it
 * may be done during the scans of other units, at the end of a thread's work at the latest. */
typedef struct {
    job *job;
    const unit *unit;
    float *m, *l, *o;                /* [rows], [rows], [rows][head_dim] */
    float *beside;                   /* [rows]: of l what a draft and the own key hold */
    float *q;                        /* 8-bit keys: queries, to score with */
    int64_t sure, border, scored;    /* 8-bit keys: selected by their scores; to be scored again; done so far */
    int64_t count, summed;           /* selected; done so far */
    int64_t each;                    /* rows during a chunk of a later scan */
    float *known;                    /* [rows][count]: weights of what was selected */
    int32_t *of_sure, *of_border, *places, *from; /* positions; top-k's places in the border; see merge_positions() */
    float *weights, *again, *values; /* [rows][sure + border] of the scan; [rows][border] exact; [border] importance */
    char *search, *scratch;          /* for top-k; a tier's own */
    int bad;
} remains;

/* What remains of a unit on this thread, with room for a unit; what was left in it is done first. NULL: memory is short. */
remains *herald_remains_of(job *job, const unit *unit, const float *q);
/* After importance: the search, and the weights that the scan left in `memory`. */
void herald_search(remains *rest, const unit_memory *memory, const float *importance, herald_asking *idle,
                   double *start);
/* What the next scan may ask for on its way; 0: nothing. */
int herald_remaining_rows(herald_rows *rows);
/* Work on what that scan has asked for. */
void herald_work_on_remaining(void);
/* All that is left of this thread's remains. */
void herald_finish_remaining(void);

#endif
