# cython: language_level=3, boundscheck=False, wraparound=False
"""Thin: addresses and sizes in, one call without the GIL, numbers out. Everything is checked in ``__init__.py``."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t


cdef extern from "herald.h" nogil:
    ctypedef struct herald_tier:
        const char *name
        int kinds

    ctypedef struct herald_kv:
        char *k
        char *v
        int64_t tile_bytes, head_bytes, slot_bytes, layer_bytes, capacity
        int dtype, head_dim, num_heads, num_slots, num_layers

    ctypedef struct herald_tuning:
        int distance, streams, turned, tiles, rows_ahead, bulk, even

    ctypedef struct herald_gather_tuning:
        int ahead, level, scattered, streaming

    ctypedef struct herald_gather_args:
        const herald_tier *tier
        const herald_kv *kv
        int64_t layer, rows, max_k
        const int64_t *slots
        const int32_t *indices
        const int32_t *counts
        char *out_k
        char *out_v
        herald_gather_tuning tuning
        int threads

    ctypedef struct herald_select_args:
        const herald_tier *tier
        const herald_kv *kv
        const herald_kv *draft
        const herald_kv *keys8
        double candidates
        int64_t layer, draft_layer, rows
        const int64_t *slots
        const int64_t *lengths
        const int64_t *budgets
        const int64_t *draft_slots
        const int64_t *draft_lengths
        const float *queries
        const float *self_k
        const float *self_v
        const herald_gather_args *gather
        int x, num_heads, pv, key_only, smoothing, paper_like, rescore_all
        herald_tuning tuning
        int64_t max_k
        float *output
        int32_t *indices
        int32_t *counts
        uint8_t *status
        float *importance
        int64_t importance_stride
        int threads
        double *phase_seconds

    int herald_num_tiers()
    const char *herald_tier_name(int index)
    int herald_tier_built(int index)
    int herald_tier_usable(int index)
    const herald_tier *herald_tier_get(int index)
    int herald_is_intel()
    int herald_kind_for(const herald_tier *tier, int queries, int group, int dtype, int head_dim, int pv)
    int herald_default_threads()
    int herald_select(const herald_select_args *args)
    void herald_quantise(const herald_kv *kv, const herald_kv *keys8, int64_t layer, int64_t slot, int64_t start,
                         int64_t stop, int threads)
    void herald_gather(const herald_gather_args *args)
    size_t herald_topk_scratch_bytes(int64_t length)
    int64_t herald_topk(const herald_tier *tier, const float *values, int64_t length, int64_t k, char *scratch,
                        int32_t *out)
    int64_t herald_topk_heap(const float *values, int64_t length, int64_t k, char *scratch, int32_t *out)
    char *herald_thread_scratch(size_t nbytes)
    void *herald_map(size_t nbytes)
    void herald_unmap(void *memory, size_t nbytes)
    double herald_read_seconds(const herald_tier *tier, const char *start, int64_t nbytes, int threads)
    double herald_copy_seconds(const herald_tier *tier, char *to, const char *start, int64_t nbytes, int threads)
    double herald_peak_flops(const herald_tier *tier, int which, int threads)
    void herald_touch(char *memory, int64_t nbytes, int threads)
    void herald_fill_normal(char *memory, int64_t elements, int dtype, uint64_t seed, int threads)


def tiers():
    """``(name, built, usable)`` of every tier, best last."""
    return [
        (herald_tier_name(i).decode(), bool(herald_tier_built(i)), bool(herald_tier_usable(i)))
        for i in range(herald_num_tiers())
    ]


def is_intel():
    return bool(herald_is_intel())


def default_threads():
    return herald_default_threads()


def kind_for(int tier, int queries, int group, int dtype, int head_dim, int pv):
    return ("few", "many", "amx")[herald_kind_for(herald_tier_get(tier), queries, group, dtype, head_dim, pv)]


cdef class View:
    """A store of KV as the kernels see it: base addresses and strides in bytes."""

    cdef herald_kv kv

    def __init__(self, uintptr_t k, uintptr_t v, int64_t tile_bytes, int64_t head_bytes, int64_t slot_bytes,
                 int64_t layer_bytes, int64_t capacity, int dtype, int head_dim, int num_heads, int num_slots,
                 int num_layers):
        self.kv = herald_kv(k=<char *> k, v=<char *> v, tile_bytes=tile_bytes, head_bytes=head_bytes,
                            slot_bytes=slot_bytes, layer_bytes=layer_bytes, capacity=capacity, dtype=dtype,
                            head_dim=head_dim, num_heads=num_heads, num_slots=num_slots, num_layers=num_layers)


def map_memory(size_t nbytes):
    """Address of zeroed memory on huge pages where the system grants them; 0 when there is none."""
    cdef void *memory
    with nogil:
        memory = herald_map(nbytes)
    return <uintptr_t> memory


def unmap_memory(uintptr_t address, size_t nbytes):
    with nogil:
        herald_unmap(<void *> address, nbytes)


def select(int tier, View kv, View draft, View keys8, double candidates, int rescore_all,
           int64_t layer, int64_t draft_layer, int64_t[::1] slots, int64_t[::1] lengths,
           int64_t[::1] budgets, int64_t[::1] draft_slots, int64_t[::1] draft_lengths, float[:, :, :, ::1] queries,
           float[:, :, :, ::1] self_k, float[:, :, :, ::1] self_v, int pv, int key_only, int smoothing,
           int paper_like, tuple tuning, int threads, float[:, :, :, ::1] output, int32_t[:, :, ::1] indices,
           int32_t[:, ::1] counts, uint8_t[:, ::1] status, float[:, :, ::1] importance, double[::1] phase_seconds,
           tuple gathered=None):
    """``gathered``: addresses of K and V that take the selected rows, and a gather's tuning; ``None``: no copy."""
    cdef herald_select_args args
    cdef herald_gather_args taken
    cdef int failed
    if queries.shape[0] == 0:
        return True
    args.tier = herald_tier_get(tier)
    args.kv = &kv.kv
    args.draft = &draft.kv if draft is not None else NULL
    args.keys8 = &keys8.kv if keys8 is not None else NULL
    args.candidates = candidates
    args.rescore_all = rescore_all
    args.layer, args.draft_layer, args.rows = layer, draft_layer, queries.shape[0]
    args.slots, args.lengths, args.budgets = &slots[0], &lengths[0], &budgets[0]
    args.draft_slots = &draft_slots[0] if draft_slots is not None else NULL
    args.draft_lengths = &draft_lengths[0] if draft_lengths is not None else NULL
    args.queries = &queries[0, 0, 0, 0]
    args.self_k = &self_k[0, 0, 0, 0] if self_k is not None else NULL
    args.self_v = &self_v[0, 0, 0, 0] if self_v is not None else NULL
    args.x, args.num_heads = <int> queries.shape[1], <int> queries.shape[2]
    args.pv, args.key_only, args.smoothing = pv, key_only, smoothing
    args.paper_like, args.threads = paper_like, threads
    args.tuning.distance, args.tuning.streams, args.tuning.turned = tuning[0], tuning[1], tuning[2]
    args.tuning.tiles, args.tuning.rows_ahead, args.tuning.bulk = tuning[3], tuning[4], tuning[5]
    args.tuning.even = tuning[6]
    args.max_k = indices.shape[2]
    args.output, args.counts, args.status = &output[0, 0, 0, 0], &counts[0, 0], &status[0, 0]
    args.indices = &indices[0, 0, 0] if indices.shape[2] > 0 else NULL
    args.importance = &importance[0, 0, 0] if importance is not None and importance.shape[2] > 0 else NULL
    args.importance_stride = importance.shape[2] if importance is not None else 0
    args.phase_seconds = &phase_seconds[0] if phase_seconds is not None else NULL
    args.gather = NULL
    if gathered is not None and args.max_k > 0:
        _fill_gather(&taken, tier, kv, layer, slots, indices, counts, gathered[0], gathered[1], gathered[2])
        args.gather = &taken
    with nogil:
        failed = herald_select(&args)
    return failed == 0


