/* Exact top-k of one importance row: ascending positions, equal values keep the lower position, NaN ranks last.
 *
 * Short rows: radix select, 11 bits of the order-preserving key at a time. Long rows: 512 or 1,024 strided samples give
 * a threshold that somewhat more than k values reach, most likely; one vector pass compresses those out, radix select works on the few that
 * are left. If the sample misled (fewer than k reach it), the full radix runs: the same result, only slower.
 */
#include "herald.h"
#include <stdlib.h>
#include <string.h>

#define DIGIT_BITS 11
#define SAMPLES 1024
#define SAMPLE_FROM 2048 /* below it the full radix is as fast */

size_t herald_topk_scratch_bytes(int64_t length) {
    return (size_t)(length + 64) * 2 * sizeof(uint32_t) + (2048 + SAMPLES + 64) * sizeof(uint32_t);
}

static inline uint32_t key_at(const float *values, int64_t i) {
    uint32_t bits;
    memcpy(&bits, values + i, 4);
    return herald_key(bits);
}

static void range_of(const uint32_t *keys, int64_t n, uint32_t *low, uint32_t *high) {
    *low = UINT32_MAX, *high = 0;
    for (int64_t i = 0; i < n; i++) {
        *low = keys[i] < *low ? keys[i] : *low;
        *high = keys[i] > *high ? keys[i] : *high;
    }
}

/* The k-th largest key of n (1 <= k <= n); *above = how many of the k are larger. `rest` may be `keys` itself. Digits are
 * the highest bits in which the keys differ: importance has few exponents, and counters that many keys share would wait for
 * each other. */
static uint32_t kth_key(const uint32_t *keys, int64_t n, int64_t k, uint32_t *rest, uint32_t *histogram,
                        int64_t *above) {
    int64_t rank = k;
    uint32_t low, high;
    for (range_of(keys, n, &low, &high); low != high; range_of(keys, n, &low, &high)) {
        int shift = 32 - __builtin_clz(high - low) - DIGIT_BITS;
        if (shift < 0) shift = 0;
        uint32_t digit = (high - low) >> shift;
        memset(histogram, 0, (size_t)(digit + 1) * sizeof *histogram);
        for (int64_t i = 0; i < n; i++) histogram[(keys[i] - low) >> shift]++;
        while (rank > histogram[digit]) rank -= histogram[digit--];
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++) {
            uint32_t key = keys[i];
            rest[kept] = key;
            kept += (key - low) >> shift == digit;
        }
        keys = rest;
        n = kept;
    }
    *above = k - rank;
    return low;
}

/* The k largest: all keys above `key` and, of those that meet it, the first `equal`. */
typedef struct {
    uint32_t key;
    int64_t equal;
} border;

static border border_of(const uint32_t *keys, int64_t n, int64_t k, uint32_t *rest, uint32_t *histogram) {
    if (k <= 0) return (border){UINT32_MAX, 0}; /* no key is that large */
    int64_t above;
    uint32_t key = kth_key(keys, n, k, rest, histogram, &above);
    return (border){key, k - above};
}
/* Whether a key is among them; asked once for each in order. Without branches, which no predictor guesses. */
static inline int within(border *limit, uint32_t key) {
    int tie = (key == limit->key) & (limit->equal > 0);
    limit->equal -= tie;
    return (key > limit->key) | tie;
}

/* A key that a few more than k of the values reach, most likely. */
static uint32_t sampled_threshold(const float *values, int64_t length, int64_t k, uint32_t *sample,
                                  uint32_t *histogram) {
    int64_t count = length < 16 * SAMPLES ? SAMPLES / 2 : SAMPLES, step = length / count;
    for (int64_t i = 0; i < count; i++) sample[i] = key_at(values, i * step);
    int64_t expected = k * count / length;
    int64_t margin = 8, root = 1;
    while (root * root < expected) root++;
    margin += 4 * root; /* four standard deviations: about one row in 30,000 falls back */
    if (expected + margin >= count) return 0;
    int64_t above;
    return kth_key(sample, count, expected + margin + 1, sample, histogram, &above);
}

