"""Rules that choose which prefix entries a block's steps read, as the accuracy study compares them.

A rule is a point on five axes: who asks (queries), when, what stands for the block before, how keys are scored, and how
importance is spread over neighbours. The product's methods are some of these points; the others ask what a cheaper or
wider selection would cost in accuracy.
"""

from dataclasses import dataclass
from enum import StrEnum

from herald_pipeline.errors import check_number, raise_problems, unknown_name
from herald_pipeline.model import ModelShape
from herald_pipeline.settings import Settings

REFINED = 2
"""With 8-bit keys, candidates as a multiple of k that are scored again with exact keys."""


class When(StrEnum):
    """What a rule looks at, and when.

    ``never``: everything is read (Dense). ``step0``: the block's own first step, over the full prefix (MAGE).
    ``proxy``: the same with speculated queries and partial keys (InfiniGen). ``ahead``: [MASK] queries of the block,
    while the block before it is denoised (HERALD). ``recent`` and ``random`` are controls.
    """

    NEVER = "never"
    STEP0 = "step0"
    PROXY = "proxy"
    AHEAD = "ahead"
    RECENT = "recent"
    RANDOM = "random"


class Previous(StrEnum):
    """What stands for block n while block n + 1 is selected for: its draft, nothing, or its final tokens."""

    DRAFT = "draft"
    OMITTED = "omitted"
    COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class Rule:
    """How entries are chosen.

    Attributes
    ----------
    queries
        [MASK] queries around the block's centre (``ahead``).
    exact_layers
        First layers that read everything.
    smoothing
        Importance is averaged over so many neighbours (odd; 1: none).
    pooling
        Importance is the largest of so many neighbours (odd; 1: none).
    key_only
        Only keys are read to score; the pass's output comes from the selected entries' values.
    int8_keys
        Scored with 8-bit keys, one scale a row; ``REFINED`` x k candidates again exactly. Implies ``key_only``.
    """

    name: str
    when: When
    queries: int = 32
    previous: Previous = Previous.DRAFT
    exact_layers: int = 2
    smoothing: int = 1
    pooling: int = 1
    key_only: bool = False
    int8_keys: bool = False

    def __post_init__(self) -> None:
        raise_problems(
            [
                check_number(self.queries, "queries", minimum=1, integer=True),
                check_number(self.exact_layers, "exact_layers", minimum=0, integer=True),
                *(
                    check_number(width, name, minimum=1, integer=True)
                    or (None if width % 2 else f"{name}: {width} is even; a window around a position is odd")
                    for name, width in (("smoothing", self.smoothing), ("pooling", self.pooling))
                ),
            ]
        )

    @property
    def values_late(self) -> bool:
        """Whether the scan reads no values."""
        return self.key_only or self.int8_keys

    def scan_bytes(self, shape: ModelShape, prefix: int, selected: int, draft: int | None = None) -> float:
        """Bytes of stored entries that one selection of one request reads, 16-bit KV; all layers.

        ``draft`` are the drafted positions that it reads, a block's unless given.

        MAGE's cross the link and HERALD's stay in host memory; what they are compared in is how much is read.
        """
        row = shape.num_kv_heads * shape.head_dim * 2.0
        layers, exact = shape.num_layers, min(self.exact_layers, shape.num_layers)
        if self.when in (When.NEVER, When.RECENT, When.RANDOM):
            return 0.0
        if self.when is When.PROXY:
            return layers * prefix * row * Settings().proxy_fraction
        if self.when is When.STEP0:
            return layers * prefix * row * 2
        if draft is None:
            draft = shape.block_length if self.previous is not Previous.OMITTED else 0
        seen = prefix + draft
        scoring = 2 * row * seen
        if self.values_late:
            scoring = row * seen + row * selected
        if self.int8_keys:
            scales = 4.0 * shape.num_kv_heads
            scoring = (row / 2 + scales) * seen + row * min(REFINED * selected, seen) + row * selected
        return exact * 2 * row * seen + (layers - exact) * scoring


def _ahead(name: str, queries: int = 1, **changes: object) -> Rule:
    return Rule(name, When.AHEAD, queries, **changes)  # type: ignore[arg-type]


RULES = {
    rule.name: rule
    for rule in (
        Rule("dense", When.NEVER, exact_layers=0),
        Rule("mage-offload", When.STEP0, exact_layers=0),
        Rule("infinigen", When.PROXY, exact_layers=0),
        _ahead("herald"),
        _ahead("herald-no-draft", previous=Previous.OMITTED),
        _ahead("representative", previous=Previous.COMPLETE),
        _ahead("herald-2q", 2),
        _ahead("herald-4q", 4),
        _ahead("herald-8q", 8),
        _ahead("herald-32q", 32),
        _ahead("herald-smooth", smoothing=7),
        _ahead("herald-pool", pooling=31),
        _ahead("herald-key-only", key_only=True),
        _ahead("herald-int8", int8_keys=True),
        Rule("recency", When.RECENT),
        Rule("random", When.RANDOM),
    )
}
"""By name. ``dense``, ``mage-offload``, ``infinigen``, ``herald``, ``herald-32q`` and ``herald-no-draft`` are the
methods of those names: a test holds their answers against the executor's."""


def get_rule(name: str) -> Rule:
    """Rule by name; :class:`ConfigError` with the closest otherwise."""
    if name not in RULES:
        raise unknown_name(kind="selection rule", name=name, valid=RULES)
    return RULES[name]
