"""What an op takes on a machine: its demand over the share of each raw rate that the engine reaches, in nanoseconds.

Formulas are those of a roofline: an op takes the longest of its demands; CPU selection takes the *sum* of its pass over
the KV and its work per query, because the kernel's gain from fewer queries is gradual down to one query (HERALD,
Fig. 8).
"""

import math
from dataclasses import dataclass, field

from herald_pipeline.hardware import Curve, Profile, Quantity, known
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.stages import SELECTIONS, Layout, Op, OpKind, Stage

# 1 TFLOP/s is 1000 FLOP/ns; 1 GB/s is 1 byte/ns.
_FLOP_NS_PER_TFLOP_S = 1000.0
NS_PER_US = 1000.0
_COPY_LAYOUT_EFFICIENCY = {
    Layout.CONTIGUOUS: None,
    Layout.STREAMED: "streamed_copy_efficiency",
    Layout.SCATTERED: "scattered_copy_efficiency",
    Layout.ROWS: "row_fetch_efficiency",
}
_SELECT_EFFICIENCY = {
    OpKind.SELECT: "select_dram_efficiency",
    OpKind.SELECT_KEYS: "select_keys_dram_efficiency",
    OpKind.SELECT_INT8: "select_int8_dram_efficiency",
}
ROW_BY_ROW = (Layout.SCATTERED, Layout.ROWS)
_MAX_OPS = 4096
MARGIN = 1.02
"""How far past the ends of a measured curve a reading still counts as measured: a run at the last point that was
measured reads a little more, because its context grows with the answer."""
_MATRICES = frozenset({OpKind.QKV, OpKind.OUTPUT, OpKind.FFN, OpKind.HEAD})


@dataclass(slots=True)
class _Part:
    """A run's prefill, or its blocks: the curves that its prices left, and the prices that are remembered for it.

    Each part remembers its own, so that what it left does not depend on which part asked first.
    """

    outside: set[str] = field(default_factory=set)
    # By identity: the description hands out the same op for the same tokens.
    op_ns: dict[int, tuple[Op, float]] = field(default_factory=dict)
    padded: dict[int, tuple[Op, Op]] = field(default_factory=dict)
    gemm_shares: dict[int, float] = field(default_factory=dict)