def quantise(View kv, View keys8, int64_t layer, int64_t slot, int64_t start, int64_t stop, int threads):
    with nogil:
        herald_quantise(&kv.kv, &keys8.kv, layer, slot, start, stop, threads)


cdef void _fill_gather(herald_gather_args *args, int tier, View kv, int64_t layer, int64_t[::1] slots,
                       int32_t[:, :, ::1] indices, int32_t[:, ::1] counts, uintptr_t out_k, uintptr_t out_v,
                       tuple tuning):
    args.tier = herald_tier_get(tier)
    args.kv = &kv.kv
    args.layer, args.rows, args.max_k = layer, indices.shape[0], indices.shape[2]
    args.slots, args.indices, args.counts = &slots[0], &indices[0, 0, 0], &counts[0, 0]
    args.out_k, args.out_v, args.threads = <char *> out_k, <char *> out_v, 0
    args.tuning.ahead, args.tuning.level = tuning[0], tuning[1]
    args.tuning.scattered, args.tuning.streaming = tuning[2], tuning[3]


def gather(int tier, View kv, int64_t layer, int64_t[::1] slots, int32_t[:, :, ::1] indices, int32_t[:, ::1] counts,
           uintptr_t out_k, uintptr_t out_v, tuple tuning, int threads):
    cdef herald_gather_args args
    if indices.shape[0] == 0 or indices.shape[2] == 0:
        return
    _fill_gather(&args, tier, kv, layer, slots, indices, counts, out_k, out_v, tuning)
    args.threads = threads
    with nogil:
        herald_gather(&args)


