"""What a launch costs on a machine: ops of the description -> nanoseconds, from the profile's rates and shares.

Formulas are those of a roofline: an op takes the longest of its demands, each over the share of the raw rate that the
engine reaches; CPU selection takes the *sum* of its pass over the KV and its work per query, because the kernel's gain
from fewer queries is gradual down to one query (HERALD, Fig. 8). Floats end here: what leaves is whole nanoseconds.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from herald_pipeline.hardware import Profile, Quantity, known
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.stages import LaunchShape, Layout, Op, OpKind, Repeat, Stage, Work

# 1 TFLOP/s is 1000 FLOP/ns; 1 GB/s is 1 byte/ns.
_FLOP_NS_PER_TFLOP_S = 1000.0
_NS_PER_US = 1000.0

DRAM, H2D, D2H, DUPLEX = "dram", "h2d", "d2h", "duplex"
RETRIEVAL_CORES = "retrieval cores"


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """Work on the GPU: ``total_ns`` alone, as kernels whose ends are where another stream's kernel can begin.

    ``segments`` are runs of equal kernels, as (nanoseconds of one, how many), in order.
    """

    total_ns: int
    segments: tuple[tuple[float, int], ...]
    count: int
    on_gpu: Literal[True] = True

    @property
    def kernel_ns(self) -> float:
        """Mean time of a kernel."""
        return self.total_ns / self.count


Uses = tuple[tuple[str, float], ...]
"""Shared rates by name, and the share of each that a flow takes at full speed."""


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Work that moves bytes: ``total_ns`` alone; ``uses`` says which share of each shared rate it takes then."""

    total_ns: int
    uses: Uses
    on_gpu: Literal[False] = False


Phase = Kernels | Flow


@dataclass(frozen=True, slots=True, eq=False)
class Cost:
    """Phases of a launch, one after another; with the bytes of its resource and its FLOPs, and bytes per link."""

    phases: tuple[Phase, ...]
    num_bytes: float
    flops: float
    h2d_bytes: float = 0.0
    d2h_bytes: float = 0.0
    dram_bytes: float = 0.0

    @property
    def total_ns(self) -> int:
        """Time of the launch when nothing else runs."""
        return sum(phase.total_ns for phase in self.phases)


_COPY_LAYOUT_EFFICIENCY = {
    Layout.CONTIGUOUS: None,
    Layout.STREAMED: "streamed_copy_efficiency",
    Layout.SCATTERED: "scattered_copy_efficiency",
}
_MAX_OPS = 4096
_MATRICES = frozenset({OpKind.QKV, OpKind.OUTPUT, OpKind.FFN, OpKind.HEAD})
_MOVES = frozenset({OpKind.SELECT, OpKind.GATHER, OpKind.COPY})
"""Ops that move bytes of host memory or the link; all others are kernels."""


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


