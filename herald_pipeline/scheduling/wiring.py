"""Which earlier launches a launch waits for: edges of the description turned into launch numbers.

Within a section that is known once and for all, as distances; between sections it is looked up when the section is
issued. A section's **plan** is its launches in order with both kinds of waits.
"""

from collections import deque
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
    """A section's launches in order, and the position of each stage's last launch."""

    launches: tuple[Planned, ...]
    last: tuple[tuple[str, int], ...]
    far: tuple[tuple[int, Planned], ...]
    """Launches with edges to look up, by their positions."""
    ring: tuple[tuple[str, int], ...]
    """Launches that a ring counts: their stage and position."""


class Wiring:
    """Edges of a template, compiled section by section as they are first issued."""

    def __init__(self, template: Template) -> None:
        self._edges: dict[str, list[Edge]] = {stage.name: [] for stage in template.stages()}
        for edge in template.edges:
            self._edges[edge.after].append(edge)
        self._plans: dict[tuple[int, frozenset[Rows]], Plan] = {}
        rings = {edge.before: edge.ring for edge in template.edges if edge.ring}
        self._recent: dict[str, deque[int]] = {name: deque(maxlen=places) for name, places in rings.items()}
        self.step_edges = tuple(self._edges[template.denoise.name])

    def plan(self, section: Section, taking: frozenset[Rows]) -> Plan:
        """Launches of ``section`` for the stages whose rows are in ``taking``."""
        key = (id(section), taking)
        if key not in self._plans:
            self._plans[key] = self._compile(section, taking)
        return self._plans[key]

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
        far = tuple((p, each) for p, each in enumerate(planned) if each.far)
        ring = tuple((each.stage.name, p) for p, each in enumerate(planned) if each.stage.name in self._recent)
        return Plan(tuple(planned), last, far, ring)

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