def topk(int tier, float[::1] values, int64_t k, int heap, int32_t[::1] out):
    """Positions of the k largest, ascending; returns how many. ``out`` holds k + 16."""
    cdef int64_t count = 0, length = values.shape[0]
    cdef char *scratch
    if length == 0 or k <= 0:
        return 0
    with nogil:
        scratch = herald_thread_scratch(herald_topk_scratch_bytes(length))
        if scratch != NULL:
            if heap:
                count = herald_topk_heap(&values[0], length, k, scratch, &out[0])
            else:
                count = herald_topk(herald_tier_get(tier), &values[0], length, k, scratch, &out[0])
        else:
            count = -1
    if count < 0:
        raise MemoryError
    return count


def read_seconds(int tier, uintptr_t address, int64_t nbytes, int threads):
    cdef double seconds
    with nogil:
        seconds = herald_read_seconds(herald_tier_get(tier), <const char *> address, nbytes, threads)
    return seconds


def copy_seconds(uintptr_t to, uintptr_t start, int64_t nbytes, int threads, int tier=-1):
    """By memcpy, or by a tier's stores past the cache."""
    cdef const herald_tier *chosen = herald_tier_get(tier) if tier >= 0 else NULL
    cdef double seconds
    with nogil:
        seconds = herald_copy_seconds(chosen, <char *> to, <const char *> start, nbytes, threads)
    return seconds


def peak_flops(int tier, int which, int threads):
    cdef double flops
    with nogil:
        flops = herald_peak_flops(herald_tier_get(tier), which, threads)
    return flops


def touch(uintptr_t address, int64_t nbytes, int threads):
    with nogil:
        herald_touch(<char *> address, nbytes, threads)


def fill_normal(uintptr_t address, int64_t elements, int dtype, uint64_t seed, int threads):
    with nogil:
        herald_fill_normal(<char *> address, elements, dtype, seed, threads)
