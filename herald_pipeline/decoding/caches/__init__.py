"""Cache rules for bidirectional models (``--cache``): what a round computes anew and what it reuses.

``caches.get("dsb", prefix_window=4)`` returns a pure object; ``caches.names()`` lists what there is.
To add one: one module with a frozen dataclass and its ``REGISTRY.add``, imported here, and a test beside the others.
"""

from herald_pipeline.decoding.caches.base import REGISTRY, CacheRule, CacheState, ForwardPlan
from herald_pipeline.decoding.caches.blockwise import Dual, NoCache, Prefix
from herald_pipeline.decoding.caches.dkv import DkvDecode, DkvGreedy, DkvPrefill
from herald_pipeline.decoding.caches.dsb import (
    DREAM_PREFIX_WINDOW,
    LLADA_PREFIX_WINDOW,
    DsbCache,
)

get = REGISTRY.get

__all__ = [
    "DREAM_PREFIX_WINDOW",
    "LLADA_PREFIX_WINDOW",
    "REGISTRY",
    "CacheRule",
    "CacheState",
    "DkvDecode",
    "DkvGreedy",
    "DkvPrefill",
    "DsbCache",
    "Dual",
    "ForwardPlan",
    "NoCache",
    "Prefix",
    "get",
    "names",
]


def names() -> list[str]:
    """All cache names, sorted."""
    return list(REGISTRY)
