"""Acceptance rules (``--decoder``): which masked positions become tokens this step, given their confidences.

``acceptance.get("confidence", threshold=0.9)`` returns a pure function; ``acceptance.names()`` lists what there is.
To add a rule: one module with a frozen dataclass and its ``REGISTRY.add``, imported here, and a test beside the others.
"""

from herald_pipeline.decoding.acceptance.base import REGISTRY, AcceptanceRule, scheduled_commits
from herald_pipeline.decoding.acceptance.confidence import (
    Confidence,
    ConfidenceFactor,
    RelativeConfidence,
)
from herald_pipeline.decoding.acceptance.entropy import Entropy
from herald_pipeline.decoding.acceptance.random_order import RandomOrder
from herald_pipeline.decoding.acceptance.static import Static
from herald_pipeline.decoding.acceptance.top1 import Top1

get = REGISTRY.get

__all__ = [
    "REGISTRY",
    "AcceptanceRule",
    "Confidence",
    "ConfidenceFactor",
    "Entropy",
    "RandomOrder",
    "RelativeConfidence",
    "Static",
    "Top1",
    "get",
    "names",
    "scheduled_commits",
]


def names() -> list[str]:
    """All decoder names, sorted."""
    return list(REGISTRY)
