"""Fast mode: the same program as a max-plus recurrence, all blocks priced at once; no events, no contention.

A launch starts when its stream is free and the launches that it waits for have ended, and takes the time it takes
alone. So fast mode equals event mode where nothing contends, and is too fast where GPU kernels take turns, rates are
shared, or the device fetches rows beside kernels. It covers lockstep batches of equal requests with one T; anything
else is refused (:func:`~herald_sim.uncontended.why_not`), and callers fall back to events and say so.

The structure of a block (its launches and what each waits for) is read off a short run of the program; the times of all
blocks come from the cost model, once for each launch of a block, with arrays over the blocks in place of numbers.
"""

from collections import Counter
from collections.abc import Set
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from herald_pipeline.hardware import Curve, Profile, Quantity, known
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.result import FORWARD_STAGES, warm_up_blocks
from herald_pipeline.scheduling.admission import Request
from herald_pipeline.scheduling.launches import Launch
from herald_pipeline.scheduling.program import Program
from herald_pipeline.stages import LaunchShape, RowGroup, Stage, Template, launch_shape
from herald_pipeline.steps import FixedSteps
from herald_pipeline.units import NS_PER_S
from herald_pipeline.workload import Workload
from herald_sim.cost import CostModel
from herald_sim.phases import Flow, Kernels, Phase, Uses
from herald_sim.uncontended import SAMPLE_BLOCKS, issued

Array = NDArray[np.float64]

_MAX_STRUCTURES = 64
_structures: "dict[tuple[int, int], tuple[Template, _Structure]]" = {}


class FastResult(NamedTuple):
    """Figures of the decode window (warm-up left out), as in :class:`~herald_pipeline.result.Result`."""

    throughput_tok_s: float
    block_time_s: float
    first_block_time_s: float
    main_time_s: float
    stall_s: float
    delivered_tokens: int
    extrapolated: frozenset[str] = frozenset()
    """Curves of the profile that were left in blocks, as :attr:`~herald_sim.op_times.OpTimes.extrapolated`."""


class _VectorCosts(CostModel):
    """The cost model on arrays over blocks: the same formulas, element by element."""

    def total_ns(self, stage: Stage, shape: LaunchShape, layer: int | None) -> Array | float:
        """Time alone of a launch in each block."""
        phases = self._phases(stage, stage.work(shape, layer))
        return cast("Array | float", sum(phase.total_ns for phase in phases))

    def _flow(self, op: Any, beside_kernels: bool) -> Flow:
        return Flow(cast(int, np.rint(self._flow_ns(op))), ())

    def _beside_scan(self, name: str, num_bytes: float, share: float = 1.0) -> Uses:
        return ()  # nothing contends

    def _whole_ns(self, time: Any) -> Any:
        return np.rint(time)

    def _longer(self, one: Any, other: Any) -> Any:
        return np.maximum(one, other)

    def _slows_steps(self) -> bool:
        return False  # nothing contends

    def _close(self, phases: list[Phase], segments: list[tuple[float, int]], beside_fetch: float) -> None:
        if segments:
            total = sum(time * count for time, count in segments)
            phases.append(Kernels(cast(int, np.rint(total)), 0.0, 0.0))  # nothing waits: no turns
            segments.clear()

    def _gemm_share(self, tokens: Any) -> Any:
        # Tokens may be an array, one number a block, which no table can be asked for.
        return self._read("gemm_efficiency", self._engine.gemm_efficiency, tokens)

    def _read(self, name: str, quantity: Quantity | None, x: Any) -> Any:
        curve = known(quantity)
        if isinstance(curve, Curve) and isinstance(x, np.ndarray):
            self._note(name, curve, float(x.min()), float(x.max()))
            return np.interp(np.log(np.maximum(x, curve.x[0])), np.log(curve.x), curve.y)
        return super()._read(name, quantity, x)


class _Planned(NamedTuple):
    """One launch of a block: its place among a block's launches, and the (blocks ago, place) that it waits for.

    A place belongs to a stage, layer and repetition, whatever the block; so ends of different blocks compare.
    """

    launch: Launch
    place: int
    after: tuple[tuple[int, int], ...]


_Plan = tuple[_Planned, ...]
_Waits = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
"""Place of each launch, and what it waits for."""


class _Structure(NamedTuple):
    """Plans of prefill, the first block, those between, and the last one, and how many places there are.

    ``waited_for``: places whose end something waits for, other than the next launch of their stream.
    """

    prefill: _Plan
    first: _Plan
    middle: _Plan
    last: _Plan
    places: int
    waited_for: frozenset[int]


