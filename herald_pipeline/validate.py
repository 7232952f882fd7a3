"""The check before anything runs: no pool is written while it is read, and no stage waits for ever.

A small instance of the pipeline (few layers, two rows, scripted steps, both batch policies) is put through the program,
so that exactly what would be issued is checked. Launches are ordered by their stream and by their edges; two accesses
of one cell, one of them a write, that are not ordered are a hazard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from herald_pipeline.errors import PipelineError
from herald_pipeline.parts import Parts
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.pools import Access, Buffer, Pool, Region
from herald_pipeline.scheduling.admission import Request
from herald_pipeline.scheduling.launches import Feedback, Idle, Launch
from herald_pipeline.scheduling.program import BatchPolicy, Program
from herald_pipeline.stages import Edge, Template

Cell = tuple[str, int, str, int, int]
"""Pool, buffer, region tag, layer, slot (-1 for a shared pool)."""

SCRIPTS: tuple[tuple[int, ...], ...] = ((3, 3), (1, 1), (2, 1), (1, 4), (4, 2))
"""Steps until complete of the two rows, block by block."""
_BLOCKS = 4
_REQUESTS = 3
_ENDS_EARLY = (1, 1)
"""Request and block with which its answer ends by EOS, so that what was retrieved for it is not used."""


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two launches that touch the same cell without an order between them."""

    earlier: str
    later: str
    cell: Cell

    def __str__(self) -> str:
        pool, buffer, region, layer, slot = self.cell
        where = f"pool {pool!r}, region {region}, buffer {buffer}, layer {layer}"
        where += "" if slot < 0 else f", slot {slot}"
        return f"{self.earlier} and {self.later} touch {where} in no order"


def check(pipeline: Pipeline) -> None:
    """Refuse a pipeline with unknown names, deadlocks or hazards.

    Raises
    ------
    PipelineError
        Naming the stages and the cell of the first hazard, or the stage that can never start.
    """
    _check_names(pipeline.template, pipeline.pools)
    small = shrink(pipeline)
    waits: set[tuple[str, str]] = set()
    for policy in BatchPolicy:
        for script in SCRIPTS:
            launches = issue(small, script, policy)
            hazard = next(hazards(small, launches), None)
            if hazard is not None:
                raise PipelineError(f"{pipeline.method.name} ({policy}, steps {script}): {hazard}")
            waits.update((launches[n].stage.name, launch.stage.name) for launch in launches for n in launch.after)
    for edge in small.template.edges:
        if (edge.before, edge.after) not in waits:
            raise PipelineError(
                f"{pipeline.method.name}: no launch of {edge.after!r} ever finds the launch of {edge.before!r} that "
                f"edge {edge} names: it is issued later, so {edge.after!r} would wait for ever"
            )


_checked: set[tuple[object, ...]] = set()


def check_once(pipeline: Pipeline) -> None:
    """:func:`check`, for runs: a structure that has passed in this process is not looked at again."""
    settings, template = pipeline.settings, pipeline.template
    key = (
        pipeline.method.build,
        template.edges,
        tuple(
            (stage.name, stage.stream, stage.reads, stage.writes, stage.drafts, stage.completes, stage.decides)
            for stage in template.stages()
        ),
        settings.queries,
        settings.exact_layers,
        settings.exact_layers_on,
        settings.gather,
        settings.staging_buffers,
    )
    if key not in _checked:
        check(pipeline)
        _checked.add(key)


def edge_verdict(pipeline: Pipeline, edge: Edge) -> str:
    """What removing ``edge`` does: ``caught`` (a hazard appears) or ``implied`` (other order already gives it).

    Raises
    ------
    PipelineError
        When the order gets weaker and yet no hazard appears: an edge without a reason.
    """
    small = shrink(pipeline)
    edges = tuple(other for other in small.template.edges if other is not edge and other != edge)
    without = replace(small, template=replace(small.template, edges=edges))
    weaker = False
    for policy in BatchPolicy:
        for script in SCRIPTS:
            launches = issue(without, script, policy)
            if next(hazards(without, launches), None) is not None:
                return "caught"
            before = _ancestors(issue(small, script, policy))
            weaker = weaker or before != _ancestors(launches)
    if weaker:
        raise PipelineError(f"{pipeline.method.name}: edge {edge} orders nothing that needs an order")
    return "implied"


