"""CPU kernels of the retrieval stream: fused attention + importance + exact top-k, and the gather.

::

    tier      vectors     x = 1 (few query rows)     many rows (x >= 4)
    portable  4 floats    dot products               lanes are query rows
    avx2      8 floats    dot products               lanes are query rows
    avx512    16 floats   dot products               lanes are query rows
    avx512bf16            the same, bf16 dot products where they are faster (Zen 4; on Intel they are slower)
    amx                   avx512's                   16 x 16 matrix tiles, bf16 P (x >= 2, 8 rows)

One C file per instruction set behind one table (``csrc/``), chosen at run time (:mod:`.dispatch`); the
definition is :mod:`.reference` in float64. All calls release the GIL and share one pool of threads, so a selection
and a gather can run at once.
"""

try:
    from . import _core as _core
except ImportError as error:
    _message = (
        "the CPU kernels are not built; run `pip install -e .` in the checkout (needs a C compiler), "
        f"or `make demo` ({error})"
    )
    raise ImportError(_message) from error

from . import reference
from .bandwidth import (
    kept_read_gb_s,
    many_queries_gb_s,
    memcpy_gb_s,
    peak_gflops,
    pool_read_gb_s,
    read_bandwidth_gb_s,
    widest_unit_tflop_s,
)
from .dispatch import active_tier, capabilities, set_tier, tier_names, usable_tiers
from .elements import as_storage, from_float32, storage_dtype, to_float32
from .int8_keys import Int8Keys
from .options import Draft, Selection, SelectOptions
from .selection import gather, kernel_kind, select, topk
from .store import PAGE_TOKENS, FlatKV, PagedKV
from .tuning import GatherTuning, Tuning, default_gather_tuning, default_tuning

__all__ = [
    "PAGE_TOKENS",
    "Draft",
    "FlatKV",
    "GatherTuning",
    "Int8Keys",
    "PagedKV",
    "SelectOptions",
    "Selection",
    "Tuning",
    "active_tier",
    "as_storage",
    "capabilities",
    "default_gather_tuning",
    "default_tuning",
    "from_float32",
    "gather",
    "kept_read_gb_s",
    "kernel_kind",
    "many_queries_gb_s",
    "memcpy_gb_s",
    "peak_gflops",
    "pool_read_gb_s",
    "read_bandwidth_gb_s",
    "reference",
    "select",
    "set_tier",
    "storage_dtype",
    "tier_names",
    "to_float32",
    "topk",
    "usable_tiers",
    "widest_unit_tflop_s",
]
