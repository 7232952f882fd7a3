/* The kernels' own threads. A job is a counter of tasks; idle workers join the job with the fewest helpers, so a selection
 * and a gather that run at once both progress. The calling thread works on its own job, so a job needs no worker to end.
 * Workers are placed on the CPUs of the process's affinity mask; under a cgroup quota smaller than the mask they float.
 */
#define _GNU_SOURCE
#include "herald.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MAX_WORKERS 512
#define SPIN_S 50e-6 /* a layer's next call often comes sooner than a sleeping thread wakes */

typedef struct job {
    herald_run run;
    void *context;
    int64_t tasks;
    _Atomic int64_t next;
    _Atomic int helpers; /* changed under the lock */
    int max_helpers;
    struct job *link;
} job;

/* Held for a few instructions at a time, so a thread that finds it taken does better to look again than to sleep. */
#ifdef PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP
static pthread_mutex_t lock = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;
#else
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
#endif
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER, idle = PTHREAD_COND_INITIALIZER;
static job *jobs;
static int num_workers;
static _Atomic uint64_t posted; /* counts jobs: what spinning workers watch */
static pthread_key_t scratch_key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

double herald_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* ---- memory ---- */

#define HUGE_PAGE ((size_t)2 << 20)

void *herald_map(size_t bytes) {
    size_t whole = herald_round_up(bytes ? bytes : 1, HUGE_PAGE);
    if (whole < bytes) return NULL;
    char *area = mmap(NULL, whole + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (area == MAP_FAILED) return NULL;
    char *start = (char *)herald_round_up((size_t)area, HUGE_PAGE);
    if (start > area) munmap(area, (size_t)(start - area));
    munmap(start + whole, (size_t)(area + HUGE_PAGE - start));
#ifdef MADV_HUGEPAGE
    madvise(start, whole, MADV_HUGEPAGE);
#endif
    return start;
}
void herald_unmap(void *memory, size_t bytes) {
    if (memory) munmap(memory, herald_round_up(bytes ? bytes : 1, HUGE_PAGE));
}

typedef struct {
    size_t bytes;
    char *memory;
} arena;

static void free_arena(void *value) {
    arena *own = value;
    herald_unmap(own->memory, own->bytes);
    free(own);
}

static void set_up(void);

char *herald_thread_scratch(size_t bytes) {
    pthread_once(&once, set_up);
    arena *own = pthread_getspecific(scratch_key);
    if (!own) {
        own = calloc(1, sizeof *own);
        if (!own) return NULL;
        pthread_setspecific(scratch_key, own);
    }
    if (own->bytes < bytes) {
        herald_unmap(own->memory, own->bytes);
        own->bytes = bytes + bytes / 4;
        own->memory = herald_map(own->bytes);
        if (!own->memory) own->bytes = 0;
    }
    return own->memory;
}

/* Results of split units: kept between calls, because fresh pages would fault in every call. */
#define KEPT 4
static struct {
    void *memory;
    size_t bytes;
} kept[KEPT];

void *herald_workspace_take(size_t bytes, size_t *got) {
    void *found = NULL, *old = NULL;
    size_t old_bytes = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < KEPT && !found; i++)
        if (kept[i].memory && kept[i].bytes >= bytes) {
            found = kept[i].memory;
            *got = kept[i].bytes;
            kept[i].memory = NULL;
        }
    for (int i = 0; i < KEPT && !found && !old; i++)
        if (kept[i].memory) { /* too small: make room for a larger one */
            old = kept[i].memory;
            old_bytes = kept[i].bytes;
            kept[i].memory = NULL;
        }
    pthread_mutex_unlock(&lock);
    herald_unmap(old, old_bytes);
    if (found) return found;
    *got = bytes + bytes / 4;
    return herald_map(*got);
}
void herald_workspace_give(void *memory, size_t got) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < KEPT && memory; i++)
        if (!kept[i].memory) {
            kept[i].memory = memory;
            kept[i].bytes = got;
            memory = NULL;
        }
    pthread_mutex_unlock(&lock);
    herald_unmap(memory, got);
}

/* ---- how many threads ---- */

static int cgroup_cpus(void) { /* whole CPUs of the quota (cgroup 2, then 1), or a large number */
    double quota = -1, period = 100000;
    FILE *file = fopen("/sys/fs/cgroup/cpu.max", "r");
    if (file) {
        if (fscanf(file, "%lf %lf", &quota, &period) < 1) quota = -1; /* "max" */
        fclose(file);
    } else if ((file = fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "r"))) {
        if (fscanf(file, "%lf", &quota) < 1) quota = -1;
        fclose(file);
        if ((file = fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "r"))) {
            if (fscanf(file, "%lf", &period) < 1) period = 100000;
            fclose(file);
        }
    }
    if (quota <= 0 || period <= 0) return MAX_WORKERS;
    double cpus = quota / period;
    return cpus < 1 ? 1 : cpus > MAX_WORKERS ? MAX_WORKERS : (int)cpus;
}

