"""What a launch costs on a machine: ops of the description -> phases of whole nanoseconds on the resources.

How long an op takes alone is in :mod:`herald_sim.op_times`; here is what becomes of a launch's ops: kernels that follow
one another on the GPU, and flows that share rates. Floats end here.
"""

import math
from collections.abc import Iterator, Mapping, Set

from herald_pipeline.hardware import known
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.stages import LaunchShape, Op, OpKind, Repeat, Stage, Work
from herald_sim.flows import MOVES, Flows
from herald_sim.op_times import NS_PER_US, ROW_BY_ROW, optional
from herald_sim.phases import D2H, H2D, Cost, Flow, Kernels, Phase

_PASS = frozenset({"project", "finish", "exact_layer"})
"""Actions of a selection pass on the device: launched layer by layer, in whichever stream."""


def needs(pipeline: Pipeline) -> frozenset[str]:
    """Op kinds and copy layouts that occur in ``pipeline``: what its profile must state numbers for."""
    block = pipeline.settings.block_length
    context = 4 * block
    shape = LaunchShape(1, block, block, context, block, block, block * context, 2 * block * block, 1, 1)
    found: set[str] = set()
    for stage in pipeline.template.stages():
        for layer in stage.layers or (None,):
            for repeat in stage.work(shape, layer):
                for op in repeat.ops:
                    found.add(op.kind)
                    if op.kind is OpKind.COPY:
                        found.add(op.layout)
    return frozenset(found)


