"""Where the CPU's stream spends a block: rates of select and gather, and its time between one launch and the next."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from herald_pipeline.trace import Span

GB = 1e9


def host_side(spans: Iterable[Span]) -> dict[str, Any]:
    """Figures of the blocks behind the first one; nothing where no CPU selects.

    ``select_layer_gb_s`` has the median of each layer; ``idle_between_selects_ms`` is from the end of a layer's
    selection to the start of the next one's (finish, project and what waits for them), and ``before_first_select_ms``
    from a block's first step to the first selection (steps 0 and 1, and the draft's way).
    """
    later = [span for span in spans if span.block > 0]
    selects = sorted(_of(later, "select"), key=lambda span: span.start_ns)
    if not selects:
        return {}
    by_layer = {layer: [s for s in selects if s.layer == layer] for layer in sorted({s.layer for s in selects})}
    found: dict[str, Any] = {
        "select_gb_s": _gb_s(selects),
        "select_busy_s_a_block": _seconds(selects) / len({span.block for span in selects}),
        "select_layer_gb_s": {layer: median(_gb_s([span]) for span in some) for layer, some in by_layer.items()},
    }
    gathers = _of(later, "gather")
    if gathers:
        beside_ns = sum(_overlap_ns(select, gather) for select in selects for gather in gathers)
        found["gather_gb_s"] = _gb_s(gathers)
        found["gather_beside_selects_share"] = beside_ns / 1e9 / _seconds(selects)
    idle = [(b.start_ns - a.end_ns) / 1e6 for a, b in pairwise(selects) if a.block == b.block]
    found["idle_between_selects_ms"] = {"median": median(idle), "worst": max(idle), "sum": sum(idle)} if idle else None
    begins = {span.block: span.start_ns for span in _of(later, "denoise") if span.step == 0}
    first = {span.block: span.start_ns for span in reversed(selects)}
    found["before_first_select_ms"] = [(first[n] - begins[n]) / 1e6 for n in sorted(first) if n in begins]
    for name in ("draft_down", "append"):
        found[f"{name}_ms"] = [(span.end_ns - span.start_ns) / 1e6 for span in _of(later, name)]
    return found


def _of(spans: Iterable[Span], stage: str) -> list[Span]:
    return [span for span in spans if span.stage == stage]


def _seconds(spans: Sequence[Span]) -> float:
    return sum(span.end_ns - span.start_ns for span in spans) / 1e9


def _gb_s(spans: Sequence[Span]) -> float:
    return sum(span.bytes for span in spans) / GB / _seconds(spans)


def _overlap_ns(one: Span, other: Span) -> int:
    return max(0, min(one.end_ns, other.end_ns) - max(one.start_ns, other.start_ns))
