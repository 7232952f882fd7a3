"""What a program issues and what it is answered: launches, sections of them, idle time, feedback."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from herald_pipeline.scheduling.rows import Taken
from herald_pipeline.scheduling.wiring import Plan
from herald_pipeline.stages import LaunchShape, RowGroup, Rows, Stage


@dataclass(slots=True, eq=False)
class Launch:
    """One instance of a stage. ``id`` counts from 0 in the order of issue; ``after`` are ids on other streams."""

    id: int
    stage: Stage
    layer: int | None
    groups: tuple[RowGroup, ...]
    shape: LaunchShape
    after: tuple[int, ...]
    block: int
    step: int


@dataclass(slots=True, eq=False)
class Issue:
    """A section's launches, issued together: launch ``first + p`` is what stands at position p of ``plan``.

    Attributes
    ----------
    plan
        The launches in order, with what they wait for within the section.
    first
        Number of the first launch.
    taken
        Row groups and shape of the launches, by which rows their stages take.
    outside
        Position -> numbers of the launches of earlier sections that it waits for, besides its stream's.
    block, step
        Where the rows stand; of several cohorts, the first one.
    """

    plan: Plan
    first: int
    taken: Mapping[Rows, Taken]
    outside: Mapping[int, set[int]]
    block: int
    step: int

    def launch(self, position: int) -> Launch:
        """The launch at ``position``."""
        stage, layer, near, _, _ = self.plan.launches[position]
        first = self.first
        after = tuple([first + earlier for earlier in near])
        others = self.outside.get(position)
        if others:
            after = tuple(sorted(others.union(after)))
        groups, shape = self.taken[stage.rows]
        return Launch(first + position, stage, layer, groups, shape, after, self.block, self.step)

    def launches(self) -> Iterator[Launch]:
        """All of them, in order."""
        return map(self.launch, range(len(self.plan.launches)))


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing can run before the next request arrives."""

    until_ns: int


class Feedback(NamedTuple):
    """What a deciding launch found.

    Attributes
    ----------
    masked
        Slots that still hold masked positions; ``True``: all that were denoised, ``False``: none.
    stopped
        Slots whose answer ends with this block (EOS), asked when their block completes.
    now_ns
        The clock, for arrivals.
    """

    masked: frozenset[int] | bool = False
    stopped: frozenset[int] = frozenset()
    now_ns: int = 0