class CostModel(Flows):
    """Prices of launches, for one pipeline on one profile."""

    def __post_init__(self) -> None:
        super().__post_init__()
        engine = self.profile.engine
        self._layer_ns = known(engine.layer_overhead_us).peak * NS_PER_US
        self._wait_share = 1.0 if engine.turn_wait_share is None else engine.turn_wait_share.peak
        own = engine.retrieval_layer_overhead_us
        self._own_layer_ns = optional(own) * NS_PER_US
        share, usual = engine.retrieval_project_share, 1.0 if own is None else 0.5
        self._project_share = usual if share is None else share.peak
        timed = engine.turn_wait_share is not None  # directly, beside a step: no bound by single blocks is needed
        self._block_ns = math.inf if timed or engine.block_us is None else engine.block_us.peak * NS_PER_US
        self._stage_ns = optional(engine.stage_overhead_us) * NS_PER_US
        self._acceptance_ns = optional(engine.acceptance_us) * NS_PER_US
        self._kernels = max(1, round(known(engine.kernels_per_layer).peak))
        retrieval = engine.retrieval_kernels_per_layer
        self._retrieval_kernels = optional(retrieval) or self._kernels
        template = self.pipeline.template
        begins = template.first_step > 0 and engine.first_step_experts_share is not None  # the head holds step 0
        self._first_steps = {stage.name for section in template.head if begins for stage in section.stages}
        # A pass in line with the steps is as it would be in their stream; numbers of passes beside steps do not hold.
        self._in_line = {stage.name for stage in template.in_line()}
        self._classes: dict[str, Mapping[int | None, int]] = {}

    def layer_classes(self, stage: Stage, shape: LaunchShape) -> Mapping[int | None, int]:
        """Layers of ``stage`` -> a number that layers of equal work share; worked out once, for the first shape."""
        classes = self._classes.get(stage.name)
        if classes is None:
            numbers: dict[Work, int] = {}
            layers: tuple[int | None, ...] = stage.layers or (None,)
            classes = {layer: numbers.setdefault(stage.work(shape, layer), len(numbers)) for layer in layers}
            self._classes[stage.name] = classes
        return classes

    def stage_cost(self, stage: Stage, shape: LaunchShape, layer: int | None) -> Cost:
        """Cost of one launch of ``stage``."""
        return self.work_cost(stage, stage.work(shape, layer))

    def work_cost(self, stage: Stage, work: Work) -> Cost:
        """Cost of ``work`` done by a launch of ``stage``."""
        hbm = flops = h2d = d2h = dram = 0.0
        for repeat in work:
            count = repeat.count
            for op in repeat.ops:
                if op.kind in MOVES:
                    flops += count * op.cpu_flops
                    h2d += count * op.h2d_bytes
                    d2h += count * op.d2h_bytes
                    dram += count * op.dram_bytes
                else:
                    flops += count * op.gpu_flops
                    hbm += count * op.hbm_bytes
        num_bytes = {"gpu": hbm, "cpu": dram, "h2d": h2d, "d2h": d2h}[stage.resource]
        return Cost(self._phases(stage, work), num_bytes, flops, h2d, d2h, dram)

    # Phases ----------------------------------------------------------------------------------------------------------

    def _phases(self, stage: Stage, work: Work) -> tuple[Phase, ...]:
        self._price(stage)
        small = stage.stream in self._small and stage.name not in self._in_line
        phases: list[Phase] = []
        segments: list[tuple[float, int]] = []
        own = self._has_own_cost(stage, small)
        fixed_ns = self._layer_cost_ns(self._own_layer_ns, _kinds(work)) if own else 0.0
        if self._emulated or not self._issued_ahead(stage, work, own):
            fixed_ns += self._stage_ns
        if fixed_ns and work:
            phases.append(Flow(round(fixed_ns), ()))
        if self._engine.decide_overhead_us is not None and stage.decides and work:
            phases.append(Flow(round(self._decide_ns(work)), ()))
        own_proxy = self._engine.proxy_efficiency is not None
        beside = self._beside_fetch(work) if self.fetches_hold_gpu and stage.resource == "gpu" else 1.0
        for repeat in _expanded(work):
            layer_ns = 0.0
            kinds: set[OpKind] = set()
            exchanges = not small and any(op.kind is OpKind.COPY for op in repeat.ops)
            for op in repeat.ops:
                kind = op.kind
                if exchanges:
                    layer_ns += self._exchange_ns(op)
                if kind in MOVES:
                    if kinds:
                        segments.append(self._layer_segment(layer_ns, kinds, small, own, 1))
                        layer_ns, kinds = 0.0, set()
                    self._close(phases, segments, beside)
                    flow = self._flow(op, beside_kernels=stage.resource == "gpu")
                    holds = small and self.fetches_hold_gpu and op.layout in ROW_BY_ROW
                    phases.append(self._holding(flow, op) if holds else flow)
                elif kind is OpKind.TOP_K and own_proxy and OpKind.PROXY in kinds:
                    kinds.add(kind)  # the proxy's share holds it
                elif kind is OpKind.HEAD:
                    segments.append((self._gpu_ns(op), repeat.count))
                elif kind is OpKind.SAMPLE:
                    passes = max(1, round(known(self._engine.sampler_passes).peak))
                    segments.append((self._gpu_ns(op) / passes, passes * repeat.count))
                else:
                    time = self._gpu_ns(op) if small or self._lanes is None else self._lanes_ns(op)
                    if kind is OpKind.EXPERTS and stage.name in self._first_steps:
                        time *= self._read("first_step_experts_share", self._engine.first_step_experts_share, op.tokens)
                    layer_ns += time
                    kinds.add(kind)
            if kinds:
                segments.append(self._layer_segment(layer_ns, kinds, small, own, repeat.count))
        if stage.decides and self._acceptance_ns and work:
            segments.append((self._acceptance_ns / self._kernels, self._kernels))  # small ones, about as many
        self._close(phases, segments, beside)
        if work and stage.resource in (H2D, D2H):
            phases += self._copy_overhead(stage.resource, work)
        if self._emulated and stage.stream != "main" and stage.name not in self._in_line:
            phases = [self._on_retrieval_cores(phase) for phase in phases]
        return tuple(phases)

    def _decide_ns(self, work: Work) -> float:
        """The host's turn before a launch that decides, by its rows."""
        rows = work[0].ops[0].tokens / self.pipeline.settings.block_length
        return self._read("decide_overhead_us", self._engine.decide_overhead_us, rows) * NS_PER_US

    def _issued_ahead(self, stage: Stage, work: Work, own: bool) -> bool:
        """Whether a launch on the device waits for the device alone: the host has issued it by then."""
        ops = [op for repeat in work for op in repeat.ops]
        if stage.resource == H2D:
            return all(op.layout in ROW_BY_ROW for op in ops)
        return stage.resource == "gpu" and not own and not any(op.kind in MOVES for op in ops)

    def _exchange_ns(self, op: Op) -> float:
        """What handing a layer's queries to the CPU, or taking its outputs, costs a pass in line besides its ops."""
        own = {OpKind.QKV: "exchange_project_us", OpKind.OUTPUT: "exchange_finish_us"}.get(op.kind)
        if own is None or getattr(self._engine, own) is None:
            return 0.0
        return self._read(own, getattr(self._engine, own), op.tokens) * NS_PER_US

    def _copy_overhead(self, resource: str, work: Work) -> tuple[Flow, ...]:
        """Host time of a launch of a copy stream: what it prepares, and where it puts what has arrived."""
        engine, ops = self._engine, [(repeat.count, op) for repeat in work for op in repeat.ops]
        if resource == H2D:
            if not self._emulated and any(op.layout in ROW_BY_ROW for _, op in ops):
                return ()  # a kernel, whose launch is in its time
            quantity, name, size = engine.h2d_overhead_us, "h2d_overhead_us", sum(n * op.h2d_bytes for n, op in ops)
        else:
            quantity, name, size = engine.d2h_overhead_us, "d2h_overhead_us", sum(n * op.d2h_bytes for n, op in ops)
        if quantity is None or not quantity.peak:
            return ()
        time = self._read(name, quantity, size) * NS_PER_US
        beside = self._beside_scan("down_beside_scan", size) if resource == D2H else ()
        return (Flow(self._whole_ns(time), self._one_object(beside)),)

    def _whole_ns(self, time: float) -> int:
        """Whole nanoseconds; fast mode prices all blocks at once and overrides it."""
        return round(time)

    def _has_own_cost(self, stage: Stage, small: bool) -> bool:
        """Whether the profile states the fixed cost of a selection pass's stages for this one.

        It is the way of a launch to the device and back, in which the device is free for others' kernels. In line with
        the steps it is the same, unless the profile says what queries and outputs cost there.
        """
        in_line = self._engine.exchange_project_us is None and self._engine.exchange_finish_us is None
        return self._engine.retrieval_layer_overhead_us is not None and stage.action in _PASS and (small or in_line)

    def _layer_cost_ns(self, whole_ns: float, kinds: Set[OpKind]) -> float:
        """What ops of these kinds carry of a pass's fixed cost of a layer: the projection has its share of it."""
        share = self._project_share
        return whole_ns * (share * (OpKind.QKV in kinds) + (1.0 - share) * (OpKind.OUTPUT in kinds))

    def _layer_segment(
        self, layer_ns: float, kinds: set[OpKind], small: bool, own: bool, count: int
    ) -> tuple[float, int]:
        """Kernels of ``count`` layers' parts: equal shares of the part's time, and of its fixed cost if not its own."""
        kernels = self._layer_kernels(kinds, small)
        if small and not own:
            layer_ns += self._layer_cost_ns(self._layer_ns, kinds)
        elif not own and OpKind.QKV in kinds:
            layer_ns += self._layer_ns
        return layer_ns / kernels, kernels * count

    def _layer_kernels(self, kinds: set[OpKind], small: bool) -> int:
        """Kernels of a layer's part; the projection and the rest of a retrieval layer are half of its kernels each."""
        if not small:
            return self._kernels
        halves = (OpKind.QKV in kinds) + (OpKind.OUTPUT in kinds or OpKind.FFN in kinds)
        return max(1, round(self._retrieval_kernels * max(halves, 1) / 2))

    def _close(self, phases: list[Phase], segments: list[tuple[float, int]], beside_fetch: float) -> None:
        """Move the kernels gathered so far into a phase."""
        if segments:
            total = sum(time * count for time, count in segments)
            count = sum(count for _, count in segments)
            waits = [(min(self._wait_share * time, self._block_ns), count) for time, count in segments]
            wait_ns = (sum(time**3 * count for time, count in waits) / count) ** (1 / 3)
            phases.append(Kernels(round(total), total / count, wait_ns, beside_fetch))
            segments.clear()


def _kinds(work: Work) -> frozenset[OpKind]:
    return frozenset(op.kind for repeat in work for op in repeat.ops)


def _expanded(work: Work) -> Iterator[Repeat]:
    """``work`` with layers that move bytes written out one by one: their phases alternate."""
    for repeat in work:
        moves = repeat.count > 1 and any(op.kind in MOVES for op in repeat.ops)
        yield from (Repeat(1, repeat.ops),) * repeat.count if moves else (repeat,)
