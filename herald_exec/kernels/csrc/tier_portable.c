/* Any machine with a GNU C compiler; what the others are compared with. */
#define TIER portable
#include "vec_portable.h"
#include "body.h"

const herald_tier herald_tier_portable = {
    .name = "portable", .kinds = 1 << HERALD_FEW | 1 << HERALD_MANY, .many_from = 4, FEW_AND_MANY, TABLE_FIELDS};
