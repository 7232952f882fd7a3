"""What came of a run: one schema for simulated and real ones, computed from launches as they end.

The :class:`Recorder` keeps sums only, so that a run's memory does not grow with its length; spans are kept when a trace
is asked for. The **window** of the speed figures begins when the second block has ended on the main stream and lasts to
the run's end. Block 0's retrieval queues behind the prefill's last copies to the host, so block 1 begins late; on a GPU
the first blocks also capture graphs. In runs of fewer than six blocks the window begins at the first block's end. The
rule stands in :func:`warm_up_blocks` alone; both interpreters and fast mode follow it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from herald_pipeline.demand import demand
from herald_pipeline.scheduling.launches import Launch
from herald_pipeline.scheduling.program import BatchPolicy
from herald_pipeline.stages import Stage
from herald_pipeline.trace import Span, Trace
from herald_pipeline.units import NS_PER_S

COPY_STREAMS = frozenset({"gather", "h2d", "d2h"})
WARM_UP_BLOCKS = 2
"""Blocks before the window of a run that is long enough."""
_SETTLED_RUN = 6
"""Shortest run, in blocks, with the full warm-up: in shorter ones too little would be left."""


def warm_up_blocks(blocks: int) -> int:
    """Blocks left out of the speed figures of a run that completed ``blocks`` of them."""
    return WARM_UP_BLOCKS if blocks >= _SETTLED_RUN else 1


@dataclass(slots=True)
class StageSums:
    """Count, busy time and bytes of one stage in the window."""

    count: int = 0
    busy_ns: int = 0
    bytes: float = 0.0
    flops: float = 0.0


@dataclass(slots=True)
class _Sums:
    """What has been counted since the first block's end; a window's figures are the difference of two of them."""

    end_ns: int = 0
    tokens: int = 0
    row_blocks: int = 0
    row_forwards: int = 0
    blocks: int = 0
    stall_ns: int = 0
    exposed_ns: int = 0
    idle_ns: int = 0
    retrieval_ns: int = 0
    passes: int = 0
    stages: dict[str, StageSums] = field(default_factory=dict)

    def copy(self) -> "_Sums":
        """The sums as they stand."""
        return replace(self, stages={name: replace(sums) for name, sums in self.stages.items()})

    def since(self, mark: "_Sums") -> "_Sums":
        """What was added after ``mark``; ``end_ns`` becomes the time between."""
        stages = {}
        for name, sums in self.stages.items():
            before = mark.stages.get(name, StageSums())
            stages[name] = StageSums(*(getattr(sums, f) - getattr(before, f) for f in StageSums.__slots__))
        numbers = {f: getattr(self, f) - getattr(mark, f) for f in type(self).__slots__ if f != "stages"}
        return _Sums(**numbers, stages=stages)


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one run. Times are seconds; rates are of the decode window, which follows the warm-up blocks.

    ``block_time_s`` leaves out ``idle_s``, in which no request was there; the throughput counts it. Where KV was filled
    in and no prompt went through the model, ``fill_time_s`` says how long that took, and what would hold a prefill's
    time (``prefill_.._s``, ``end_to_end_tok_s``) is left out.
    ``hbm_bytes`` is what stays on the device: weights, pools, logits, and what libraries keep; ``dram_bytes`` the pools
    in host memory. What comes and goes is in neither.
    ``status`` is ``STABLE``, ``BOUND BY x`` or ``EXTRAPOLATED``, which says that the throughput rests on prices from
    outside what was measured; ``interval`` is a 95% interval of it where one is known. ``provenance`` names where every
    number that went in came from.
    """

    source: str
    throughput_tok_s: float | None
    block_time_s: float | None
    first_block_time_s: float | None
    main_time_s: float | None
    retrieval_time_s: float | None
    stall_s: float | None
    exposed_transfer_s: float | None
    forwards_per_block: float | None
    tokens_per_forward: float | None
    batch: int
    budget: float
    blocks: int
    delivered_tokens: int
    forwards: int
    finished: int
    rejected: Mapping[int, str]
    partial: bool = False
    status: str = "STABLE"
    limit: str | None = None
    kv_bytes_per_request: float | None = None
    hbm_bytes: float | None = None
    dram_bytes: float | None = None
    beyond_max_positions: bool = False
    idle_s: float | None = None
    prefill_time_s: float | None = None
    prefill_tok_s: float | None = None
    end_to_end_tok_s: float | None = None
    fill_time_s: float | None = None
    stages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a figure that could not be derived is left out, never NaN."""
        names = [name for name in self.__slots__ if name != "extra"]
        values = {name: getattr(self, name) for name in names}
        values["rejected"] = {str(key): reason for key, reason in self.rejected.items()}
        values.update(self.extra)
        return {name: value for name, value in values.items() if value is not None}


class Recorder:
    """Collects launches as they end; both interpreters feed it and nothing else makes a :class:`Result`.

    Launches of one stream must be recorded in the order in which they ran. In all but lockstep, rows (or halves of the
    batch) complete blocks in turn: times of a block are then those of a row's block and not from one completion to the
    next, and the warm-up lasts until as many completions as make the blocks that it has.
    """

    def __init__(self, source: str, *, keep_trace: bool = False, policy: BatchPolicy = BatchPolicy.LOCKSTEP) -> None:
        self.source = source
        self._in_turn = policy is not BatchPolicy.LOCKSTEP
        self._parts = policy.parts
        self.trace: Trace | None = Trace(source) if keep_trace else None
        self._sums = _Sums()
        self._stages = self._sums.stages
        self._marks: list[_Sums] = []
        self.makespan_ns = 0
        self.delivered_tokens = 0
        self.forwards = 0
        self._blocks = 0
        self._first_block_ns = 0
        self._main_end_ns = 0
        self._compute_end_ns = 0
        self._pass_block = -1
        self._pass_start_ns = self._pass_end_ns = self._closed_end_ns = 0
        self._prefill_ns = 0
        self._prefill_tokens = 0
        self.prefills_between_blocks = False
        """Whether prompts were prefilled after the first block: the throughput then holds their time."""

    def record(
        self,
        launch: Launch,
        start_ns: int,
        end_ns: int,
        *,
        queued_ns: int = 0,
        num_bytes: float = 0.0,
        flops: float = 0.0,
    ) -> None:
        """One launch ran from ``start_ns`` to ``end_ns``; ``num_bytes`` and ``flops`` are what was counted."""
        if launch.block < 0:
            self._prefill(launch, start_ns, end_ns)
        self.ran(launch.stage, launch.block, start_ns, end_ns, num_bytes, flops)
        if self.trace is not None:
            self._span(launch, start_ns, end_ns, queued_ns, num_bytes, flops)

    def ran(self, stage: Stage, block: int, start_ns: int, end_ns: int, num_bytes: float, flops: float) -> None:
        """The sums of :meth:`record`: all that a launch of a block adds where no trace is kept."""
        stream = stage.stream
        if end_ns > self.makespan_ns:
            self.makespan_ns = end_ns
        if block >= 0 and self._blocks:
            sums = self._stages.get(stage.name)
            if sums is None:
                sums = self._stages[stage.name] = StageSums()
            sums.count += 1
            sums.busy_ns += end_ns - start_ns
            sums.bytes += num_bytes
            sums.flops += flops
            if stage.name in _RETRIEVAL_STAGES:
                # One pass's layers have one block; the next pass begins when that changes.
                if self._parts > 1 and block < self._pass_block:
                    # The second half's last copies, beside the first half's next pass.
                    late_ns = max(0, end_ns - self._closed_end_ns)
                    self._sums.retrieval_ns += late_ns
                    self._closed_end_ns += late_ns
                elif block != self._pass_block:
                    self._close_pass()
                    self._pass_block, self._pass_start_ns, self._pass_end_ns = block, start_ns, end_ns
                elif end_ns > self._pass_end_ns:
                    self._pass_end_ns = end_ns
        if stream == "main":
            gap = start_ns - self._main_end_ns
            if gap > 0 and self._blocks and block >= 0:
                self._sums.stall_ns += gap
                self._sums.exposed_ns += max(0, start_ns - max(self._main_end_ns, self._compute_end_ns))
            self._main_end_ns = end_ns
        elif stream not in COPY_STREAMS:
            self._compute_end_ns = end_ns

    @property
    def stages(self) -> Mapping[str, StageSums]:
        """Sums by stage since the first block's end."""
        return self._stages

    def step(self, launch: Launch) -> None:
        """Count a deciding launch as one forward of its rows."""
        self.forwards += 1
        if self._blocks:
            self._sums.row_forwards += launch.shape.rows

    def block_done(self, end_ns: int, rows: int, tokens: int) -> None:
        """``rows`` rows completed a block at ``end_ns`` on the main stream; ``tokens`` of it are delivered."""
        self.delivered_tokens += tokens
        sums = self._sums
        sums.end_ns = end_ns
        if self._blocks:
            sums.tokens += tokens
            sums.row_blocks += rows
            sums.blocks += 1
        else:
            self._first_block_ns = end_ns - self._prefill_ns
        self._blocks += 1
        if self._blocks <= WARM_UP_BLOCKS * self._parts:
            self._marks.append(sums.copy())

    def _prefill(self, launch: Launch, start_ns: int, end_ns: int) -> None:
        if launch.stage.stream == "main":
            # A prompt's first launch after everything had ended: until it arrived, there was nothing to do.
            if self._blocks and start_ns > self.makespan_ns:
                self._sums.idle_ns += start_ns - self.makespan_ns
            self._prefill_ns += end_ns - start_ns
            self.prefills_between_blocks = self.prefills_between_blocks or self._blocks > 0
            if launch.layer == 0:
                self._prefill_tokens += launch.shape.prefix_tokens

    def _close_pass(self) -> None:
        if self._pass_block >= 0:
            self._sums.retrieval_ns += self._pass_end_ns - self._pass_start_ns
            self._sums.passes += 1
            self._closed_end_ns = self._pass_end_ns
        self._pass_block = -1
        self._pass_start_ns = self._pass_end_ns = 0

    def _span(
        self,
        launch: Launch,
        start_ns: int,
        end_ns: int,
        queued_ns: int,
        num_bytes: float,
        flops: float,
    ) -> None:
        assert self.trace is not None
        stage = launch.stage
        expected = demand(stage.work(launch.shape, launch.layer))
        self.trace.spans.append(
            Span(
                stage.name,
                stage.stream,
                stage.resource,
                launch.block,
                launch.step,
                launch.layer,
                launch.shape.rows,
                start_ns,
                end_ns,
                queued_ns,
                num_bytes,
                flops,
                expected.traced_bytes(stage.resource),
                expected.flops,
                launch.id,
                launch.after,
            )
        )

    def result(
        self,
        *,
        batch: int,
        budget: float,
        finished: int,
        rejected: Mapping[int, str],
        prefilled: bool = True,
        **facts: Any,
    ) -> Result:
        """The figures so far. Rates need at least two blocks; with fewer they are left out, never infinite.

        ``prefilled``: prompts went through the model; otherwise their KV was only filled in.
        """
        self._close_pass()
        window = self._window()
        measured = window.blocks > 0 and window.end_ns > 0
        blocks = window.row_blocks / batch if self._in_turn else window.blocks
        blocks = blocks if measured else 1

        def per_block(total_ns: float) -> float | None:
            return total_ns / blocks / NS_PER_S if measured else None

        main_ns = sum(sums.busy_ns for name, sums in window.stages.items() if name in FORWARD_STAGES)
        rows = window.row_blocks
        return Result(
            source=self.source,
            throughput_tok_s=window.tokens * NS_PER_S / window.end_ns if measured else None,
            block_time_s=per_block(window.end_ns - window.idle_ns),
            first_block_time_s=self._first_block_s(),
            main_time_s=per_block(main_ns),
            # A pass's own time: the last block has none, so dividing by blocks would make it look shorter.
            retrieval_time_s=(window.retrieval_ns / max(window.passes, 1) / NS_PER_S if measured else None),
            stall_s=per_block(window.stall_ns),
            exposed_transfer_s=per_block(window.exposed_ns),
            forwards_per_block=window.row_forwards / rows if rows else None,
            tokens_per_forward=(window.tokens / window.row_forwards if window.row_forwards else None),
            idle_s=window.idle_ns / NS_PER_S if window.idle_ns else None,
            batch=batch,
            budget=budget,
            blocks=self._blocks,
            delivered_tokens=self.delivered_tokens,
            forwards=self.forwards,
            finished=finished,
            rejected=dict(rejected),
            **self._before_blocks(prefilled),
            stages={
                name: {
                    "count": sums.count,
                    "busy_s": sums.busy_ns / NS_PER_S,
                    "bytes": sums.bytes,
                    "flops": sums.flops,
                }
                for name, sums in sorted(window.stages.items())
            },
            **facts,
        )

    def _before_blocks(self, prefilled: bool) -> dict[str, Any]:
        """Figures that hold the time of prompts; where KV was filled in, that time alone."""
        prefill_ns, whole_ns = self._prefill_ns, self.makespan_ns
        time_s = prefill_ns / NS_PER_S if prefill_ns else None
        if not prefilled:
            return {"fill_time_s": time_s}
        return {
            "prefill_time_s": time_s,
            "prefill_tok_s": self._prefill_tokens * NS_PER_S / prefill_ns if prefill_ns else None,
            "end_to_end_tok_s": self.delivered_tokens * NS_PER_S / whole_ns if whole_ns else None,
        }

    def _window(self) -> _Sums:
        """What was counted after the warm-up; nothing where no block was completed."""
        if not self._marks:
            return _Sums()
        warm_up = warm_up_blocks(self._blocks // self._parts) * self._parts
        return self._sums.since(self._marks[min(warm_up, len(self._marks)) - 1])

    def _first_block_s(self) -> float | None:
        return self._first_block_ns / NS_PER_S if self._marks else None


_RETRIEVAL_STAGES = frozenset(
    {
        "project",
        "scan",
        "select",
        "finish",
        "exact_layer",
        "gather",
        "upload",
        "fetch",
        "proxy",
        "score",
        "rebuild",
        "retrieve",
    }
)
"""The retrieval latency of Fig. 14: selection and everything until its entries are on the device."""
FORWARD_STAGES = frozenset(
    {"denoise", "decide", "exact_step", "select_step", "step_layer", "step_project", "step_attend", "step_finish"}
)
"""Model forwards of the main stream: Fig. 14's main latency."""
