"""Flows of a launch: which shared rates its moved bytes take, and what is slower beside what.

Kernels beside rows that the device fetches are here too: each of the two holds what the other needs.
"""

from herald_pipeline.hardware import known
from herald_pipeline.stages import SELECTIONS, Op, OpKind, Template, Work
from herald_sim.op_times import ROW_BY_ROW, OpTimes, optional
from herald_sim.phases import (
    BESIDE,
    D2H,
    DRAM,
    DUPLEX,
    FIRST,
    H2D,
    KERNELS,
    RETRIEVAL_CORES,
    SCAN,
    Flow,
    Kernels,
    Phase,
    Uses,
)

MOVES = SELECTIONS | {OpKind.GATHER, OpKind.GATHER_FUSED, OpKind.COPY}
"""Ops that move bytes of host memory or the link; all others are kernels."""


class Flows(OpTimes):
    """Flows of ops that move bytes, for one pipeline on one profile."""

    def __post_init__(self) -> None:
        super().__post_init__()
        template = self.pipeline.template
        # Without a GPU, cores play it: some for the main stream, the others for retrieval and every copy.
        self._emulated = self.profile.machine.gpu.emulated
        self._duplex = optional(self.profile.machine.link.duplex_gb_s)
        self._scans = _scans(template)
        self._small = {stream.name for stream in template.streams if stream.high_priority}
        self._uses: dict[Uses, Uses] = {}
        self.fetches_hold_gpu = self._slows_steps()
        """Whether kernels take longer while rows are fetched: what contends for the GPU is more than kernels then."""

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
        elif op.kind in SELECTIONS:
            uses.append((SCAN, 0.0))
        else:
            uses += self._slower(op, time)
        return Flow(round(time), self._one_object(tuple(uses)))

    def _slower(self, op: Op, time: float) -> Uses:
        """What a scan makes of an op that moves bytes; a gather's fixed cost is no longer for it."""
        if op.kind is OpKind.GATHER_FUSED:
            return ()  # the scan's own workers
        if op.kind is OpKind.GATHER:
            rate = known(self.profile.machine.dram.read_gb_s).peak
            share = self._read("gather_dram_efficiency", self._engine.gather_dram_efficiency, op.dram_bytes)
            return self._beside_scan("gather_beside_scan", op.dram_bytes, op.dram_bytes / (rate * share) / time)
        if op.d2h_bytes:
            return self._beside_scan("down_beside_scan", op.d2h_bytes)
        by_row = op.layout in ROW_BY_ROW
        return self._beside_scan("row_fetch_beside_scan" if by_row else "copy_beside_scan", op.h2d_bytes)

    def _one_object(self, uses: Uses) -> Uses:
        """The same object for equal uses: the shared rates know a mix of flows by the identities of their uses."""
        return self._uses.setdefault(uses, uses)

    def _on_retrieval_cores(self, phase: Phase) -> Phase:
        """The phase without a GPU and its copy engines: retrieval's kernels, selection and copies take turns."""
        other = () if isinstance(phase, Kernels) else phase.uses
        return Flow(phase.total_ns, self._one_object((*other, (RETRIEVAL_CORES, 1.0))))

    def _beside_scan(self, name: str, num_bytes: float, share: float = 1.0) -> Uses:
        """How much slower a flow is beside a scan, of which ``share`` of its time is as much longer as measured."""
        quantity = getattr(self._engine, name)
        if quantity is None or self._emulated:
            return ()
        longer = 1.0 + (self._read(name, quantity, num_bytes) - 1.0) * share
        return ((BESIDE + SCAN, min(1.0, round(1.0 / longer, 9))),)

    def _slows_steps(self) -> bool:
        """Whether the profile says what row fetches and kernels cost each other, and the former go first here."""
        engine = self._engine
        own = (engine.step_beside_row_fetch, engine.proxy_beside_row_fetch, engine.row_fetch_beside_step)
        stated = any(quantity is not None for quantity in own)
        fetching = (stage for stage in self.pipeline.template.stages() if stage.action == "fetch_rows")
        return stated and not self._emulated and any(stage.stream in self._small for stage in fetching)

    def _beside_fetch(self, work: Work) -> float:
        """How many times as long a launch's kernels take while rows are fetched."""
        engine, ops = self._engine, [op for repeat in work for op in repeat.ops if op.kind not in MOVES]
        scores = [op for op in ops if op.kind is OpKind.PROXY]
        if scores and engine.proxy_beside_row_fetch is not None:
            longer = self._read("proxy_beside_row_fetch", engine.proxy_beside_row_fetch, scores[0].hbm_bytes)
        elif ops and engine.step_beside_row_fetch is not None:
            longer = self._read("step_beside_row_fetch", engine.step_beside_row_fetch, ops[0].tokens)
        else:
            longer = 1.0
        return max(1.0, longer)

    def _holding(self, flow: Flow, op: Op) -> Flow:
        """A fetch by programs of the device, which run beside kernels."""
        uses, longer = flow.uses, self._engine.row_fetch_beside_step
        if longer is not None:
            speed = 1.0 / max(1.0, self._read("row_fetch_beside_step", longer, op.h2d_bytes))
            uses = self._one_object((*uses, (BESIDE + KERNELS, round(speed, 9))))
        return Flow(flow.total_ns, uses, holds_gpu=True)


def _scans(template: Template) -> frozenset[OpKind]:
    """The ops that take a share of host memory's rate: of those that occur, the ones that read most."""
    actions = {stage.action for stage in template.stages() if stage.resource == "cpu"}
    if "select" in actions:
        return SELECTIONS
    return frozenset({OpKind.GATHER if actions else OpKind.COPY})


def _share(rate: float, whole: float) -> float:
    """``rate`` as a share of ``whole``, rounded so that flows of one kind have equal shares whatever their bytes."""
    return min(1.0, round(rate / whole, 9))
