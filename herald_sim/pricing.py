"""Prices remembered: what a stage costs is worked out once for the totals of a launch that its work depends on.

Most stages of a block ask a launch's shape for one or two totals (its rows, what is selected), and half of them for
none that changes from block to block. Which ones, the work itself shows: it is asked with a shape that takes notes.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from herald_pipeline.stages import LaunchShape, Stage, Work
from herald_sim.phases import Cost

_MAX_KNOWN = 256
_TOTALS = LaunchShape._fields


class NotedShape:
    """A launch shape that notes which of its totals are asked for; anything else that is asked counts as all."""

    __slots__ = ("asked", "shape")

    def __init__(self, shape: LaunchShape) -> None:
        self.shape = shape
        self.asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.asked.update((name,) if name in _TOTALS else _TOTALS)
        return getattr(self.shape, name)


class Pricer:
    """Costs of one stage in one layer, by the totals that its work asked for.

    Work is a function of what it asks: with the same totals it asks the same again, and costs the same. Where it asks
    for others in another case, both sets are kept.
    """

    __slots__ = ("_cost", "_known", "_layer", "_newest", "_newest_cost", "_stage")

    def __init__(self, cost: Callable[[Stage, Work], Cost], stage: Stage, layer: int | None) -> None:
        self._cost = cost
        self._stage = stage
        self._layer = layer
        self._newest: LaunchShape | None = None
        self._newest_cost: Cost | None = None
        self._known: dict[frozenset[str], tuple[Callable[[LaunchShape], object], dict[object, Cost]]] = {}

    def price(self, shape: LaunchShape) -> Cost:
        """Cost of a launch of this shape."""
        if shape is self._newest:
            assert self._newest_cost is not None
            return self._newest_cost
        for totals, known in self._known.values():
            cost = known.get(totals(shape))
            if cost is not None:
                break
        else:
            cost = self._work_out(shape)
        self._newest, self._newest_cost = shape, cost
        return cost

    def _work_out(self, shape: LaunchShape) -> Cost:
        noted = NotedShape(shape)
        work: Any = self._stage.work  # it takes what looks like a shape
        cost = self._cost(self._stage, work(noted, self._layer))
        asked = frozenset(noted.asked)
        if asked not in self._known:
            self._known[asked] = (attrgetter(*sorted(asked)) if asked else _nothing, {})
        totals, known = self._known[asked]
        if len(known) >= _MAX_KNOWN:
            known.clear()
        known[totals(shape)] = cost
        return cost


def _nothing(_shape: LaunchShape) -> tuple[()]:
    return ()
