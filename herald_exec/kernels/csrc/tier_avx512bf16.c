/* AVX-512 with bf16 dot products (Zen 4, Cooper Lake and later).
 *
 * `vdpbf16ps` multiplies pairs of bf16: on Zen 4 it issues as often as FP32 FMA and does twice the work; on Intel it takes
 * four times as long. So this tier measures itself once (`bf16_dot_pays`) and takes the FP32 kernels where those are faster.
 * Queries are split into a high and a low bf16 part, which keeps scores at fp32 accuracy: importance and index sets stay
 * in the fp32 class. In PV, P is rounded to bf16 (pv = "bf16" or "auto"), as rows of V are taken in pairs.
 */
#define TIER avx512bf16
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
    .accumulate = FN(accumulate),
    .collect = FN(collect),
    .copy_row = FN(copy_row),
    .fence = FN(fence),
    .read = FN(read),
    .peak = {FN(peak_fma), FN(peak_dot)}};