@dataclass
class CostModel:
    """Prices for one pipeline on one profile.

    ``extrapolated`` collects the profile's curves that were read outside what was measured.
    """

    pipeline: Pipeline
    profile: Profile
    extrapolated: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        machine, engine = self.profile.machine, self.profile.engine
        self._engine = engine
        self._hbm = known(machine.gpu.bandwidth_gb_s).peak
        self._peak = known(machine.gpu.peak_tflop_s).peak * _FLOP_NS_PER_TFLOP_S
        self._weight_rate = self._hbm * known(engine.weight_read_efficiency).peak
        self._layer_ns = known(engine.layer_overhead_us).peak * _NS_PER_US
        self._copy_ns = {
            H2D: _optional(engine.h2d_overhead_us) * _NS_PER_US,
            D2H: _optional(engine.d2h_overhead_us) * _NS_PER_US,
        }
        own = engine.retrieval_layer_overhead_us
        self._retrieval_layer_ns = None if own is None else own.peak * _NS_PER_US
        self._stage_ns = _optional(engine.stage_overhead_us) * _NS_PER_US
        self._head_share = 1.0 if engine.head_token_share is None else engine.head_token_share.peak
        # Without a GPU, cores play it: some for the main stream, the others for retrieval and every copy.
        self._emulated = machine.gpu.emulated
        self._kernels = max(1, round(known(engine.kernels_per_layer).peak))
        retrieval = engine.retrieval_kernels_per_layer
        self._retrieval_kernels = _optional(retrieval) or self._kernels
        self._duplex = _optional(machine.link.duplex_gb_s)
        self._small = {stream.name for stream in self.pipeline.template.streams if stream.high_priority}
        moe = self.pipeline.model.moe
        self._experts = moe.num_experts if moe else 1
        self._per_token = moe.experts_per_token if moe else 1
        self._classes: dict[str, Mapping[int | None, int]] = {}
        # By identity: the description hands out the same op for the same tokens.
        self._op_ns: dict[int, tuple[Op, float]] = {}
        self._uses: dict[Uses, Uses] = {}
        self._gemm_shares: dict[int, float] = {}

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
                if op.kind in _MOVES:
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
        small = stage.stream in self._small
        phases: list[Phase] = []
        segments: list[tuple[float, int]] = []
        if self._stage_ns and work:
            phases.append(Flow(round(self._stage_ns), ()))
        if self._engine.decide_overhead_us is not None and stage.decides and work:
            phases.append(Flow(round(self._decide_ns(work)), ()))
        for repeat in _expanded(work):
            layer_ns = 0.0
            kinds: set[OpKind] = set()
            for op in repeat.ops:
                kind = op.kind
                if kind in _MOVES:
                    if kinds:
                        segments.append(self._layer_segment(layer_ns, kinds, small, 1))
                        layer_ns, kinds = 0.0, set()
                    self._close(phases, segments)
                    phases.append(self._flow(op))
                elif kind is OpKind.HEAD:
                    segments.append((self._gpu_ns(op), repeat.count))
                elif kind is OpKind.SAMPLE:
                    passes = max(1, round(known(self._engine.sampler_passes).peak))
                    segments.append((self._gpu_ns(op) / passes, passes * repeat.count))
                else:
                    layer_ns += self._gpu_ns(op)
                    kinds.add(kind)
            if kinds:
                segments.append(self._layer_segment(layer_ns, kinds, small, repeat.count))
        self._close(phases, segments)
        copy_ns = self._copy_ns.get(stage.resource, 0.0)
        if copy_ns and work:
            phases.append(Flow(round(copy_ns), ()))
        if self._emulated and stage.stream != "main":
            phases = [self._on_retrieval_cores(phase) for phase in phases]
        return tuple(phases)

    def _decide_ns(self, work: Work) -> float:
        """The host's turn before a launch that decides, by its rows."""
        rows = work[0].ops[0].tokens / self.pipeline.settings.block_length
        return self._read("decide_overhead_us", self._engine.decide_overhead_us, rows) * _NS_PER_US

    def _layer_segment(self, layer_ns: float, kinds: set[OpKind], small: bool, count: int) -> tuple[float, int]:
        """Kernels of ``count`` layers' parts: equal shares of the part's time and its fixed cost."""
        kernels = self._layer_kernels(kinds, small)
        return (layer_ns + self._layer_overhead_ns(kinds, small)) / kernels, kernels * count

    def _layer_kernels(self, kinds: set[OpKind], small: bool) -> int:
        """Kernels of a layer's part; the projection and the rest of a retrieval layer are half of its kernels each."""
        if not small:
            return self._kernels
        halves = (OpKind.QKV in kinds) + (OpKind.OUTPUT in kinds or OpKind.FFN in kinds)
        return max(1, round(self._retrieval_kernels * max(halves, 1) / 2))

    def _layer_overhead_ns(self, kinds: set[OpKind], small: bool) -> float:
        """Fixed cost of a layer's part: the projection carries it.

        Where the retrieval's own is stated, the projection and the rest of the layer carry half each.
        """
        if not small or self._retrieval_layer_ns is None:
            return self._layer_ns if OpKind.QKV in kinds else 0.0
        return self._retrieval_layer_ns * ((OpKind.QKV in kinds) + (OpKind.OUTPUT in kinds)) / 2

    def _flow(self, op: Op) -> Flow:
        """Time alone of an op that moves bytes, and the shares of the rates that it takes then."""
        time = self._flow_ns(op)
        if not time:
            return Flow(0, ())
        read = self.profile.machine.dram.read_gb_s
        uses: list[tuple[str, float]] = []
        if op.h2d_bytes:
            uses.append((H2D, 1.0))
        if op.d2h_bytes:
            uses.append((D2H, 1.0))
        if uses and self._duplex:
            uses.append((DUPLEX, _share((op.h2d_bytes + op.d2h_bytes) / time, self._duplex)))
        if read is not None:
            uses.append((DRAM, _share(op.dram_bytes / time, read.peak)))
        return Flow(round(time), self._one_object(tuple(uses)))

    def _one_object(self, uses: Uses) -> Uses:
        """The same object for equal uses: the shared rates know a mix of flows by the identities of their uses."""
        return self._uses.setdefault(uses, uses)

    def _on_retrieval_cores(self, phase: Phase) -> Phase:
        """The phase without a GPU and its copy engines: retrieval's kernels, selection and copies take turns."""
        other = () if isinstance(phase, Kernels) else phase.uses
        return Flow(phase.total_ns, self._one_object((*other, (RETRIEVAL_CORES, 1.0))))

    def _flow_ns(self, op: Op) -> float:
        if op.kind is OpKind.SELECT:
            return self._select_ns(op)
        machine, engine = self.profile.machine, self._engine
        if op.kind is OpKind.GATHER:
            share = self._read("gather_dram_efficiency", engine.gather_dram_efficiency, op.dram_bytes)
            overhead = _optional(engine.gather_overhead_us) * _NS_PER_US
            return overhead + op.dram_bytes / (known(machine.dram.read_gb_s).peak * share)
        name = _COPY_LAYOUT_EFFICIENCY[op.layout]
        size = op.h2d_bytes + op.d2h_bytes
        efficiency = 1.0 if name is None else self._read(name, getattr(engine, name), size)
        up = self._link_rate("h2d_gb_s", machine.link.h2d_gb_s, op.h2d_bytes)
        down = self._link_rate("d2h_gb_s", machine.link.d2h_gb_s, op.d2h_bytes)
        return (op.h2d_bytes / up + op.d2h_bytes / down) / efficiency

    def _link_rate(self, name: str, rate: Quantity | None, num_bytes: float) -> float:
        """Rate of one direction; a direction that nothing crosses is not asked for."""
        unused = isinstance(num_bytes, float) and not num_bytes
        return math.inf if unused else self._read(name, rate, num_bytes)

    def _select_ns(self, op: Op) -> float:
        """Sum of the pass over the KV and of the queries' work, and a fixed time where the engine states one."""
        machine, engine = self.profile.machine, self._engine
        share = self._read("select_dram_efficiency", engine.select_dram_efficiency, op.dram_bytes)
        flops = known(machine.cpu.attention_tflop_s).peak * _FLOP_NS_PER_TFLOP_S
        flops *= self._read("select_flops_efficiency", engine.select_flops_efficiency, op.queries)
        time = op.dram_bytes / (known(machine.dram.read_gb_s).peak * share) + op.cpu_flops / flops
        return time + _optional(engine.select_overhead_us) * _NS_PER_US

    def _longer(self, one: float, other: float) -> float:
        """The later of two ends; fast mode prices all blocks at once and overrides it."""
        return max(one, other)

    def _close(self, phases: list[Phase], segments: list[tuple[float, int]]) -> None:
        """Move the kernels gathered so far into a phase."""
        if segments:
            total = sum(time * count for time, count in segments)
            phases.append(Kernels(round(total), tuple(segments), sum(count for _, count in segments)))
            segments.clear()

    # Ops on the GPU --------------------------------------------------------------------------------------------------

    def _gpu_ns(self, op: Op) -> float:
        known = self._op_ns.get(id(op))
        if known is not None and known[0] is op:
            return known[1]
        if len(self._op_ns) >= _MAX_OPS:
            self._op_ns.clear()
        time = self._op_time(op)
        self._op_ns[id(op)] = (op, time)
        return time

    def _op_time(self, op: Op) -> float:
        if op.kind is OpKind.HEAD and self._head_share < 1:
            rate = self._peak * self._gemm_share(max(1, round(op.tokens * self._head_share)))
            return self._longer(op.weight_bytes / self._weight_rate, op.gpu_flops * self._head_share / rate)
        if op.kind in _MATRICES:
            rate = self._peak * self._gemm_share(op.tokens)
            return self._longer(op.weight_bytes / self._weight_rate, op.gpu_flops / rate)
        if op.kind is OpKind.EXPERTS:
            return self._experts_ns(op)
        if op.kind is OpKind.SAMPLE:
            size = op.hbm_bytes * self._head_share
            return size * known(self._engine.sampler_passes).peak / self._hbm
        share = self._read("attention_efficiency", self._engine.attention_efficiency, op.hbm_bytes)
        time = op.hbm_bytes / (self._hbm * share)
        if op.kind is not OpKind.TOP_K:
            own = self._engine.attention_flops_efficiency
            if own is not None and op.kind is OpKind.ATTENTION:
                share = self._read("attention_flops_efficiency", own, op.hbm_bytes / op.tokens)
            else:
                share = self._gemm_share(op.tokens)
            time = self._longer(time, op.gpu_flops / (self._peak * share))
        return time

    def _gemm_share(self, tokens: int) -> float:
        """Share of the peak that products of ``tokens`` rows reach; attention asks for the same one in every block."""
        share = self._gemm_shares.get(tokens)
        if share is None:
            if len(self._gemm_shares) >= _MAX_OPS:
                self._gemm_shares.clear()
            share = self._read("gemm_efficiency", self._engine.gemm_efficiency, tokens)
            self._gemm_shares[tokens] = share
        return share

    def _experts_ns(self, op: Op) -> float:
        """Grouped products: experts that the tokens hit are read, and half a tile of padding each is computed."""
        hit = self.experts_hit(op.tokens)
        rows = op.tokens * self._per_token
        padding = hit * known(self._engine.grouped_gemm_tile_rows).peak / 2
        efficiency = self._read("grouped_gemm_efficiency", self._engine.grouped_gemm_efficiency, op.tokens)
        flops = op.gpu_flops * (1 + padding / max(rows, 1))
        read = op.weight_bytes * hit / self._experts
        return self._longer(read / self._weight_rate, flops / (self._peak * efficiency))

    def experts_hit(self, tokens: int) -> float:
        """Distinct experts of a layer that ``tokens`` tokens reach; [MASK] tokens route alike (routed_token_share)."""
        independent = known(self._engine.routed_token_share).peak * tokens
        return self._experts * float(1 - (1 - self._per_token / self._experts) ** independent)

    def _read(self, name: str, quantity: Quantity | None, x: float) -> float:
        reading = known(quantity).at(x)
        if reading.extrapolated:
            self.extrapolated.add(name)
        return reading.value


def _share(rate: float, whole: float) -> float:
    """``rate`` as a share of ``whole``, rounded so that flows of one kind have equal shares whatever their bytes."""
    return min(1.0, round(rate / whole, 9))


def _expanded(work: Work) -> Iterator[Repeat]:
    """``work`` with layers that move bytes written out one by one: their phases alternate."""
    for repeat in work:
        moves = repeat.count > 1 and any(op.kind in _MOVES for op in repeat.ops)
        yield from (Repeat(1, repeat.ops),) * repeat.count if moves else (repeat,)


def _optional(quantity: Quantity | None) -> float:
    return 0.0 if quantity is None else quantity.peak