def shrink(pipeline: Pipeline) -> Pipeline:
    """The same method on a model of few layers: as many sparse ones as it takes to wrap each ring twice.

    The edges are those of ``pipeline``, which may differ from what its method builds.
    """
    exact = min(pipeline.settings.exact_layers, 2)
    layers = exact + 2 * pipeline.settings.staging_buffers + 1
    moe = pipeline.model.moe
    dense = None if moe is None else replace(moe, first_dense_layers=min(1, moe.first_dense_layers))
    model = replace(pipeline.model, num_layers=layers, moe=dense)
    template, pools = pipeline.method.build(Parts(model, pipeline.settings))
    template = replace(template, edges=pipeline.template.edges)
    return replace(pipeline, model=model, template=template, pools=pools)


def issue(pipeline: Pipeline, script: Sequence[int], policy: BatchPolicy) -> list[Launch]:
    """All launches of three requests in two slots whose blocks take ``script`` steps (rotated each block)."""
    requests = [Request(index, 2 * pipeline.settings.block_length, _BLOCKS) for index in range(_REQUESTS)]
    program = Program(pipeline, requests, slots=2, policy=policy)
    launches: list[Launch] = []
    generator = program.launches()
    feedback: Feedback | None = None
    steps: dict[int, tuple[int, int]] = {}
    stopped: set[int] = set()
    try:
        while True:
            item = generator.send(feedback)
            feedback = None
            if isinstance(item, Idle):
                continue
            launches.append(item)
            if item.stage.decides:
                stopped |= _stopping(item, program)
                feedback = Feedback(_still_masked(item, script, steps), frozenset(stopped))
            elif item.block < 0:
                stopped -= {slot for group in item.groups for slot in group.slots}
    except StopIteration:
        return launches


def _stopping(launch: Launch, program: Program) -> set[int]:
    """Slots whose answer ends with the block that this launch completes."""
    request, block = _ENDS_EARLY
    return {
        slot
        for group in launch.groups
        if group.mode.completes
        for slot, at in zip(group.slots, group.blocks, strict=True)
        if at == block and program.admission.running[slot].id == request
    }


def _still_masked(launch: Launch, script: Sequence[int], steps: dict[int, tuple[int, int]]) -> frozenset[int]:
    masked = set()
    for group in launch.groups:
        for slot, block in zip(group.slots, group.blocks, strict=True):
            seen = steps.get(slot, (block, 0))
            count = seen[1] + 1 if seen[0] == block else 1
            steps[slot] = (block, count)
            if count < script[(slot + block) % len(script)]:
                masked.add(slot)
    return frozenset(masked)


def hazards(pipeline: Pipeline, launches: Sequence[Launch]) -> Iterator[Hazard]:
    """Unordered conflicting accesses among ``launches``.

    Two requests that use a slot one after the other have different lengths, so their regions overlap whatever they are
    called: between them, every access of a pool's layer counts.
    """
    ancestors = _ancestors(launches)
    pools = {pool.name: pool for pool in pipeline.pools}
    # Of each cell the last write and the reads since: what came before is ordered with them, or was a hazard already.
    written: dict[Cell, int] = {}
    read_since: dict[Cell, list[int]] = {}
    tenants = _Tenants(launches, ancestors)
    counts: dict[str, int] = {}
    for index, launch in enumerate(launches):
        turn = counts.get(launch.stage.name, 0)
        counts[launch.stage.name] = turn + 1
        reads, writes = _cells(launch, pools, turn)
        before = ancestors[index]
        for cell in reads | writes:
            write = cell in writes
            yield from tenants.enter(index, cell, write)
            earlier = [written[cell]] if cell in written else []
            if write:
                earlier += read_since.pop(cell, ())
                written[cell] = index
            else:
                read_since.setdefault(cell, []).append(index)
            for other in earlier:
                if not before >> other & 1:
                    yield Hazard(_label(launches[other]), _label(launch), cell)


