"""Which earlier launches a launch waits for: edges of the description turned into launch numbers.

Within a section that is known once and for all, as distances; between sections it is looked up when the section is
issued. A section's **plan** is its launches in order with both kinds of waits, and what follows from them: which launch
holds up which, and where each stream enters and leaves the section.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from herald_pipeline.errors import PipelineError
from herald_pipeline.stages import Edge, LayerLink, Rows, Section, Stage, Template


class Planned(NamedTuple):
    """One launch of a section: ``near`` are positions in the section's plan, ``far`` edges to look up."""

    stage: Stage
    layer: int | None
    near: tuple[int, ...]
    far: tuple[Edge, ...]
    ring: tuple[tuple[str, int], ...]
    """Stage and how many launches ago (counted before this section), for a ring's first places."""


class Plan(NamedTuple):
    """A section's launches in order, by their positions 0, 1, ...

    Attributes
    ----------
    last
        Position of each stage's last launch.
    outside
        Launches with edges to look up or rings to count back in, by their positions.
    ring
        Launches that a ring counts: their stage and position.
    blockers
        How many launches of the section each one waits for: those it has edges from, and the one before it on its
        stream.
    followers
        The launches of the section that each one holds up, in order.
    ready
        Launches that wait for none of the section.
    first_on, last_on
        Stream -> position of its first and of its last launch.
    decider
        Position of the launch that decides, which is the last one; ``None`` where none does.
    """

    launches: tuple[Planned, ...]
    last: tuple[tuple[str, int], ...]
    outside: tuple[tuple[int, Planned], ...]
    ring: tuple[tuple[str, int], ...]
    blockers: tuple[int, ...]
    followers: tuple[tuple[int, ...], ...]
    ready: tuple[int, ...]
    first_on: tuple[tuple[str, int], ...]
    last_on: tuple[tuple[str, int], ...]
    decider: int | None


class Wiring:
    """Edges of a template, compiled section by section as they are first issued."""

    def __init__(self, template: Template) -> None:
        self._edges: dict[str, list[Edge]] = {stage.name: [] for stage in template.stages()}
        for edge in template.edges:
            self._edges[edge.after].append(edge)
        self._plans: dict[tuple[int, frozenset[Rows]], Plan] = {}
        rings = {edge.before: edge.ring for edge in template.edges if edge.ring}
        self._recent: dict[str, deque[int]] = {name: deque(maxlen=places) for name, places in rings.items()}

    def plan(self, section: Section, taking: frozenset[Rows]) -> Plan:
        """Launches of ``section`` for the stages whose rows are in ``taking``."""
        key = (id(section), taking)
        known = self._plans.get(key)
        if known is None:
            known = self._plans[key] = self._compile(section, taking)
        return known

    def _compile(self, section: Section, taking: frozenset[Rows]) -> Plan:
        stages = [stage for stage in section.stages if stage.rows in taking]
        rounds = sorted({layer - stage.lead for stage in stages for layer in stage.layers})
        order: list[tuple[Stage, int | None]] = []
        order += [(stage, at + stage.lead) for at in rounds for stage in stages if at + stage.lead in stage.layers]
        order += [(stage, None) for stage in stages if not stage.layers]
        positions: dict[str, list[int]] = {stage.name: [] for stage in stages}
        at: dict[tuple[str, int | None], int] = {}
        planned = []
        for position, (stage, layer) in enumerate(order):
            planned.append(self._wire(stage, layer, positions, at))
            positions[stage.name].append(position)
            at[stage.name, layer] = position
        last = tuple((name, found[-1]) for name, found in positions.items() if found)
        outside = tuple((p, each) for p, each in enumerate(planned) if each.far or each.ring)
        ring = tuple((each.stage.name, p) for p, each in enumerate(planned) if each.stage.name in self._recent)
        return Plan(tuple(planned), last, outside, ring, *_order(planned), _decider(planned))

    def _wire(
        self,
        stage: Stage,
        layer: int | None,
        positions: dict[str, list[int]],
        at: dict[tuple[str, int | None], int],
    ) -> Planned:
        turn = len(positions[stage.name])
        near: set[int] = set()
        far: list[Edge] = []
        ring: list[tuple[str, int]] = []
        for edge in self._edges[stage.name]:
            inside = positions.get(edge.before)
            if edge.ring:
                if inside is not None and turn >= edge.ring:
                    if turn - edge.ring >= len(inside):
                        raise PipelineError(
                            f"edge {edge}: with {edge.ring} place(s) in the ring, launch {turn} of {stage.name!r} in a "
                            f"section waits for a launch of {edge.before!r} that is issued later, for ever; "
                            "give the ring more places (staging_buffers)"
                        )
                    near.add(inside[turn - edge.ring])
                else:
                    ring.append((edge.before, edge.ring - turn))
            elif edge.first_only and turn:
                continue
            elif edge.block_offset or inside is None:
                far.append(edge)
            elif edge.layer is LayerLink.LAST or layer is None:
                near.update(inside[-1:])
            else:
                wanted = layer if edge.layer is LayerLink.SAME else layer - 1
                if (edge.before, wanted) in at:
                    near.add(at[edge.before, wanted])
        return Planned(stage, layer, tuple(sorted(near)), tuple(far), tuple(ring))

    def recent(self, name: str, ago: int) -> int | None:
        """Number of the launch of ``name`` issued ``ago`` launches ago (1 is the last), if there was one."""
        launches = self._recent[name]
        return launches[-ago] if ago <= len(launches) else None

    def remember(self, plan: Plan, first: int) -> None:
        """Note the numbers of ring stages of a section whose plan begins at number ``first``."""
        for name, position in plan.ring:
            self._recent[name].append(first + position)


def _order(
    planned: Sequence[Planned],
) -> tuple[
    tuple[int, ...],
    tuple[tuple[int, ...], ...],
    tuple[int, ...],
    tuple[tuple[str, int], ...],
    tuple[tuple[str, int], ...],
]:
    """``blockers``, ``followers``, ``ready``, ``first_on`` and ``last_on`` of a :class:`Plan`."""
    first: dict[str, int] = {}
    newest: dict[str, int] = {}
    blockers: list[int] = []
    followers: list[list[int]] = [[] for _ in planned]
    for position, each in enumerate(planned):
        stream = each.stage.stream
        before = {*each.near, newest[stream]} if stream in newest else set(each.near)
        for earlier in before:
            followers[earlier].append(position)
        blockers.append(len(before))
        first.setdefault(stream, position)
        newest[stream] = position
    ready = tuple(position for position, count in enumerate(blockers) if not count)
    return tuple(blockers), tuple(map(tuple, followers)), ready, tuple(first.items()), tuple(newest.items())


def _decider(planned: Sequence[Planned]) -> int | None:
    """Where a section's deciding launch stands: at its end, for what follows is issued with its answer."""
    found = [position for position, each in enumerate(planned) if each.stage.decides]
    if found and found != [len(planned) - 1]:
        raise PipelineError(
            f"stage {planned[found[0]].stage.name!r} decides, so it must be the last launch of its section, which ends "
            f"with {planned[-1].stage.name!r}; put what follows into a section of its own"
        )
    return found[0] if found else None
