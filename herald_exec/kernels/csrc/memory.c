/* Ceilings to compare with, and memory filled in parallel by the threads that will read it. */
#include "herald.h"
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define BLOCK ((int64_t)1 << 20)

typedef struct {
    const herald_tier *tier;
    char *to;
    const char *from;
    int64_t bytes, element_bytes;
    uint64_t seed;
    int dtype;
    _Atomic uint64_t sum;
} area_job;

static int64_t block_bytes(const area_job *job, int64_t task) {
    int64_t left = job->bytes - task * BLOCK;
    return left < BLOCK ? left : BLOCK;
}
static void read_block(void *context, int64_t task) {
    area_job *job = context;
    atomic_fetch_add(&job->sum, job->tier->read(job->from + task * BLOCK, block_bytes(job, task)));
}
static void copy_block(void *context, int64_t task) {
    area_job *job = context;
    if (job->tier) {
        job->tier->copy_row(job->to + task * BLOCK, job->from + task * BLOCK, block_bytes(job, task), 1);
        job->tier->fence();
    } else memcpy(job->to + task * BLOCK, job->from + task * BLOCK, (size_t)block_bytes(job, task));
}
static void touch_block(void *context, int64_t task) {
    area_job *job = context;
    volatile char *at = job->to + task * BLOCK;
    for (int64_t i = 0; i < block_bytes(job, task); i += 4096) at[i] = at[i]; /* what is there stays */
}

static uint64_t mix(uint64_t x) { /* splitmix64 */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}
/* Sum of eight 8-bit uniforms, centred: close to a unit normal, the same for every thread count. */
static float normal_of(uint64_t seed, uint64_t index) {
    uint64_t bits = mix(seed + index * 0x2545f4914f6cdd1du);
    bits = (bits & 0x00ff00ff00ff00ffu) + (bits >> 8 & 0x00ff00ff00ff00ffu); /* four sums of two bytes each */
    int sum = (int)(bits * 0x0001000100010001u >> 48);
    return ((float)sum - 1020.0f) / 209.02f;
}
static uint16_t half_of(uint32_t bits, int dtype) {
    if (dtype == HERALD_BF16) return (uint16_t)((bits + 0x8000u) >> 16);
    /* |value| is within [2^-7, 5) here, or 0: a plain change of exponent */
    int32_t exponent = (int32_t)(bits >> 23 & 0xff) - 112;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    return exponent > 0 ? (uint16_t)(sign | exponent << 10 | (int32_t)(bits >> 13 & 0x3ff)) : sign;
}
static void normal_block(void *context, int64_t task) {
    const area_job *job = context;
    const int64_t first = task * BLOCK / job->element_bytes, count = block_bytes(job, task) / job->element_bytes;
    const uint64_t seed = job->seed;
    const int dtype = job->dtype;
    char *to = job->to + task * BLOCK; /* stores through a char pointer might change the job: read it once */
    for (int64_t i = 0; i < count; i++) {
        float value = normal_of(seed, (uint64_t)(first + i));
        uint32_t bits;
        memcpy(&bits, &value, 4);
        if (dtype == HERALD_FP32) memcpy(to + i * 4, &bits, 4);
        else {
            uint16_t half = half_of(bits, dtype);
            memcpy(to + i * 2, &half, 2);
        }
    }
}

static double timed(herald_run run, area_job *job, int threads) {
    double start = herald_seconds();
    herald_parallel(run, job, (job->bytes + BLOCK - 1) / BLOCK, threads);
    return herald_seconds() - start;
}

double herald_read_seconds(const herald_tier *tier, const char *from, int64_t bytes, int threads) {
    area_job job = {.tier = tier, .from = from, .bytes = bytes};
    return timed(read_block, &job, threads);
}
double herald_copy_seconds(const herald_tier *tier, char *to, const char *from, int64_t bytes, int threads) {
    area_job job = {.tier = tier, .to = to, .from = from, .bytes = bytes};
    return timed(copy_block, &job, threads);
}
typedef struct {
    const herald_tier *tier;
    int which;
    _Atomic int64_t flops;
} peak_job;

static void peak_task(void *context, int64_t task) {
    (void)task;
    peak_job *job = context;
    atomic_fetch_add(&job->flops, job->tier->peak[job->which](20000));
}
double herald_peak_flops(const herald_tier *tier, int which, int threads) {
    if (which < 0 || which >= HERALD_PEAKS || !tier->peak[which]) return 0;
    if (threads <= 0) threads = herald_default_threads();
    peak_job job = {.tier = tier, .which = which};
    herald_parallel(peak_task, &job, threads, threads); /* wakes the workers and warms the units */
    atomic_store(&job.flops, 0);
    double start = herald_seconds();
    herald_parallel(peak_task, &job, (int64_t)threads * 40, threads);
    return (double)job.flops / (herald_seconds() - start);
}
void herald_touch(char *memory, int64_t bytes, int threads) {
    area_job job = {.to = memory, .bytes = bytes};
    timed(touch_block, &job, threads);
}
void herald_fill_normal(char *memory, int64_t elements, int dtype, uint64_t seed, int threads) {
    area_job job = {.to = memory, .bytes = elements * herald_element_bytes(dtype), .dtype = dtype, .seed = seed,
                    .element_bytes = herald_element_bytes(dtype)};
    timed(normal_block, &job, threads);
}
