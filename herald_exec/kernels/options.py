"""What a selection is asked and what it answers."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from herald_pipeline.errors import ConfigError, check_number, unknown_name

from .store import FlatKV, PagedKV
from .tuning import Tuning

Store = PagedKV | FlatKV
PV = {"auto": 0, "f32": 1, "bf16": 2}
#: Where time goes: the scan; importance of every position; top-k; exact scores of 8-bit keys' candidates; output; the
#: copy of what was selected, where selection makes it.
PHASES = ("scan", "importance", "topk", "rescore", "output", "gather")


@dataclass(frozen=True)
class SelectOptions:
    """How one selection computes; the defaults are the paper's arithmetic.

    Attributes
    ----------
    pv
        Precision of the probabilities in P x V: ``"f32"`` never rounds them, ``"bf16"`` and ``"auto"`` let a tier
        use its matrix unit (tiers without one keep fp32, which is more exact).
    key_only
        Importance from K alone, output from the selected entries' V (renormalised over them, the draft and the own
        key): half the bytes. Beyond the paper.
    smoothing
        Odd width of a running mean over neighbouring positions, applied before ranking; 1 is none. Beyond the paper.
    keep_importance
        Return the ranked values, ``[rows, kv_heads, longest length]``.
    paper_like
        Raw scores kept, a second exponential pass, a min-heap: the baseline of the benchmark.
    candidates
        With 8-bit keys: this times the budget may be selected; what ranks within the budget over this is selected as
        it is, and only the heaviest eighth of it scored again from K, with all those between. 1 or more.
    rescore_all
        With 8-bit keys: every candidate is scored again, so that the output's weights are K's as well.
    tuning
        Prefetch and where scores are computed; ``None`` is the processor's default.
    """

    pv: str = "auto"
    key_only: bool = False
    smoothing: int = 1
    keep_importance: bool = False
    paper_like: bool = False
    candidates: float = 1.1
    rescore_all: bool = False
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        if self.pv not in PV:
            raise unknown_name("pv", self.pv, PV)
        problem = check_number(self.smoothing, "smoothing", minimum=1, maximum=1025, integer=True)
        if problem is None and self.smoothing % 2 == 0:
            problem = f"smoothing must be odd (a window around each position), got {self.smoothing}"
        problem = problem or check_number(self.candidates, "candidates", minimum=1, maximum=1000)
        if self.paper_like and self.key_only:
            problem = problem or "paper_like is the paper's kernel, which reads V; drop key_only or paper_like"
        if problem:
            raise ConfigError(problem)


@dataclass(frozen=True)
class Draft:
    """Rows that take part in attention but never in top-k: the drafted block in its own buffer.

    Attributes
    ----------
    store
        KV of the same shape and dtype as the pool's.
    slots, lengths
        Slot and valid tokens per row of the batch.
    layer
        Layer in ``store``; ``None`` is the pool's layer.
    """

    store: Store
    slots: Any
    lengths: Any
    layer: int | None = None


@dataclass(frozen=True)
class Selection:
    """What :func:`select` found.

    Attributes
    ----------
    output
        Attention output, fp32 ``[rows, x, num_heads, head_dim]``.
    indices
        Positions in ascending order, int32 ``[rows, kv_heads, max_k]``; -1 fills the rest.
    counts
        Valid indices, int32 ``[rows, kv_heads]``.
    status
        0, or 1 where keys, values or queries were not finite, uint8 ``[rows, kv_heads]``.
    importance
        With ``keep_importance``: fp32 ``[rows, kv_heads, longest]``, zero behind a row's length.
    phase_seconds
        With ``measure``: seconds of each of :data:`PHASES`, summed over the threads.
    """

    output: npt.NDArray[Any]
    indices: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    status: npt.NDArray[np.uint8]
    importance: npt.NDArray[Any] | None = None
    phase_seconds: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(PHASES)))