@dataclass
class OpTimes:
    """Times alone of ops, for one pipeline on one profile.

    It notes which of the profile's curves were read outside what was measured (by more than :data:`MARGIN`), for
    prefill and for blocks apart.
    """

    pipeline: Pipeline
    profile: Profile

    def __post_init__(self) -> None:
        machine, engine = self.profile.machine, self.profile.engine
        self._engine = engine
        self._hbm = known(machine.gpu.bandwidth_gb_s).peak
        self._peak = known(machine.gpu.peak_tflop_s).peak * _FLOP_NS_PER_TFLOP_S
        self._weight_rate = self._hbm * known(engine.weight_read_efficiency).peak
        self._head_share = 1.0 if engine.head_token_share is None else engine.head_token_share.peak
        moe = self.pipeline.model.moe
        self._experts = moe.num_experts if moe else 1
        # What waits for nothing but the device leaves it no rest; blocks on their way to the host hold nothing up.
        resources = {stage.resource for stage in self.pipeline.template.stages()}
        self._load = self._load_name() if resources <= {"gpu", "d2h"} else ""
        self._per_token = moe.experts_per_token if moe else 1
        self._lanes = engine.lane_padding
        self._blocks, self._prefill = _Part(), _Part()
        self._part = self._blocks
        self._prefill_stages = {stage.name for section in self.pipeline.template.prefill for stage in section.stages}

    @property
    def extrapolated(self) -> frozenset[str]:
        """Curves of the profile that prices of blocks were read from outside what was measured."""
        return frozenset(self._blocks.outside)

    @property
    def prefill_extrapolated(self) -> frozenset[str]:
        """As :attr:`extrapolated`, of prefill's prices."""
        return frozenset(self._prefill.outside)

    def _price(self, stage: Stage) -> None:
        """What is read from now on is a price of ``stage``."""
        self._part = self._prefill if stage.name in self._prefill_stages else self._blocks

    # Host memory and the link ----------------------------------------------------------------------------------------

    def _flow_ns(self, op: Op) -> float:
        if op.kind in SELECTIONS:
            return self._select_ns(op)
        machine, engine = self.profile.machine, self._engine
        if op.kind is OpKind.GATHER:
            share = self._read("gather_dram_efficiency", engine.gather_dram_efficiency, op.dram_bytes)
            overhead = optional(engine.gather_overhead_us) * NS_PER_US
            rate = known(machine.dram.read_gb_s).peak
            return overhead + op.dram_bytes / (rate * share) + self._beside_ns(op)
        if op.kind is OpKind.GATHER_FUSED:
            share = self._read("fused_gather_dram_efficiency", engine.fused_gather_dram_efficiency, op.dram_bytes)
            return op.dram_bytes / (known(machine.dram.read_gb_s).peak * share)
        name = _COPY_LAYOUT_EFFICIENCY[op.layout]
        size = op.h2d_bytes + op.d2h_bytes
        efficiency = 1.0 if name is None else self._read(name, getattr(engine, name), size)
        up = self._link_rate("h2d_gb_s", machine.link.h2d_gb_s, op.h2d_bytes)
        down = self._link_rate("d2h_gb_s", machine.link.d2h_gb_s, op.d2h_bytes)
        time = (op.h2d_bytes / up + op.d2h_bytes / down) / efficiency
        for whole, num_bytes in ((machine.link.duplex_gb_s, size), (machine.dram.read_gb_s, op.dram_bytes)):
            if whole is not None:
                time = self._longer(time, num_bytes / whole.peak)
        return time

    def _link_rate(self, name: str, rate: Quantity | None, num_bytes: float) -> float:
        """Rate of one direction; a direction that nothing crosses is not asked for."""
        unused = isinstance(num_bytes, float) and not num_bytes
        return math.inf if unused else self._read(name, rate, num_bytes)

    def _select_ns(self, op: Op) -> float:
        """Sum of the pass over the KV and of the queries' work, and a fixed time where the engine states one."""
        machine, engine = self.profile.machine, self._engine
        name = _SELECT_EFFICIENCY[op.kind]
        if getattr(engine, name) is None:
            name = "select_dram_efficiency"
        share = self._read(name, getattr(engine, name), op.dram_bytes)
        flops = known(machine.cpu.attention_tflop_s).peak * _FLOP_NS_PER_TFLOP_S
        flops *= self._read("select_flops_efficiency", engine.select_flops_efficiency, op.queries)
        if engine.select_size_cost is not None and op.queries > 1:
            flops = flops / self._read("select_size_cost", engine.select_size_cost, op.dram_bytes)
        time = op.dram_bytes / (known(machine.dram.read_gb_s).peak * share) + op.cpu_flops / flops
        return time + optional(engine.select_overhead_us) * NS_PER_US + self._beside_ns(op)

    def _beside_ns(self, op: Op) -> float:
        """Time in which memory moves what is copied beside a scan or gather, which has what is left.

        Cores that play the GPU take turns, copies included: nothing runs beside.
        """
        machine, engine = self.profile.machine, self._engine
        if machine.gpu.emulated:
            return 0.0
        copy, gather = (
            1.0 if cost is None else cost.peak for cost in (engine.copy_beside_cost, engine.gather_beside_cost)
        )
        moved = op.beside_copy_bytes * copy + op.beside_gather_bytes * gather
        return moved / known(machine.dram.read_gb_s).peak

    def _longer(self, one: float, other: float) -> float:
        """The later of two ends; fast mode prices all blocks at once and overrides it."""
        return max(one, other)

    # The GPU ---------------------------------------------------------------------------------------------------------

    def _load_name(self) -> str:
        """The share of constant load that fits the steps, or nothing where none is stated.

        Full attention takes more power than steps over selected entries do.
        """
        sparse = any(pool.name == "sparse" for pool in self.pipeline.pools)
        names = ("constant_load_efficiency_sparse",) if sparse else ()
        stated = (name for name in (*names, "constant_load_efficiency") if getattr(self._engine, name) is not None)
        return next(stated, "")

    def _gpu_ns(self, op: Op) -> float:
        remembered = self._part.op_ns
        known = remembered.get(id(op))
        if known is not None and known[0] is op:
            return known[1]
        if len(remembered) >= _MAX_OPS:
            remembered.clear()
        time = self._op_time(op)
        # Experts are timed in steps that follow one another (calibration.gpu.steps): that load is in their rate.
        if self._load and op.kind is not OpKind.EXPERTS:
            time /= self._read(self._load, getattr(self._engine, self._load), op.tokens)
        remembered[id(op)] = (op, time)
        return time

    def _lanes_ns(self, op: Op) -> float:
        """Time of an op of a step, whose blocks the engine pads to a number of lanes that it has a graph for."""
        padded = self._part.padded
        known = padded.get(id(op))
        if known is None or known[0] is not op:
            if len(padded) >= _MAX_OPS:
                padded.clear()
            known = padded[id(op)] = (op, self._of_all_lanes(op))
        return self._gpu_ns(known[1])

    def _of_all_lanes(self, op: Op) -> Op:
        """The op with the demand of all lanes: products are of each, and attention is spread over their programs."""
        if op.kind is OpKind.REBUILD:
            return op  # its tokens are selected entries
        lanes = op.tokens / self.pipeline.settings.block_length
        if lanes < 1:
            return op
        factor = self._read("lane_padding", self._lanes, lanes)
        read = op.hbm_bytes * factor if op.kind is OpKind.ATTENTION else op.hbm_bytes
        return op._replace(tokens=round(op.tokens * factor), gpu_flops=op.gpu_flops * factor, hbm_bytes=read)

    def _op_time(self, op: Op) -> float:
        own_head = self._engine.head_efficiency
        if op.kind is OpKind.SAMPLE and own_head is not None:
            return 0.0  # the head's share of the peak holds it
        if op.kind is OpKind.HEAD and (self._head_share < 1 or own_head is not None):
            seen = max(1, round(op.tokens * self._head_share))
            share = self._gemm_share(seen) if own_head is None else self._read("head_efficiency", own_head, seen)
            rate = self._peak * share
            return self._longer(op.weight_bytes / self._weight_rate, op.gpu_flops * self._head_share / rate)
        if op.kind in _MATRICES:
            rate = self._peak * self._gemm_share(op.tokens)
            return self._longer(op.weight_bytes / self._weight_rate, op.gpu_flops / rate)
        if op.kind is OpKind.EXPERTS:
            return self._experts_ns(op)
        if op.kind is OpKind.SAMPLE:
            size = op.hbm_bytes * self._head_share
            return size * known(self._engine.sampler_passes).peak / self._hbm
        if op.kind is OpKind.TOP_K and self._engine.top_k_efficiency is not None:
            share = self._read("top_k_efficiency", self._engine.top_k_efficiency, op.hbm_bytes / op.tokens)
            return op.hbm_bytes / (self._hbm * share)
        if op.kind is OpKind.PROXY and self._engine.proxy_efficiency is not None:
            share = self._read("proxy_efficiency", self._engine.proxy_efficiency, op.hbm_bytes)
            return op.hbm_bytes / (self._hbm * share)
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
        shares = self._part.gemm_shares
        share = shares.get(tokens)
        if share is None:
            if len(shares) >= _MAX_OPS:
                shares.clear()
            share = self._read("gemm_efficiency", self._engine.gemm_efficiency, tokens)
            shares[tokens] = share
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
        curve = known(quantity)
        reading = curve.at(x)
        if reading.extrapolated and isinstance(curve, Curve):
            self._note(name, curve, x, x)
        return reading.value

    def _note(self, name: str, curve: Curve, least: float, most: float) -> None:
        """Note that ``curve`` was read between ``least`` and ``most``, if that is outside what was measured."""
        if least * MARGIN < curve.x[0] or most > curve.x[-1] * MARGIN:
            self._part.outside.add(name)


def optional(quantity: Quantity | None) -> float:
    """Peak of a quantity that a profile may leave out: then it takes no time."""
    return 0.0 if quantity is None else quantity.peak
