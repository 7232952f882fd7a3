"""What a launch costs on a machine: ops of the description -> phases of whole nanoseconds on the resources.

How long an op takes alone is in :mod:`herald_sim.op_times`; here is what becomes of a launch's ops: kernels that follow
one another on the GPU, and flows that share rates. Floats end here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from herald_pipeline.hardware import known
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.stages import SELECTIONS, LaunchShape, Op, OpKind, Repeat, Stage, Template, Work
from herald_sim.op_times import NS_PER_US, OpTimes, optional

DRAM, H2D, D2H, DUPLEX = "dram", "h2d", "d2h", "duplex"
RETRIEVAL_CORES = "retrieval cores"
FIRST = "goes first"
"""Among a flow's uses: it takes what it needs of its rates before flows without it do."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """Work on the GPU: ``total_ns`` alone, as kernels between which another stream's kernels can run.

    ``kernel_ns`` is the mean time of one. ``wait_ns`` is what another stream's kernel waits for, in which long kernels
    count for more: the power mean of order 3. The kernel that a random moment falls into would be the mean over time,
    which comes near it but gets longer if only short kernels get shorter; this one never does.
    """

    total_ns: int
    kernel_ns: float
    wait_ns: float
    on_gpu: Literal[True] = True


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


_MOVES = SELECTIONS | {OpKind.GATHER, OpKind.GATHER_FUSED, OpKind.COPY}
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


def _scans(template: Template) -> frozenset[OpKind]:
    """The ops that take a share of host memory's rate: of those that occur, the ones that read most."""
    actions = {stage.action for stage in template.stages() if stage.resource == "cpu"}
    if "select" in actions:
        return SELECTIONS
    return frozenset({OpKind.GATHER if actions else OpKind.COPY})


class CostModel(OpTimes):
    """Prices of launches, for one pipeline on one profile."""

    def __post_init__(self) -> None:
        super().__post_init__()
        machine, engine = self.profile.machine, self.profile.engine
        self._layer_ns = known(engine.layer_overhead_us).peak * NS_PER_US
        self._copy_ns = {
            H2D: optional(engine.h2d_overhead_us) * NS_PER_US,
            D2H: optional(engine.d2h_overhead_us) * NS_PER_US,
        }
        own = engine.retrieval_layer_overhead_us
        self._retrieval_layer_ns = self._layer_ns if own is None else own.peak * NS_PER_US
        share, usual = engine.retrieval_project_share, 1.0 if own is None else 0.5
        self._project_share = usual if share is None else share.peak
        self._stage_ns = optional(engine.stage_overhead_us) * NS_PER_US
        # Without a GPU, cores play it: some for the main stream, the others for retrieval and every copy.
        self._emulated = machine.gpu.emulated
        self._kernels = max(1, round(known(engine.kernels_per_layer).peak))
        retrieval = engine.retrieval_kernels_per_layer
        self._retrieval_kernels = optional(retrieval) or self._kernels
        self._duplex = optional(machine.link.duplex_gb_s)
        self._scans = _scans(self.pipeline.template)
        self._small = {stream.name for stream in self.pipeline.template.streams if stream.high_priority}
        self._classes: dict[str, Mapping[int | None, int]] = {}
        self._uses: dict[Uses, Uses] = {}

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
                    phases.append(self._flow(op, beside_kernels=stage.resource == "gpu"))
                elif kind is OpKind.HEAD:
                    segments.append((self._gpu_ns(op), repeat.count))
                elif kind is OpKind.SAMPLE:
                    passes = max(1, round(known(self._engine.sampler_passes).peak))
                    segments.append((self._gpu_ns(op) / passes, passes * repeat.count))
                else:
                    layer_ns += self._gpu_ns(op) if small or self._lanes is None else self._lanes_ns(op)
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
        return self._read("decide_overhead_us", self._engine.decide_overhead_us, rows) * NS_PER_US

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
        """Fixed cost of a layer's part: the projection carries it, of a retrieval layer its share of it."""
        if not small:
            return self._layer_ns if OpKind.QKV in kinds else 0.0
        share, rest = self._project_share, 1.0 - self._project_share
        return self._retrieval_layer_ns * (share * (OpKind.QKV in kinds) + rest * (OpKind.OUTPUT in kinds))

    def _flow(self, op: Op, beside_kernels: bool) -> Flow:
        """Time alone of an op that moves bytes, and the shares of the rates that it takes then.

        What a stage of the GPU exchanges with the host (queries, outputs) does not queue behind copies of a pool. Of
        host memory only one stage of a run takes a share, which replicas on a host compete with: what runs beside it is
        in its time (:attr:`~herald_pipeline.stages.Op.beside_copy_bytes`).
        """
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
        if read is not None and op.kind in self._scans:
            moved = op.dram_bytes + op.beside_copy_bytes + op.beside_gather_bytes
            uses.append((DRAM, _share(moved / time, read.peak)))
        if uses and beside_kernels and not self._emulated:
            uses.append((FIRST, 0.0))
        return Flow(round(time), self._one_object(tuple(uses)))

    def _one_object(self, uses: Uses) -> Uses:
        """The same object for equal uses: the shared rates know a mix of flows by the identities of their uses."""
        return self._uses.setdefault(uses, uses)

    def _on_retrieval_cores(self, phase: Phase) -> Phase:
        """The phase without a GPU and its copy engines: retrieval's kernels, selection and copies take turns."""
        other = () if isinstance(phase, Kernels) else phase.uses
        return Flow(phase.total_ns, self._one_object((*other, (RETRIEVAL_CORES, 1.0))))

    def _close(self, phases: list[Phase], segments: list[tuple[float, int]]) -> None:
        """Move the kernels gathered so far into a phase."""
        if segments:
            total = sum(time * count for time, count in segments)
            count = sum(count for _, count in segments)
            wait_ns = (sum(time**3 * count for time, count in segments) / count) ** (1 / 3)
            phases.append(Kernels(round(total), total / count, wait_ns))
            segments.clear()


def _share(rate: float, whole: float) -> float:
    """``rate`` as a share of ``whole``, rounded so that flows of one kind have equal shares whatever their bytes."""
    return min(1.0, round(rate / whole, 9))


def _expanded(work: Work) -> Iterator[Repeat]:
    """``work`` with layers that move bytes written out one by one: their phases alternate."""
    for repeat in work:
        moves = repeat.count > 1 and any(op.kind in _MOVES for op in repeat.ops)
        yield from (Repeat(1, repeat.ops),) * repeat.count if moves else (repeat,)