static int allowed_cpus(int *cpus, int room) {
    int count = 0;
#ifdef __linux__
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        for (int cpu = 0; cpu < CPU_SETSIZE && count < room; cpu++)
            if (CPU_ISSET(cpu, &set)) cpus[count++] = cpu;
#endif
    if (!count) {
        long online = sysconf(_SC_NPROCESSORS_ONLN);
        for (count = 0; count < online && count < room; count++) cpus[count] = count;
    }
    return count ? count : 1;
}

int herald_default_threads(void) {
    int cpus[MAX_WORKERS], allowed = allowed_cpus(cpus, MAX_WORKERS), quota = cgroup_cpus();
    return allowed < quota ? allowed : quota;
}

/* ---- workers ---- */

#ifdef HERALD_HAVE_X86
/* Flush denormals: they are below every tolerance here and cost 150 cycles each. The caller's mode is put back. */
static unsigned enter_flush(void) {
    unsigned old;
    __asm__ volatile("stmxcsr %0" : "=m"(old));
    unsigned flush = old | 0x8040;
    __asm__ volatile("ldmxcsr %0" : : "m"(flush));
    return old;
}
static void leave_flush(unsigned old) { __asm__ volatile("ldmxcsr %0" : : "m"(old)); }
#else
static unsigned enter_flush(void) { return 0; }
static void leave_flush(unsigned old) { (void)old; }
#endif

/* A helper looks up when another job was posted, so that a long selection shares its workers with a gather. */
static void work(job *own, int helper, uint64_t seen) {
    unsigned old = enter_flush();
    int64_t task;
    while (!(helper && atomic_load_explicit(&posted, memory_order_relaxed) != seen) &&
           (task = atomic_fetch_add_explicit(&own->next, 1, memory_order_relaxed)) < own->tasks)
        own->run(own->context, task);
    leave_flush(old);
}

static void pause_a_little(void) {
#ifdef HERALD_HAVE_X86
    __builtin_ia32_pause();
#endif
}

static job *pick(void) { /* under the lock: the open job with the fewest helpers */
    job *best = NULL;
    for (job *each = jobs; each; each = each->link)
        if (each->helpers < each->max_helpers &&
            atomic_load_explicit(&each->next, memory_order_relaxed) < each->tasks &&
            (!best || each->helpers < best->helpers))
            best = each;
    return best;
}

static void *worker(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        job *own = pick();
        if (own) {
            own->helpers++;
            uint64_t seen = atomic_load(&posted);
            pthread_mutex_unlock(&lock);
            work(own, 1, seen);
            pthread_mutex_lock(&lock);
            if (--own->helpers == 0) pthread_cond_broadcast(&idle);
            continue;
        }
        uint64_t seen = atomic_load(&posted);
        pthread_mutex_unlock(&lock);
        for (double until = herald_seconds() + SPIN_S; atomic_load(&posted) == seen; pause_a_little())
            if (herald_seconds() > until) break;
        pthread_mutex_lock(&lock);
        if (atomic_load(&posted) == seen) pthread_cond_wait(&wake, &lock);
    }
    return NULL;
}

static void start_worker(void) { /* under the lock */
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
#ifdef __linux__
    int cpus[MAX_WORKERS], allowed = allowed_cpus(cpus, MAX_WORKERS);
    if (allowed <= cgroup_cpus() && num_workers + 1 < allowed) { /* the first CPU is left to the caller */
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpus[num_workers + 1], &set);
        pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
    }
#endif
    if (pthread_create(&thread, &attributes, worker, NULL) == 0) num_workers++;
    pthread_attr_destroy(&attributes);
}

static void after_fork(void) { /* the child has no workers: it starts its own when it needs them */
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&wake, NULL);
    pthread_cond_init(&idle, NULL);
    jobs = NULL;
    num_workers = 0;
}
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }
static void set_up(void) {
    pthread_key_create(&scratch_key, free_arena);
    pthread_atfork(before_fork, after_fork_in_parent, after_fork);
}

void herald_parallel(herald_run run, void *context, int64_t tasks, int threads) {
    pthread_once(&once, set_up);
    if (tasks <= 0) return;
    if (threads <= 0) threads = herald_default_threads();
    if (threads > tasks) threads = (int)tasks;
    job own = {.run = run, .context = context, .tasks = tasks, .max_helpers = threads - 1};
    atomic_init(&own.next, 0);
    if (threads > 1) {
        pthread_mutex_lock(&lock);
        while (num_workers < threads - 1 && num_workers < MAX_WORKERS) {
            int before = num_workers;
            start_worker();
            if (num_workers == before) break;
        }
        own.link = jobs;
        jobs = &own;
        atomic_fetch_add(&posted, 1);
        pthread_mutex_unlock(&lock);
        pthread_cond_broadcast(&wake); /* without the lock, which they take first */
    }
    work(&own, 0, 0);
    if (threads > 1) {
        for (double until = herald_seconds() + SPIN_S; atomic_load(&own.helpers); pause_a_little())
            if (herald_seconds() > until) break; /* the others are at their last tasks: most end sooner than a sleeper wakes */
        pthread_mutex_lock(&lock);
        for (job **at = &jobs; *at; at = &(*at)->link)
            if (*at == &own) {
                *at = own.link;
                break;
            }
        while (own.helpers) pthread_cond_wait(&idle, &lock);
        pthread_mutex_unlock(&lock);
    }
}
