/* Exact top-k of one importance row: ascending positions, equal values keep the lower position, NaN ranks last.
 *
 * Short rows: radix select (11 + 11 + 10 bits of the order-preserving key). Long rows: 512 or 1,024 strided samples give
 * a threshold that somewhat more than k values reach, most likely; one vector pass compresses those out, radix select works on the few that
 * are left. If the sample misled (fewer than k reach it), the full radix runs: the same result, only slower.
 */
#include "herald.h"
#include <stdlib.h>
#include <string.h>

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

/* The digit at which the count from the top reaches k; *k becomes the rank within that digit. */
static uint32_t find_digit(const uint32_t *histogram, int digits, int64_t *k) {
    int digit = digits - 1;
    while (*k > histogram[digit]) *k -= histogram[digit--];
    return (uint32_t)digit;
}

/* The k-th largest key of n (1 <= k <= n); *above = how many of the k are larger. `rest` may be `keys` itself. */
static uint32_t kth_key(const uint32_t *keys, int64_t n, int64_t k, uint32_t *rest, uint32_t *histogram,
                        int64_t *above) {
    static const int shifts[] = {21, 10, 0}, widths[] = {11, 11, 10};
    int64_t rank = k;
    uint32_t prefix = 0;
    for (int pass = 0; pass < 3; pass++) {
        int digits = 1 << widths[pass], shift = shifts[pass];
        memset(histogram, 0, (size_t)digits * sizeof *histogram);
        for (int64_t i = 0; i < n; i++) histogram[keys[i] >> shift & (uint32_t)(digits - 1)]++;
        uint32_t digit = find_digit(histogram, digits, &rank);
        prefix |= digit << shift;
        if (pass == 2) break;
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++) {
            uint32_t key = keys[i];
            rest[kept] = key;
            kept += (key >> shift & (uint32_t)(digits - 1)) == digit;
        }
        keys = rest;
        n = kept;
    }
    *above = k - rank;
    return prefix;
}

/* Emit the k positions of keys above the threshold and, of those that meet it, the first `equal`. positions NULL: 0, 1,
 * 2, .. Without branches on keys, which no predictor guesses. */
static int64_t emit(const uint32_t *keys, const int32_t *positions, int64_t n, uint32_t threshold, int64_t equal, int64_t k,
                    int32_t *out) {
    int64_t count = 0;
    for (int64_t i = 0; i < n && count < k; i++) {
        int tie = (keys[i] == threshold) & (equal > 0);
        equal -= tie;
        out[count] = positions ? positions[i] : (int32_t)i;
        count += (keys[i] > threshold) | tie;
    }
    return count;
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

int64_t herald_topk(const herald_tier *tier, const float *values, int64_t length, int64_t k, char *scratch,
                    int32_t *out) {
    if (k > length) k = length;
    if (k <= 0) return 0;
    if (k == length) {
        for (int64_t i = 0; i < length; i++) out[i] = (int32_t)i;
        return k;
    }
    uint32_t *histogram = (uint32_t *)scratch, *sample = histogram + 2048, *keys = sample + SAMPLES + 16;
    int32_t *positions = (int32_t *)(keys + length + 32);
    int64_t above;
    if (length > SAMPLE_FROM) {
        uint32_t threshold = sampled_threshold(values, length, k, sample, histogram);
        int64_t kept = threshold ? tier->collect(values, length, threshold, keys, positions) : 0;
        if (kept >= k) {
            uint32_t *rest = keys + kept + 16; /* survivors are kept for the emission when there is room beside them */
            if (2 * kept + 16 > length) rest = malloc((size_t)kept * sizeof *rest);
            if (rest) {
                uint32_t kth = kth_key(keys, kept, k, rest, histogram, &above);
                if (2 * kept + 16 > length) free(rest);
                return emit(keys, positions, kept, kth, k - above, k, out);
            }
        }
    }
    for (int64_t i = 0; i < length; i++) keys[i] = key_at(values, i);
    uint32_t kth = kth_key(keys, length, k, (uint32_t *)positions, histogram, &above);
    return emit(keys, NULL, length, kth, k - above, k, out);
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
