/* AVX2 + FMA + F16C: Haswell, Zen and later. */
#define TIER avx2
#include "vec_avx2.h"
#include "body.h"

const herald_tier herald_tier_avx2 = {
    .name = "avx2", .kinds = 1 << HERALD_FEW | 1 << HERALD_MANY, .many_from = 16, FEW_AND_MANY, TABLE_FIELDS};