def evaluate(pipeline: Pipeline, profile: Profile, workload: Workload) -> FastResult:
    """Figures of ``workload``; ``why_not`` must have found nothing."""
    steps = cast(FixedSteps, workload.steps).count
    request = workload.blocked()[0]
    rows, blocks = len(workload.requests), request.blocks
    structure = _structure(pipeline, steps)
    prices = _Prices(pipeline, profile, request.context, rows, blocks)
    prefill = prices.prefill(structure.prefill)
    first = prices.block(structure.first, np.arange(1))
    middle = prices.block(structure.middle, np.arange(1, blocks - 1))
    last = prices.block(structure.last, np.arange(blocks - 1, blocks))

    runs = ((structure.prefill, prefill), (structure.first, first), (structure.middle, middle), (structure.last, last))
    before: list[float] = [0.0] * structure.places
    older = before
    ends: list[float] = []
    for plan, times in runs:
        mark = max((p.place for p in plan if p.launch.stage.decides), default=None)
        waits, merged = _merged(plan, times, structure.waited_for | ({mark} if mark is not None else set()))
        for column in merged.T.tolist():
            older, before = before, _ends(waits, before, older, column)
            if mark is not None:
                ends.append(before[mark])
    skipped = warm_up_blocks(blocks) - 1
    window = ((structure.middle, middle[:, skipped:]), (structure.last, last))
    forwards = [_busy(plan, times, forwards=True) for plan, times in window]
    main = [_busy(plan, times) for plan, times in window]
    found = _figures(workload, ends, sum(main), sum(forwards), _busy(structure.prefill, prefill))
    return found._replace(extrapolated=prices.extrapolated)


def _merged(plan: _Plan, times: Array, needed: Set[int]) -> tuple[_Waits, Array]:
    """``plan`` with launches that only follow another one, which nobody else waits for, made one with it."""
    groups: list[list[int]] = []
    group_ending_at: dict[int, int] = {}
    for index, planned in enumerate(plan):
        single = planned.after[0] if len(planned.after) == 1 else (1, 0)
        at = group_ending_at.pop(single[1], None) if single[0] == 0 and single[1] not in needed else None
        if at is None:
            groups.append([index])
            at = len(groups) - 1
        else:
            groups[at].append(index)
        group_ending_at[planned.place] = at
    groups.sort(key=lambda members: members[-1])
    merged = np.array([times[members].sum(axis=0) for members in groups]).reshape(len(groups), times.shape[1])
    return tuple((plan[members[-1]].place, plan[members[0]].after) for members in groups), merged


def _ends(
    waits: _Waits,
    before: list[float],
    older: list[float],
    times: list[float],
) -> list[float]:
    """End of each launch of a block, from those of the block before and the one before that."""
    ends = [0.0] * len(before)
    sources = (ends, before, older)
    for (place, after), time in zip(waits, times, strict=True):
        start = 0.0
        for ago, at in after:
            end = sources[ago][at]
            if end > start:
                start = end
        ends[place] = start + time
    return ends


def _busy(plan: _Plan, times: Array, *, forwards: bool = False) -> float:
    """Time of the main stream's launches, or of its forwards alone."""
    counted = [
        index
        for index, planned in enumerate(plan)
        if planned.launch.stage.stream == "main" and (not forwards or planned.launch.stage.name in FORWARD_STAGES)
    ]
    return float(times[counted].sum())


def _figures(
    workload: Workload, ends: list[float], busy_ns: float, forwards_ns: float, prefill_ns: float
) -> FastResult:
    rows, length = len(workload.requests), workload.block_length
    first = workload.requests[0]
    used = (first.prompt_tokens + first.new_tokens) % length
    warm_up = warm_up_blocks(len(ends))
    tokens = rows * (length * (len(ends) - warm_up - 1) + (used or length))
    window_ns, blocks = ends[-1] - ends[warm_up - 1], len(ends) - warm_up
    return FastResult(
        tokens * NS_PER_S / window_ns,
        window_ns / blocks / NS_PER_S,
        (ends[0] - prefill_ns) / NS_PER_S,
        forwards_ns / blocks / NS_PER_S,
        (window_ns - busy_ns) / blocks / NS_PER_S,
        tokens + rows * length * warm_up,
    )


