/* AVX-512 F, BW, VL, DQ with fp32 multiply-add: Skylake-X, Zen 4 and later. */
#define TIER avx512
#include "vec_avx512.h"
#include "body.h"

const herald_tier herald_tier_avx512 = {
    .name = "avx512", .kinds = 1 << HERALD_FEW | 1 << HERALD_MANY, .many_from = 16, FEW_AND_MANY, TABLE_FIELDS};