/* Keys that reach a threshold below the k-th, or all; positions NULL: 0, 1, 2, .. `rest` has room for as many keys. */
typedef struct {
    uint32_t *keys, *rest, *histogram;
    int32_t *positions;
    int64_t count;
} survivors;

static survivors survivors_of(const herald_tier *tier, const float *values, int64_t length, int64_t k, char *scratch) {
    uint32_t *histogram = (uint32_t *)scratch, *sample = histogram + 2048, *keys = sample + SAMPLES + 16;
    int32_t *positions = (int32_t *)(keys + length + 32);
    uint32_t threshold = length > SAMPLE_FROM ? sampled_threshold(values, length, k, sample, histogram) : 0;
    int64_t count = threshold ? tier->collect(values, length, threshold, keys, positions) : 0;
    /* the rest goes behind the survivors where there is room; where they are most of the row, all are taken again */
    if (threshold && count >= k && 2 * count + 16 <= length)
        return (survivors){keys, keys + count + 16, histogram, positions, count};
    for (int64_t i = 0; i < length; i++) keys[i] = key_at(values, i);
    return (survivors){keys, (uint32_t *)positions, histogram, NULL, length};
}

int64_t herald_topk(const herald_tier *tier, const float *values, int64_t length, int64_t k, char *scratch, int32_t *out) {
    if (k > length) k = length;
    if (k <= 0) return 0;
    if (k == length) {
        for (int64_t i = 0; i < length; i++) out[i] = (int32_t)i;
        return k;
    }
    survivors some = survivors_of(tier, values, length, k, scratch);
    border limit = border_of(some.keys, some.count, k, some.rest, some.histogram);
    int64_t count = 0;
    for (int64_t i = 0; i < some.count && count < k; i++) {
        out[count] = some.positions ? some.positions[i] : (int32_t)i;
        count += within(&limit, some.keys[i]);
    }
    return count;
}

void herald_topk_parts(const herald_tier *tier, const float *values, int64_t length, int64_t heavy, int64_t sure,
                       int64_t wanted, char *scratch, int32_t *middle, int64_t *num_middle, int32_t *others,
                       int64_t *num_others) {
    *num_middle = *num_others = 0;
    if (wanted > length) wanted = length;
    if (wanted <= 0) return;
    survivors some = survivors_of(tier, values, length, wanted, scratch);
    border all = border_of(some.keys, some.count, wanted, some.rest, some.histogram);
    border second = border_of(some.keys, some.count, sure, some.rest, some.histogram);
    border first = border_of(some.keys, some.count, heavy, some.rest, some.histogram);
    int64_t a = 0, b = 0;
    for (int64_t i = 0; i < some.count; i++) {
        uint32_t key = some.keys[i];
        int is_wanted = within(&all, key), is_sure = within(&second, key), is_middle = is_sure & !within(&first, key);
        middle[a] = others[b] = some.positions ? some.positions[i] : (int32_t)i;
        a += is_middle;
        b += is_wanted & !is_middle;
    }
    *num_middle = a;
    *num_others = b;
}

/* The paper's way (section IV-B4), kept as the benchmark's baseline: a min-heap of (key, lower position wins). */
static int ascending_position(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}
static void sift_down(uint64_t *heap, int64_t size, int64_t at) {
    uint64_t item = heap[at];
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= item) break;
        heap[at] = heap[child];
    }
    heap[at] = item;
}
int64_t herald_topk_heap(const float *values, int64_t length, int64_t k, char *scratch, int32_t *out) {
    if (k > length) k = length;
    if (k <= 0) return 0;
    uint64_t *heap = (uint64_t *)scratch;
    for (int64_t i = 0; i < k; i++) heap[i] = (uint64_t)key_at(values, i) << 32 | (uint32_t)~i;
    for (int64_t i = k / 2; i-- > 0;) sift_down(heap, k, i);
    for (int64_t i = k; i < length; i++) {
        uint64_t item = (uint64_t)key_at(values, i) << 32 | (uint32_t)~i;
        if (item > heap[0]) heap[0] = item, sift_down(heap, k, 0);
    }
    for (int64_t i = 0; i < k; i++) out[i] = (int32_t)~(uint32_t)heap[i];
    qsort(out, (size_t)k, sizeof *out, ascending_position);
    return k;
}