class _Tenants:
    """Accesses of a slot by the request that it holds, to find those that overlap the next request's."""

    def __init__(self, launches: Sequence[Launch], ancestors: Sequence[int]) -> None:
        self._launches, self._ancestors = launches, ancestors
        self._current: dict[tuple[str, int, int, int], list[tuple[int, bool]]] = {}
        self._before: dict[tuple[str, int, int, int], list[tuple[int, bool]]] = {}
        self._entered: dict[int, int] = {}

    def enter(self, index: int, cell: Cell, writes: bool) -> Iterator[Hazard]:
        """Note an access; hazards with accesses of the slot's last request."""
        pool, buffer, _, layer, slot = cell
        if slot < 0:
            return
        launch = self._launches[index]
        if launch.block < 0 and launch.stage.stream == "main" and launch.layer in (0, None):
            self._move_in(slot, index)
        place = (pool, buffer, layer, slot)
        for earlier, earlier_writes in self._before.get(place, ()):
            if (writes or earlier_writes) and not self._ancestors[index] >> earlier & 1:
                yield Hazard(_label(self._launches[earlier]), _label(launch), cell)
        self._current.setdefault(place, []).append((index, writes))

    def _move_in(self, slot: int, index: int) -> None:
        if self._entered.get(slot) == index:
            return
        self._entered[slot] = index
        for place in [place for place in self._current if place[3] == slot]:
            self._before[place] = self._current.pop(place)


def _label(launch: Launch) -> str:
    layer = "" if launch.layer is None else f"[{launch.layer}]"
    return f"{launch.stage.name}{layer} of block {launch.block}"


def _ancestors(launches: Sequence[Launch]) -> list[int]:
    """Bit set, per launch, of the launches that must have ended before it starts."""
    found: list[int] = []
    newest: dict[str, int] = {}
    for index, launch in enumerate(launches):
        sources = list(launch.after)
        if launch.stage.stream in newest:
            sources.append(newest[launch.stage.stream])
        newest[launch.stage.stream] = index
        bits = 0
        for source in sources:
            if source >= index:
                raise PipelineError(
                    f"{_label(launch)} waits for {_label(launches[source])}, which is issued later: "
                    "it would wait for ever"
                )
            bits |= found[source] | 1 << source
        found.append(bits)
    return found


def _cells(launch: Launch, pools: dict[str, Pool], turn: int) -> tuple[set[Cell], set[Cell]]:
    stage = launch.stage
    reads: set[Cell] = set()
    writes: set[Cell] = set()
    for group in launch.groups:
        written = list(stage.writes)
        written += stage.drafts if group.mode.drafts else ()
        written += stage.completes if group.mode.completes else ()
        for slot, block in zip(group.slots, group.blocks, strict=True):
            for access in stage.reads:
                reads.update(_places(access, pools[access.pool], launch, slot, block, turn))
            for access in written:
                writes.update(_places(access, pools[access.pool], launch, slot, block, turn))
    return reads, writes


def _places(access: Access, pool: Pool, launch: Launch, slot: int, block: int, turn: int) -> list[Cell]:
    kind = access.buffer
    if kind is Buffer.RING:
        buffer = turn % pool.buffers
    else:
        buffer = 0 if kind is Buffer.ONE else (block + (kind is Buffer.IDLE)) % 2
    layers = access.layers
    if layers is None:
        layers = pool.layers if launch.layer is None else (launch.layer,)
    tags = _tags(access.region, block)
    if pool.shared:
        return [(pool.name, buffer, tag, -1, -1) for layer in layers if layer in pool.layers for tag in tags]
    return [(pool.name, buffer, tag, layer, slot) for layer in layers if layer in pool.layers for tag in tags]


def _tags(region: Region, block: int) -> list[str]:
    if region is Region.PREFIX:
        return [f"block {index}" for index in range(-1, block)]
    return [f"block {block}"] if region is Region.BLOCK else [region.value]


def _check_names(template: Template, pools: Sequence[Pool]) -> None:
    stages = {stage.name: stage for stage in template.stages()}
    if len(stages) != len(template.stages()):
        names = [stage.name for stage in template.stages()]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise PipelineError(f"stage names must be unique; twice: {', '.join(twice)}")
    if not template.denoise.decides:
        raise PipelineError(f"stage {template.denoise.name!r} must decide: its end tells which rows go on")
    streams = {stream.name for stream in template.streams}
    known = {pool.name for pool in pools}
    for stage in stages.values():
        if stage.stream not in streams:
            raise PipelineError(f"stage {stage.name!r} is on stream {stage.stream!r}, which is not declared")
        for access in (*stage.reads, *stage.writes, *stage.drafts, *stage.completes):
            if access.pool not in known:
                raise PipelineError(f"stage {stage.name!r} touches pool {access.pool!r}, which is not declared")
    for edge in template.edges:
        for end in (edge.before, edge.after):
            if end not in stages:
                raise PipelineError(f"edge {edge} names stage {end!r}, which does not exist")
        if stages[edge.before].stream == stages[edge.after].stream:
            raise PipelineError(f"edge {edge} is within stream {stages[edge.after].stream!r}, which is in order anyway")
