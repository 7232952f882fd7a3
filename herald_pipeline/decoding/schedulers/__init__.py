"""Block schedulers (``--scheduler``): the range [s, e) in which a request may commit next.

``schedulers.get("dsb-greedy", s_init=32, s_max=64)`` returns a pure object; ``schedulers.names()`` lists what there is.
To add one: one module with a frozen dataclass and its ``REGISTRY.add``, imported here, and a test beside the others.
"""

from herald_pipeline.decoding.schedulers.adablock import (
    DREAM_DELIMITERS,
    LLADA_DELIMITERS,
    AdaBlock,
)
from herald_pipeline.decoding.schedulers.base import REGISTRY, BlockState, Scheduler
from herald_pipeline.decoding.schedulers.dsb import DsbConst, DynamicSlidingBlock
from herald_pipeline.decoding.schedulers.fixed import Fixed

get = REGISTRY.get

__all__ = [
    "DREAM_DELIMITERS",
    "LLADA_DELIMITERS",
    "REGISTRY",
    "AdaBlock",
    "BlockState",
    "DsbConst",
    "DynamicSlidingBlock",
    "Fixed",
    "Scheduler",
    "get",
    "names",
]


def names() -> list[str]:
    """All scheduler names, sorted."""
    return list(REGISTRY)
