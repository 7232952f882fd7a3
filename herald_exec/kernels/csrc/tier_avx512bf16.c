/* AVX-512 with bf16 dot products (Zen 4, Cooper Lake and later).
 *
 * `vdpbf16ps` multiplies pairs of bf16: on Zen 4 it issues as often as FP32 FMA and does twice the work; on Intel it takes
 * four times as long. So with pv = "auto" this tier measures itself once (`dot_pays`) and takes the FP32 kernel where that
 * is faster; pv = "bf16" and "f32" decide by hand. Scores, importance and index sets are FP32 either way.
 */
#define TIER avx512bf16
#define HERALD_VNNI /* every processor with bf16 dots has 16-bit integer ones */
#include "bf16_dot.h"

const herald_tier herald_tier_avx512bf16 = {
    .name = "avx512bf16",
    .kinds = 1 << HERALD_FEW | 1 << HERALD_MANY,
    .many_from = 16,
    .attend = {FN(attend_dot), FN(attend_many)},
    .importance = {FN(importance_few), FN(importance_many)},
    .weights = {FN(weights_few), FN(weights_many)},
    .p_tile_bytes = {FN(p_tile_few), FN(p_tile_many)},
    .p_max_floats = {FN(p_max_few), FN(p_max_many)},
    .scratch_bytes = FN(scratch_bytes),
    .scan_int8 = FN(scan_int8),
    .score = FN(score),
    .accumulate = FN(accumulate),
    .collect = FN(collect),
    .widen = FN(widen_row),
    .copy_row = FN(copy_row),
    .fence = FN(fence),
    .read = FN(read),
    .peak = {FN(peak_fma), FN(peak_dot)}};