class _Prices:
    """Times of a block's launches for all its blocks: shapes with arrays in place of sums over rows."""

    def __init__(self, pipeline: Pipeline, profile: Profile, context: int, rows: int, blocks: int) -> None:
        self._costs = _VectorCosts(pipeline, profile)
        self._length = pipeline.settings.block_length
        self._lookahead = pipeline.template.lookahead
        prefixes = context + self._length * np.arange(blocks)
        selected = np.array([pipeline.settings.selected_tokens(int(prefix)) for prefix in prefixes])
        self._slots = tuple(range(rows))
        self._prefix = rows * prefixes
        self._to_select = rows * selected
        reads = np.concatenate([selected[:1], selected[:-1]]) if self._lookahead else selected
        self._selected = rows * reads
        self._tail = rows * self._length * (np.arange(blocks) > 0) * bool(self._lookahead)
        self._known: dict[tuple[object, ...], Array] = {}

    @property
    def extrapolated(self) -> frozenset[str]:
        """Curves that prices of blocks left."""
        return self._costs.extrapolated

    def block(self, plan: _Plan, at: NDArray[np.int_]) -> Array:
        """Times in nanoseconds, one row a launch of ``plan`` and one column a block of ``at``."""
        self._known.clear()
        times = np.empty((len(plan), len(at)))
        for index, planned in enumerate(plan):
            times[index] = self._times(planned.launch, at)
        return times

    def prefill(self, plan: _Plan) -> Array:
        """Times of the prefill's launches: its prompts are the prefix of block 0."""
        found = []
        known: dict[tuple[str, int], Array | float] = {}
        for planned in plan:
            prefix, selected = int(self._prefix[0]), int(self._to_select[0])
            groups = [
                group._replace(slots=self._slots, prefix_tokens=prefix, selected_tokens=selected, tail_tokens=0)
                for group in planned.launch.groups
            ]
            stage, layer = planned.launch.stage, planned.launch.layer
            key = (stage.name, self._costs.layer_classes(stage, planned.launch.shape)[layer])
            if key not in known:
                known[key] = self._costs.total_ns(stage, launch_shape(groups, self._length), layer)
            found.append(known[key])
        return np.array(found, dtype=np.float64).reshape(len(plan), 1)

    def _times(self, launch: Launch, at: NDArray[np.int_]) -> Array | float:
        stage = launch.stage
        alike = self._costs.layer_classes(stage, launch.shape)[launch.layer]
        key = (stage.name, tuple(group.mode for group in launch.groups), alike)
        if key not in self._known:
            deciding = stage.name == self._costs.pipeline.template.denoise.name
            groups = [self._group(group, at, deciding=deciding) for group in launch.groups]
            shape = launch_shape(groups, self._length)
            found = self._costs.total_ns(stage, shape, launch.layer)
            self._known[key] = np.broadcast_to(np.asarray(found, dtype=np.float64), at.shape)
        return self._known[key]

    def _group(self, group: RowGroup, at: NDArray[np.int_], *, deciding: bool) -> RowGroup:
        """``group`` with the totals of every block of ``at``."""
        selected = self._selected if deciding else self._to_select
        tail = self._tail[at] if deciding else 0 * at
        prefix: Any = self._prefix[at]
        return group._replace(
            slots=self._slots,
            prefix_tokens=prefix,
            selected_tokens=cast(Any, selected[at]),
            tail_tokens=cast(Any, tail),
        )


def _structure(pipeline: Pipeline, steps: int) -> _Structure:
    """What a block launches and waits for, whatever the rows and the context; read off a short run once."""
    key = (id(pipeline.template), steps)
    known = _structures.get(key)
    if known is not None and known[0] is pipeline.template:
        return known[1]
    if len(_structures) >= _MAX_STRUCTURES:
        _structures.clear()
    found = _read_structure(pipeline, steps)
    _structures[key] = (pipeline.template, found)
    return found


def _read_structure(pipeline: Pipeline, steps: int) -> _Structure:
    requests = [Request(0, pipeline.settings.block_length, SAMPLE_BLOCKS)]
    places: dict[tuple[str, int | None, int], int] = {}
    repeats: Counter[tuple[int, str, int | None]] = Counter()
    where: dict[int, tuple[int, int]] = {}
    newest: dict[str, int] = {}
    plans: dict[int, list[_Planned]] = {}
    waited_for: set[int] = set()
    for launch in issued(Program(pipeline, requests, slots=1), steps):
        name, stream = launch.stage.name, launch.stage.stream
        repeat = repeats[launch.block, name, launch.layer]
        repeats[launch.block, name, launch.layer] += 1
        place = places.setdefault((name, launch.layer, repeat), len(places))
        sources = [where[number] for number in launch.after]
        waited_for.update(at for _, at in sources)
        if stream in newest:
            sources.append(where[newest[stream]])
        newest[stream] = launch.id
        where[launch.id] = (launch.block, place)
        after = tuple(dict.fromkeys((launch.block - block, at) for block, at in sources))
        plans.setdefault(launch.block, []).append(_Planned(launch, place, after))
    middle = SAMPLE_BLOCKS // 2
    one, other = ([(planned.place, planned.after) for planned in plans[block]] for block in (middle, middle + 1))
    assert one == other, "blocks in the middle of a run differ"
    prefill, first, between, last = (tuple(plans[block]) for block in (-1, 0, middle, SAMPLE_BLOCKS - 1))
    # What the next block's first launch follows must keep its end as well.
    waited_for.update(at for plan in plans.values() for p in plan for ago, at in p.after if ago)
    return _Structure(prefill, first, between, last, len(places), frozenset(waited_for))
